// inference/token_fields.cu: logit_bias, as it is given, and log-probabilities, as they are shown.
#include "inference/inference.h"
#include "json.h"

#include <algorithm>
#include <random>

namespace {

TextRequest asked(const std::vector<int32_t>& prompt) {
    TextRequest request;
    request.prompt = prompt;
    return request;
}

}  // namespace

TEST_CASE("logit_bias is the same as text and as JSON", "[token_fields]") {
    const LogitBias expected = {{13, -100}, {25, 2.5}, {7, 1}};
    CHECK(parse_logit_bias("--flag", "13:-1e2,25:2.5,7:1") == expected);
    CHECK(read_logit_bias(value({{"25", 2.5}, {"13", -100}, {"7", 1}})) == expected);
    const std::pair<const char*, const char*> wrong[] = {
        {"13", "--flag 13: give ID:VALUE, or several with commas between them"},
        {"13:1,", "give ID:VALUE"},
        {"x:1", "--flag x: give a whole number"},
        {"13:x", "--flag x: give a number"},
        {"13:inf", "--flag inf: give a number"},
        {"5000000000:1", "too large"}};
    for (const auto& [text, words] : wrong)
        CHECK_THROWS_WITH(parse_logit_bias("--flag", text), ContainsSubstring(words));
    CHECK_THROWS_WITH(read_logit_bias(value(JsonText::array())), ContainsSubstring("expected an object"));
    CHECK_THROWS_WITH(read_logit_bias(value({{"x", 1}})), ContainsSubstring("of token x: give a whole number"));
    CHECK_THROWS_WITH(read_logit_bias(value({{"13", "1"}})), ContainsSubstring("of token 13: expected a number"));
}

TEST_CASE("log-probabilities have a key for each text, whatever tokens are written alike", "[token_fields]") {
    const auto tokenizer = make_byte_tokenizer();  // a byte from 128 on is no character by itself
    const std::vector<Sampled> tokens = {{.token = 200, .logprob = -3, .top = {{'a', -1}, {201, -1.5}, {200, -3}}},
                                         {.token = '"', .logprob = -4, .top = {{202, -0.5}, {203, -2}, {300, -2.5}}},
                                         {.token = 'b', .logprob = -1, .top = {}}};
    TextOffsets offsets(*tokenizer, asked({'a'}));
    const json found =
        parsed_json(logprobs_json(*tokenizer, tokens, offsets).str());  // Error for a key that is there twice
    CHECK(found["tokens"] == value(std::vector<std::string>{"\uFFFD", "\"", "b"}));
    CHECK(found["token_logprobs"] == value(std::vector<double>{-3, -4, -1}));
    CHECK(found["top_logprobs"][0] == value({{"a", -1.0}, {"\uFFFD", -3.0}}));               // the chosen token's
    CHECK(found["top_logprobs"][1] == value({{"\uFFFD", -0.5}, {"", -2.5}, {"\"", -4.0}}));  // no token 300: no text
    CHECK(found["top_logprobs"][2] == value({{"b", -1.0}}));
    CHECK(found["text_offset"] == value(std::vector{0, 1, 2}));
    CHECK(
        logprobs_table(*tokenizer, std::span(tokens).last(2)) ==
        "log-probability   token  text          most probable\n"
        "        -4.0000      34  \"\\\"\"          202 \"\uFFFD\" -0.5000  203 \"\uFFFD\" -2.0000  300 \"\" -2.5000\n"
        "        -1.0000      98  \"b\"\n");
}

TEST_CASE("a prompt's tokens stand where the prompt has their text", "[token_fields][tokenizer]") {
    const auto tokenizer = load_tokenizer("test/golden/tokenizer/llama3/tokenizer.json");
    const std::string text = "Gr\u00f6\u00dfe it";
    const std::vector<int32_t> prompt = tokenizer->encode_with_special(text);  // <|begin_of_text|> first
    const auto found = [&](const std::string& echo) {
        TextOffsets offsets(*tokenizer, asked(prompt), &echo);
        std::vector<int64_t> all;
        for (const int32_t token : prompt) all.push_back(offsets.next(token));
        all.push_back(offsets.next(prompt.back()));  // the answer's first
        return all;
    };
    const std::vector<int64_t> offsets = found(text);
    CHECK((offsets[0] == 0 && offsets[1] == 0));
    CHECK((offsets[prompt.size() - 1] == 5 && offsets.back() == 8));  // " it"
    std::vector<int64_t> later = found(tokenizer->decode(prompt));
    CHECK(later[0] == 0);
    const auto special = std::ssize(std::string("<|begin_of_text|>"));
    for (size_t i = 1; i < later.size(); ++i) CHECK(later[i] == special + offsets[i]);
}

