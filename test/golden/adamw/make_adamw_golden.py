#!/usr/bin/env python3
"""Makes golden.txt: what torch.optim.AdamW and clip_grad_norm_ do to a few weights in 50 steps.

    python3 make_adamw_golden.py

All in float64. Start values and gradients are small multiples of powers of two, given by the formulas in `start` and
`gradient`: test_adamw.cu computes the same ones, exactly, so they need not be stored. The gradients' global norm is above
max_norm in some steps and below it in others. Lines of the file:

    case NAME lr beta1 beta2 eps weight_decay max_norm
    norms  of the 50 steps, before clipping
    step T  all weights after T steps, parameter after parameter
"""

import pathlib

import torch

SHAPES = [(5, 7), (3,), (1, 1), (11,)]  # the matrices are decayed, the vectors are not
STEPS = 50
CASES = [
    ("defaults", 1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0),
    ("pytorch_defaults", 1e-3, 0.9, 0.999, 1e-8, 0.01, 0.0),  # max_norm 0: no clipping
    ("coarse", 0.05, 0.8, 0.99, 1e-3, 0.5, 0.5),              # large steps, an eps that counts, strong decay
]


def start(i):
    return ((i * 29) % 61 - 30) / 64


def gradient(i, t):
    """Of element i in step t, counted from 1. Every fourth step is ten times as large; some elements are 0 in every step."""
    if i % 13 == 5:
        return 0.0
    return ((i * 7 + t * 13) % 31 - 14) / 128 * (10 if t % 4 == 0 else 1)


def numbers(values):
    return " ".join(f"{float(v):.12g}" for v in values)


def main():
    lines = [f"# torch {torch.__version__}: made by make_adamw_golden.py"]
    n = sum(torch.Size(shape).numel() for shape in SHAPES)
    for name, lr, beta1, beta2, eps, weight_decay, max_norm in CASES:
        flat = torch.tensor([start(i) for i in range(n)], dtype=torch.float64)
        params = [torch.nn.Parameter(part.clone().view(shape))
                  for part, shape in zip(flat.split([torch.Size(s).numel() for s in SHAPES]), SHAPES)]
        groups = [{"params": [p for p in params if p.dim() == 2], "weight_decay": weight_decay},
                  {"params": [p for p in params if p.dim() != 2], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=(beta1, beta2), eps=eps)
        norms, after = [], []
        for t in range(1, STEPS + 1):
            at = 0
            for p in params:
                p.grad = torch.tensor([gradient(at + i, t) for i in range(p.numel())], dtype=torch.float64).view(p.shape)
                at += p.numel()
            norms.append(torch.nn.utils.clip_grad_norm_(params, max_norm if max_norm > 0 else float("inf")))
            optimizer.step()
            if t in (1, 2, 10, STEPS):
                after.append(f"step {t} " + numbers(torch.cat([p.detach().flatten() for p in params])))
        lines += [f"case {name} {lr} {beta1} {beta2} {eps} {weight_decay} {max_norm}", "norms " + numbers(norms), *after]
    pathlib.Path(__file__).with_name("golden.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
