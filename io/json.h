// io/json.h: JSON that is read, as JsonCpp's values, and JSON that is written, as text. (RFC 8259)
// Apart from io.h because few files need it.
#pragma once

#include "io/io.h"

#include <json/value.h>

#include <concepts>

// ---------------------------------------------------------------------------------------------------------------------
// Reading
//
// A Json::Value that is asked for a missing key gets one, and asInt() or asString() of a value of another type converts
// it, or throws what no user can read. So values are const here, and are read by the functions below.

// The value that a text is. Error, as "NAME: not valid JSON at line 3, column 7: Missing ',' or '}' ...", for all that
// RFC 8259 does not allow, for a key that an object has twice, and for a number that no double holds. Lists and objects
// in each other have at most `max_depth` levels. `name`: of the file, or what else the text is.
Json::Value parse_json(std::string_view text, const std::string& name, int max_depth = 200);
Json::Value read_json_file(const std::string& path);

// A member of an object; null if there is none, or if `value` is no object.
const Json::Value& member(const Json::Value& value, std::string_view key);
bool has(const Json::Value& value, std::string_view key);  // even where it is null

// A number without point and exponent that 64 bits hold. (JsonCpp's isInt64() says so of 5.0, too.)
bool is_whole(const Json::Value& value);

// Sets `to` and returns true if the value is of its type. 16.0 is a whole number, too.
bool read_value(const Json::Value& value, bool& to);
bool read_value(const Json::Value& value, std::string& to);
bool read_value(const Json::Value& value, double& to);
bool read_value(const Json::Value& value, int32_t& to);
bool read_value(const Json::Value& value, int64_t& to);
bool read_value(const Json::Value& value, uint64_t& to);
template <class T>
bool read_value(const Json::Value& value, std::vector<T>& to) {
    if (!value.isArray()) return false;
    to.resize(value.size());
    for (Json::ArrayIndex i = 0; i < value.size(); ++i)
        if (!read_value(value[i], to[i])) return false;
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Writing

// The text of a value. Keys stay in the order in which they are given. A double is written with as few digits as read
// back as the same bits; NaN and infinities, which JSON lacks, are null. Bytes that are not UTF-8 become U+FFFD.
class JsonText {
  public:
    JsonText(std::nullptr_t = nullptr) : text_("null") {}
    JsonText(std::string_view text);
    JsonText(const std::string& text) : JsonText(std::string_view(text)) {}
    JsonText(const char* text) : JsonText(std::string_view(text)) {}
    JsonText(double number);
    template <std::integral T>  // bool as well: not a function of its own, to which any pointer would convert
    JsonText(T value) {
        if constexpr (std::is_same_v<T, bool>) text_ = value ? "true" : "false";
        else text_ = std::to_string(value);
    }
    template <class T>
    JsonText(const std::vector<T>& values) : text_("[]") {
        for (const T& value : values) push_back(value);
    }
    JsonText(const Json::Value& value);
    // An object: {{"key", value}, ...}
    JsonText(std::initializer_list<std::pair<std::string_view, JsonText>> members);
    static JsonText object() { return JsonText(std::initializer_list<std::pair<std::string_view, JsonText>>{}); }
    static JsonText array(std::initializer_list<JsonText> values = {}) { return std::vector<JsonText>(values); }

    void set(std::string_view key, const JsonText& value);  // of an object that does not have this key yet
    void push_back(const JsonText& value);                  // to a list

    const std::string& str() const { return text_; }  // in one line, without blanks
    std::string indented(int spaces) const;           // each member in a line of its own

  private:
    void append(const std::string& text);
    std::string text_;
};

// The bytes of the character at text[i], or of those at it that become one U+FFFD.
size_t json_character_bytes(std::string_view text, size_t i);
bool is_utf8(std::string_view text);
