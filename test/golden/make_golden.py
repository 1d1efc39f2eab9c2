#!/usr/bin/env python3
"""Makes the golden files: what PyTorch and Hugging Face transformers say that our C++ must say too.

    python3 make_golden.py               writes beside this script: the models' folders, tokenizer/, versions.json
    python3 make_golden.py --out DIR     writes there instead; `diff -r` shows whether anything changed
    python3 make_golden.py --only NAME   one model's folder (and its lines of versions.json) alone; may be repeated

It needs the packages whose versions versions.json names, on the CPU only:

    python3 -m venv ~/golden && ~/golden/bin/pip install torch==2.15.0 transformers==5.23.0 safetensors==0.8.0 \
        tokenizers==0.23.3 numpy && ~/golden/bin/python test/golden/make_golden.py

Small models, all with odd sizes (no power of two where the architecture leaves the choice):

    gpt2          LayerNorm, biases, gelu_new, learned positions, tied head
    llama         RMSNorm, SwiGLU, RoPE with llama3 scaling, 6 query heads over 2 key/value heads, untied head
    llama_sharded the weights of `llama` in several shards, its config.json in the older style of the hub
    llama_tied    multi-head, plain RoPE, tied head, weights stored in bfloat16; logits and loss only
    llama_biases  attention_bias and mlp_bias: a bias on every linear layer of the blocks; RoPE with linear scaling
    llama_dynamic RoPE with dynamic scaling, on sequences longer and shorter than max_position_embeddings
    mistral       a sliding window of 5 tokens, and the same weights without a window
    qwen2         biases on queries, keys and values; grouped-query, tied head
    qwen2_window  a sliding window from the second layer on (max_window_layers 1); logits and loss only
    qwen3         RMSNorm of each query and key head; a head size that is not C / H; grouped-query
    deepseek      multi-head latent attention with a query latent, RoPE of neighbours, YaRN with mscale; no experts
    deepseek_lite the same without a query latent and YaRN, with RoPE of halves, tied head; logits and loss only
    mfa           multi-matrix factorization attention: transformers has none, so its model is written here (`MfaAttention`)

What is true?  The reference is the float64 model, rounded to float32 once at the end. It starts from the same float32
(or bfloat16) weights that the folder holds, so its error against the exact result is half a float32 rounding, and
whatever a test measures is the error of the code under test. transformers drops to float32 inside a float64 model
(RMSNorm, RoPE, softmax); `Float64` below forbids that. versions.json notes how far plain float32 PyTorch is from the
reference: the yardstick for tolerances. See README.md for every tensor.
"""

import argparse
import contextlib
import datetime
import json
import math
import os
import pathlib
import platform
import shutil

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig, AutoModelForCausalLM, DeepseekV3Config, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config)

from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRMSNorm, apply_rotary_pos_emb

import make_tokenizer_golden

B, T, STEPS = 3, 17, 10
LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0

GPT2 = GPT2Config(
    vocab_size=97, n_positions=32, n_embd=36, n_layer=2, n_head=3, activation_function="gelu_new",
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=96, eos_token_id=96)

# RoPE turns at 1, 0.1, 0.01, 0.001 radians a position: wavelengths 6.3, 63, 628, 6283. With these factors the first
# stays (shorter than 128/4), the second is blended, the other two are divided by 8: every branch of llama3 scaling.
LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=128)

LLAMA = LlamaConfig(
    vocab_size=101, hidden_size=48, intermediate_size=76, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=1024, rms_norm_eps=1e-5, tie_word_embeddings=False,
    rope_parameters=LLAMA3_ROPE, bos_token_id=99, eos_token_id=100)

LLAMA_TIED = LlamaConfig(
    vocab_size=67, hidden_size=40, intermediate_size=52, num_hidden_layers=2, num_attention_heads=5,
    num_key_value_heads=5, max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=True,
    rope_parameters=dict(rope_type="default", rope_theta=500000.0), bos_token_id=65, eos_token_id=66)

# Linear scaling by 4: the points turn at 0.25, 0.025, 0.0025 and 0.00025 radians a position.
LLAMA_BIASES = LlamaConfig(
    vocab_size=59, hidden_size=30, intermediate_size=36, num_hidden_layers=2, num_attention_heads=3,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False,
    attention_bias=True, mlp_bias=True, rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0),
    bos_token_id=57, eos_token_id=58)