namespace {

// Against the whole text: a token that begins at a byte stands behind the characters that end before or at it.
void check_offsets(const Tokenizer& tokenizer, std::mt19937& random, bool echoes) {
    const auto draw = [&](size_t n) { return static_cast<size_t>(random() % n); };
    const auto draw_token = [&] {
        // Bytes as UTF-8 has them, with others among them.
        constexpr int kBytes[] = {'a', 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 300};
        if (tokenizer.vocab_size() == 256) return kBytes[draw(12)];
        // SentencePiece's special tokens are the first.
        return static_cast<int32_t>(draw(draw(3) == 0 ? 3 : static_cast<size_t>(tokenizer.vocab_size()) + 2));
    };
    TextRequest request;
    std::vector<int32_t> answer;
    for (size_t n = 1 + draw(4); n > 0; --n) request.prompt.push_back(draw_token());
    for (size_t n = 1 + draw(12); n > 0; --n) answer.push_back(draw_token());
    request.skip_special_tokens = draw(4) != 0;
    const auto shown = [&](std::vector<int32_t> tokens) {
        const auto is_left_out = [&](int32_t t) { return request.skip_special_tokens && tokenizer.is_special(t); };
        std::erase_if(tokens, [&](int32_t t) { return !tokenizer.has(t) || is_left_out(t); });
        return tokenizer.decode(tokens);
    };
    const std::string echo = text_of_tokens(tokenizer, request.prompt);
    TextOffsets offsets(tokenizer, request, echoes ? &echo : nullptr);
    const std::string prompt = shown(request.prompt);
    std::vector<int32_t> all = request.prompt;
    std::vector<size_t> begins;  // in `text`
    std::string text = echoes ? echo : "";
    if (echoes)
        for (size_t i = 0; i < request.prompt.size(); ++i)
            begins.push_back(text_of_tokens(tokenizer, {all.begin(), all.begin() + std::ssize(begins)}).size());
    const size_t n_echoed = text.size();
    for (const int32_t token : answer) {
        begins.push_back(n_echoed + shown(all).size() - prompt.size());
        all.push_back(token);
    }
    text += shown(all).substr(prompt.size());
    std::vector<size_t> ends;  // of its characters
    for (size_t i = 0; i < text.size();) ends.push_back(i += json_character_bytes(text, i));
    for (size_t i = 0; i < begins.size(); ++i) {
        const int32_t token = all[all.size() - begins.size() + i];
        const int64_t expected = std::ranges::upper_bound(ends, begins[i]) - ends.begin(), found = offsets.next(token);
        CAPTURE(tokenizer.name(), echoes, request.skip_special_tokens, i, token, found, expected, JsonText(text).str());
        // Behind a character that is not complete, a token without text may stand before its end or behind it.
        const bool has_text = (i + 1 < begins.size() ? begins[i + 1] : text.size()) > begins[i];
        REQUIRE((found == expected || (!has_text && found == expected + 1)));
    }
}

}  // namespace

TEST_CASE("text_offset of any tokens, whole characters or not", "[token_fields][tokenizer]") {
    std::mt19937 random(20261201);
    std::vector<std::unique_ptr<Tokenizer>> tokenizers;
    tokenizers.push_back(make_byte_tokenizer());
    for (const char* family : {"llama2", "llama3", "mistral", "qwen3"})
        tokenizers.push_back(load_tokenizer(concat("test/golden/tokenizer/", family, "/tokenizer.json")));
    for (int i = 0; i < 500; ++i)
        for (const auto& tokenizer : tokenizers) check_offsets(*tokenizer, random, i % 2 == 0);
}

// SentencePiece's decoder leaves out the space before the first word of a text; an answer goes on from a prompt.
TEST_CASE("the texts of an answer's tokens together are the answer", "[token_fields][tokenizer]") {
    for (const char* family : {"llama2", "mistral", "qwen3"}) {
        const auto tokenizer = load_tokenizer(concat("test/golden/tokenizer/", family, "/tokenizer.json"));
        std::string text;
        for (const int32_t token : tokenizer->encode(" and so on, x x")) text += text_of(*tokenizer, token).value();
        INFO(family);
        CHECK(text.substr(text.find_first_not_of(' ')) == "and so on, x x");
        CHECK(text.starts_with(' '));
    }
    // The token that begins a prompt, which is not scored, is that word.
    const auto llama2 = load_tokenizer("test/golden/tokenizer/llama2/tokenizer.json");
    const std::vector<Sampled> tokens = {{.token = llama2->encode("and")[0], .logprob = kUnscored, .top = {}}};
    const std::string text = "and";
    TextOffsets offsets(*llama2, asked({tokens[0].token}), &text);
    CHECK(parsed_json(logprobs_json(*llama2, tokens, offsets).str())["tokens"] ==
          value(std::vector<std::string>{"and"}));
    CHECK(offsets.next(tokens[0].token) == 3);
}
