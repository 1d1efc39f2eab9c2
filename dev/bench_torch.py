#!/usr/bin/env python3
"""dev/bench_torch.py: PyTorch at its best, as the opponent of `make bench`.

    bench_torch.py limits  --dtype bf16
    bench_torch.py kernels --config gpt2.json --batch 64 --seq 1024 --dtype bf16
    bench_torch.py train   --config gpt2.json --batch 32 --seq 1024 --dtype bf16 --steps 20

The models are written here, in plain PyTorch, with the shapes and the initialisation of llm.cu's; the sizes come from the
config.json that both sides read. "At its best" means here:

  - torch.compile for the model; single operations are timed compiled and eager, and the faster one counts
  - attention: every backend of scaled_dot_product_attention is timed at the shape, forward and backward, and the fastest
    trains the model. The names of the kernels that ran are in the note.
  - AdamW with fused=True, weight decay on matrices only, gradients clipped to norm 1, as ours
  - the vocabulary padded to a multiple of 128, as ours
  - bf16: `--precision autocast` keeps float32 weights and casts them where they multiply (the usual way); `master` computes
    with bf16 weights and updates float32 ones, as ours does; `pure` has nothing but bf16, optimizer states too, which is
    faster and less exact, and is listed by itself
  - the whole step, AdamW included, is captured in one CUDA graph and replayed
  - dev/bench.sh runs it at several batch sizes, and the best counts

Output: tab-separated lines "kernel", "limit", "train" as dev/bench_report.cu describes them (without the model's name, which
dev/bench.sh adds). If one subject fails, the reason is printed on stderr, and the others still run.
"""
import argparse
import contextlib
import json
import math
import statistics
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
CUDA = torch.cuda.is_available()
# "math" is plain matrix products: much slower than the others on a GPU. A CPU has it and a flash attention.
BACKENDS_HERE = [name for name in BACKENDS if (name != "math" if CUDA else name in ("flash", "math"))]
DEVICE = torch.device("cuda" if CUDA else "cpu")


def say(*words):
    print("bench_torch:", *words, file=sys.stderr, flush=True)


def row(*columns):
    print("\t".join(str(c) for c in columns), flush=True)


# ----------------------------------------------------------------------------------------------------------------------
# Sizes


class Sizes:
    """The letters of layers/layers.h, from a Hugging Face config.json."""

    def __init__(self, path):
        with open(path, encoding="utf-8") as file:
            c = json.load(file)
        if c["model_type"] not in ("gpt2", "llama"):
            sys.exit(f"bench_torch: {path}: model_type {c['model_type']}: only gpt2 and llama are written here")
        self.gpt2 = c["model_type"] == "gpt2"
        self.V = c["vocab_size"]
        self.Vp = (self.V + 127) // 128 * 128
        if self.gpt2:
            self.L, self.H, self.C = c["n_layer"], c["n_head"], c["n_embd"]
            self.K, self.D, self.T_max = self.H, self.C // self.H, c["n_positions"]
            self.F = c.get("n_inner") or 4 * self.C
            self.eps, self.tied = c.get("layer_norm_epsilon", 1e-5), c.get("tie_word_embeddings", True)
        else:
            self.L, self.H, self.C = c["num_hidden_layers"], c["num_attention_heads"], c["hidden_size"]
            self.K, self.D = c.get("num_key_value_heads", self.H), c.get("head_dim") or self.C // self.H
            self.F, self.eps = c["intermediate_size"], c.get("rms_norm_eps", 1e-6)
            self.tied = c.get("tie_word_embeddings", False)
            rope = c.get("rope_parameters") or {}
            self.rope_base = rope.get("rope_theta", c.get("rope_theta", 10000.0))
        self.std = c.get("initializer_range", 0.02)
        self.Q = (self.H + 2 * self.K) * self.D


# ----------------------------------------------------------------------------------------------------------------------
# The operations, as functions of tensors


def rope_table(T, D, base):
    """cos and sin (T, D/2). LLaMA 3's scaling changes the angles, not the work, and is left out."""
    frequencies = base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    angles = torch.arange(T, dtype=torch.float64)[:, None] * frequencies[None, :]
    return angles.cos().float().to(DEVICE), angles.sin().float().to(DEVICE)


