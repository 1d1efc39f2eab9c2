// io/regex.cu: the patterns of a tokenizer.json, matched by PCRE2 and its just-in-time compiler.
//
// Hugging Face's library matches them with Oniguruma (Ruby's dialect, Unicode 16), and a token split depends on every
// difference between the two engines:
//   - What is written the same and means something else is rewritten: \w, \h, \v, \b, \p{Script}, {,n}, X{n}+, (?m).
//     What cannot be rewritten is refused: classes within classes, && and [:names:] in them.
//   - PCRE2's tables may be older: Debian 12's has Unicode 14, to which letters and emoji of 2022 are not characters.
//     Before matching, each newer character is replaced by an older one of the same class and length in bytes
//     (unicode_tables.h), and each byte that is not UTF-8 by a control character. Nearly all text has neither, and is
//     matched as it is; either way the matches are those of the text.
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "io/tokenizer_parts.h"
#include "io/unicode_tables.h"

#include <algorithm>
#include <cstring>

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Oniguruma's dialect to PCRE2's

// Outside of [...] Oniguruma also takes the six fractions and small digits of Latin-1 for letters of a word.
const char* const kLatin1Word = R"(\x{B2}\x{B3}\x{B9}\x{BC}-\x{BE})";

class Translator {
  public:
    Translator(const std::string& pattern, const std::string& file) : in_(pattern), file_(file) {}
    std::string translate();

  private:
    [[noreturn]] void refuse(const char* what) const {
        fail(file_, ": the pattern ", quoted_line(in_), " has ", what, " at byte ", i_,
             ", which is not supported: write it in another way");
    }
    bool at(const char* text) const { return in_.compare(i_, std::strlen(text), text) == 0; }
    void escape(bool in_class);
    void property();
    void character_class();
    void group();
    void quantifier();

    const std::string& in_;
    const std::string& file_;
    size_t i_ = 0;
    std::string out_;
    std::vector<size_t> groups_;  // where in out_ those begin that are still open
    size_t atom_ = 0;             // where in out_ the last atom begins, which a quantifier repeats
};

std::string Translator::translate() {
    while (i_ < in_.size()) {
        const char c = in_[i_];
        if (c == '{') {
            quantifier();
            continue;
        }
        atom_ = out_.size();  // *, + and ? are none, but behind them PCRE2 takes no braces
        if (c == '\\') escape(false);
        else if (c == '[') character_class();
        else if (c == '(') group();
        else {
            if (c == ')' && !groups_.empty()) {
                atom_ = groups_.back();
                groups_.pop_back();
            }
            out_ += in_[i_++];
        }
    }
    return out_;
}

void Translator::escape(bool in_class) {
    const char c = i_ + 1 < in_.size() ? in_[i_ + 1] : '\0';
    const std::string word = concat("[", kWord, kLatin1Word, "]"), no_word = concat("[^", kWord, kLatin1Word, "]");
    if (c == 'p' || c == 'P') return property();
    if (in_class && (c == 'W' || c == 'H')) refuse("\\W or \\H within [...]");
    // To Oniguruma \C, \E, \Q and \V are these letters, and \X ends elsewhere between emoji than to PCRE2 10.42.
    if (c != '\0' && std::strchr("CEQVX", c) != nullptr) refuse("\\C, \\E, \\Q, \\V or \\X");
    // \x80 and above are bytes to it, and characters to PCRE2.
    if (c == 'x' && (i_ + 2 >= in_.size() || in_[i_ + 2] < '0' || in_[i_ + 2] > '7'))
        refuse("\\x{...}, or \\x with no number below 80 (\\uHHHH is known)");
    i_ += 2;
    if (c == 'w') out_ += in_class ? kWord : word;
    else if (c == 'W') out_ += no_word;
    else if (c == 'h') out_ += in_class ? "0-9A-Fa-f" : "[0-9A-Fa-f]";
    else if (c == 'H') out_ += "[^0-9A-Fa-f]";
    else if (c == 'v') out_ += "\\x0B";  // to PCRE2 newlines, too
    else if (c == 'b' && !in_class) out_ += "(?:(?<=" + word + ")(?!" + word + ")|(?<!" + word + ")(?=" + word + "))";
    else if (c == 'B' && !in_class) out_ += "(?:(?<=" + word + ")(?=" + word + ")|(?<!" + word + ")(?!" + word + "))";
    else if (c == 'u') {  // \uHHHH
        out_ += "\\x{" + in_.substr(std::min(i_, in_.size()), 4) + "}";
        i_ = std::min(i_ + 4, in_.size());
    } else {
        out_ += '\\';
        if (c != '\0') out_ += c;
    }
}

