// The parts of tokenizers: patterns, the ways to split, normal forms, against what Hugging Face's library makes of the
// same strings (test/golden/make_tokenizer_golden.py).
#include <filesystem>
#include "io/tokenizer_parts.h"
#include "json.h"
#include "temp_folder.h"
#include "test.h"

namespace {

using Words = std::vector<std::string>;

json golden(const std::string& name) {
    return parsed_json(slurp((std::filesystem::path(__FILE__).parent_path() / "golden" / "tokenizer" / name).string()));
}

Words words_of(const std::vector<PreTokenizer>& steps, const std::string& text) {
    if (text.empty()) return {};
    ChangedTexts changed;
    Words words;
    for (const Piece& piece : pre_tokenize(steps, {text, true}, changed)) words.emplace_back(piece.text);
    return words;
}

}  // namespace

TEST_CASE("Split cuts as Hugging Face's, whatever the pattern and what becomes of its matches") {
    const std::map<std::string, SplitBehavior> behaviors = {
        {"isolated", SplitBehavior::isolated},
        {"removed", SplitBehavior::removed},
        {"merged_with_previous", SplitBehavior::merged_with_previous},
        {"merged_with_next", SplitBehavior::merged_with_next},
        {"contiguous", SplitBehavior::contiguous}};
    const json file = golden("words.json");
    REQUIRE(file["rows"].size() > 60);
    for (const json& row : file["rows"]) {
        const PreTokenizer step = split(Regex(row["pattern"].asString(), "t"), behaviors.at(row["behavior"].asString()),
                                        as<bool>(row["invert"]));
        for (Json::ArrayIndex i = 0; i < file["texts"].size(); ++i) {
            INFO(dumped(row) << ": " << dumped(file["texts"][i]));
            CHECK(words_of({step}, file["texts"][i].asString()) == as<Words>(row["words"][i]));
        }
    }
    for (Json::ArrayIndex i = 0; i < file["texts"].size(); ++i)
        CHECK(words_of({split_off_white_space()}, file["texts"][i].asString()) == as<Words>(file["whitespace"][i]));
}

TEST_CASE("words of whole files are cut as Hugging Face's cuts them") {
    // The vocabularies of the golden files are small, so that different words may give equal ids: words are compared.
    for (std::string name : {"gpt2", "llama3", "deepseek"}) {
        const json file = golden(name + "/tokenizer.json");
        std::vector<PreTokenizer> steps;
        if (name == "gpt2")
            steps = {split(Regex(R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)", "t"),
                           SplitBehavior::isolated)};
        else
            for (const json& step : file["pre_tokenizer"]["pretokenizers"])
                if (step["type"] == "Split")
                    steps.push_back(split(Regex(step["pattern"]["Regex"].asString(), "t"), SplitBehavior::isolated));
        int n_compared = 0;
        for (const json& c : golden(name + "/cases.json")) {
            const std::string text = c["text"].asString();
            if (text.find("<") != text.npos) continue;  // added tokens are cut out before
            INFO(name << ": " << dumped(c["text"]));
            CHECK(words_of(steps, text) == as<Words>(c["pieces"]));
            ++n_compared;
        }
        CHECK(n_compared > 150);
    }
}

TEST_CASE("a byte that is not UTF-8 is one control character to patterns") {
    const PreTokenizer letters = split(Regex("\\p{L}+|[\\p{P}\\p{S}]+", "t"), SplitBehavior::isolated);
    CHECK(words_of({letters}, "a\xC3z\u00e9\xFF\xE2\x82!") == Words{"a", "\xC3", "z\u00e9", "\xFF\xE2\x82", "!"});
    CHECK(words_of({split(Regex("\\p{Cc}", "t"), SplitBehavior::isolated)}, "\xE2\x82") == Words{"\xE2", "\x82"});
}

// The first range is in the files of DeepSeek LLM 7B and 67B. U+A7DB and U+A7DC are of Unicode 16, U+1FAE8 of 15.
TEST_CASE("a range in a pattern takes newer characters by where they are") {
    const PreTokenizer range = split(Regex("[\u0800-\u4e00]+|[\U0001F300-\U0001FAFF]", "t"), SplitBehavior::isolated);
    CHECK(words_of({range}, "a\ua7db\ua7dca") == Words{"a\ua7db\ua7dca"});
    CHECK(words_of({range}, "a\U0001FAE8a") == Words{"a", "\U0001FAE8", "a"});
}

