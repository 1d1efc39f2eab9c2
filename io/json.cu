// io/json.cu: JSON, read by JsonCpp and written by us.                    (github.com/open-source-parsers/jsoncpp)
//
// JsonCpp's strict mode still takes what is not JSON: bytes that are not UTF-8, broken surrogate pairs, control
// characters in strings, numbers like 01 and +1, and a zero byte, which is the end to it. A Scan looks for these
// before, and counts the levels of lists and objects, of which JsonCpp's own limit, 1000, gives an error that is hard
// to read. JsonCpp's writer sorts the keys of an object, writes 0.1 as 0.10000000000000001, and all but ASCII as \uXXXX
// or, with emitUTF8, also bytes that are not UTF-8 as they are: we write without it.
#include "io/json.h"

#include <json/reader.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Reading

// Part of a message: at most 200 characters in one line.
std::string one_line(std::string text) {
    if (text.size() > 200) text = text.substr(0, 200) + "...";
    for (char& c : text)
        if (static_cast<unsigned char>(c) < 32) c = '?';
    return text;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// -? (0 | [1-9][0-9]*) (. [0-9]+)? ([eE] [+-]? [0-9]+)?
bool is_number(const std::string& text) {
    size_t i = text[0] == '-';
    const auto digits = [&] {
        const size_t first = i;
        while (is_digit(text[i])) ++i;
        return i > first;
    };
    if (text[i] == '0') ++i;
    else if (!digits()) return false;
    if (text[i] == '.' && (++i, !digits())) return false;
    if (text[i] == 'e' || text[i] == 'E') {
        ++i;
        if (text[i] == '+' || text[i] == '-') ++i;
        if (!digits()) return false;
    }
    return i == text.size();
}

class Scan {
  public:
    Scan(std::string_view text, const std::string& name, int max_depth)
        : text_(text), name_(name), max_depth_(max_depth) {}

    void run() {
        int depth = 0;
        while (at_ < text_.size()) {
            const char c = text_[at_];
            if (c == '"') {
                scan_string();
                continue;
            }
            if (c == '-' || c == '+' || is_digit(c)) {
                scan_number();
                continue;
            }
            if (c == '[' || c == '{')
                check(++depth <= max_depth_, name_, ": more than ", max_depth_, " levels of lists and objects");
            if (c == ']' || c == '}') --depth;
            if (c == '\0') fault("a zero byte");
            if (c == '/') fault("a '/', and JSON has no comments");  // JsonCpp takes those inside of lists and objects
            ++at_;
        }
    }

  private:
    [[noreturn]] void fault(const char* what) const {
        const std::string_view before = text_.substr(0, at_);
        const size_t line = 1 + static_cast<size_t>(std::count(before.begin(), before.end(), '\n'));
        const size_t column = at_ - (before.rfind('\n') + 1) + 1;  // npos + 1 is 0
        fail(name_, ": not valid JSON at line ", line, ", column ", column, ": ", what);
    }

    void scan_string() {
        for (++at_; at_ < text_.size();) {
            const auto c = static_cast<unsigned char>(text_[at_]);
            if (c == '"') {
                ++at_;
                return;
            }
            if (c < 32) fault("a control character in a string");
            if (c == '\\') {
                scan_escape();
            } else if (c < 128) {
                ++at_;
            } else {
                const size_t bytes = utf8_char_at(text_, at_).bytes;
                if (bytes == 1) fault("a byte that is not UTF-8");
                at_ += bytes;
            }
        }
    }

    // \uD83D\uDE00 is one character: the first half is D800 to DBFF, the second DC00 to DFFF, and none stands alone.
    void scan_escape() {
        const uint32_t code = escaped_code();
        if (code >= 0xDC00 && code < 0xE000) fault("the second half of a surrogate pair without the first");
        if (code < 0xD800 || code >= 0xE000) {
            at_ += 2;
            return;
        }
        at_ += 6;
        const uint32_t second = escaped_code();
        if (second < 0xDC00 || second >= 0xE000) fault("the first half of a surrogate pair without the second");
        at_ += 6;
    }
    // Of \uXXXX here; 0 if there is something else, which JsonCpp looks at.
    uint32_t escaped_code() const {
        uint32_t code = 0;
        const std::string_view here = text_.substr(std::min(at_, text_.size()), 6);
        if (!here.starts_with("\\u") || here.size() < 6) return 0;
        const char* const end = std::from_chars(here.data() + 2, here.data() + 6, code, 16).ptr;
        return end == here.data() + 6 ? code : 0;
    }

    void scan_number() {
        const size_t end = std::min(text_.find_first_not_of("0123456789+-.eE", at_), text_.size());
        const std::string number(text_.substr(at_, end - at_));
        if (!is_number(number)) fault("a number that is written wrong");
        // Whole numbers of up to 18 characters fit into 64 bits.
        const bool is_double = number.size() > 18 || number.find_first_of(".eE") != number.npos;
        if (is_double && !std::isfinite(std::strtod(number.c_str(), nullptr))) fault("a number out of range");
        at_ = end;
    }

    std::string_view text_;
    const std::string& name_;
    int max_depth_;
    size_t at_ = 0;
};

Json::CharReaderBuilder strict_reader() {
    Json::CharReaderBuilder builder;
    Json::CharReaderBuilder::strictMode(&builder.settings_);
    builder["strictRoot"] = false;  // a text or a number alone is JSON, too
    return builder;
}

}  // namespace