// \p{L}, \p{^Lu}: general categories are the same. A longer name is a script: to newer versions of PCRE2 \p{Han} also
// holds punctuation that is used with it, and \p{sc:Han} is what is meant.
void Translator::property() {
    const size_t end = in_.find('}', i_);
    if (i_ + 2 >= in_.size() || in_[i_ + 2] != '{' || end == in_.npos) refuse("\\p without {name}");
    std::string name = in_.substr(i_ + 3, end - i_ - 3);
    const bool negated = name.starts_with('^');
    if (negated) name.erase(0, 1);
    constexpr std::pair<const char*, const char*> kLongNames[] = {
        {"Letter", "L"}, {"Mark", "M"}, {"Number", "N"}, {"Punctuation", "P"}, {"Symbol", "S"}, {"Separator", "Z"}};
    for (const auto& [long_name, short_name] : kLongNames)
        if (name == long_name) name = short_name;
#if PCRE2_MAJOR > 10 || PCRE2_MINOR >= 40
    if (name.size() > 2 && name != "Any") name = "sc:" + name;
#endif
    out_ += concat('\\', in_[i_ + 1], '{', negated ? "^" : "", name, '}');
    i_ = end + 1;
}

void Translator::character_class() {
    out_ += in_[i_++];
    if (i_ < in_.size() && in_[i_] == '^') out_ += in_[i_++];
    const size_t first = i_;
    while (i_ < in_.size() && (in_[i_] != ']' || i_ == first)) {
        if (in_[i_] == '[') refuse("a class within a class");
        if (at("&&")) refuse("&& in a class");
        if (in_[i_] == '\\') escape(true);
        else out_ += in_[i_++];
    }
    if (i_ < in_.size()) out_ += in_[i_++];
}

// Of the options in (?imx-imx), m means that the point also matches a newline: PCRE2's s.
void Translator::group() {
    groups_.push_back(out_.size());
    out_ += in_[i_++];
    if (i_ >= in_.size() || in_[i_] != '?') return;
    out_ += in_[i_++];
    const size_t letters = i_;
    while (i_ < in_.size() && std::strchr("imx-", in_[i_]) != nullptr) ++i_;
    const bool is_options = i_ > letters && i_ < in_.size() && (in_[i_] == ':' || in_[i_] == ')');
    if (!is_options && (i_ > letters || std::strchr(":=!>|#<", in_[i_]) == nullptr)) refuse("an unknown (?...)");
    for (size_t k = letters; k < i_; ++k) out_ += in_[k] == 'm' ? 's' : in_[k];
}

// {n}, {n,m}, {n,}, {,m} with ? or + after them; anything else in braces is text.
void Translator::quantifier() {
    size_t end = i_ + 1;
    while (end < in_.size() && (std::isdigit(static_cast<unsigned char>(in_[end])) || in_[end] == ',')) ++end;
    const std::string counts = in_.substr(i_ + 1, end - i_ - 1);
    if (end >= in_.size() || in_[end] != '}' || counts.empty() || counts == ",") {
        atom_ = out_.size();
        out_ += "\\{";
        ++i_;
        return;
    }
    i_ = end + 1;
    const char behind = i_ < in_.size() ? in_[i_] : '\0';
    const bool has_comma = counts.find(',') != counts.npos;
    if (behind == '?' && !has_comma) refuse("{n}?");
    if (behind == '+') out_.insert(atom_, "(?:");  // X{n}+ repeats X{n}; to PCRE2 the + would forbid giving back
    out_ += "{" + (counts[0] == ',' ? "0" + counts : counts) + "}";
    if (behind == '+') out_ += ')';
}

// ---------------------------------------------------------------------------------------------------------------------
// Texts as an older PCRE2 can read them

// The character that stands in for one that PCRE2 may not know, or 0.
uint32_t stand_in(uint32_t code) {
    const StandIn* found = find_range(newer_characters, code);
    return found ? found->like : 0;
}

