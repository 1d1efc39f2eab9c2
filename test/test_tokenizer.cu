// The tokenizers: against what Hugging Face's library makes of the same text, and against files that are wrong.
#include <filesystem>
#include <thread>

#include "io/io.h"
#include "json.h"
#include "temp_folder.h"
#include "test.h"

namespace {

std::string golden(const std::string& name) {
    return (std::filesystem::path(__FILE__).parent_path() / "golden" / "tokenizer" / name).string();
}

// The file of a tokenizer of three letters and two merges; `change` makes of it what a test wants.
template <class F>
std::string small_file(F&& change) {
    json file = value({{"added_tokens", JsonText::array()},
                       {"normalizer", nullptr},
                       {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
                       {"decoder", {{"type", "ByteLevel"}}},
                       {"model",
                        {{"type", "BPE"},
                         {"vocab", {{"a", 0}, {"b", 1}, {"Ġ", 2}, {"ab", 3}, {"abb", 4}}},
                         {"merges", JsonText::array({"a b", "ab b"})}}}});
    change(file);
    return dumped(file);
}

template <class F>
std::unique_ptr<Tokenizer> small_tokenizer(F&& change) {
    return parse_tokenizer(small_file(change), "t");
}

template <class F>
std::string refusal(F&& change) {
    return error_of([&] { parse_tokenizer(small_file(change), "tokenizer.json"); });
}

JsonText added_token(const std::string& text, int id, bool normalized) {
    return {{"id", id},        {"content", text}, {"single_word", false},    {"lstrip", false},
            {"rstrip", false}, {"special", true}, {"normalized", normalized}};
}

using Ids = std::vector<int32_t>;
const std::vector<std::string> kFamilies = {"gpt2", "llama3", "qwen3", "deepseek", "llama2", "mistral", "lossy"};

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
    for (const std::string& name : kFamilies) {
        auto tokenizer = load_tokenizer(golden(name + "/tokenizer.json"));
        json file = parsed_json(slurp(golden(name + "/tokenizer.json")));
        json cases = parsed_json(slurp(golden(name + "/cases.json")));
        REQUIRE(cases.size() > 150);

        size_t n_tokens = file["model"]["vocab"].size();
        for (const json& added : file["added_tokens"]) {
            n_tokens += !file["model"]["vocab"].isMember(added["content"].asString());
            CHECK(tokenizer->is_special(as<int>(added["id"])) == as<bool>(added["special"]));
        }
        CHECK(tokenizer->vocab_size() == static_cast<int>(n_tokens));
        CHECK(tokenizer->name() == golden(name + "/tokenizer.json"));
        CHECK_FALSE(tokenizer->is_special(300));

        for (const json& c : cases) {
            INFO(name << ": " << dumped(c["text"]));
            const std::string text = c["text"].asString();
            Ids ids = tokenizer->encode(text);
            CHECK(ids == as<Ids>(c["ids"]));
            CHECK(tokenizer->decode(ids) == as<std::string>(c["decoded"]));
            if (c.isMember("with_special")) CHECK(tokenizer->encode_with_special(text) == as<Ids>(c["with_special"]));
        }
    }
}

// What push() and finish() give is together decode() of all tokens, and each part but the last is whole characters.
TEST_CASE("text comes in whole characters, token by token") {
    for (const std::string& name : kFamilies) {
        auto tokenizer = load_tokenizer(golden(name + "/tokenizer.json"));
        StreamDecoder stream(*tokenizer);  // used again for each text
        for (const json& c : parsed_json(slurp(golden(name + "/cases.json")))) {
            INFO(name << ": " << dumped(c["text"]));
            std::string all;
            for (int32_t id : as<Ids>(c["ids"])) {
                const std::string part = stream.push(id);
                for (size_t i = 0; i < part.size(); i += utf8_char_at(part, i).bytes)
                    CHECK(utf8_char_at(part, i).is_utf8());
                all += part;
            }
            CHECK(all + stream.finish() == as<std::string>(c["decoded"]));
        }
    }
    // Bytes one by one: a character appears with its last byte, and what can become none at once.
    auto bytes = make_byte_tokenizer();
    auto parts_of = [&](std::string_view text) {
        StreamDecoder stream(*bytes);
        std::vector<std::string> parts;
        for (unsigned char byte : text) parts.push_back(stream.push(byte));
        parts.push_back(stream.finish());
        return parts;
    };
    using Parts = std::vector<std::string>;
    CHECK(parts_of("a\xC3\xA9") == Parts{"a", "", "\xC3\xA9", ""});
    CHECK(parts_of("\xF0\x9F\x98\x80!") == Parts{"", "", "", "\xF0\x9F\x98\x80", "!", ""});
    CHECK(parts_of("\xE2\x82") == Parts{"", "", "\xE2\x82"});
    CHECK(parts_of("\xE2\x82z") == Parts{"", "", "\xE2\x82z", ""});
    CHECK(parts_of("\xFF\x80") == Parts{"\xFF", "\x80", ""});
    CHECK(parts_of("\xED\xA0") == Parts{"", "\xED\xA0", ""});  // a surrogate
    CHECK(parts_of("\xE0\x80\xF4\x90") == Parts{"", "\xE0\x80", "", "\xF4\x90", ""});
    // A token that is none is an Error, which takes nothing away.
    StreamDecoder stream(*bytes);
    CHECK(stream.push(0xC3) == "");
    CHECK_THROWS_WITH(stream.push(300), ContainsSubstring("token id 300"));
    CHECK(stream.push(0xA9) == "\xC3\xA9");
}

TEST_CASE("any bytes come back, UTF-8 or not, from every tokenizer that keeps its text") {
    std::vector<std::unique_ptr<Tokenizer>> tokenizers;
    for (const char* name : {"gpt2", "llama3", "deepseek", "llama2", "mistral"})
        tokenizers.push_back(load_tokenizer(golden(name + std::string("/tokenizer.json"))));
    tokenizers.push_back(make_byte_tokenizer());
    for (uint64_t n = 0; n < 300; ++n) {
        std::string text;  // from few bytes, so that sequences of UTF-8 begin and break off
        const std::string alphabet = "a' \n9\xC5\xBF\xE3\x80\xF0\x9F\xED\xA0\xFF<|";
        for (uint64_t i = 0; i < n; ++i) text += alphabet[uniform_below(1, n, i, alphabet.size())];
        if (text.starts_with(' ')) continue;  // to Mistral's pre-tokenizer it is the space that it puts there
        for (const auto& tokenizer : tokenizers) CHECK(tokenizer->decode(tokenizer->encode(text)) == text);
    }
}

TEST_CASE("merges go by rank, then from left to right") {
    auto tokenizer = small_tokenizer([](json&) {});
    CHECK(tokenizer->encode("abb") == Ids{4});
    CHECK(tokenizer->encode("aabb") == Ids{0, 4});
    CHECK(tokenizer->encode("abab b") == Ids{3, 3, 2, 1});

    auto pairs = small_tokenizer([](json& f) {
        f["model"]["vocab"]["aa"] = 5;
        f["model"]["merges"] = parsed_json(R"([["a", "a"], ["a", "b"]])");  // as newer files write them
    });
    CHECK(pairs->encode("aaab") == Ids{5, 3});
    CHECK(pairs->encode("aaaab") == Ids{5, 5, 1});

    // When "ab" and then "xab" have been made, "x a" is no longer possible, though an "a" follows again.
    auto remade = small_tokenizer([](json& f) {
        f["model"]["vocab"] = parsed_json(R"({"a": 0, "b": 1, "x": 2, "ab": 3, "xab": 4, "xa": 5, "xaba": 6})");
        f["model"]["merges"] = parsed_json(R"(["a b", "x ab", "x a", "xab a"])");
    });
    CHECK(remade->encode("xaba") == Ids{6});
}

TEST_CASE("a text to be found may have characters newer than those of PCRE2") {
    const auto with_normalizer = [](const char* pattern) {
        return [=](json& f) {
            f["normalizer"] = value({{"type", "Replace"}, {"pattern", parsed_json(pattern)}, {"content", "b"}});
        };
    };
    CHECK(small_tokenizer(with_normalizer("{\"String\": \"\U0001FAE8\"}"))->encode("a\U0001FAE8\U0001FAE8") == Ids{4});
    // In a pattern they would stand for nothing.
    CHECK(one_line_with(refusal(with_normalizer("{\"Regex\": \"[\U0001FAE8x]\"}")), "Unicode 15", "not supported"));
    CHECK(small_tokenizer(with_normalizer("{\"Regex\": \"[\U0001F600x]\"}"))->encode("a\U0001F600") == Ids{3});
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
    // Of a whole text that is one word, too: what stands between two places where no token spans is no word.
    auto characters = small_tokenizer([&](json& f) {
        no_way_to_bb(f);
        f["pre_tokenizer"] = json();
        f["model"]["ignore_merges"] = true;
    });
    CHECK(characters->encode("bb") == Ids{5});
    CHECK(characters->encode("\u0120bb\u0120") == Ids{2, 1, 1, 2});
}

TEST_CASE("added tokens: the longest first, and those of raw text before normalized ones") {
    auto tokenizer = small_tokenizer([](json& f) {
        f["added_tokens"] = value(
            JsonText::array({added_token("<a>", 10, false), added_token("<a><a>", 11, false),
                             added_token("ba", 12, true), added_token("aba", 13, true), added_token("b<", 14, true)}));
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

TEST_CASE("added tokens for normalized text are normalized, too") {
    const auto tokenizer = small_tokenizer([](json& f) {
        f["normalizer"] = parsed_json(R"({"type": "Lowercase"})");
        f["added_tokens"] = value(JsonText::array({added_token("BA", 10, true)}));
    });
    CHECK(tokenizer->encode("aBAa") == Ids{0, 10, 0});
}

// As Hugging Face's library has it, whose older versions wrote add_prefix_space.
TEST_CASE("Metaspace puts a mark before a text, and splits it, unless it is told otherwise") {
    const auto with = [](const char* options) {
        return small_tokenizer([=](json& f) {
            f["pre_tokenizer"] = f["decoder"] = parsed_json(options);
            f["model"]["vocab"]["_"] = 5, f["model"]["vocab"]["a_"] = 6;
            f["model"]["merges"].append("a _");
            f["added_tokens"] = value(JsonText::array({added_token("<n>", 10, true)}));
        });
    };
    const auto first = with(R"({"type": "Metaspace", "replacement": "_", "prepend_scheme": "first"})");
    CHECK(first->encode("a b") == Ids{5, 0, 5, 1});
    CHECK(first->encode("<n>a") == Ids{10, 0});
    CHECK(first->decode({5, 0}) == "a");
    const auto older = with(R"({"type": "Metaspace", "replacement": "_", "add_prefix_space": false})");
    CHECK(older->encode("a b") == Ids{0, 5, 1});
    CHECK(older->decode({5, 0}) == " a");
    const auto whole = with(R"({"type": "Metaspace", "replacement": "_", "add_prefix_space": false, "split": false})");
    CHECK(whole->encode("a b") == Ids{6, 1});
}

TEST_CASE("add_prefix_space gives one to every text without") {
    auto tokenizer = small_tokenizer([](json& f) {
        f["pre_tokenizer"]["add_prefix_space"] = true;
        f["added_tokens"] = value(JsonText::array({added_token("<a>", 5, false)}));
    });
    CHECK(tokenizer->encode("a<a>a<a> a") == Ids{2, 0, 5, 2, 0, 5, 2, 0});
    CHECK(tokenizer->encode("").empty());
}

TEST_CASE("a long word takes n log n") {
    const std::string text(400'000, 'a');  // one word; at n * n this test would take minutes
    for (const char* name : {"gpt2", "llama2"}) {
        auto tokenizer = load_tokenizer(golden(name + std::string("/tokenizer.json")));
        CHECK(tokenizer->decode(tokenizer->encode(text)) == text);
    }
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
    const json bytes = parsed_json(byte_tokenizer_json()), vocab = bytes["model"]["vocab"];
    const json of_gpt2 = parsed_json(read_text_file(golden("gpt2/tokenizer.json")))["model"]["vocab"];
    const auto gpt2 = load_tokenizer(golden("gpt2/tokenizer.json"));
    REQUIRE(vocab.size() == 256);
    for (const std::string& token : vocab.getMemberNames()) {
        REQUIRE(of_gpt2.isMember(token));
        CHECK(gpt2->decode({as<int>(of_gpt2[token])}) == std::string(1, static_cast<char>(as<int>(vocab[token]))));
    }
    CHECK(parse_tokenizer(byte_tokenizer_json(), "t")->name() == "bytes");
    // Whatever differs makes it another tokenizer.
    json other = bytes;
    std::swap(other["model"]["vocab"]["a"], other["model"]["vocab"]["b"]);
    CHECK(parse_tokenizer(dumped(other), "t")->encode("ab") == std::vector<int32_t>{'b', 'a'});
    other = bytes;
    other["added_tokens"] = value(JsonText::array({JsonText{{"content", "ab"}, {"id", 256}}}));
    CHECK(parse_tokenizer(dumped(other), "t")->encode("ab") == std::vector<int32_t>{256});
    const auto name_with = [&](auto&& change) {
        json its = bytes;
        change(its);
        return parse_tokenizer(dumped(its), "t")->name();
    };
    CHECK(name_with([](json& f) { f["pre_tokenizer"]["add_prefix_space"] = true; }) == "t");
    CHECK(name_with([](json& f) {  // its marks are characters
              f["pre_tokenizer"]["type"] = "Metaspace", f["pre_tokenizer"]["replacement"] = "_";
          }) == "t");
    CHECK(name_with([](json& f) { f["normalizer"] = parsed_json(R"({"type": "Lowercase"})"); }) == "t");
    const auto add_a = [](json& f) { f["added_tokens"] = value(JsonText::array({added_token("a", 97, false)})); };
    CHECK(name_with(add_a) == "t");
    CHECK(name_with([](json& f) {
              f["post_processor"] = parsed_json(R"({"type": "TemplateProcessing", "single": [{"Sequence": {}},
                  {"SpecialToken": {"id": "x"}}], "special_tokens": {"x": {"ids": [10]}}})");
          }) == "t");
}

TEST_CASE("characters: bytes or the unknown token for those that the vocabulary lacks") {
    auto characters = [](json& f) {
        f["pre_tokenizer"] = json();
        f["decoder"] = parsed_json(R"({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]})");
        const std::pair<const char*, int> more[] = {
            {"<0x21>", 5}, {"<0xC3>", 6}, {"<0xA9>", 7}, {"?", 8}, {"\u00ea", 9}};
        for (const auto& [token, id] : more) f["model"]["vocab"][token] = id;
    };
    auto with = [&](const char* key, const json& value, const char* key2 = "", const json& value2 = {}) {
        return small_tokenizer([&](json& f) {
            characters(f);
            f["model"][key] = value;
            if (*key2 != 0) f["model"][key2] = value2;
        });
    };
    auto fallback = with("byte_fallback", true);
    CHECK(fallback->encode("ab!\u00e9\u00ea") == Ids{3, 5, 6, 7, 9});
    CHECK(fallback->decode({3, 5, 6, 7, 9}) == "ab!\u00e9\u00ea");
    CHECK(fallback->encode("a\xC3") == Ids{0, 6});  // a byte that is not UTF-8
    CHECK(one_line_with(error_of([&] { fallback->encode("a\u00e8"); }), "t: ", "no token for", "unknown token"));
    CHECK(with("unk_token", "?")->encode("a!!\u00e9b") == Ids{0, 8, 8, 8, 1});
    CHECK(with("unk_token", "?", "fuse_unk", true)->encode("a!!\u00e9b!") == Ids{0, 8, 1, 8});
    CHECK(with("unk_token", "?", "byte_fallback", true)->encode("!\u00e8b") == Ids{5, 8, 1});
    CHECK(with("unk_token", "?", "byte_fallback", true)->encode("\u00e8!b") == Ids{5, 8, 1});  // as tokenizers has it
}

// What tokenizers 0.23 prints, too. (Of a token that is all stripped it has no text: it stops with an error.)
TEST_CASE("the decoder Strip without Fuse before it strips each token") {
    const auto tokenizer = small_tokenizer([](json& f) {
        f["pre_tokenizer"] = json();
        f["decoder"] = parsed_json(R"({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "_"}, "content": " "},
            {"type": "Strip", "content": " ", "start": 1, "stop": 2}, {"type": "Fuse"}]})");
        for (const auto& [token, id] : {std::pair("__a", 5), {"a___", 6}, {"___b_", 7}, {"___", 8}})
            f["model"]["vocab"][token] = id;
    });
    CHECK(tokenizer->decode({5, 6, 3, 7}) == " aa ab  b");
    CHECK(tokenizer->decode({3, 8, 1}) == "abb");
}

// The step of Hugging Face's library knows the punctuation of Unicode 8, whatever its patterns know. Here U+061D is of
// Unicode 14, U+1B7F and U+11B00 of Unicode 16; U+2E42 and U+10100 of Unicode 7 and 4, and U+166D was punctuation then.
TEST_CASE("Punctuation isolates what was punctuation in Unicode 8") {
    const auto tokenizer = small_tokenizer([](json& f) {
        f["pre_tokenizer"] = parsed_json(R"({"type": "Punctuation"})");
        f["decoder"] = parsed_json(R"({"type": "Fuse"})");
        f["model"]["unk_token"] = "?", f["model"]["fuse_unk"] = true;  // one for each word without known letters
        f["model"]["vocab"]["?"] = 5;
    });
    for (const char* const other : {"\u061d", "\u1b7f", "\U00011b00", "\u00e9"})
        CHECK(tokenizer->encode(std::string(other) + other) == Ids{5});
    for (const char* const mark : {"!", "-", "[", "\\", "]", "^", "`", "~", "$", "\u2e42", "\U00010100", "\u166d"})
        CHECK(tokenizer->encode(std::string(mark) + mark) == Ids{5, 5});
}

TEST_CASE("added tokens that take white space with them, or must stand alone") {
    auto tokenizer = small_tokenizer([](json& f) {
        f["added_tokens"] = value(JsonText::array(
            {added_token("<l>", 10, false), added_token("<r>", 11, false), added_token("aa", 12, false)}));
        f["added_tokens"][0]["lstrip"] = true;
        f["added_tokens"][1]["rstrip"] = true;
        f["added_tokens"][2]["single_word"] = true;
    });
    CHECK(tokenizer->encode("a \t\u3000<l> a") == Ids{0, 10, 2, 0});
    CHECK(tokenizer->encode("a <r> \n\u00a0a") == Ids{0, 2, 11, 0});
    CHECK(tokenizer->encode("<r>  <l>") == Ids{11, 10});
    CHECK(tokenizer->encode("aa aab baa aa") == Ids{12, 2, 0, 3, 2, 1, 0, 0, 2, 12});
    CHECK(tokenizer->encode("aaa") == Ids{0, 0, 0});
    // Tokens that stand in white space which the one before them strips.
    tokenizer = small_tokenizer([](json& f) {
        f["added_tokens"] = value(JsonText::array(
            {added_token("<r>", 10, false), added_token("\n", 11, false), added_token("\t", 12, false)}));
        f["added_tokens"][0]["rstrip"] = true;
        f["added_tokens"][2]["lstrip"] = true;
    });
    CHECK(tokenizer->encode("<r> \na") == Ids{10, 11, 0});
    CHECK(tokenizer->encode("<r>\n a") == Ids{10, 11, 2, 0});
    CHECK(tokenizer->encode("<r>\ta") == Ids{10, 0});
}

TEST_CASE("a post_processor puts its tokens around a prompt") {
    auto around = [](json& f) {
        f["added_tokens"] = value(JsonText::array({added_token("<s>", 10, false), added_token("</s>", 11, false)}));
        f["post_processor"] = parsed_json(R"({"type": "Sequence", "processors": [{"type": "ByteLevel"},
            {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x"}}, {"Sequence": {"id": "A"}},
             {"SpecialToken": {"id": "y"}}], "special_tokens": {"x": {"ids": [10, 0]}, "y": {"ids": [11]}}}]})");
    };
    auto tokenizer = small_tokenizer(around);
    CHECK(tokenizer->encode("b") == Ids{1});
    CHECK(tokenizer->encode_with_special("b") == Ids{10, 0, 1, 11});
    CHECK(tokenizer->special_prefix() == Ids{10, 0});
    CHECK(tokenizer->special_suffix() == Ids{11});
    CHECK(make_byte_tokenizer()->encode_with_special("b") == Ids{'b'});
    auto change = [&](auto&& more) {
        return refusal([&](json& f) { around(f), more(f["post_processor"]["processors"][1]); });
    };
    for (const int id : {-1, 5, 12, 99})  // 5: the vocabulary ends with 4, and the added tokens begin with 10
        CHECK(one_line_with(change([id](json& p) { p["special_tokens"]["y"]["ids"][0] = id; }), "post_processor adds",
                            "lacks"));
    CHECK(one_line_with(change([](json& p) { p["special_tokens"].removeMember("y"); }), "no ids"));
    CHECK(one_line_with(change([](json& p) {
                            json removed;
                            p["single"].removeIndex(1, &removed);
                        }),
                        "lacks the text"));
    CHECK(one_line_with(change([](json& p) { p["single"][1]["Sequence"]["id"] = "B"; }), "a second text"));
    CHECK(one_line_with(refusal([&](json& f) {
                            around(f);
                            json& processors = f["post_processor"]["processors"];
                            processors.append(processors[1]);
                        }),
                        "two templates"));
    CHECK(one_line_with(change([](json& p) { p["type"] = "RobertaProcessing"; }), "\"RobertaProcessing\""));
}

