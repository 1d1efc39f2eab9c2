#!/usr/bin/env python3
"""Is a checkpoint of OUR program a whole Hugging Face folder?

    python3 check_folder.py DIR...

AutoTokenizer and AutoModelForCausalLM must load DIR, and the model must generate from the tokenizer's ids, which are then
decoded. Training on must be without dropout, which our program has none of. DIR/encodings.json, if it is there, is a list of
{"text": ..., "ids": [...]}: what our tokenizer makes of the text, and what AutoTokenizer must make of it, without the tokens
that it would add around it; decoding must give the text back.

transformers gives each model of type qwen2 its own Qwen2Tokenizer, which brings text into Unicode's form NFC whatever
tokenizer.json says: there, texts that are not in this form are left out.

Exit status: 0 all is well; 1 not; 77 (skipped) torch or transformers is missing.
"""

import json
import pathlib
import sys
import unicodedata

try:
    import torch
    import transformers
except ImportError as error:
    print(f"check_folder: skipped: {error}")
    sys.exit(77)


def fail(message):
    print(f"check_folder: FAILED: {message}")
    sys.exit(1)


def check_encodings(folder, tokenizer, model_type):
    path = folder / "encodings.json"
    n = 0
    for case in json.loads(path.read_text(encoding="utf-8")) if path.exists() else []:
        text = case["text"]
        if model_type == "qwen2" and unicodedata.normalize("NFC", text) != text:
            continue
        ids = tokenizer.encode(text, add_special_tokens=False)
        if ids != case["ids"]:
            fail(f"{folder}: {text!r}: AutoTokenizer gives {ids}, our tokenizer {case['ids']}")
        if tokenizer.decode(ids) != text:
            fail(f"{folder}: {text!r}: decoded as {tokenizer.decode(ids)!r}")
        n += 1
    return n


def check(folder):
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except Exception as error:
        fail(f"transformers cannot load {folder}: {error}")
    if len(tokenizer) > model.config.vocab_size:
        fail(f"{folder}: the tokenizer has {len(tokenizer)} tokens, the model {model.config.vocab_size}")
    n_texts = check_encodings(folder, tokenizer, model.config.model_type)
    if model.generation_config.eos_token_id != model.config.eos_token_id:
        fail(f"{folder}: config.json and generation_config.json differ in eos_token_id")
    for name, token, token_id in [("bos", tokenizer.bos_token_id, model.config.bos_token_id),
                                  ("eos", tokenizer.eos_token_id, model.config.eos_token_id)]:
        if token != token_id:
            fail(f"{folder}: {name}_token_id is {token_id} in config.json, {token} of the tokenizer")
    if any(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)):
        fail(f"{folder}: transformers would train this model with dropout")
    inputs = tokenizer("Line 1 of", return_tensors="pt")
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=5, do_sample=False)[0]
        logits = model(input_ids=out[None]).logits[0]
    n = inputs["input_ids"].shape[1]
    if out[n:].tolist() != logits[n - 1:-1].argmax(-1).tolist() or len(out) == n:
        fail(f"{folder}: generate() gives {out[n:].tolist()}, and greedy choices are {logits[n - 1:-1].argmax(-1).tolist()}")
    print(f"check_folder: ok: {folder}: {type(tokenizer).__name__} with {len(tokenizer)} tokens, {n_texts} texts, "
          f"{type(model).__name__} generated {tokenizer.decode(out)!r}")


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