def rotate(x, cos, sin):
    """x (B, T, heads, D): the pairs are (i, i + D/2)."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def attention(qkv, s, cos=None, sin=None):
    """qkv (B, T, (H + 2K) D) -> (B, T, H D), causal, with rotary positions where a table is given."""
    B, T, _ = qkv.shape
    q, k, v = qkv.split((s.H * s.D, s.K * s.D, s.K * s.D), dim=-1)
    q, k, v = q.view(B, T, s.H, s.D), k.view(B, T, s.K, s.D), v.view(B, T, s.K, s.D)
    if cos is not None:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if s.K != s.H and not s.native_gqa:
        k, v = k.repeat_interleave(s.H // s.K, dim=1), v.repeat_interleave(s.H // s.K, dim=1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s.K != s.H and s.native_gqa)
    return out.transpose(1, 2).reshape(B, T, s.H * s.D)


# ----------------------------------------------------------------------------------------------------------------------
# Timing


def seconds_of(run, budget):
    """Median seconds of run(), between CUDA events, all repeats queued at once. On the GPU run() is captured in a CUDA graph
    where that works: Python and PyTorch's dispatcher then take no time."""
    for _ in range(3):
        run()
    if not CUDA:
        times = []
        while len(times) < 5 or (sum(times) < budget and len(times) < 50):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    launch = run
    try:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=torch.cuda.current_stream()):
            run()
        launch = captured.replay
    except RuntimeError as error:
        say("not captured in a graph:", str(error).splitlines()[0])
        torch.cuda.synchronize()
    times = []
    for repeats in (3, None):
        n = repeats or max(5, min(50, int(budget / max(min(times), 1e-7))))
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(n)]
        for start, end in events:
            start.record()
            launch()
            end.record()
        torch.cuda.synchronize()
        times = [start.elapsed_time(end) * 1e-3 for start, end in events]
    return statistics.median(times)


def attention_kernels_of(run):
    """Names of the GPU kernels of run() that may be attention's."""
    if not CUDA:
        return "on the CPU"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    words = ("attention", "flash", "fmha", "sdpa", "cudnn")
    names = {event.key for event in profiler.key_averages() if any(word in event.key.lower() for word in words)}
    return ", ".join(sorted(name[:60] for name in names)) or "no kernel of that name"


# ----------------------------------------------------------------------------------------------------------------------
# kernels