TEST_CASE("what a quantifier repeats, and where a class ends, is as in Oniguruma") {
    const auto replaced = [](const char* pattern, const char* text) {
        return Regex(pattern, "t").replace_all(text, "-");
    };
    CHECK(replaced("(ab){2}+", "ababab") == "-ab");
    CHECK(replaced("a{{2}+", "a{{{{{") == "-{");
    CHECK(replaced("a{,2}", "aaaa") == "--");
    for (const char* text : {"a{,}", "a{}", "a{,"}) CHECK(replaced(text, concat("a", text).c_str()) == "a-");
    CHECK(replaced("[]\\w]", "a]!") == "--!");
}

TEST_CASE("ByteFallback takes nothing but a byte for one") {
    const Decoder::Step step = decode_byte_fallback();
    CHECK(step("<0x4a>", false) == "J");
    for (const char* text : {"<0x4a]", "<0x4g>", "<0x4>", "<0x04a>", "<0y4a>"}) CHECK(step(text, false) == text);
}

TEST_CASE("patterns that cannot be used are refused in one line") {
    auto refusal = [](const char* pattern) { return error_of([&] { Regex(pattern, "tokenizer.json"); }); };
    CHECK(refusal("a|b") == "");
    CHECK(one_line_with(refusal("(a\n"), "tokenizer.json: the pattern \"(a?\"", "cannot be compiled", "parenthesis"));
    CHECK(one_line_with(refusal("[a[b]]"), "a class within a class at byte 2"));
    CHECK(one_line_with(refusal("[[:alpha:]]"), "a class within a class"));
    CHECK(one_line_with(refusal("[a-z&&b]"), "&& in a class at byte 4"));
    CHECK(one_line_with(refusal("[\\W]"), "within [...]"));
    CHECK(one_line_with(refusal("\\p{Klingon}"), "cannot be compiled"));
    CHECK(one_line_with(refusal("\\pL"), "\\p without {name}"));
    CHECK(one_line_with(refusal("(?s)a"), "unknown (?...)"));
    CHECK(one_line_with(refusal("(?~a)"), "unknown (?...)"));
    CHECK(one_line_with(refusal("a{2}?"), "{n}?"));
    CHECK(one_line_with(refusal("\\x{41}"), "\\x{...}"));
    for (const char* pattern : {"\\xC3\\xA9", "[\\xe9]", "\\x"})
        CHECK(one_line_with(refusal(pattern), "no number below 80"));
    for (const char* pattern : {"\\C", "a\\Eb", "\\Qa.\\E", "[\\V]", "\\X+"})
        CHECK(one_line_with(refusal(pattern), "\\C, \\E, \\Q, \\V or \\X"));
    CHECK(one_line_with(refusal("\\"), "cannot be compiled"));
    // One that tries all ways to cut the text in two gives up.
    const Regex slow("(a+)+$", "t");
    std::string many(41, 'a');
    many.back() = 'b';
    CHECK(one_line_with(error_of([&] { slow.found_in(many); }), "(a+)+$", "come to an end"));
}

TEST_CASE("normal forms, lower case and stripping as Hugging Face's") {
    const std::map<std::string, Normalizer> normalizers = {
        {"NFC", normal_form(true, false)},  {"NFD", normal_form(false, false)}, {"NFKC", normal_form(true, true)},
        {"NFKD", normal_form(false, true)}, {"Lowercase", lowercase()},         {"Strip", strip(true, true)},
        {"Left", strip(true, false)},       {"Right", strip(false, true)}};
    const json file = golden("normal_forms.json");
    REQUIRE(file["results"].size() == normalizers.size());
    for (const auto& [name, normalizer] : normalizers)
        for (Json::ArrayIndex i = 0; i < file["texts"].size(); ++i) {
            INFO(name << ": " << dumped(file["texts"][i]));
            CHECK(normalizer(as<std::string>(file["texts"][i])) == as<std::string>(file["results"][name][i]));
        }
    // A letter with a million marks, above and below it in turns: in time in proportion to their number.
    std::string marks = "e", ordered = "\u1eb9";
    for (int i = 0; i < 500000; ++i) marks += "\u0301\u0323";
    for (int i = 1; i < 500000; ++i) ordered += "\u0323";
    for (int i = 0; i < 500000; ++i) ordered += "\u0301";
    CHECK((normal_form(true, false)(marks) == ordered));
    // Bytes that are not UTF-8 stay, and what is around them is normalized.
    CHECK(normal_form(true, false)("e\u0301\xFF\u0301\xE2\x82") == "\u00e9\xFF\u0301\xE2\x82");
    CHECK(lowercase()("A\xFF\xC3Z") == "a\xFF\xC3z");
    CHECK(strip(true, true)(" \xFF ") == "\xFF");
    CHECK(strip(true, true)("\u0085\u200a x\u2029\u205f") == "x");
    CHECK(normalize({prepend("x"), replace(Regex::literal("."), "!")}, "a.b") == "xa!b");
    CHECK(prepend("x")("") == "");
}