Json::Value parse_json(std::string_view text, const std::string& name, int max_depth) {
    Scan(text, name, max_depth).run();
    static const Json::CharReaderBuilder builder = strict_reader();
    const std::unique_ptr<Json::CharReader> reader(builder.newCharReader());
    Json::Value value;
    std::string errors;  // "* Line 1, Column 5\n  Syntax error: ...\n", and so on
    if (reader->parse(text.data(), text.data() + text.size(), &value, &errors)) return value;
    const size_t end_of_place = errors.find('\n'), end = errors.find('\n', end_of_place + 1);
    int line = 0, column = 0;
    std::sscanf(errors.c_str(), "* Line %d, Column %d", &line, &column);
    std::string what = errors.substr(end_of_place + 3, end - end_of_place - 3);
    if (what.ends_with('.')) what.pop_back();  // the sentence may go on
    fail(name, ": not valid JSON at line ", line, ", column ", column, ": ", one_line(what));
}

Json::Value read_json_file(const std::string& path) { return parse_json(read_regular_file(path), path); }

const Json::Value& member(const Json::Value& value, std::string_view key) {
    const Json::Value* found = value.isObject() ? value.find(key.data(), key.data() + key.size()) : nullptr;
    return found ? *found : Json::Value::nullSingleton();
}
bool has(const Json::Value& value, std::string_view key) {
    return value.isObject() && value.find(key.data(), key.data() + key.size());
}

bool is_whole(const Json::Value& value) { return value.type() == Json::intValue || value.type() == Json::uintValue; }

namespace {

template <class Whole>
bool read_whole(const Json::Value& value, Whole& to) {
    if (value.type() == Json::intValue)
        return std::in_range<Whole>(value.asInt64()) && (to = static_cast<Whole>(value.asInt64()), true);
    if (value.type() == Json::uintValue)
        return std::in_range<Whole>(value.asUInt64()) && (to = static_cast<Whole>(value.asUInt64()), true);
    const double number = value.isDouble() ? value.asDouble() : 0.5;
    if (number != std::floor(number) || std::abs(number) >= 0x1p31 || (std::is_unsigned_v<Whole> && number < 0))
        return false;
    to = static_cast<Whole>(number);
    return true;
}

}  // namespace

bool read_value(const Json::Value& value, int32_t& to) { return read_whole(value, to); }
bool read_value(const Json::Value& value, int64_t& to) { return read_whole(value, to); }
bool read_value(const Json::Value& value, uint64_t& to) { return read_whole(value, to); }
bool read_value(const Json::Value& value, double& to) { return value.isDouble() && (to = value.asDouble(), true); }
bool read_value(const Json::Value& value, bool& to) { return value.isBool() && (to = value.asBool(), true); }
bool read_value(const Json::Value& value, std::string& to) { return value.isString() && (to = value.asString(), true); }

// ---------------------------------------------------------------------------------------------------------------------
// Writing

