"""Makes the tokenizer golden files with the `tokenizers` library: small BPE vocabularies trained on tokenizer/corpus.txt,
and what the library makes of the strings below. Called by make_golden.py.

    gpt2    as GPT-2's file: pieces by ByteLevel's own pattern; merges as strings "a b" (the older way to write them)
    llama3  as LLaMA 3's: pieces by a pattern in the file, then ByteLevel; ignore_merges: a piece that is in the
            vocabulary is one token, even if no merges lead there; merges as pairs ["a", "b"]
    qwen3   as Qwen 2's and 3's: form NFC before; special and other added tokens
    deepseek  as DeepSeek's: three patterns, one after the other
    llama2  as LLaMA 2's: no pre-tokenizer; spaces are "▁", one more is put before the text; characters, and bytes for
            those that the vocabulary lacks
    mistral as Mistral's newer files: the same by Metaspace, which puts "▁" before the first piece only
    lossy   what none of these has: NFKC, lower case, white space left out, digits and punctuation cut out, unknown
            characters, added tokens that take white space or must stand alone

words.json has what Split makes of strings, for patterns that read differently to PCRE2; normal_forms.json what the
normalizers make of strings.
"""

import collections
import itertools
import json
import pathlib

import tokenizers
from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors,
                        trainers)

VERSION = tokenizers.__version__
VOCABULARY = 600                                # without special tokens and extra words

LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                  r"|\s*[\r\n]+|\s+(?!\S)|\s+")
GPT2_SPECIAL = ["<|endoftext|>"]
LLAMA3_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
QWEN_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
DEEPSEEK_PATTERNS = [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
                     r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
                     r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""]
O200K_PATTERN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
                 r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
                 r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
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
    # form NFC, new characters, what SentencePiece uses for itself
    "Å Å", "e\u0323\u0302x", "\u0915\u093c", "\u1ab0\u0301\u1abf\u0301", "\U00031350\U0001fae8 \u1c89x", "\u0897\ua7cbx", "▁a ▁ b",
    "<0x41>", "<s>Hi</s> there", "<unk>", "<｜User｜>Hi<｜Assistant｜>", "<think>so</think>  no",
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


def make_qwen3(corpus):
    tokenizer = train(False, pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), corpus)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    add_special(tokenizer, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=False) for name in ("<think>", "</think>")])
    return tokenizer.to_str()