# Dynamic scaling starts beyond 12 positions: with T = 17 the base is 10000 (2 * 17 / 12 - 1)^(8 / 6).
LLAMA_DYNAMIC = LlamaConfig(
    vocab_size=61, hidden_size=30, intermediate_size=36, num_hidden_layers=2, num_attention_heads=3,
    num_key_value_heads=3, head_dim=8, max_position_embeddings=12, rms_norm_eps=1e-5, tie_word_embeddings=True,
    rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0), bos_token_id=59, eos_token_id=60)

MISTRAL = MistralConfig(
    vocab_size=67, hidden_size=28, intermediate_size=36, num_hidden_layers=2, num_attention_heads=3,
    num_key_value_heads=1, head_dim=12, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False,
    sliding_window=5, rope_parameters=dict(rope_type="default", rope_theta=10000.0), bos_token_id=65, eos_token_id=66)

QWEN2 = Qwen2Config(
    vocab_size=89, hidden_size=40, intermediate_size=60, num_hidden_layers=2, num_attention_heads=5, num_key_value_heads=1,
    max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=True, use_sliding_window=False,
    rope_parameters=dict(rope_type="default", rope_theta=1e6), bos_token_id=87, eos_token_id=88)

QWEN2_WINDOW = Qwen2Config(
    vocab_size=53, hidden_size=24, intermediate_size=36, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1,
    max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=True, use_sliding_window=True, sliding_window=6,
    max_window_layers=1, rope_parameters=dict(rope_type="default", rope_theta=1e6), bos_token_id=51, eos_token_id=52)

QWEN3 = Qwen3Config(
    vocab_size=83, hidden_size=36, intermediate_size=52, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
    head_dim=12, max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=False, use_sliding_window=False,
    rope_parameters=dict(rope_type="default", rope_theta=1e6), bos_token_id=81, eos_token_id=82)

# With 64 original positions and theta 10000 the four points turn 10, 1.0, 0.1, 0.01 times: between 4 and 0.5 lie one kept,
# one mixed and two slowed ones. mscale and mscale_all_dim differ (in DeepSeek's own files they don't), so that the cosines
# have a factor of their own, beside the softmax's.
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, beta_fast=4, beta_slow=0.5, mscale=1.2, mscale_all_dim=0.8,
            original_max_position_embeddings=64)

DEEPSEEK = DeepseekV3Config(
    vocab_size=97, hidden_size=44, intermediate_size=56, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3,
    q_lora_rank=20, kv_lora_rank=28, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16, first_k_dense_replace=2,
    max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=False, rope_interleave=True, rope_parameters=YARN,
    num_nextn_predict_layers=0, bos_token_id=95, eos_token_id=96)

DEEPSEEK_LITE = DeepseekV3Config(
    vocab_size=71, hidden_size=36, intermediate_size=52, num_hidden_layers=2, num_attention_heads=5, num_key_value_heads=5,
    q_lora_rank=None, kv_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12, first_k_dense_replace=2,
    max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=True, rope_interleave=False,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0), num_nextn_predict_layers=0, bos_token_id=69, eos_token_id=70)


class MfaConfig(LlamaConfig):
    model_type = "mfa"
    share_q_dim: int = 16


class MfaAttention(torch.nn.Module):
    """One key head and one value head; all query heads from one latent (Hu et al. 2024, arXiv:2412.19255)."""

    def __init__(self, config, layer_idx):
        super().__init__()
        linear = lambda columns, rows: torch.nn.Linear(columns, rows, bias=False)
        self.H, self.D = config.num_attention_heads, config.head_dim
        self.q_proj = linear(config.hidden_size, config.share_q_dim)
        self.k_proj = linear(config.hidden_size, self.D)
        self.v_proj = linear(config.hidden_size, self.D)
        self.inter_norm = LlamaRMSNorm(config.share_q_dim, eps=config.rms_norm_eps)
        self.wq = linear(config.share_q_dim, self.H * self.D)
        self.o_proj = linear(self.H * self.D, config.hidden_size)

    def forward(self, hidden_states, position_embeddings, **_):
        B, T, _ = hidden_states.shape
        q = self.wq(self.inter_norm(self.q_proj(hidden_states))).view(B, T, self.H, self.D).transpose(1, 2)
        k, v = self.k_proj(hidden_states)[:, None], self.v_proj(hidden_states)[:, None]
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        scores = q @ k.transpose(2, 3) / math.sqrt(self.D)
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        out = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1)), None


class MfaForCausalLM(LlamaForCausalLM):
    config_class = MfaConfig

    def __init__(self, config):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = MfaAttention(config, index)


