#!/usr/bin/env python3
"""Makes golden.txt: what PyTorch's optimizers do to a few weights in 50 steps; Lion and 8-bit Adam from their papers.

    python3 make_optim_golden.py

All in float64, from hyperparameters rounded to float32. Start values and gradients are exact in float32 and given by the
formulas in `start` and `gradient`: test_optimizers.cu computes the same ones. Lines of the file:

    case NAME OPTIMIZER LAYOUT lr n_options  option value ...        layouts: as in LAYOUTS and in test_optimizers.cu
    step T  all weights after T steps, parameter after parameter
    m_codes, v_codes  (adam8bit) of all elements after the last step

Gradients are multiplied by SCALE, the result of clipping. torch's Muon iterates in bfloat16: here the iteration is its own
code with `bfloat16` replaced by `float64`.
"""

import inspect
import pathlib

import numpy as np
import torch
import torch.optim._muon as torch_muon

STEPS, SHOWN, SCALE = 50, (1, 2, 50), 0.75
# name, shape; matrices are decayed, and those with a layer number are Muon's.
LAYOUTS = [
    [("layers.0.wide", (5, 7)), ("layers.0.tall", (7, 3)), ("layers.0.bias", (3,)), ("layers.1.square", (4, 4)),
     ("embed", (6, 2)), ("norm", (11,)), ("one", (1, 1))],
    [("layers.0.weight", (3, 100)), ("bias", (9,))],
]


def start(i):
    return ((i * 29) % 61 - 30) / 64


def gradient(layout, i, t):
    """Of element i in step t, counted from 1. Some elements are 0 in every step; in layout 1 most are."""
    h = (i * 7919 + t * 104729 + i * t * 31 + t * t * 17) % 20011
    zero = i % 13 == 5 if layout == 0 else i % 11 != 3
    return 0.0 if zero else (h - 10005) / 2**16


def gradients(layout, n, t):
    return np.array([SCALE * gradient(layout, i, t) for i in range(n)])


def f32(x):
    return float(np.float32(x))


# ---- PyTorch -----------------------------------------------------------------------------------------------------------
def in_float64():
    """torch's Newton-Schulz iteration, in float64."""
    source = inspect.getsource(torch_muon._zeropower_via_newtonschulz).replace("torch.bfloat16", "torch.float64")
    exec(source, torch_muon.__dict__)


def torch_run(name, layout, lr, o):
    names, shapes = zip(*LAYOUTS[layout])
    sizes = [int(np.prod(s)) for s in shapes]
    flat = torch.tensor([start(i) for i in range(sum(sizes))], dtype=torch.float64)
    params = [torch.nn.Parameter(part.clone().view(s)) for part, s in zip(flat.split(sizes), shapes)]
    decay, plain = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
    wd = o.get("weight_decay", 0.0)

    def groups(keep):
        return [{"params": [p for p in decay if keep(p)], "weight_decay": wd},
                {"params": [p for p in plain if keep(p)], "weight_decay": 0.0}]

    everything = groups(lambda p: True)
    betas, eps = (o.get("beta1"), o.get("beta2")), o.get("eps")
    if name == "sgd":
        optimizers = [torch.optim.SGD(everything, lr=lr)]
    elif name in ("momentum", "nesterov"):
        optimizers = [torch.optim.SGD(everything, lr=lr, momentum=o["momentum"], nesterov=name == "nesterov")]
    elif name == "adagrad":
        optimizers = [torch.optim.Adagrad(everything, lr=lr, eps=eps)]
    elif name == "rmsprop":
        optimizers = [torch.optim.RMSprop(everything, lr=lr, alpha=o["beta2"], eps=eps)]
    elif name == "adam":
        optimizers = [torch.optim.Adam(everything, lr=lr, betas=betas, eps=eps)]
    elif name == "adamw":
        optimizers = [torch.optim.AdamW(everything, lr=lr, betas=betas, eps=eps)]
    elif name == "adafactor":  # torch clamps mean(row) at eps1 and v at eps1^2: here the second is the paper's 1e-30
        optimizers = [torch.optim.Adafactor(everything, lr=lr, beta2_decay=-o["decay_power"],
                                            eps=(eps**0.5, o["min_scale"]), d=o["clip_threshold"])]
    elif name == "muon":
        hidden = {p for p, n in zip(params, names) if n.startswith("layers.") and p.dim() == 2}
        optimizers = [torch.optim.Muon(list(hidden), lr=lr, weight_decay=wd, momentum=o["momentum"]),
                      torch.optim.AdamW(groups(lambda p: p not in hidden), lr=lr * o["adamw_lr_ratio"], betas=betas, eps=eps)]
    shown = []
    for t in range(1, STEPS + 1):
        for p, g in zip(params, torch.tensor(gradients(layout, sum(sizes), t)).split(sizes)):
            p.grad = g.clone().view(p.shape)
        for optimizer in optimizers:
            optimizer.step()
        if t in SHOWN:
            shown.append(torch.cat([p.detach().flatten() for p in params]).numpy())
    return shown, []


# ---- from the papers ---------------------------------------------------------------------------------------------------
def decays(layout):
    return np.concatenate([np.full(int(np.prod(s)), float(len(s) == 2)) for _, s in LAYOUTS[layout]])