TEST_CASE("tokenizer files that cannot work are refused in one line") {
    const std::string ours = "doc/models.md lists";
    CHECK(refusal([](json&) {}) == "");
    CHECK(
        one_line_with(refusal([](json& f) { f["model"]["type"] = "Unigram"; }), "tokenizer.json", "\"Unigram\"", ours));
    CHECK(one_line_with(refusal([](json& f) { f["model"]["type"] = "WordPiece"; }), "\"WordPiece\"", ours));
    CHECK(
        one_line_with(refusal([](json& f) { f["model"]["end_of_word_suffix"] = "</w>"; }), "end_of_word_suffix", ours));
    CHECK(one_line_with(refusal([](json& f) { f["model"]["dropout"] = 0.1; }), "dropout", ours));
    CHECK(refusal([](json& f) { f["model"]["dropout"] = 0.0; }) == "");
    CHECK(one_line_with(refusal([](json& f) { f.removeMember("model"); }), "model", "none", ours));
    CHECK(one_line_with(refusal([](json& f) { f["model"].removeMember("vocab"); }), "vocab", ours));
    CHECK(one_line_with(refusal([](json& f) { f["model"].removeMember("merges"); }), "merges", ours));
    CHECK(
        one_line_with(refusal([](json& f) { f["model"]["byte_fallback"] = true; }), "byte_fallback or fuse_unk", ours));
    CHECK(one_line_with(refusal([](json& f) {
                            f["model"]["fuse_unk"] = true;
                            f["model"]["unk_token"] = "a";
                        }),
                        "byte_fallback or fuse_unk", ours));

    auto component = [](const char* key, const char* text) {
        return refusal([=](json& f) { f[key] = parsed_json(text); });
    };
    CHECK(one_line_with(component("normalizer", R"({"type": "Nmt"})"), "normalizer \"Nmt\"", ours));
    CHECK(one_line_with(component("normalizer", R"({"type": "Replace", "pattern": {"String": "a"}})"), "no content"));
    CHECK(one_line_with(component("normalizer", R"({"type": "Prepend"})"), "no prepend"));
    CHECK(one_line_with(component("decoder", R"({"type": "WordPiece"})"), "decoder \"WordPiece\"", ours));
    CHECK(one_line_with(component("decoder", R"({"type": "Sequence", "decoders": [{"type": "ByteLevel"},
        {"type": "ByteFallback"}]})"),
                        "ByteLevel is not the only one", ours));
    CHECK(one_line_with(component("decoder", R"({"type": "Sequence", "decoders": [{"type": "ByteLevel"},
        {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})"),
                        "ByteLevel is not the only one", ours));
    CHECK(one_line_with(component("decoder", R"({"type": "Sequence", "decoders": [{"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1}, {"type": "Strip", "content": "_", "start": 1}]})"),
                        "strips the end", ours));
    CHECK(one_line_with(component("decoder", R"({"type": "Sequence", "decoders": [{"type": "ByteFallback"},
        {"type": "Replace", "pattern": {"String": "_"}, "content": " "}]})"),
                        "\"Replace\" follows ByteFallback", ours));
    CHECK(one_line_with(component("decoder", R"({"type": "Sequence", "decoders": [{"type": "ByteFallback"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})"),
                        "\"Strip\" follows ByteFallback", ours));
    CHECK(one_line_with(component("decoder", R"({"type": "Sequence", "decoders": [{"type": "Fuse"},
        {"type": "ByteFallback"}]})"),
                        "\"ByteFallback\" follows Fuse", ours));
    CHECK(one_line_with(component("decoder", R"({"type": "Sequence", "decoders": [{"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 0, "stop": 1}]})"),
                        "strips the end", ours));
    CHECK(one_line_with(component("decoder", R"({"type": "Strip", "content": " ", "start": -1})"), "start of -1"));
    CHECK(one_line_with(component("pre_tokenizer", R"({"type": "BertPreTokenizer"})"), "\"BertPreTokenizer\"", ours));
    CHECK(one_line_with(component("pre_tokenizer", R"({"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"},
        {"type": "Whitespace"}]})"),
                        "\"Whitespace\" follows ByteLevel", ours));
    CHECK(one_line_with(component("pre_tokenizer", R"({"type": "Metaspace", "replacement": "_",
        "prepend_scheme": "twice"})"),
                        "prepend_scheme \"twice\"", ours));
    CHECK(one_line_with(component("pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "a"},
        "behavior": "Lost"})"),
                        "behavior \"Lost\"", ours));
    CHECK(one_line_with(component("pre_tokenizer", R"({"type": "Digits", "individual_digits": "true"})"),
                        "\"individual_digits\" of Digits is not true or false"));
    CHECK(one_line_with(component("pre_tokenizer", R"({"type": "Punctuation", "behavior": 1})"),
                        "\"behavior\" of Punctuation is not a string"));
    CHECK(one_line_with(refusal([](json& f) { f["model"]["ignore_merges"] = 1; }), "\"ignore_merges\" of BPE is not"));
    CHECK(one_line_with(refusal([](json& f) { f["model"]["unk_token"] = 0; }), "\"unk_token\" of BPE is not a string"));
    CHECK(one_line_with(component("pre_tokenizer", R"({"type": "Split", "behavior": "Isolated"})"), "Split has no"));
    CHECK(one_line_with(refusal([](json& f) { f["pre_tokenizer"] = f["decoder"] = json(); }), "no decoder", ours));

    CHECK(one_line_with(refusal([](json& f) { f["model"]["merges"].append("a"); }), "merge 2", "\"a\""));
    CHECK(one_line_with(refusal([](json& f) { f["model"]["merges"].append("a b c"); }), "merge 2", "\"a b c\""));
    CHECK(one_line_with(refusal([](json& f) { f["model"]["merges"].append(value(std::vector{"a"})); }), "merge 2"));
    CHECK(one_line_with(refusal([](json& f) { f["model"]["merges"].append("b a"); }), "merge 2", "\"ba\"", "lacks"));
    CHECK(one_line_with(refusal([](json& f) { f["model"]["vocab"]["c"] = 0; }), "shares id 0"));
    CHECK(one_line_with(refusal([](json& f) { f["model"]["vocab"]["c"] = 2000000000; }), "\"c\"", "no id from 0 to"));
    CHECK(one_line_with(refusal([](json& f) { f["model"]["vocab"]["c"] = -1; }), "\"c\"", "no id from 0 to"));
    CHECK(one_line_with(refusal([](json& f) { f["model"]["vocab"]["c"] = "7"; }), "\"c\"", "no id from 0 to"));
    CHECK(one_line_with(
        refusal([](json& f) { f["added_tokens"] = value(JsonText::array({added_token("a", 9, false)})); }),
        "has ids 0 and 9"));

    auto tokenizer = small_tokenizer([](json&) {});
    CHECK(one_line_with(error_of([&] { tokenizer->encode("abc"); }), "t", "no token for byte 99"));
}

