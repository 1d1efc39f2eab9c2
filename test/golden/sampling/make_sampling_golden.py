#!/usr/bin/env python3
"""Makes golden.txt: what the logits processors of Hugging Face transformers leave of a few rows of logits.

    python3 make_sampling_golden.py

In float64. Lines of the file:

    case NAME temperature top_k top_p min_p repetition_penalty seed
    seen     tokens of the prompt and the answer
    p        probabilities of the 53 tokens after the processors, in the order in which generate() applies them

The logits are given by the formula in `logits`: test_sampling.cu computes the same ones. They have no equal numbers, because
with those the definitions differ: ours keeps all that equal the last one kept, transformers those that its sort puts first.
"""

import pathlib

import torch
from transformers.generation import logits_process as hf

V = 53
CASES = [  # name, temperature, top_k, top_p, min_p, repetition_penalty, seed, seen
    ("temperature", 0.7, 0, 1, 0, 1, 1, []),
    ("top_k", 1, 7, 1, 0, 1, 2, []),
    ("top_p", 1, 0, 0.8, 0, 1, 3, []),
    ("top_p_of_one", 0.4, 0, 0.05, 0, 1, 4, []),
    ("min_p", 1, 0, 1, 0.05, 1, 5, []),
    ("repetition", 1, 0, 1, 0, 1.6, 6, [0, 5, 5, 17, 30, 52]),
    ("repetition_below_1", 1, 0, 1, 0, 0.7, 7, [3, 4, 8, 8, 8]),
    ("top_k_and_top_p", 1.2, 12, 0.85, 0, 1, 8, []),
    ("all", 1.5, 30, 0.95, 0.08, 1.3, 9, [1, 2, 3, 40, 41, 40]),
]


def logits(seed):
    """Multiples of 1/64 between -6 and 6; no two are equal, since 389 is prime and larger than V."""
    return [((v * (29 + 2 * seed) + 101 * seed) % 389 * 2 - 388) / 64 for v in range(V)]


def probabilities(temperature, top_k, top_p, min_p, repetition_penalty, seed, seen):
    x = torch.tensor([logits(seed)], dtype=torch.float64)
    processors = []
    if repetition_penalty != 1:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(repetition_penalty))
    if temperature != 1:
        processors.append(hf.TemperatureLogitsWarper(temperature))
    if top_k:
        processors.append(hf.TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(hf.TopPLogitsWarper(top_p))
    if min_p:
        processors.append(hf.MinPLogitsWarper(min_p))
    for processor in processors:
        x = processor(torch.tensor([seen], dtype=torch.long), x)
    return torch.softmax(x, -1)[0].tolist()


def main():
    lines = []
    for name, *numbers, seen in CASES:
        p = probabilities(*numbers, seen)
        assert len(set(logits(numbers[-1]))) == V and abs(sum(p) - 1) < 1e-12
        lines += [f"case {name} " + " ".join(map(str, numbers)), " ".join(["seen", *map(str, seen)]),
                  " ".join(["p", *(f"{x:.9g}" for x in p)])]
    pathlib.Path(__file__).with_name("golden.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