def lion_run(layout, lr, o):
    """Chen et al. 2023, algorithm 2."""
    decay = decays(layout) * o["weight_decay"]
    w, m, shown = np.array([start(i) for i in range(len(decay))]), np.zeros(len(decay)), []
    for t in range(1, STEPS + 1):
        g = gradients(layout, len(w), t)
        c = o["beta1"] * m + (1 - o["beta1"]) * g
        assert all((abs(c) > 1e-6) | (m == 0) & (g == 0)), "a sign that float32 may see differently: change the gradients"
        w -= lr * (np.sign(c) + decay * w)
        m = o["beta2"] * m + (1 - o["beta2"]) * g
        if t in SHOWN:
            shown.append(w.copy())
    return shown, []


def dynamic_table(signed):
    """Dettmers et al. 2022, as bitsandbytes' create_dynamic_map has it."""
    table = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1)
        numbers = 10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2
        table += [*numbers, *(-numbers if signed else [])]
    assert len(table) == 256
    return np.sort(np.array(table).astype(np.float32).astype(np.float64))


def encode(x, table, margin):
    """Codes and scales of 256-element blocks, and how near (relative to x) any element came to a midpoint."""
    codes, scales = np.zeros(len(x), int), np.zeros(len(x))
    midpoints = (table[1:] + table[:-1]) / 2
    for at in range(0, len(x), 256):
        block = x[at:at + 256]
        scale = abs(block).max()
        part = block / scale if scale > 0 else block * 0
        codes[at:at + 256] = np.searchsorted(midpoints, part)
        scales[at:at + 256] = scale
        for p in part[part != 0]:
            margin = min(margin, abs(midpoints / p - 1).min())
    return codes, scales, margin


def adam8bit_run(layout, lr, o):
    decay, lengths = decays(layout) * o["weight_decay"], [int(np.prod(s)) for _, s in LAYOUTS[layout]]
    n, tables, margin, shown = len(decay), (dynamic_table(True), dynamic_table(False)), 1.0, []
    w, m, v = np.array([start(i) for i in range(n)]), np.zeros(n), np.zeros(n)
    for t in range(1, STEPS + 1):
        g = gradients(layout, n, t)
        m = o["beta1"] * m + (1 - o["beta1"]) * g
        v = o["beta2"] * v + (1 - o["beta2"]) * g * g
        w -= lr * (m / (1 - o["beta1"] ** t) / (np.sqrt(v / (1 - o["beta2"] ** t)) + o["eps"]) + decay * w)
        codes = [[], []]
        for at, length in zip(np.cumsum([0] + lengths), lengths):  # blocks begin anew with each parameter
            part = slice(at, at + length)
            for k, state in enumerate((m, v)):
                code, scale, margin = encode(state[part], tables[k], margin)
                if k == 1:
                    code = np.where((code == 0) & (state[part] > 0), 1, code)
                state[part] = tables[k][code] * scale
                codes[k] += list(code)
        if t in SHOWN:
            shown.append(w.copy())
    assert margin > 3e-6, f"float32 may round another way, margin {margin}: change the gradients"
    return shown, [("m_codes", codes[0]), ("v_codes", codes[1])]


CASES = [
    ("sgd", "sgd", 0, 0.1, {"weight_decay": 0.01}),
    ("momentum", "momentum", 0, 0.02, {"weight_decay": 0.01, "momentum": 0.9}),
    ("nesterov", "nesterov", 0, 0.02, {"weight_decay": 0.01, "momentum": 0.8}),
    ("adagrad", "adagrad", 0, 0.01, {"weight_decay": 0.01, "eps": 1e-10}),
    ("rmsprop", "rmsprop", 0, 1e-3, {"weight_decay": 0.01, "beta2": 0.99, "eps": 1e-8}),
    ("adam", "adam", 0, 1e-3, {"weight_decay": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}),
    ("adamw", "adamw", 0, 1e-3, {"weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}),
    ("adafactor", "adafactor", 0, 1e-2,
     {"weight_decay": 0.0, "eps": 1e-30, "decay_power": 0.8, "min_scale": 1e-3, "clip_threshold": 1.0}),
    ("adafactor_coarse", "adafactor", 0, 0.3,
     {"weight_decay": 0.1, "eps": 1e-9, "decay_power": 0.5, "min_scale": 0.3, "clip_threshold": 1.05}),
    ("lion", "lion", 0, 1e-3, {"weight_decay": 1.0, "beta1": 0.9, "beta2": 0.99}),
    ("muon", "muon", 0, 0.02, {"weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "momentum": 0.95,
                               "adamw_lr_ratio": 0.0625}),
    ("adam8bit", "adam8bit", 1, 1e-3, {"weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}),
]


def main():
    in_float64()
    lines = [f"# torch {torch.__version__}, numpy {np.__version__}: made by make_optim_golden.py"]
    for name, optimizer, layout, lr, options in CASES:
        o = {key: f32(value) for key, value in options.items()}
        run = {"lion": lion_run, "adam8bit": adam8bit_run}.get(optimizer)
        shown, codes = run(layout, lr, o) if run else torch_run(optimizer, layout, lr, o)
        lines.append(f"case {name} {optimizer} {layout} {lr} {len(o)} " + " ".join(f"{k} {v:.9g}" for k, v in o.items()))
        lines += [f"step {t} " + " ".join(f"{x:.10g}" for x in values) for t, values in zip(SHOWN, shown)]
        lines += [f"{what} " + " ".join(map(str, numbers)) for what, numbers in codes]
    pathlib.Path(__file__).with_name("golden.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