def make_deepseek(corpus):
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in DEEPSEEK_PATTERNS]
    tokenizer = train(False, pre_tokenizers.Sequence(
        splits + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), corpus)
    tokenizer.normalizer = normalizers.Sequence([])
    add_special(tokenizer, ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"])
    tokenizer.add_tokens([AddedToken(name, normalized=True, special=False) for name in ("<｜User｜>", "<｜Assistant｜>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        "<｜begin▁of▁sentence｜> $A", special_tokens=[("<｜begin▁of▁sentence｜>", VOCABULARY)])
    return tokenizer.to_str()


def train_characters(corpus, **options):
    """<unk>, <s>, </s>, the 256 bytes, then characters and merges of words that begin with "▁"."""
    names = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    counts = collections.Counter(corpus.replace("\n", "").replace(" ", "▁"))
    alphabet = sorted(counts, key=lambda c: (-counts[c], c))[:120]             # of equal counts the trainer takes any
    tokenizer.train_from_iterator([corpus.replace("\n", " ")], trainers.BpeTrainer(
        vocab_size=1200, special_tokens=names, initial_alphabet=alphabet, limit_alphabet=len(alphabet), show_progress=False))
    spec = json.loads(tokenizer.to_str())
    vocab, merges = spec["model"]["vocab"], [tuple(merge) for merge in spec["model"]["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", **options))
    add_special(tokenizer, names[:3])
    return tokenizer


def sentencepiece_decoder():
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                              decoders.Strip(" ", 1, 0)])


def make_llama2(corpus):
    tokenizer = train_characters(corpus, fuse_unk=True, byte_fallback=True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = sentencepiece_decoder()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    return tokenizer.to_str()


def make_mistral(corpus):
    tokenizer = train_characters(corpus, fuse_unk=True, byte_fallback=True, ignore_merges=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> <s> $B </s>",
                                                             [("<s>", 1), ("</s>", 2)])
    return tokenizer.to_str()


def make_lossy(corpus):
    tokenizer = train_characters(corpus, fuse_unk=True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip(),
                                                 normalizers.Replace(Regex("[ßẞ]"), "ss")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Punctuation(),
        pre_tokenizers.Metaspace(prepend_scheme="always")])
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_tokens([AddedToken("hello", single_word=True, normalized=True), AddedToken("<mask>", lstrip=True, normalized=False),
                          AddedToken("<|", rstrip=True, normalized=False), AddedToken("Be", single_word=True, normalized=False)])
    return tokenizer.to_str()


MAKERS = dict(gpt2=make_gpt2, llama3=make_llama3, qwen3=make_qwen3, deepseek=make_deepseek, llama2=make_llama2,
              mistral=make_mistral, lossy=make_lossy)
KEEPS_TEXT = ["gpt2", "llama3", "deepseek"]     # no normalizer changes the strings


def cases(name, tokenizer):
    """For every string: the ids, without and (for the first strings) with what the post-processor adds, and the text they
    decode to. Of some also the pieces that it is cut into (special tokens are pieces of their own): so small a
    vocabulary often gives the same ids for a wrong cut, and the pieces show it."""
    rows = []
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
    for text in CASES:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        row = dict(text=text, ids=encoding.ids, decoded=decode(encoding.ids))
        if len(rows) < 12:
            row["with_special"] = tokenizer.encode(text, add_special_tokens=True).ids
        if name in KEEPS_TEXT:
            row["pieces"] = [decode([i for _, i in group]) for _, group in
                             itertools.groupby(zip(encoding.word_ids, encoding.ids), key=lambda pair: pair[0])]
            assert row["decoded"] == "".join(row["pieces"]) == text, f"{text!r} comes back as {row}"
        rows.append(row)
    return rows


WORD_TEXTS = ["", "a1b22  c333\r\n\n x", "Größe_Ω₂ naïve e\u0301 日本語テキスト 한국어", "aXbXXc", "XX", "'ſx I'LL It's", "ABCdef123456789",
              "\u180ex\u00a0\u2003y\u0085z", "\U00031350\U0001fae8\u1c89\u0897 \U0001cc00\U0001e4f5", "(deadBEEF) {x}", "中々ー〇、x", "Ⓐⅷ½²³\u200dk\u212a"]
WORD_PATTERNS = DEEPSEEK_PATTERNS + [
    O200K_PATTERN, QWEN_PATTERN, r"\w+", r"\W", r"[^\w\s]+", r"\h+", r"[\h_]", r"\H", r"\bX|x\b", r"\BX", r"\d{,2}", r"\p{N}{1,3}+",
    r"(?:X|b){1,2}+c", r"(?m:a.+)", r"(?i)x+", r"^.", r".$", r"\p{Han}+", r"\p{^L}+", r"\P{Lu}", r"\p{Letter}", r"[\]\[(]", r"\u65e5",
    r"X*", r"(?=X)", r"a{x", r"(?<=a)X|(?<n>c)", r"\s+(?!\S)", r"[\S]", r"\v", r"\R"]


def words():
    rows = []
    for pattern in WORD_PATTERNS:
        for behavior in ("isolated", "removed", "merged_with_previous", "merged_with_next", "contiguous"):
            for invert in (False, True):
                if (behavior, invert) != ("isolated", False) and pattern not in (r"X*", r"\p{Han}+", r"(?i)x+", r"\W"):
                    continue
                split = pre_tokenizers.Split(Regex(pattern), behavior, invert)
                found = [[word for word, _ in split.pre_tokenize_str(text)] for text in WORD_TEXTS]
                rows.append(dict(pattern=pattern, behavior=behavior, invert=invert, words=found))
    whitespace = [[word for word, _ in pre_tokenizers.Whitespace().pre_tokenize_str(text)] for text in WORD_TEXTS]
    return dict(texts=WORD_TEXTS, rows=rows, whitespace=whitespace)


NORMAL_FORM_TEXTS = ["", "plain", "e\u0301 A\u030a \u212b", "\u1112\u1161\u11ab 한", "a\u0323\u0307 a\u0307\u0323", "ﬁ ① ㎏ ｱ ½ …", "\u0915\u093c \u0958",
                     "\ufb2a", "x\u1abf\u0323", "\U0001e030 \u32ff", "\U00011938 \U00011935\U00011930", "İΣς ẞ ǅ", " \u00a0\u3000 x y\u2003\n", "\u0344 \u0f73"]


def normal_forms():
    makers = dict(NFC=normalizers.NFC(), NFD=normalizers.NFD(), NFKC=normalizers.NFKC(), NFKD=normalizers.NFKD(),
                  Lowercase=normalizers.Lowercase(), Strip=normalizers.Strip(), Left=normalizers.Strip(True, False),
                  Right=normalizers.Strip(False, True))
    return dict(texts=NORMAL_FORM_TEXTS,
                results={name: [maker.normalize_str(text) for text in NORMAL_FORM_TEXTS] for name, maker in makers.items()})


def write_json(path, value):
    path.write_text(json.dumps(value) + "\n", encoding="ascii")               # \u escapes: safe in any editor


def make(out):
    """Writes out/NAME/ with tokenizer.json and cases.json, out/words.json and out/normal_forms.json."""
    corpus = (pathlib.Path(__file__).resolve().parent / "tokenizer" / "corpus.txt").read_text(encoding="utf-8")
    assert len(set(CASES)) == len(CASES), "a case appears twice"
    for name, maker in MAKERS.items():
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(maker(corpus) + "\n", encoding="utf-8")
        rows = cases(name, Tokenizer.from_file(str(folder / "tokenizer.json")))
        lines = ",\n".join(json.dumps(row) for row in rows)
        (folder / "cases.json").write_text(f"[\n{lines}\n]\n", encoding="ascii")
    write_json(out / "words.json", words())
    write_json(out / "normal_forms.json", normal_forms())