def bench_kernels(s, args):
    dtype, B, T = DTYPES[args.dtype], args.batch, args.seq
    N = B * T
    bias = s.gpt2

    def random(*dims, scale=1.0, grad=False):
        return torch.empty(dims, device=DEVICE, dtype=dtype).normal_(0, scale).requires_grad_(grad)

    def tokens(*dims):
        return torch.randint(0, s.V, dims, device=DEVICE)

    def report(who, name, way, shape, run):
        if args.only not in name:
            return
        try:
            row("kernel", who, name, way, shape, f"{seconds_of(run, args.budget):.6g}", 0, 0)
        except Exception as error:  # one operation that fails must not end the others
            say(f"{who}: {name} {way} failed: {type(error).__name__}: {str(error).splitlines()[:1]}")
            if CUDA:
                torch.cuda.synchronize()

    ways = ["eager"] + (["compile"] if args.compile else [])

    def prepared(f, who):
        if who != "compile":
            return f
        torch._dynamo.reset()
        return torch.compile(f, dynamic=False)

    # A forward, and the gradient of its outputs with respect to its inputs.
    def pair(name, shape, f, make, who_list=None, context=contextlib.nullcontext):
        if args.only not in name:
            return
        for who in who_list or ways:
            try:
                with context():
                    g = prepared(f, who)
                    inputs = make()
                    report(who, name, "forward", shape, lambda: g(*inputs))
                    outputs = g(*inputs)
                    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                    gradients = tuple(torch.randn_like(o) for o in outputs)
                    wanted = [x for x in inputs if torch.is_tensor(x) and x.requires_grad]
                    report(who, name, "backward", shape,
                           lambda: torch.autograd.grad(outputs, wanted, gradients, retain_graph=True))
            except Exception as error:
                say(f"{who}: {name} failed: {type(error).__name__}: {str(error).splitlines()[:1]}")
            inputs = outputs = gradients = wanted = None
            if CUDA:
                torch.cuda.empty_cache()

    def linear(name, O, I, with_bias):
        if args.only not in name:
            return
        shape = f"N={N} C={I} O={O}"
        x, w, b, dout = random(N, I), random(O, I, scale=0.02), random(O) if with_bias else None, random(N, O)

        def by_weight(dout, x):  # includes the bias's gradient, as in our operation
            return (dout.t() @ x, dout.sum(0)) if with_bias else dout.t() @ x

        with torch.no_grad():
            report("eager", name, "forward", shape, lambda: F.linear(x, w, b))
            report("eager", name, "backward input", shape, lambda: dout @ w)
            for who in ways if with_bias else ways[:1]:
                g = prepared(by_weight, who)
                report(who, name, "backward weight", shape, lambda: g(dout, x))

    linear("linear qkv", s.Q, s.C, bias)
    linear("linear attn_out", s.C, s.H * s.D, bias)
    linear("linear up", s.F if s.gpt2 else 2 * s.F, s.C, bias)
    linear("linear down", s.C, s.F, bias)
    linear("linear head", s.Vp, s.C, False)

    shape = f"B={B} T={T} H={s.H} K={s.K} D={s.D}"
    for name, backend in BACKENDS.items():
        if name not in BACKENDS_HERE:
            continue
        s.native_gqa = name != "efficient"
        pair("attention", shape, lambda qkv: attention(qkv, s), lambda: (random(B, T, s.Q, grad=True),), ["sdpa " + name],
             lambda backend=backend: sdpa_kernel([backend]))
    s.native_gqa = True
    pair("attention", shape, lambda qkv: attention(qkv, s), lambda: (random(B, T, s.Q, grad=True),))

    nc, nf = f"N={N} C={s.C}", f"N={N} F={s.F}"
    if s.gpt2:
        def layernorm(inp, branch, w, b):
            x = inp + branch
            return F.layer_norm(x, (s.C,), w, b, s.eps), x

        pair("layernorm", nc, layernorm, lambda: (random(N, s.C, grad=True), random(N, s.C), random(s.C, grad=True), random(s.C, grad=True)))
        pair("gelu", nf, lambda x: F.gelu(x, approximate="tanh"), lambda: (random(N, s.F, grad=True),))
        if args.only in "column sum":
            dout = random(N, s.F)
            for who in ways:
                g = prepared(lambda d: d.sum(0), who)
                report(who, "column sum", "backward", nf, lambda: g(dout))
            dout = None
    else:
        def rmsnorm(inp, branch, w):
            x = inp + branch
            return F.rms_norm(x, (s.C,), w, s.eps), x

        def swiglu(x):
            gate, up = x.chunk(2, dim=-1)
            return F.silu(gate) * up

        pair("rmsnorm", nc, rmsnorm, lambda: (random(N, s.C, grad=True), random(N, s.C), random(s.C, grad=True)))
        pair("swiglu", nf, swiglu, lambda: (random(N, 2 * s.F, grad=True),))
        cos, sin = rope_table(T, s.D, s.rope_base)

        def rope(qk):
            return rotate(qk, cos, sin)

        pair("rope", shape, rope, lambda: (random(B, T, s.H + s.K, s.D, grad=True),))

    if s.gpt2:
        pair("embedding", nc, lambda t, wte, wpe: F.embedding(t, wte) + wpe,
             lambda: (tokens(B, T), random(s.Vp, s.C, grad=True), random(T, s.C, grad=True)))
    else:
        pair("embedding", nc, lambda t, wte: F.embedding(t, wte), lambda: (tokens(B, T), random(s.Vp, s.C, grad=True)))

    if args.only in "cross entropy":
        nv = f"N={N} V={s.Vp}"
        logits, targets = random(N, s.Vp, grad=True), tokens(N)

        def loss_eager(logits, targets):  # sums in float32 inside, without a float32 copy of the logits
            return F.cross_entropy(logits, targets, reduction="none")

        def loss_compiled(logits, targets):
            return F.cross_entropy(logits.float(), targets, reduction="none")

        for who in ways:
            g = prepared(loss_compiled if who == "compile" else loss_eager, who)
            with torch.no_grad():
                report(who, "cross entropy", "forward", nv, lambda: g(logits.detach(), targets))
            report(who, "cross entropy", "forward+backward", nv,
                   lambda: torch.autograd.grad(g(logits, targets).sum() / N, logits))


# ----------------------------------------------------------------------------------------------------------------------
# The models


