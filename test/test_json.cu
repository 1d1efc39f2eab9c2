// JSON: what is refused, what is read, and what is written.
#include "json.h"

#include "core/core.h"
#include "temp_folder.h"

#include <bit>
#include <cmath>

TEST_CASE("what is no JSON is refused in one line that says where") {
    const auto error = [](const std::string& text) { return error_of([&] { parse_json(text, "x.json", 8); }); };
    const std::string pair = "\\ud83d\\ude00";
    struct Case {
        std::string text, words;
    };
    const Case cases[] = {
        {"", "line 1, column 1"},
        {"{\n  \"a\": tru\n}", "line 2, column 8"},
        {"{} x", "line 1, column 4"},
        {std::string("{}\0", 3), "column 3: a zero byte"},
        {"[1, 2,]", "not valid JSON"},
        {"{\"a\": 1,}", "not valid JSON"},
        {"[1 2]", "not valid JSON"},
        {"{a: 1}", "not valid JSON"},
        {"{'a': 1}", "not valid JSON"},
        {"[1] // one", "a '/', and JSON has no comments"},
        {"{\"a\": 1 /* one */}", "column 9: a '/'"},
        {"[NaN]", "not valid JSON"},
        {"[-Infinity]", "not valid JSON"},
        {"[\"\xff\"]", "column 3: a byte that is not UTF-8"},
        {"[\"\xe2\x96\"]", "a byte that is not UTF-8"},
        {"[\"\xed\xa0\x80\"]", "a byte that is not UTF-8"},  // a surrogate
        {"[\"a\nb\"]", "a control character in a string"},
        {"[\"\\x\"]", "not valid JSON"},
        {"[\"\\u12g4\"]", "not valid JSON"},
        {"[\"\\ud83d\"]", "the first half of a surrogate pair"},
        {"[\"\\ud83d\\u0041\"]", "the first half of a surrogate pair"},
        {"[\"\\ud83d\\ue000\"]", "the first half of a surrogate pair"},
        {"[\"\\ud800\"]", "the first half of a surrogate pair"},
        {"[\"\\ud83d\\ud83d\\ude00\"]", "the first half of a surrogate pair"},
        {"[\"\\ude00\"]", "the second half of a surrogate pair"},
        {"[\"open", "not valid JSON"},
        {"[01]", "a number that is written wrong"},
        {"[1.]", "a number that is written wrong"},
        {"[-]", "a number that is written wrong"},
        {"[1e+]", "a number that is written wrong"},
        {"[+1]", "a number that is written wrong"},
        {"[.5]", "not valid JSON"},
        {"[1e999]", "column 2: a number out of range"},
        {"[1E999]", "column 2: a number out of range"},
        {"[" + std::string(400, '9') + "]", "a number out of range"},
        {"{\"a\": 1, \"a\": 2}", "Duplicate key: 'a'"},
        {R"({"a\tb": 1, "a\tb": 2})", "Duplicate key: 'a?b'"},
        {concat("{\"", std::string(1000, 'k'), "\": 1, \"", std::string(1000, 'k'), "\": 2}"), "kkk..."},
        {std::string(9, '['), "more than 8 levels"},
        {std::string(1'000'000, '['), "more than 8 levels"},
        {"{\"" + std::string(1'000'000, 'k') + "\" 1}", "not valid JSON"},
    };
    for (const Case& wrong : cases) {
        INFO(wrong.text.substr(0, 80) << "\n  wanted: " << wrong.words << "\n  got: " << error(wrong.text));
        CHECK(one_line_with(error(wrong.text), "x.json: ", wrong.words));
        CHECK(error(wrong.text).size() < 400);
        const bool is_cut = error(wrong.text).ends_with("...");
        CHECK((is_cut || !error(wrong.text).ends_with('.')));  // a sentence goes on behind it
        // '?' stands for a line end: of what JsonCpp says only the first line is shown.
        CHECK(error(wrong.text).find('?') == error(wrong.text).find("?b'"));
    }
    CHECK(error(std::string(8, '[') + std::string(8, ']')) == "");
    CHECK(error("[{}, {}, {}, {}, {}, {}, {}, {}, {}, [], [], [], [], [], [], [], [], []]") == "");
    CHECK(error("\xef\xbb\xbf[\"" + pair + "\", 1e-999, -0.5E+3, 0]") == "");
}

