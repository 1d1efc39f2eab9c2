// inference/token_fields.cu: logit_bias, as it is given, and log-probabilities, as they are shown.
#include "inference/inference.h"
#include "json.h"

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
    int64_t offset = 7;
    const json found =
        parsed_json(logprobs_json(*tokenizer, tokens, offset).str());  // Error for a key that is there twice
    CHECK(found["tokens"] == value(std::vector<std::string>{"\uFFFD", "\"", "b"}));
    CHECK(found["token_logprobs"] == value(std::vector<double>{-3, -4, -1}));
    CHECK(found["top_logprobs"][0] == value({{"a", -1.0}, {"\uFFFD", -3.0}}));               // the chosen token's
    CHECK(found["top_logprobs"][1] == value({{"\uFFFD", -0.5}, {"", -2.5}, {"\"", -4.0}}));  // no token 300: no text
    CHECK(found["top_logprobs"][2] == value({{"b", -1.0}}));
    CHECK(offset == 7 + 1 + 1 + 1);
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
    std::vector<Sampled> tokens;
    for (const int32_t token : prompt) tokens.push_back({.token = token, .logprob = -1, .top = {}});
    int64_t offset = first_offset(*tokenizer, prompt, text);
    const json offsets = parsed_json(logprobs_json(*tokenizer, tokens, offset).str())["text_offset"];
    CHECK((offsets[0] == 0 && offsets[1] == 0));
    CHECK(offsets[static_cast<int>(prompt.size()) - 1] == 5);  // " it"
    CHECK(offset == 8);
    CHECK(first_offset(*tokenizer, prompt, tokenizer->decode(prompt)) == 0);
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
    int64_t offset = 0;
    CHECK(parsed_json(logprobs_json(*llama2, tokens, offset).str())["tokens"] ==
          value(std::vector<std::string>{"and"}));
    CHECK(offset == 3);
}
