"""Makes the tokenizer golden files with the `tokenizers` library: two small byte-level BPE vocabularies trained on
tokenizer/corpus.txt, and what the library makes of the strings below. Called by make_golden.py.

    gpt2    as GPT-2's file: pieces by ByteLevel's own pattern; merges as strings "a b" (the older way to write them)
    llama3  as LLaMA 3's: pieces by a pattern in the file, then ByteLevel; ignore_merges: a piece that is in the
            vocabulary is one token, even if no merges lead there; merges as pairs ["a", "b"]
"""

import itertools
import json
import pathlib

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VERSION = tokenizers.__version__
VOCABULARY = 600                                # without special tokens and extra words

LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                  r"|\s*[\r\n]+|\s+(?!\S)|\s+")
GPT2_SPECIAL = ["<|endoftext|>"]
LLAMA3_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
LLAMA3_EXTRA_WORDS = [" tokenizer", "Shakespeare", " 日本語", "threadIdx", "777", "'Ll", "    \n"]  # no merges lead there

CASES = [
    # plain text, spaces
    "", " ", "  ", "   ", "a", " a", "a ", "  a", "a  b", "a   b    c", "Hello world", "Hello, world!", " leading",
    "trailing ", "trailing   ", "   both   ", "First Citizen:\nBefore we proceed any further, hear me speak.",
    "But, soft! what light through yonder window breaks?", "antidisestablishmentarianism",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    # line ends, tabs, other white space
    "\n", "\n\n", "\n\n\n", "a\nb", "a\n\nb", "a \n b", "a  \n  b", "\r", "\r\n", "\r\n\r\n", "a\r\nb\r\n", "a\rb",
    "a \r\n \r\n  b", "\t", "\ta", "a\tb", "\t\ta\t \tb\t", "a \t\n", "x\n ", "x\n  y", "x  \n", "!\n\n", "!\r\n?",
    "...\n  ...", "\v\f", "a\x0bb\x0cc", "a\u00a0b", "a\u00a0\u00a0b", "\u2003em space", "a\u3000b",
    "a\u2028b\u2029c", "a\u0085b", "a\u1680b\u202fc\u205fd", "zero\u200bwidth", "\ufeffmark", "a\u180eb", "\x00",
    "a\x00b", "\x1c\x1d\x1e\x1f", "\x7f", "  \u00a0 x", "\u00a0x", "x \u3000", "x\u3000\n\u3000y",
    # digits
    "0", "12", "123", "1234", "12345678", "3.14159265", "1,000,000", "2024-01-31", "1st 2nd 3rd", "x1y22z333", "777",
    " 777", "7777", "0x1F 1e-5 -42", "½ ¼ ²³ ⅷ Ⅻ", "٣٤٥٦", "१२३४", "12½34", "①②③④", "〇一二三",
    # contractions
    "I'm you're he's they've we'll I'd don't", "I'M YOU'RE HE'S THEY'VE WE'LL I'D DON'T", "I'm I'M i'M",
    "'s 't 're 've 'm 'll 'd", "'S 'T 'Re 'vE 'LL 'Ll 'lL 'D", "it''s", "'tis", "o'clock", "rock'n'roll", "'", "''",
    "' s", "'sx", "'lla", "x'r", "it’s", "'ſ x'ſ",
    # punctuation, code
    "!!!", "a!b?c.", "(a)[b]{c}", "--- a --- b", "\"quoted\" 'single'", "a_b_c", "foo.bar(baz, 42);",
    "x != y && z <= w", "int i = blockIdx.x * blockDim.x + threadIdx.x;",
    "    if (i < n) {\n        out[i] = 0;\n    }\n", "threadIdx", " threadIdx", "def f(x):\n\treturn x  # note\n",
    "https://example.org/a?b=c&d=e#f", "C:\\path\\to", "$5 €5 £3 100%", "a@b.c", "#!/bin/sh\n",
    # letters of other scripts, marks
    "Größe Straße Äpfel", "déjà vu naïve café", "cafe\u0301 e\u0301 n\u0303", "\u0301", "a\u0301\u0302\u0303b",
    " \u0301x", "Žluťoučký kůň", "Привет, мир!", "Γειά σου Κόσμε", "שלום עולם", "שָׁלוֹם", "مرحبا بالعالم",
    "नमस्ते दुनिया", "สวัสดีชาวโลก", "日本語の文章", " 日本語", "你好,世界!", "안녕하세요 세계", "\u1112\u1161\u11ab", "ǅ ǲ ʰ ª º",
    "İstanbul ıI", "ﬁ ﬂ ß ẞ", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛𝟜", "𐍈𐌰 𒀀𒁀", "𠜎𠜱𠝹", "ⓐⓑ ᛗ ꙮ", "㎏ ℃ ℓ №", "\u00ad soft\u00adhyphen",
    # emoji, symbols, rare code points
    "😀", "😀😃", " 😀", "a😀b", "👍🏽", "👩‍👩‍👧‍👦", "🇨🇭🇯🇵", "❤️ ❤", "1️⃣", "→∑∞≤", "“quoted” – — …", "\ufffd", "\ue000",
    "\U000f0000", "\U0010ffff", "\u0378", "\U0001fbf0", "x\u200dy", "😀\n\n😀 \r\n", "a→b ∞c",
    # special tokens in text, whole and broken
    "<|endoftext|>", "a<|endoftext|>b", "a <|endoftext|> b", "<|endoftext|><|endoftext|>", "<|endoftext|",
    "<|endoftext|>\n\n", "  <|endoftext|>", "<|begin_of_text|>Hello<|end_of_text|>",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi!<|eot_id|>", "<|eot_id|", "<|<|eot_id|>|>",
    "<|ENDOFTEXT|>", "it's<|eot_id|>'s", "12<|eot_id|>34", "a  <|begin_of_text|>  b",
    # words that are in the vocabulary without merges
    "a tokenizer", " tokenizer", "tokenizer", " tokenizers", "Shakespeare", " Shakespeare", "x    \ny", "    \n",
]