class Block(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.s = s
        bias = s.gpt2
        norm = (lambda: nn.LayerNorm(s.C, eps=s.eps)) if s.gpt2 else (lambda: nn.RMSNorm(s.C, eps=s.eps))
        self.norm1, self.norm2 = norm(), norm()
        self.qkv = nn.Linear(s.C, s.Q, bias=bias)
        self.attn_out = nn.Linear(s.H * s.D, s.C, bias=bias)
        self.up = nn.Linear(s.C, s.F if s.gpt2 else 2 * s.F, bias=bias)
        self.down = nn.Linear(s.F, s.C, bias=bias)

    def forward(self, x, cos, sin):
        x = x + self.attn_out(attention(self.qkv(self.norm1(x)), self.s, cos, sin))
        h = self.up(self.norm2(x))
        if self.s.gpt2:
            h = F.gelu(h, approximate="tanh")
        else:
            gate, up = h.chunk(2, dim=-1)
            h = F.silu(gate) * up
        return x + self.down(h)


class Model(nn.Module):
    def __init__(self, s, T):
        super().__init__()
        self.wte = nn.Embedding(s.Vp, s.C)
        self.wpe = nn.Embedding(s.T_max, s.C) if s.gpt2 else None
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.L))
        self.norm = nn.LayerNorm(s.C, eps=s.eps) if s.gpt2 else nn.RMSNorm(s.C, eps=s.eps)
        self.head = nn.Linear(s.C, s.Vp, bias=False)
        for name, p in self.named_parameters():
            if p.dim() < 2:
                continue  # norms: scale 1; biases: below
            residual = name.endswith(("attn_out.weight", "down.weight"))
            nn.init.normal_(p, std=s.std / math.sqrt(2 * s.L) if residual else s.std)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
        if s.tied:
            self.head.weight = self.wte.weight
        cos, sin = (None, None) if s.gpt2 else rope_table(T, s.D, s.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens, targets):
        x = self.wte(tokens)
        if self.wpe is not None:
            x = x + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten())


def best_backend(s, B, T, dtype, budget):
    """The backend of scaled_dot_product_attention that takes the least time forward and backward, and what it took."""
    best = (None, True, float("inf"))
    for name, backend in BACKENDS.items():
        if name not in BACKENDS_HERE:
            continue
        for native in (True, False) if s.K != s.H else (True,):
            s.native_gqa = native
            try:
                with sdpa_kernel([backend]):
                    qkv = torch.randn(B, T, s.Q, device=DEVICE, dtype=dtype).requires_grad_()
                    dout = torch.randn(B, T, s.H * s.D, device=DEVICE, dtype=dtype)
                    seconds = seconds_of(lambda: torch.autograd.grad(attention(qkv, s), qkv, dout), budget)
                say(f"attention {name}{'' if native else ', repeated heads'}: {1e6 * seconds:.0f} us forward and backward")
                if seconds < best[2]:
                    best = (name, native, seconds)
            except RuntimeError as error:
                say(f"attention {name}{'' if native else ', repeated heads'}: {str(error).splitlines()[0]}")
                if CUDA:
                    torch.cuda.synchronize()
    if best[0] is None:
        raise RuntimeError("no backend of scaled_dot_product_attention takes this shape")
    s.native_gqa = best[1]
    return best[0]


def to_compute_dtype(model, dtype):
    cos, sin = model.cos, model.sin  # the table of angles stays float32
    model.to(dtype)
    model.cos, model.sin = cos, sin