AutoConfig.register("mfa", MfaConfig)
AutoModelForCausalLM.register(MfaConfig, MfaForCausalLM)
MFA = MfaConfig(
    vocab_size=79, hidden_size=42, intermediate_size=52, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
    head_dim=24, share_q_dim=28, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0), bos_token_id=77, eos_token_id=78)

# The tensors whose gradients the case with ignored targets keeps.
IGNORED_GRADS = {
    "gpt2": ["transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"],
    "llama": ["lm_head.weight", "model.layers.0.self_attn.k_proj.weight"],
    "llama_biases": [], "llama_dynamic": [], "mistral": [],         # ten steps, but not this case
    "qwen2": [], "qwen3": [], "deepseek": [], "mfa": [],
}
SHORT = 9                                                           # positions of `short_logits`: below LLAMA_DYNAMIC's 12


class Float64(TorchFunctionMode):
    """While active, code that asks for float32 (`x.float()`, `x.to(torch.float32)`, `dtype=torch.float32`) gets
    float64, and a float32 result of any operation is an error."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        widen = lambda x: torch.float64 if x is torch.float32 else x
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(widen(a) for a in args)
        kwargs = {k: widen(v) for k, v in (kwargs or {}).items()}
        result = func(*args, **kwargs)
        if func is not torch.Tensor.dtype.__get__ and isinstance(result, torch.Tensor):
            assert result.dtype not in (torch.float32, torch.bfloat16), f"{func} left float64"
        return result


def randomize(model, generator):
    """Weights at which everything matters: matrices keep the variance (attention is far from uniform), norm weights are
    not 1, biases not 0. A small final norm brings the gradient's norm to about 1, where clipping starts."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.dim() >= 2:
                p.copy_(0.15 * noise)
            elif name.endswith("bias"):
                p.copy_(0.1 * noise)
            else:
                p.copy_(1 + 0.2 * noise)
            if name.startswith(("transformer.ln_f.", "model.norm.")):
                p.mul_(0.25)


def make_tokens(vocab_size, generator):
    """(STEPS, B, T+1) int32. Batches with all ids alike and batches with mostly small ids take turns: the second kind
    has the larger gradient. (AdamW forgives any factor on the gradients that is the same in every step.)"""
    u = torch.rand(STEPS, B, T + 1, generator=generator, dtype=torch.float64)
    power = torch.tensor([1.0, 5.0] * (STEPS // 2), dtype=torch.float64).view(STEPS, 1, 1)
    return (vocab_size * u.pow(power)).to(torch.int32)


def load(folder, dtype, **changes):
    """The model of a Hugging Face folder in float32 or float64; the RoPE frequencies too are made in that dtype.
    changes: what is to be otherwise than in its config.json."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **changes)
    model.train()                                                   # all dropouts are 0
    if dtype == torch.float64:
        model.double()
        for module in model.modules():
            if hasattr(module, "inv_freq"):
                with Float64():
                    module.__init__(module.config)                  # no parameters in it: only the frequencies
        assert all(t.dtype == torch.float64 for t in [*model.parameters(), *model.buffers()] if t.is_floating_point())
    return model


@contextlib.contextmanager
def mode_of(model):
    """Float64() for a float64 model; and products of integers and Python numbers are float64 then, too."""
    if next(model.parameters()).dtype != torch.float64:
        yield
        return
    torch.set_default_dtype(torch.float64)
    try:
        with Float64():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def logits_and_loss(model, inputs, targets):
    """logits (B,T,V); loss: mean over the targets that are not -100."""
    with mode_of(model):
        logits = model(input_ids=inputs.long(), use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.long().flatten(), ignore_index=-100)
    return logits, loss


def gradients(model, inputs, targets):
    model.zero_grad()
    logits, loss = logits_and_loss(model, inputs, targets)
    loss.backward()
    return logits.detach(), loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def adamw_steps(model, tokens, clip=CLIP):
    """STEPS steps, each on its own batch. Returns losses, gradient norms before clipping, and the final weights."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]      # embeddings are matrices too
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [dict(params=matrices, weight_decay=WEIGHT_DECAY), dict(params=vectors, weight_decay=0.0)],
        lr=LR, betas=BETAS, eps=EPS)
    losses, norms = [], []
    for batch in tokens:
        optimizer.zero_grad()
        _, loss = logits_and_loss(model, batch[:, :-1], batch[:, 1:])
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), torch.stack(norms), {n: p.detach().clone() for n, p in model.named_parameters()}