def train(ignore_merges, pre_tokenizer, corpus):
    """A Tokenizer with VOCABULARY tokens: the 256 bytes first, then one for each merge."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False)
    tokenizer.train_from_iterator([corpus], trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY, "the corpus is too short for this vocabulary"
    return tokenizer


def add_special(tokenizer, names):
    tokenizer.add_special_tokens([AddedToken(n, normalized=False, special=True) for n in names])


def make_gpt2(corpus):
    """The text of tokenizer.json, with what GPT-2's own file has and nothing newer."""
    tokenizer = train(False, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True), corpus)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    add_special(tokenizer, GPT2_SPECIAL)
    spec = json.loads(tokenizer.to_str())
    spec["model"]["merges"] = [f"{a} {b}" for a, b in spec["model"]["merges"]]
    for newer in ("byte_fallback", "ignore_merges"):
        del spec["model"][newer]
    for part in ("pre_tokenizer", "post_processor", "decoder"):
        spec[part].pop("use_regex")             # its default is true
    return json.dumps(spec, ensure_ascii=False)


def make_llama3(corpus):
    tokenizer = train(True, pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), corpus)
    spec = json.loads(tokenizer.to_str())
    vocab = spec["model"]["vocab"]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in LLAMA3_EXTRA_WORDS:
        bytes_as_letters = byte_level.pre_tokenize_str(word)[0][0]
        vocab.setdefault(bytes_as_letters, len(vocab))
    assert len(vocab) == VOCABULARY + len(LLAMA3_EXTRA_WORDS), "an extra word was reached by merges"
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    add_special(tokenizer, LLAMA3_SPECIAL)
    begin = LLAMA3_SPECIAL[0]
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single=f"{begin} $A", pair=f"{begin} $A {begin} $B",
                                      special_tokens=[(begin, tokenizer.token_to_id(begin))])])
    return tokenizer.to_str()


def cases(tokenizer):
    """For every string: the pieces it is cut into (special tokens are pieces of their own), the ids, without what the
    post-processor would add, and the text they decode to. So small a vocabulary often gives the same ids for a
    wrong cut: the pieces show it."""
    rows = []
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
    for text in CASES:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        pieces = [decode([i for _, i in group]) for _, group in
                  itertools.groupby(zip(encoding.word_ids, encoding.ids), key=lambda pair: pair[0])]
        row = dict(text=text, pieces=pieces, ids=encoding.ids, decoded=decode(encoding.ids))
        assert row["decoded"] == "".join(pieces) == text, f"{text!r} comes back as {row}"
        rows.append(row)
    return rows


def make(out):
    """Writes out/gpt2/ and out/llama3/, each with tokenizer.json and cases.json."""
    corpus = (pathlib.Path(__file__).resolve().parent / "tokenizer" / "corpus.txt").read_text(encoding="utf-8")
    assert len(set(CASES)) == len(CASES), "a case appears twice"
    for name, spec in (("gpt2", make_gpt2(corpus)), ("llama3", make_llama3(corpus))):
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(spec + "\n", encoding="utf-8")
        rows = cases(Tokenizer.from_file(str(folder / "tokenizer.json")))
        lines = ",\n".join(json.dumps(row) for row in rows)                    # \u escapes: safe in any editor
        (folder / "cases.json").write_text(f"[\n{lines}\n]\n", encoding="ascii")