TEST_CASE("spaces are marked, and a mark put before the first piece or all") {
    auto words = [](PrependScheme scheme, bool begins_text, const std::string& text) {
        ChangedTexts changed;
        std::vector<Piece> parts;
        mark_spaces("_", scheme)({text, begins_text}, changed, parts);
        return std::string(parts.at(0).text);
    };
    CHECK(words(PrependScheme::always, false, "a b") == "_a_b");
    CHECK(words(PrependScheme::always, true, " a") == "_a");
    CHECK(words(PrependScheme::always, true, "_a") == "_a");
    CHECK(words(PrependScheme::first, true, "a") == "_a");
    CHECK(words(PrependScheme::first, false, "a") == "a");
    CHECK(words(PrependScheme::never, true, "a b") == "a_b");
    ChangedTexts changed;  // of the parts of a text only the first begins it
    const PreTokenizer isolate = split(Regex::literal("b"), SplitBehavior::isolated);
    const auto parts = pre_tokenize({isolate, mark_spaces("_", PrependScheme::first)}, {"ab", true}, changed);
    REQUIRE(parts.size() == 2);
    CHECK(parts[0].text == "_a");
    CHECK(parts[1].text == "b");
}

// Each text of random letters is merged whole and cut: the same tokens.
TEST_CASE("a text cut where no token spans gives the tokens of the whole") {
    Bpe bpe;
    bpe.id_of_byte.fill(-1);
    const Words vocabulary = {"a", "b", "c", "d", "_", "ab", "abc", "_a", "cd", "_ab", "dd", "<unk>"};
    for (const std::string& token : vocabulary) bpe.id_of.emplace(token, static_cast<int32_t>(bpe.id_of.size()));
    bpe.unknown = bpe.id_of.at("<unk>");
    bpe.fuse_unknown = true;
    int32_t rank = 0;
    for (const auto& [left, right] : std::vector<std::pair<std::string, std::string>>{
             {"c", "d"}, {"a", "b"}, {"_", "a"}, {"ab", "c"}, {"_", "ab"}, {"d", "d"}, {"_a", "b"}})
        bpe.merges.set(bpe.id_of.at(left), bpe.id_of.at(right), {rank++, bpe.id_of.at(left + right)});
    const PreTokenizer cut = bpe.cut_where_no_token_spans();
    size_t n_pieces = 0;
    for (uint64_t n = 1; n < 200; ++n) {
        std::string text;
        for (uint64_t i = 0; i < n; ++i) text += "abcd_xy"[uniform_below(1, n, i, 7)];
        std::vector<int32_t> whole, parts;
        bpe.encode(text, whole);
        for (const std::string& piece : words_of({cut}, text)) bpe.encode(piece, parts), ++n_pieces;
        CHECK(whole == parts);
    }
    CHECK(n_pieces > 5000);
}

TEST_CASE("added tokens are found as by trying each") {
    std::vector<AddedToken> tokens;
    for (const char* text : {"<a>", "<a><a>", "<", "<|x|>", "<|x", "b", "\xEF\xBD\x9C"})
        tokens.push_back({.text = text, .id = static_cast<int32_t>(tokens.size())});
    const AddedTokens added(tokens);
    for (uint64_t n = 0; n < 300; ++n) {
        std::string text;
        for (uint64_t i = 0; i < n % 40; ++i) text += "<a>|xb\xEF\xBD\x9C"[uniform_below(2, n, i, 9)];
        std::vector<std::pair<std::string, int32_t>> expected, got;
        for (size_t i = 0; i < text.size();) {
            const AddedToken* best = nullptr;
            for (const AddedToken& token : tokens)
                if (text.compare(i, token.text.size(), token.text) == 0 &&
                    (best == nullptr || token.text.size() > best->text.size()))
                    best = &token;
            if (best != nullptr) expected.emplace_back(best->text, best->id);
            else if (i > 0 && !expected.empty() && expected.back().second < 0) expected.back().first += text[i];
            else expected.emplace_back(text.substr(i, 1), -1);
            i += best != nullptr ? best->text.size() : 1;
        }
        added.split(text, [&](std::string_view found, const AddedToken* token) {
            got.emplace_back(std::string(found), token != nullptr ? token->id : -1);
        });
        CHECK(got == expected);
    }
    // A token that must stand alone: behind a letter and a symbol of four bytes, and where another one overlaps it.
    const AddedTokens alone({{.text = "a a", .single_word = true}});
    for (const auto& [text, n] : {std::pair("\U0001D400a a", 0), {"\U0001F600a a", 1}, {"ba a a", 0}}) {
        int n_found = 0;
        alone.split(text, [&](std::string_view, const AddedToken* token) { n_found += token != nullptr; });
        INFO(text);
        CHECK(n_found == n);
    }
}