TEST_CASE("values are read as what they are, and nothing is converted") {
    const json read = parsed_json(R"({"largest": 18446744073709551615, "least": -9223372036854775808, "beyond":
        18446744073709551616, "point": 5.0, "minus": -5.0, "far": 3e9, "half": 0.5, "text": "5", "nul": "a\u0000b",
        "none": null, "yes": true, "list": [1, 2], "mixed": [1, "2"]})");
    CHECK(as<uint64_t>(read["largest"]) == UINT64_MAX);
    CHECK(as<int64_t>(read["least"]) == INT64_MIN);
    CHECK(as<double>(read["beyond"]) == 0x1p64);
    CHECK(as<int32_t>(read["point"]) == 5);
    CHECK(as<std::string>(read["nul"]) == std::string("a\0b", 3));
    CHECK(as<std::vector<int32_t>>(read["list"]) == std::vector<int32_t>{1, 2});
    CHECK(is_whole(read["largest"]));
    CHECK_FALSE(is_whole(read["point"]));
    CHECK(has(read, "none"));
    CHECK_FALSE(has(read, "missing"));
    CHECK(member(read, "missing").isNull());
    CHECK(member(read["list"], "missing").isNull());
    int64_t whole = 7;
    uint64_t count = 7;
    int32_t small = 7;
    double number = 7;
    std::string text = "7";
    bool truth = false;
    std::vector<int32_t> list;
    for (const char* key : {"largest", "beyond", "far", "half", "text", "none", "yes", "list", "missing"})
        CHECK_FALSE(read_value(member(read, key), whole));
    for (const char* key : {"least", "minus", "half", "text", "none", "yes"}) CHECK_FALSE(read_value(read[key], count));
    CHECK_FALSE(read_value(read["least"], small));
    for (const char* key : {"text", "none", "yes", "list"}) CHECK_FALSE(read_value(read[key], number));
    for (const char* key : {"point", "none", "yes", "list"}) CHECK_FALSE(read_value(read[key], text));
    for (const char* key : {"point", "none", "text"}) CHECK_FALSE(read_value(read[key], truth));
    CHECK_FALSE(read_value(read["mixed"], list));
}

TEST_CASE("JSON is written in the order that it is given, and is UTF-8") {
    JsonText object = {{"z", 1}, {"a", {{"b", nullptr}, {"c", true}}}, {"list", JsonText::array({1, "x", 0.5})}};
    object.set("empty", JsonText::object());
    object.set("none", JsonText::array());
    CHECK(object.str() == R"({"z":1,"a":{"b":null,"c":true},"list":[1,"x",0.5],"empty":{},"none":[]})");
    CHECK(JsonText{{"a\"", JsonText::array({"[{:,", "\\\""})}, {"b", JsonText::object()}}.indented(2) ==
          "{\n  \"a\\\"\": [\n    \"[{:,\",\n    \"\\\\\\\"\"\n  ],\n  \"b\": {}\n}");
    CHECK(JsonText("\"\\\b\f\n\r\t\x01\x1f\x7f/\u00e9").str() ==
          "\"\\\"\\\\\\b\\f\\n\\r\\t\\u0001\\u001f\x7f/\u00e9\"");
    CHECK(JsonText(std::string("a\0b", 3)).str() == "\"a\\u0000b\"");
    // Half a character becomes one U+FFFD, what can begin none one each.
    CHECK(JsonText("\xe2\x96").str() == "\"\uFFFD\"");
    CHECK(JsonText("\xf0\x9fz").str() == "\"\uFFFDz\"");
    CHECK(JsonText("\xf0\x9f\x98z\xff\x80").str() == "\"\uFFFDz\uFFFD\uFFFD\"");
    CHECK(JsonText("\xe0\x80\xc3").str() == "\"\uFFFD\uFFFD\uFFFD\"");
    CHECK(is_utf8("a\u00e9\U0001F600"));
    CHECK_FALSE(is_utf8("a\xe2\x96"));
    CHECK(JsonText(UINT64_MAX).str() == "18446744073709551615");
    CHECK(JsonText(parsed_json(R"({"b": [1, -2, 1.5, "t", false, null, 18446744073709551615], "a": {}})")).str() ==
          R"({"a":{},"b":[1,-2,1.5,"t",false,null,18446744073709551615]})");
}

TEST_CASE("numbers are written so that the same bits are read") {
    const std::pair<double, const char*> shown[] = {
        {0.1, "0.1"},       {1, "1.0"},      {-0.0, "-0.0"},     {1e-5, "1e-05"},    {0.0001, "0.0001"},
        {1e6, "1000000.0"}, {1e15, "1e+15"}, {5e-324, "5e-324"}, {INFINITY, "null"}, {NAN, "null"}};
    for (const auto& [number, text] : shown) CHECK(JsonText(number).str() == text);
    for (uint64_t i = 0; i < 10'000; ++i) {
        const double number = std::bit_cast<double>(uniform_below(3, 0, 2 * i, uint64_t{1} << 32) << 32 |
                                                    uniform_below(3, 0, 2 * i + 1, uint64_t{1} << 32));
        if (!std::isfinite(number)) continue;
        const std::string text = JsonText(number).str();
        INFO(text);
        CHECK(std::bit_cast<uint64_t>(as<double>(parsed_json(text))) == std::bit_cast<uint64_t>(number));
        CHECK_FALSE(is_whole(parsed_json(text)));
    }
}