TEST_CASE("files that are no JSON, or JSON of another kind") {
    auto parse = [](std::string_view text) { return error_of([&] { parse_tokenizer(text, "x.json"); }); };
    std::string whole = slurp(golden("gpt2/tokenizer.json"));
    CHECK(one_line_with(parse(std::string_view(whole).substr(0, 5000)), "x.json", "not valid JSON at line ", "column ",
                        "downloaded"));
    CHECK(one_line_with(parse(""), "not valid JSON"));
    CHECK(one_line_with(parse("[]"), "x.json", "the model has the type"));
    CHECK(one_line_with(parse("1e999"), "x.json", "a number out of range"));
    CHECK(one_line_with(parse(R"({"model":7,"pre_tokenizer":[[]]})"), "x.json"));
    CHECK(one_line_with(error_of([] { load_tokenizer("/nowhere/tokenizer.json"); }), "/nowhere/tokenizer.json"));

    const std::string deep(300'000, '[');  // deep enough to overflow the stack of a recursive reader
    const std::string close(300'000, ']');
    CHECK(one_line_with(parse(deep), "x.json", "more than 200 levels"));
    CHECK(one_line_with(parse(deep + close), "more than 200 levels"));
    CHECK(one_line_with(parse(R"({"model":{"vocab":{"a":)" + deep + close + "}}}"), "more than 200 levels"));
    CHECK(one_line_with(parse(std::string(200, '[') + std::string(200, ']')), "the model has the type"));
}