def bench_train(s, args):
    dtype, B, T = DTYPES[args.dtype], args.batch, args.seq
    pure = args.precision == "pure" and dtype != torch.float32
    if s.gpt2:
        s.T_max = max(s.T_max, T)
    torch.manual_seed(1)
    backend = best_backend(s, B, T, dtype, args.budget)
    model = Model(s, T).to(DEVICE)
    if pure:
        to_compute_dtype(model, dtype)
    weights = list(model.parameters())
    if args.precision == "master" and dtype != torch.float32:  # float32 copies, from whose gradients AdamW updates them
        masters = [p.detach().clone() for p in weights]
        for m in masters:
            m.grad = torch.zeros_like(m)
        to_compute_dtype(model, dtype)
        trained = masters
    else:
        masters, trained = None, weights
    matrices = [p for p in trained if p.dim() >= 2]
    others = [p for p in trained if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                                  lr=torch.tensor(args.lr, device=DEVICE) if CUDA else args.lr, betas=(0.9, 0.95), eps=1e-8,
                                  fused=True, **({"capturable": True} if CUDA else {}))
    # Autocast's cache of cast weights must be off while a graph is captured.
    autocast = (torch.autocast(DEVICE.type, dtype, cache_enabled=False)
                if args.precision == "autocast" and dtype != torch.float32 else contextlib.nullcontext())
    forward = model
    if args.compile == "full":
        forward = torch.compile(model, dynamic=False)
    elif args.compile == "blocks":  # one compilation for all blocks: for models that are too deep to wait for
        for block in model.blocks:
            block.compile(dynamic=False)

    batches = [torch.randint(0, s.V, (2, B, T), device=DEVICE) for _ in range(4)]
    static = batches[0].clone()

    def step():
        for p in weights:
            p.grad = None
        with autocast:
            loss = forward(static[0], static[1])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        if masters:
            torch._foreach_copy_([m.grad for m in masters], [p.grad for p in weights])
        optimizer.step()
        if masters:
            with torch.no_grad():
                torch._foreach_copy_(weights, masters)
        return loss.detach()

    with sdpa_kernel([BACKENDS[backend]]):
        started = time.perf_counter()
        losses = [float(step()) for _ in range(args.warmup)]
        compile_s = time.perf_counter() - started
        # All steps use the same batch: if the loss does not go down, the training is wrong.
        if not (all(math.isfinite(x) for x in losses) and losses[-1] < losses[0] and abs(losses[0] - math.log(s.V)) < 1.0):
            raise RuntimeError(f"the loss does not go down from log V = {math.log(s.V):.2f}: {losses}")
        kernels = attention_kernels_of(step)
        run, how = step, "no graph"
        if CUDA:
            try:
                for p in weights:
                    p.grad = None  # the captured backward makes them, in the graph's own memory
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                    captured_loss = step()
                run, how = (lambda: (graph.replay(), captured_loss)[1]), "CUDA graph"
            except RuntimeError as error:
                say("the step is not captured:", str(error).splitlines()[0])
                torch.cuda.synchronize()
        times = []
        for i in range(args.steps + 2):
            start = time.perf_counter()
            static.copy_(batches[i % len(batches)])
            loss = float(run())  # waits for the step, as a training program that logs its loss does
            if i >= 2:
                times.append(time.perf_counter() - start)
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss is {loss}")
    peak = torch.cuda.max_memory_reserved() if CUDA else 0
    how_exact = "fp32" if dtype == torch.float32 else args.precision + " " + args.dtype
    compiled = f"compiled ({args.compile})" if args.compile else "eager"
    note = (f"{compiled}, {how}, {how_exact}, SDPA {backend}{'' if s.native_gqa else ' with repeated heads'} ({kernels}), "
            f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, ready after {compile_s:.0f} s"
            + (f", allocator {peak / 2**30:.1f} GiB" if peak else ""))
    row("train", "PyTorch" + (" pure bf16" if pure else ""), T, B, f"{B * T / statistics.median(times):.6g}", 0, note)


def bench_limits(args):
    n = 8192 if CUDA else 256
    dtype = DTYPES[args.dtype]
    a, b = (torch.randn(n, n, device=DEVICE, dtype=dtype) for _ in range(2))
    row("limit", "PyTorch", "matmul " + {"fp32": "f32", "fp16": "f16"}.get(args.dtype, args.dtype), f"{2 * n**3 / seconds_of(lambda: a @ b.t(), args.budget):.6g}")
    x = torch.randn(2**30 if CUDA else 2**20, device=DEVICE)
    y = torch.empty_like(x)
    row("limit", "PyTorch", "copy", f"{2 * 4 * x.numel() / seconds_of(lambda: y.copy_(x), args.budget):.6g}")
    row("info", "PyTorch", torch.__version__ + (f", cuDNN {torch.backends.cudnn.version()}" if CUDA else ", on the CPU"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["limits", "kernels", "train"])
    parser.add_argument("--config", help="the model's config.json")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--precision", choices=["autocast", "master", "pure"], default="autocast")
    parser.add_argument("--compile", choices=["full", "blocks", ""], default="full" if CUDA else "")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--warmup", type=int, default=6, help="steps before, all on one batch: the loss must go down")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--only", default="", help="only operations whose name contains this")
    parser.add_argument("--budget", type=float, default=0.2, help="seconds to repeat an operation for")
    args = parser.parse_args()
    if args.what != "limits" and not args.config:
        parser.error(f"{args.what} needs --config")
    if CUDA:
        # All work is on one stream of our own: a backward runs on its forward's stream, and the default one cannot be captured.
        torch.cuda.set_stream(torch.cuda.Stream())
    # Retained graphs are run again and again: a compiled backward must not reuse the memory of its inputs.
    import torch._functorch.config as functorch_config
    functorch_config.donated_buffer = False
    if args.what == "limits":
        bench_limits(args)
    elif args.what == "kernels":
        bench_kernels(Sizes(args.config), args)
    else:
        bench_train(Sizes(args.config), args)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        say(f"{type(error).__name__}: {error}")
        sys.exit(2)
