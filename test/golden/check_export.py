#!/usr/bin/env python3
"""Does Hugging Face transformers see the same model in a folder that OUR program saved?

    python3 check_export.py DIR...

DIR is a Hugging Face folder (config.json and model.safetensors, or shards with their index). DIR/logits.safetensors holds
`tokens` (B,T) int32 and `logits` (B,T,V) float32: what our program computed. transformers computes the same in float32; the
largest difference, relative to the largest logit, may be 1e-4. Several folders take little longer than one: most of the time
goes into starting Python.

Exit status: 0 the same; 1 different, or not loadable; 77 (skipped) torch, transformers or safetensors is missing.
"""

import pathlib
import sys

TOLERANCE = 1e-4

try:
    import torch
    import transformers
    from safetensors.torch import load_file
except ImportError as error:
    print(f"check_export: skipped: {error}")
    sys.exit(77)


def fail(message):
    print(f"check_export: FAILED: {message}")
    sys.exit(1)


def check(folder):
    tokens_file = folder / "logits.safetensors"
    try:
        ours = load_file(tokens_file)
        tokens, logits = ours["tokens"], ours["logits"].float()
    except KeyError as error:
        fail(f"{tokens_file} has no tensor {error}")
    except Exception as error:
        fail(f"cannot read {tokens_file}: {error}")
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, output_loading_info=True)
    except Exception as error:
        fail(f"transformers cannot load {folder}: {error}")
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(problem):                   # transformers only warns, and goes on with random weights
            fail(f"{folder}: {problem}: {sorted(map(str, info[problem]))}")

    with torch.no_grad():
        theirs = model.eval()(input_ids=tokens.long(), use_cache=False).logits
    if theirs.shape != logits.shape:
        fail(f"logits have shape {tuple(logits.shape)}, transformers gives {tuple(theirs.shape)}")
    difference = ((logits - theirs).abs().max() / theirs.abs().max()).item()
    if not difference <= TOLERANCE:             # so that NaN fails too
        fail(f"logits differ by {difference:.2e} of the largest, allowed {TOLERANCE:.0e}")
    print(f"check_export: ok: {folder}: logits {tuple(logits.shape)} differ by {difference:.2e} of the largest")


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__.strip())
        sys.exit(0 if sys.argv[1:] == ["--help"] else 2)
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for folder in sys.argv[1:]:
        check(pathlib.Path(folder))


if __name__ == "__main__":
    main()