def ignored_case(tokens, generator):
    """The targets of step 0 with about a third ignored, and the last row wholly."""
    targets = tokens[0, :, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = -100
    targets[-1] = -100
    return targets


def run(folder, name, tokens, ignored, dtype):
    """Everything golden.safetensors holds for a model, computed in dtype."""
    model = load(folder, dtype)
    logits, loss, grads = gradients(model, tokens[0, :, :-1], tokens[0, :, 1:])
    out = {"logits": logits, "loss": loss} | {f"grad.{n}": g for n, g in grads.items()}
    if name == "llama_dynamic":
        out["short_logits"] = logits_and_loss(model, tokens[0, :, :SHORT], tokens[0, :, 1:SHORT + 1])[0].detach()
    if name == "mistral":
        out["logits_without_window"] = gradients(
            load(folder, dtype, sliding_window=None), tokens[0, :, :-1], tokens[0, :, 1:])[0]
    if name in IGNORED_GRADS:
        _, out["ignored_loss"], grads = gradients(model, tokens[0, :, :-1], ignored)
        out |= {f"ignored_grad.{n}": grads[n] for n in IGNORED_GRADS[name]}
        out["losses"], out["grad_norms"], after = adamw_steps(load(folder, dtype), tokens)
        out |= {f"after.{n}": p for n, p in after.items()}
    else:
        out = {"logits": out["logits"], "loss": out["loss"]}
    return out


def key_bias(name, tensor):
    """The key's third of GPT-2's c_attn.bias, else nothing. It adds the same number to all scores of a softmax row, so
    its gradient is exactly zero; in float32 it is rounding noise, which AdamW divides by its own size and so turns into
    steps of up to lr. After training these elements say nothing, and tests must leave them out."""
    third = tensor.numel() // 3
    return tensor[third:2 * third] if name.endswith("attn.c_attn.bias") else tensor[:0]


def float32_noise(exact, plain):
    """How far plain float32 PyTorch is from float64, in the measures that the tests use."""
    absolute = lambda a, b: (a - b).abs().max().item() if a.numel() else 0.0
    relative_to_max = lambda a, b: absolute(a, b) / b.abs().max().item()
    relative_norm = lambda a, b: ((a - b).norm() / b.norm()).item()

    def worst(prefix, measure, pick=lambda name, tensor: tensor):
        return max((measure(pick(n, plain[n]), pick(n, exact[n])) for n in exact if n.startswith(prefix)), default=0.0)

    def rest(name, tensor):
        n = key_bias(name, tensor).numel()
        return torch.cat([tensor[:n], tensor[2 * n:]]) if n else tensor

    for name, t in exact.items():
        if name.startswith("grad."):
            assert absolute(key_bias(name, t), torch.zeros(())) < 1e-16, "a key bias must have no gradient"
    noise = dict(logits_relative_to_max=worst("logits", relative_to_max), loss_absolute=worst("loss", absolute),
                 grad_relative_norm=worst("grad.", relative_norm), grad_norms_absolute=worst("grad_norms", absolute),
                 after_relative_norm=worst("after.", relative_norm, rest),
                 after_absolute=worst("after.", absolute, rest),
                 after_absolute_in_gpt2_key_bias=worst("after.", absolute, key_bias))
    return {k: float(f"{v:.1e}") for k, v in noise.items() if v}


def make_model(out, name, config, seed, dtype=torch.float32):
    """Writes out/<name>: config.json, model.safetensors, golden.safetensors, losses.csv. Returns the notes for
    versions.json."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)

    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert getattr(model.get_input_embeddings(), "padding_idx", None) is None, \
        f"{name}: set pad_token_id=None: PyTorch gives that token's embedding no gradient"
    randomize(model, generator)
    model.to(dtype).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)

    tokens = make_tokens(config.vocab_size, generator)
    ignored = ignored_case(tokens, generator)
    exact = run(folder, name, tokens, ignored, torch.float64)
    plain = run(folder, name, tokens, ignored, torch.float32)

    golden = {n: t.to(torch.float32).reshape(t.shape or 1).contiguous() for n, t in exact.items()}
    golden["loss_f64"], golden["loss"] = golden["loss"], plain["loss"].reshape(1)
    golden["tokens"] = tokens if "losses" in exact else tokens[:1].clone()
    if "losses" in exact:
        golden["ignored_targets"] = ignored
        golden["losses_f32"] = plain["losses"]
        check_steps(exact, adamw_steps(load(folder, torch.float64), tokens, clip=math.inf)[2])
        rows = [f"{step},{loss:.4f},{norm:.4f}\n" for step, (loss, norm) in
                enumerate(zip(exact["losses"].tolist(), exact["grad_norms"].tolist()))]
        (folder / "losses.csv").write_text("step,loss,grad_norm\n" + "".join(rows))
    safetensors.torch.save_file(golden, folder / "golden.safetensors")
    return float32_noise(exact, plain)


def check_steps(exact, after_unclipped):
    """The steps are only a test if clipping acts in some and not in all, and if leaving it out moves weights by far
    more than the tolerance of 1e-4. Four decimals can only be compared as text if no loss lies so near a rounding edge
    that float32 noise tips it over."""
    clipped = (exact["grad_norms"] > CLIP).sum().item()
    assert 0 < clipped < STEPS, f"clipping acts in {clipped} of {STEPS} steps: {exact['grad_norms'].tolist()}"
    effect = max((exact[f"after.{n}"] - p).abs().max().item() for n, p in after_unclipped.items())
    assert effect > 1e-3, f"without clipping the weights only differ by {effect:.1e}"
    for loss in exact["losses"].tolist():
        edge = abs(loss * 1e4 - math.floor(loss * 1e4) - 0.5) / 1e4
        assert edge > 3e-6, f"loss {loss:.7f} lies on a rounding edge of 4 decimals: take another seed"


def make_sharded(out):
    """out/llama_sharded: the weights of `llama` in shards, under a config.json as transformers 4 wrote it."""
    folder = out / "llama_sharded"
    shutil.rmtree(folder, ignore_errors=True)
    model = load(out / "llama", torch.float32)
    model.save_pretrained(folder, max_shard_size="64KB")
    (folder / "generation_config.json").unlink(missing_ok=True)

    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    inputs = torch.arange(T)[None]
    same = torch.equal(model(inputs).logits, load(folder, torch.float32)(inputs).logits)
    assert same, "the sharded folder must hold the model `llama`"
    assert len(list(folder.glob("*.safetensors"))) >= 2


def check_float64(folder):
    """The float64 model really is one: its gradient agrees with a central difference far below float32's reach."""
    model = load(folder, torch.float64)
    inputs, targets = torch.arange(T)[None], torch.arange(T)[None] + 1
    _, _, grads = gradients(model, inputs, targets)
    for name, p in model.named_parameters():
        index, h, losses = grads[name].abs().argmax(), 1e-5, []
        with torch.no_grad():
            for sign in (+1, -1):
                p.view(-1)[index] += sign * h
                losses.append(logits_and_loss(model, inputs, targets)[1].item())
                p.view(-1)[index] -= sign * h
        error = abs((losses[0] - losses[1]) / (2 * h) - grads[name].view(-1)[index].item())
        assert error < 1e-8, f"{folder}: {name}: gradient and difference quotient differ by {error:.1e}"


# name: the configuration, the seed of its weights and tokens, and the dtype of its weights in the file
MODELS = {
    "gpt2": (GPT2, 1), "llama": (LLAMA, 2), "llama_tied": (LLAMA_TIED, 3, torch.bfloat16),
    "llama_biases": (LLAMA_BIASES, 3), "llama_dynamic": (LLAMA_DYNAMIC, 2), "mistral": (MISTRAL, 2),
    "qwen2": (QWEN2, 4), "qwen2_window": (QWEN2_WINDOW, 1), "qwen3": (QWEN3, 5),
    "deepseek": (DEEPSEEK, 7), "deepseek_lite": (DEEPSEEK_LITE, 9), "mfa": (MFA, 9),
}


def main():
    here = pathlib.Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=here)
    parser.add_argument("--only", action="append", choices=MODELS, metavar="NAME")
    arguments = parser.parse_args()
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)                                        # one order of summation on every machine
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    noise = {name: make_model(out, name, *MODELS[name]) for name in arguments.only or MODELS}
    for name in noise:
        check_float64(out / name)
    if not arguments.only:
        make_sharded(out)
        make_tokenizer_golden.make(out / "tokenizer")

    versions = dict(date=datetime.date.today().isoformat(), python=platform.python_version(), torch=torch.__version__,
                    transformers=transformers.__version__, safetensors=safetensors.__version__,
                    tokenizers=make_tokenizer_golden.VERSION)
    if arguments.only and (out / "versions.json").exists():         # all that it says of the others stays
        noise = {name: its | dict(made_with=versions) for name, its in noise.items()}
        versions = json.loads((out / "versions.json").read_text())
    known = versions.get("float32_pytorch_against_float64", {}) | noise
    versions["float32_pytorch_against_float64"] = {name: known[name] for name in MODELS if name in known}
    (out / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")
    for path in sorted(p for p in out.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        print(f"{path.stat().st_size:9,d}  {path.relative_to(out)}")


if __name__ == "__main__":
    main()