namespace {

// How many bytes at text[i], where no whole character is, become one U+FFFD: those that some bytes after them would
// complete, or else one. (Unicode 15, 3.9: a maximal subpart)
size_t broken_bytes(std::string_view text, size_t i) {
    for (size_t n = std::min<size_t>(3, text.size() - i); n > 1; --n)
        for (const char* rest : {"\x80", "\x80\x80"})
            if (utf8_char_at(concat(text.substr(i, n), rest), 0).bytes > n) return n;
    return 1;
}

void append_escaped(std::string& out, char c) {
    constexpr std::string_view kShort = "\"\\\b\f\n\r\t", kLetters = "\"\\bfnrt";
    const size_t known = kShort.find(c);
    if (known != kShort.npos) out += {'\\', kLetters[known]};
    else out += format("\\u%04x", static_cast<unsigned>(c));
}

std::string quoted_json(std::string_view text) {
    std::string out = "\"";
    for (size_t i = 0, bytes = 0; i < text.size(); i += bytes) {
        const char c = text[i];
        bytes = json_character_bytes(text, i);
        if (!utf8_char_at(text, i).is_utf8()) out += "\uFFFD";
        else if (c == '"' || c == '\\' || static_cast<unsigned char>(c) < 32) append_escaped(out, c);
        else out += text.substr(i, bytes);
    }
    return out + '"';
}

// With a point or an exponent, so that it is read as a double again: 1.0, 0.0001, 1e-05, 1e+15.
std::string double_text(double number) {
    if (!std::isfinite(number)) return "null";
    const double size = std::abs(number);
    const bool plain = size == 0 || (size >= 1e-4 && size < 1e15);
    char text[40];
    const auto end = std::to_chars(text, text + sizeof text, number,
                                   plain ? std::chars_format::fixed : std::chars_format::scientific)
                         .ptr;
    std::string out(text, end);
    return out.find_first_of(".e") == out.npos ? out + ".0" : out;
}

}  // namespace

JsonText::JsonText(std::string_view text) : text_(quoted_json(text)) {}
JsonText::JsonText(double number) : text_(double_text(number)) {}
JsonText::JsonText(std::initializer_list<std::pair<std::string_view, JsonText>> members) : text_("{}") {
    for (const auto& [key, value] : members) set(key, value);
}
JsonText::JsonText(const Json::Value& value) {
    switch (value.type()) {
        case Json::nullValue: text_ = "null"; break;
        case Json::booleanValue: *this = value.asBool(); break;
        case Json::intValue: *this = value.asInt64(); break;
        case Json::uintValue: *this = value.asUInt64(); break;
        case Json::realValue: *this = value.asDouble(); break;
        case Json::stringValue: *this = value.asString(); break;
        case Json::arrayValue:
            text_ = "[]";
            for (const Json::Value& item : value) push_back(item);
            break;
        case Json::objectValue:
            text_ = "{}";
            for (auto item = value.begin(); item != value.end(); ++item) set(item.name(), *item);
            break;
    }
}

void JsonText::set(std::string_view key, const JsonText& value) { append(quoted_json(key) + ":" + value.text_); }
void JsonText::push_back(const JsonText& value) { append(value.text_); }
void JsonText::append(const std::string& text) {
    const char close = text_.back();
    text_.pop_back();
    if (text_.size() > 1) text_ += ',';
    text_ += text;
    text_ += close;
}

std::string JsonText::indented(int spaces) const {
    std::string out;
    size_t depth = 0;
    bool in_string = false;
    const auto new_line = [&] { out += '\n' + std::string(depth * static_cast<size_t>(spaces), ' '); };
    for (size_t i = 0; i < text_.size(); ++i) {
        const char c = text_[i];
        const bool opens = !in_string && (c == '{' || c == '['), closes = !in_string && (c == '}' || c == ']');
        const bool is_empty = opens && (text_[i + 1] == '}' || text_[i + 1] == ']');
        if (is_empty) {
            out += {c, text_[++i]};
            continue;
        }
        if (closes) --depth, new_line();
        out += c;
        if (in_string && c == '\\') out += text_[++i];
        if (c == '"') in_string = !in_string;
        if (opens) ++depth, new_line();
        if (!in_string && c == ',') new_line();
        if (!in_string && c == ':') out += ' ';
    }
    return out;
}

size_t json_character_bytes(std::string_view text, size_t i) {
    const Utf8Char c = utf8_char_at(text, i);
    return c.is_utf8() ? c.bytes : broken_bytes(text, i);
}

bool is_utf8(std::string_view text) {
    for (size_t i = 0; i < text.size();) {
        const Utf8Char c = utf8_char_at(text, i);
        if (!c.is_utf8()) return false;
        i += c.bytes;
    }
    return true;
}
