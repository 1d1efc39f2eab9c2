#!/usr/bin/env python3
"""Makes generate/: what transformers' generate() writes with the models of make_golden.py: greedy.json, beams.json.

    python3 make_generate_golden.py [--out DIR] [--only NAME]

--only: of one model; what the files here say of the others stays.

Prompts of 1, 5 and 13 tokens, and 64 tokens more. The models are those of the folders here, in float64, but for their number of
positions: GPT-2's 32 learned ones are repeated, and rotary models are told that they have enough. (Dynamic rotary scaling changes
all rotations beyond the original positions: there the answers end with them.) `gap` is the smallest difference between the two
largest logits of an answer: a float32 model may be wrong by less than this. beams.json: three beams, with a stop token, and all
three answers; there `gap` is the smallest difference of their scores.
"""
import argparse
import json
import pathlib

import torch

from make_golden import load, mode_of

HERE = pathlib.Path(__file__).parent
MODELS = ("gpt2", "llama", "llama_biases", "llama_dynamic", "llama_tied", "mistral", "qwen2", "qwen2_window", "qwen3", "deepseek",
          "deepseek_lite", "mfa")
POSITIONS, N = 96, 64


def open_model(name):
    positions = 12 if name == "llama_dynamic" else POSITIONS
    model = load(HERE / name, torch.float64).eval()
    if name == "gpt2":
        table = model.transformer.wpe.weight.data
        model.transformer.wpe = torch.nn.Embedding.from_pretrained(table.repeat(POSITIONS // len(table), 1))
    for config in (model.config, model.generation_config):
        config.eos_token_id = None
    return model, positions


def continue_prompt(model, name, prompt, n):
    with torch.no_grad(), mode_of(model):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=n, do_sample=False, use_cache=name != "mfa",
                             return_dict_in_generate=True, output_logits=True)
    top = torch.stack(out.logits).topk(2).values
    return {"prompt": prompt, "ids": out.sequences[0, len(prompt):].tolist(), "gap": (top[..., 0] - top[..., 1]).min().item()}


def search_beams(model, prompt, n, stop):
    with torch.no_grad(), mode_of(model):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=n, do_sample=False, num_beams=3, num_return_sequences=3,
                             length_penalty=0.7, eos_token_id=stop, pad_token_id=stop, return_dict_in_generate=True,
                             output_scores=True)
    answers = []
    for row in out.sequences[:, len(prompt):].tolist():
        answers.append(row[:row.index(stop)] if stop in row else row)
    scores = out.sequences_scores
    return {"prompt": prompt, "stop": stop, "tokens": n, "answers": answers, "gap": (scores[:-1] - scores[1:]).min().item()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, default=HERE)
    parser.add_argument("--only", choices=MODELS, metavar="NAME")
    arguments = parser.parse_args()
    folder = arguments.out / "generate"
    folder.mkdir(parents=True, exist_ok=True)
    golden, beams = ({}, {}) if not arguments.only else (
        json.loads((HERE / "generate" / file).read_text()) for file in ("greedy.json", "beams.json"))
    for index, name in enumerate(MODELS):
        if arguments.only and name != arguments.only:
            continue
        model, positions = open_model(name)
        generator = torch.Generator().manual_seed(index)
        cases = []
        for length in (1, 5, 13):
            if length < positions:
                prompt = torch.randint(model.config.vocab_size, (length,), generator=generator).tolist()
                cases.append(continue_prompt(model, name, prompt, min(N, positions - length)))
        golden[name] = {"positions": positions, "cases": cases}
        if name in ("gpt2", "llama", "deepseek"):
            beams[name] = {"positions": positions,
                           "cases": [search_beams(model, case["prompt"], 12, case["ids"][-1]) for case in cases]}
            print(name, "beams", beams[name])
        print(name, *(f"{case['gap']:.1e}" for case in cases), *(len(set(case["ids"])) for case in cases))
    for file, content in (("greedy.json", golden), ("beams.json", beams)):
        text = json.dumps(content).replace('{"prompt"', '\n  {"prompt"').replace('}, "', '},\n"')
        (folder / file).write_text(text + "\n")


if __name__ == "__main__":
    main()
