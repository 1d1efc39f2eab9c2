// test/json.h: JSON in tests.
#pragma once

#include "io/json.h"
#include "test.h"

using json = Json::Value;

// A value from what JsonText is made of: value({{"key", 1}}).
inline json value(const JsonText& text) { return parse_json(text.str(), "a test's JSON"); }
inline json parsed_json(const std::string& text) { return parse_json(text, "a test's JSON"); }
inline std::string dumped(const json& value) { return JsonText(value).str(); }

// What a value is, which must be of that type.
template <class T>
T as(const json& value) {
    T to{};
    INFO(dumped(value));
    REQUIRE(read_value(value, to));
    return to;
}

template <>
struct Catch::StringMaker<json> {
    static std::string convert(const json& value) { return dumped(value); }
};
