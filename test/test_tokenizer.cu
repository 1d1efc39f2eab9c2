// The tokenizers: against what Hugging Face's library makes of the same text, and against files that are wrong.
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "io/io.h"
#include "temp_folder.h"
#include "test.h"

namespace {

using json = nlohmann::json;

std::string golden(const std::string& name) {
    return (std::filesystem::path(__FILE__).parent_path() / "golden" / "tokenizer" / name).string();
}

// The file of a tokenizer of three letters and two merges; `change` makes of it what a test wants.
template <class F>
std::string small_file(F&& change) {
    json file = {{"added_tokens", json::array()},
                 {"normalizer", nullptr},
                 {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
                 {"decoder", {{"type", "ByteLevel"}}},
                 {"model",
                  {{"type", "BPE"},
                   {"vocab", {{"a", 0}, {"b", 1}, {"Ġ", 2}, {"ab", 3}, {"abb", 4}}},
                   {"merges", {"a b", "ab b"}}}}};
    change(file);
    return file.dump();
}

template <class F>
std::unique_ptr<Tokenizer> small_tokenizer(F&& change) {
    return parse_tokenizer(small_file(change), "t");
}

template <class F>
std::string refusal(F&& change) {
    return error_of([&] { parse_tokenizer(small_file(change), "tokenizer.json"); });
}

json added_token(const std::string& text, int id, bool normalized) {
    return {{"id", id},        {"content", text}, {"single_word", false},    {"lstrip", false},
            {"rstrip", false}, {"special", true}, {"normalized", normalized}};
}

using Ids = std::vector<int32_t>;

}  // namespace

TEST_CASE("byte tokenizer") {
    auto bytes = make_byte_tokenizer();
    CHECK(bytes->vocab_size() == 256);
    CHECK(bytes->name() == "bytes");
    CHECK(bytes->encode(std::string("a\0\xFF", 3)) == Ids{97, 0, 255});
    CHECK(bytes->decode({97, 0, 255}) == std::string("a\0\xFF", 3));
    CHECK(one_line_with(error_of([&] { bytes->decode({256}); }), "256", "not a byte"));
    CHECK(one_line_with(error_of([&] { bytes->decode({-1}); }), "-1", "not a byte"));
}

TEST_CASE("tokenizers equal Hugging Face's on every golden case") {
    for (std::string name : {"gpt2", "llama3"}) {
        auto tokenizer = load_tokenizer(golden(name + "/tokenizer.json"));
        json file = json::parse(slurp(golden(name + "/tokenizer.json")));
        json cases = json::parse(slurp(golden(name + "/cases.json")));
        REQUIRE(cases.size() > 150);

        size_t n_tokens = file["model"]["vocab"].size();
        for (const json& added : file["added_tokens"]) n_tokens += !file["model"]["vocab"].contains(added["content"]);
        CHECK(tokenizer->vocab_size() == static_cast<int>(n_tokens));
        CHECK(tokenizer->name() == golden(name + "/tokenizer.json"));

        for (const json& c : cases) {
            INFO(name << ": " << c["text"].dump());
            Ids ids = tokenizer->encode(c["text"].get<std::string>());
            CHECK(ids == c["ids"].get<Ids>());
            CHECK(tokenizer->decode(ids) == c["decoded"].get<std::string>());
        }
    }
}

// The vocabularies of the golden files are small, so that different words may give equal ids: words are compared too.
TEST_CASE("words are cut as Hugging Face cuts them") {
    json llama3 = json::parse(slurp(golden("llama3/tokenizer.json")));
    std::string regex = llama3["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"];
    REQUIRE(find_word_splitter("\\w+") == nullptr);
    for (std::string name : {"gpt2", "llama3"}) {
        WordSplitter first_word = find_word_splitter(name == "gpt2" ? "" : regex);
        REQUIRE(first_word != nullptr);
        int n_compared = 0;
        for (const json& c : json::parse(slurp(golden(name + "/cases.json")))) {
            std::string all = c["text"];
            if (all.find("<|") != all.npos) continue;  // added tokens are cut out before
            std::vector<std::string> words;
            for (std::string_view text = all; !text.empty(); text.remove_prefix(words.back().size()))
                words.emplace_back(text.substr(0, first_word(text)));
            INFO(name << ": " << c["text"].dump());
            CHECK(words == c["pieces"].get<std::vector<std::string>>());
            ++n_compared;
        }
        CHECK(n_compared > 150);
    }
}

TEST_CASE("Qwen 2 makes every digit a word") {
    WordSplitter first_word =
        find_word_splitter(R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
                           R"(|\s*[\r\n]+|\s+(?!\S)|\s+)");
    REQUIRE(first_word != nullptr);
    CHECK(first_word("123") == 1);
    CHECK(first_word("'VErs") == 3);
    CHECK(first_word("'\xC5\xBFz") == 3);  // U+017F is an s where case is ignored
    CHECK(first_word(" 1") == 1);
}

TEST_CASE("what is not UTF-8 counts as one symbol a byte") {
    auto at = [](std::string_view text) { return std::pair(utf8_char_at(text, 0).code, utf8_char_at(text, 0).bytes); };
    using Pair = std::pair<uint32_t, size_t>;
    CHECK(at("A") == Pair{'A', 1});
    CHECK(at("\xC3\xA9") == Pair{0xE9, 2});
    CHECK(at("\xE2\x82\xAC") == Pair{0x20AC, 3});
    CHECK(at("\xF0\x9F\x98\x80") == Pair{0x1F600, 4});
    CHECK(at("\xF4\x8F\xBF\xBF") == Pair{0x10FFFF, 4});
    for (const char* bad : {"\x80", "\xFF", "\xC3", "\xC3(", "\xE2\x82", "\xE2\x82(", "\xC1\xBF", "\xE0\x9F\xBF",
                            "\xF0\x8F\xBF\xBF", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xF8\x88\x80\x80\x80"})
        CHECK(at(bad) == Pair{0xFFFD, 1});
}

TEST_CASE("any bytes come back, UTF-8 or not, from every tokenizer") {
    auto gpt2 = load_tokenizer(golden("gpt2/tokenizer.json")), llama3 = load_tokenizer(golden("llama3/tokenizer.json"));
    auto bytes = make_byte_tokenizer();
    for (uint64_t n = 0; n < 300; ++n) {
        std::string text;  // from few bytes, so that sequences of UTF-8 begin and break off
        const std::string alphabet = "a' \n9\xC5\xBF\xE3\x80\xF0\x9F\xED\xA0\xFF<|";
        for (uint64_t i = 0; i < n; ++i) text += alphabet[uniform_below(1, n, i, alphabet.size())];
        for (auto* tokenizer : {&gpt2, &llama3, &bytes})
            CHECK((*tokenizer)->decode((*tokenizer)->encode(text)) == text);
    }
}

TEST_CASE("merges go by rank, then from left to right") {
    auto tokenizer = small_tokenizer([](json&) {});
    CHECK(tokenizer->encode("abb") == Ids{4});
    CHECK(tokenizer->encode("aabb") == Ids{0, 4});
    CHECK(tokenizer->encode("abab b") == Ids{3, 3, 2, 1});

    auto pairs = small_tokenizer([](json& f) {
        f["model"]["vocab"]["aa"] = 5;
        f["model"]["merges"] = json::parse(R"([["a", "a"], ["a", "b"]])");  // as newer files write them
    });
    CHECK(pairs->encode("aaab") == Ids{5, 3});
    CHECK(pairs->encode("aaaab") == Ids{5, 5, 1});
}

TEST_CASE("ignore_merges takes a word that is a token") {
    auto no_way_to_bb = [](json& f) { f["model"]["vocab"]["bb"] = 5; };
    CHECK(small_tokenizer(no_way_to_bb)->encode("bb") == Ids{1, 1});
    auto tokenizer = small_tokenizer([&](json& f) {
        no_way_to_bb(f);
        f["model"]["ignore_merges"] = true;
    });
    CHECK(tokenizer->encode("bb") == Ids{5});
    CHECK(tokenizer->encode("bbb") == Ids{1, 1, 1});
}

TEST_CASE("added tokens: the longest first, and those of raw text before normalized ones") {
    auto tokenizer = small_tokenizer([](json& f) {
        f["added_tokens"] = {added_token("<a>", 10, false), added_token("<a><a>", 11, false),
                             added_token("ba", 12, true), added_token("aba", 13, true), added_token("b<", 14, true)};
    });
    CHECK(tokenizer->vocab_size() == 15);
    CHECK(tokenizer->encode("a<a>b") == Ids{0, 10, 1});
    CHECK(tokenizer->encode("<a><a><a>") == Ids{11, 10});
    CHECK(tokenizer->encode("b<a>") == Ids{1, 10});
    CHECK(tokenizer->encode("babab") == Ids{12, 12, 1});
    CHECK(tokenizer->encode("aba") == Ids{13});
    CHECK(tokenizer->decode({11, 2, 13}) == "<a><a> aba");
    CHECK(one_line_with(error_of([&] { tokenizer->decode({7}); }), "token id 7"));  // in a gap of the ids
    CHECK(one_line_with(error_of([&] { tokenizer->decode({15}); }), "token id 15", "t, whose ids go to 14"));
    CHECK(one_line_with(error_of([&] { tokenizer->decode({-1}); }), "token id -1"));
}

TEST_CASE("add_prefix_space gives one to every text without") {
    auto tokenizer = small_tokenizer([](json& f) {
        f["pre_tokenizer"]["add_prefix_space"] = true;
        f["added_tokens"] = {added_token("<a>", 5, false)};
    });
    CHECK(tokenizer->encode("a<a>a<a> a") == Ids{2, 0, 5, 2, 0, 5, 2, 0});
    CHECK(tokenizer->encode("").empty());
}

TEST_CASE("a long word takes n log n") {
    auto tokenizer = load_tokenizer(golden("gpt2/tokenizer.json"));
    std::string text(400'000, 'a');  // one word; at n * n this test would take minutes
    CHECK(tokenizer->decode(tokenizer->encode(text)) == text);
}

TEST_CASE("one tokenizer serves several threads") {
    auto tokenizer = load_tokenizer(golden("llama3/tokenizer.json"));
    std::string text = slurp(golden("corpus.txt"));
    Ids expected = tokenizer->encode(text);
    std::vector<Ids> got(4);
    std::vector<std::thread> threads;
    for (Ids& ids : got) threads.emplace_back([&] { ids = tokenizer->encode(text); });
    for (std::thread& thread : threads) thread.join();
    for (const Ids& ids : got) CHECK(ids == expected);
}

// The characters that stand for bytes are those of the golden file: Hugging Face's library chose them there.
TEST_CASE("one token a byte, as a tokenizer.json") {
    const json bytes = json::parse(byte_tokenizer_json()), vocab = bytes.at("model").at("vocab");
    const json of_gpt2 = json::parse(read_text_file(golden("gpt2/tokenizer.json"))).at("model").at("vocab");
    const auto gpt2 = load_tokenizer(golden("gpt2/tokenizer.json"));
    REQUIRE(vocab.size() == 256);
    for (const auto& [token, id] : vocab.items()) {
        REQUIRE(of_gpt2.contains(token));
        CHECK(gpt2->decode({of_gpt2.at(token)}) == std::string(1, static_cast<char>(id.get<int>())));
    }
    CHECK(parse_tokenizer(byte_tokenizer_json(), "t")->name() == "bytes");
    // Whatever differs makes it another tokenizer.
    json other = bytes;
    std::swap(other["model"]["vocab"]["a"], other["model"]["vocab"]["b"]);
    CHECK(parse_tokenizer(other.dump(), "t")->encode("ab") == std::vector<int32_t>{'b', 'a'});
    other = bytes;
    other["added_tokens"] = {{{"content", "ab"}, {"id", 256}}};
    CHECK(parse_tokenizer(other.dump(), "t")->encode("ab") == std::vector<int32_t>{256});
}

TEST_CASE("normalization form C is demanded, not guessed") {
    CHECK(is_surely_nfc("na\xC3\xAFve \xE6\x97\xA5\xE6\x9C\xAC \xED\x95\x9C \xF0\x9F\x98\x80"));
    CHECK_FALSE(is_surely_nfc("e\xCC\x81"));     // e + U+0301 composes
    CHECK_FALSE(is_surely_nfc("\xE2\x84\xAB"));  // the angstrom sign becomes a letter
    CHECK(is_surely_nfc("\xD7\xA9\xD6\xBC \xD7\xA9\xD6\xB0"));
    CHECK_FALSE(is_surely_nfc("\xD7\xA9\xD6\xBC\xD6\xB0"));  // two Hebrew points in the wrong order
    auto tokenizer = small_tokenizer([](json& f) { f["normalizer"] = {{"type", "NFC"}}; });
    CHECK(tokenizer->encode("ab") == Ids{3});
    CHECK(one_line_with(error_of([&] { tokenizer->encode("e\xCC\x81"); }), "t wants", "NFC", "normalize it first"));
}

TEST_CASE("tokenizer files that cannot work are refused in one line") {
    const std::string ours = "supported are byte-level BPE";
    CHECK(refusal([](json&) {}) == "");
    CHECK(
        one_line_with(refusal([](json& f) { f["model"]["type"] = "Unigram"; }), "tokenizer.json", "\"Unigram\"", ours));
    CHECK(one_line_with(refusal([](json& f) { f["model"]["type"] = "WordPiece"; }), "\"WordPiece\"", ours));
    CHECK(one_line_with(refusal([](json& f) { f["model"]["byte_fallback"] = true; }), "SentencePiece", ours));
    CHECK(
        one_line_with(refusal([](json& f) { f["model"]["end_of_word_suffix"] = "</w>"; }), "end_of_word_suffix", ours));
    CHECK(one_line_with(refusal([](json& f) { f["model"]["dropout"] = 0.1; }), "dropout", ours));
    CHECK(one_line_with(refusal([](json& f) { f.erase("model"); }), "model type", "none", ours));
    CHECK(one_line_with(refusal([](json& f) { f["model"].erase("vocab"); }), "vocab", ours));
    CHECK(one_line_with(refusal([](json& f) { f["model"].erase("merges"); }), "merges", ours));
    CHECK(one_line_with(refusal([](json& f) { f["normalizer"] = {{"type", "Lowercase"}}; }), "\"Lowercase\"", ours));
    CHECK(one_line_with(refusal([](json& f) { f["decoder"] = {{"type", "Metaspace"}}; }), "\"Metaspace\"", ours));
    CHECK(one_line_with(refusal([](json& f) { f["pre_tokenizer"] = nullptr; }), "not byte-level", ours));
    CHECK(one_line_with(refusal([](json& f) { f["pre_tokenizer"]["type"] = "Whitespace"; }), "\"Whitespace\"", ours));
    CHECK(one_line_with(refusal([](json& f) { f["pre_tokenizer"]["use_regex"] = false; }), "splits by none", ours));

    auto split = [](const std::string& regex, const std::string& behavior) {
        return [=](json& f) {
            f["pre_tokenizer"] = {{"type", "Sequence"},
                                  {"pretokenizers",
                                   {{{"type", "Split"}, {"pattern", {{"Regex", regex}}}, {"behavior", behavior}},
                                    {{"type", "ByteLevel"}, {"use_regex", false}, {"add_prefix_space", false}}}}};
        };
    };
    CHECK(one_line_with(refusal(split("\\w+\n|.", "Isolated")), "\"\\w+?|.\"", ours));
    CHECK(one_line_with(refusal(split("", "MergedWithNext")), "Split", ours));

    CHECK(one_line_with(refusal([](json& f) { f["model"]["merges"].push_back("a"); }), "merge 2", "\"a\""));
    CHECK(one_line_with(refusal([](json& f) { f["model"]["merges"].push_back("a b c"); }), "merge 2", "\"a b c\""));
    CHECK(one_line_with(refusal([](json& f) { f["model"]["merges"].push_back(json::array({"a"})); }), "merge 2"));
    CHECK(one_line_with(refusal([](json& f) { f["model"]["merges"].push_back("b a"); }), "merge 2", "\"ba\"", "lacks"));
    CHECK(one_line_with(refusal([](json& f) { f["model"]["vocab"]["c"] = 0; }), "shares id 0"));
    CHECK(one_line_with(refusal([](json& f) { f["model"]["vocab"]["c"] = 2000000000; }), "\"c\"", "no id from 0 to"));
    CHECK(one_line_with(refusal([](json& f) { f["model"]["vocab"]["c"] = -1; }), "\"c\"", "no id from 0 to"));
    CHECK(one_line_with(refusal([](json& f) { f["model"]["vocab"]["c"] = "7"; }), "\"c\"", "no id from 0 to"));
    CHECK(one_line_with(refusal([](json& f) { f["added_tokens"] = {added_token("a", 9, false)}; }), "has ids 0 and 9"));
    auto lstrip = [](json& f) {
        f["added_tokens"] = {added_token("<m>", 9, false)};
        f["added_tokens"][0]["lstrip"] = true;
    };
    CHECK(one_line_with(refusal(lstrip), "\"<m>\"", "lstrip"));

    auto tokenizer = small_tokenizer([](json&) {});
    CHECK(one_line_with(error_of([&] { tokenizer->encode("abc"); }), "t", "no token for byte 99"));
}

TEST_CASE("files that are no JSON, or JSON of another kind") {
    auto parse = [](std::string_view text) { return error_of([&] { parse_tokenizer(text, "x.json"); }); };
    std::string whole = slurp(golden("gpt2/tokenizer.json"));
    CHECK(one_line_with(parse(std::string_view(whole).substr(0, 5000)), "x.json", "not valid JSON", "5000",
                        "downloaded"));
    CHECK(one_line_with(parse(""), "not valid JSON"));
    CHECK(one_line_with(parse("[]"), "x.json", "model type"));
    CHECK(one_line_with(parse("1e999"), "x.json", "not a tokenizer.json"));
    CHECK(one_line_with(parse(R"({"model":7,"pre_tokenizer":[[]]})"), "x.json"));
    CHECK(one_line_with(error_of([] { load_tokenizer("/nowhere/tokenizer.json"); }), "/nowhere/tokenizer.json"));

    const std::string deep(300'000, '[');  // deep enough to overflow the stack of a recursive reader
    const std::string close(300'000, ']');
    CHECK(one_line_with(parse(deep), "not valid JSON"));
    CHECK(one_line_with(parse(deep + close), "model type"));
    auto parse_deep = [&](const std::string& before, const std::string& after) {
        return parse(before + deep + close + after);
    };
    CHECK(one_line_with(parse_deep(R"({"model":{"type":"BPE"},"normalizer":)", "}"), "normalizer"));
    CHECK(one_line_with(parse_deep(R"({"model":{"type":"BPE"},"pre_tokenizer":)", "}"), "pre-tokenizer"));
    const std::string vocab = parse_deep(R"({"model":{"vocab":{"a":)", R"(}},"pre_tokenizer":{"type":"ByteLevel"}})");
    CHECK(one_line_with(vocab, "\"a\"", "no id"));
}