// The text itself, or a copy of the same length in `copy`.
std::string_view readable(std::string_view text, std::string& copy) {
    constexpr char kNotUtf8 = '\x7f';
    for (size_t i = 0; i < text.size();) {
        if (static_cast<unsigned char>(text[i]) < 0x80) {
            ++i;
            continue;
        }
        const auto [code, bytes] = utf8_char_at(text, i);
        const uint32_t other = bytes == 1 ? kNotUtf8 : stand_in(code);
        if (other != 0) {
            if (copy.empty()) copy = text;
            std::string encoded;
            append_utf8(encoded, other);
            copy.replace(i, bytes, encoded);
        }
        i += bytes;
    }
    return copy.empty() ? text : copy;
}

std::string message_of(int error) {
    PCRE2_UCHAR text[256] = "unknown error";
    pcre2_get_error_message(error, text, sizeof text);
    return reinterpret_cast<const char*>(text);
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Matching

void Regex::compile(const std::string& pattern, uint32_t options, const std::string& file) {
    const std::unique_ptr<pcre2_compile_context, decltype(&pcre2_compile_context_free)> context(
        pcre2_compile_context_create(nullptr), pcre2_compile_context_free);
    check(context != nullptr, "no memory for a pattern");
    pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
    int error = 0;
    size_t where = 0;
    code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), options, &error, &where,
                              context.get()),
                pcre2_code_free);
    check(code_ != nullptr, file, ": the pattern ", shown_, " cannot be compiled: ", message_of(error),
          "; correct it, or convert the tokenizer to one without it");
    pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE);  // where there is no such compiler, pcre2_match interprets
}

Regex::Regex(const std::string& pattern, const std::string& file) : shown_(quoted_line(pattern)) {
    std::string copy;
    check(readable(pattern, copy) == pattern, file, ": the pattern ", shown_,
          " has a character of Unicode 15 or later, or a byte that is not UTF-8, which is not supported in a Regex");
    compile(Translator(pattern, file).translate(), PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, file);
}

Regex Regex::literal(const std::string& text) {
    Regex regex;
    regex.shown_ = quoted_line(text);
    regex.is_literal_ = true;
    regex.compile(text, PCRE2_LITERAL, "a text to be found");
    return regex;
}

void Regex::split(std::string_view text, const std::function<void(size_t, size_t, bool)>& stretch) const {
    std::string copy;
    const std::string_view subject = is_literal_ ? text : readable(text, copy);
    const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> data(pcre2_match_data_create(1, nullptr),
                                                                                   pcre2_match_data_free);
    check(data != nullptr, "no memory to match a pattern");
    const size_t* match = pcre2_get_ovector_pointer(data.get());
    size_t done = 0, from = 0;
    size_t last_end = text.npos;  // an empty match there would be found again and again
    while (from <= text.size()) {
        auto run = [&](uint32_t options) {
            return pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(subject.data()), subject.size(), from,
                               options | PCRE2_NO_UTF_CHECK, data.get(), nullptr);
        };
        int result = run(0);
        if (result == PCRE2_ERROR_JIT_STACKLIMIT) result = run(PCRE2_NO_JIT);
        if (result == PCRE2_ERROR_NOMATCH) break;
        check(result >= 0, "the pattern ", shown_, " does not come to an end on this text: ", message_of(result));
        const size_t begin = match[0], end = match[1];
        check(begin >= done && begin <= end, "the pattern ", shown_, " matches what it has matched before");
        if (begin == end && end == last_end) {
            from = end + (end < text.size() ? utf8_char_at(text, end).bytes : 1);
            continue;
        }
        if (done != begin) stretch(done, begin, false);
        stretch(begin, end, true);
        done = from = last_end = end;
    }
    if (done != text.size()) stretch(done, text.size(), false);
}

bool Regex::found_in(std::string_view text) const {
    bool found = false;
    split(text, [&](size_t, size_t, bool is_match) { found |= is_match; });
    return found;
}

std::string Regex::replace_all(std::string_view text, const std::string& replacement) const {
    std::string out;
    split(text, [&](size_t begin, size_t end, bool is_match) {
        out += is_match ? std::string_view(replacement) : text.substr(begin, end - begin);
    });
    return out;
}
