// io/mistyped.cu: what the command line answers to a word that is not a flag, and to a value that is not a number.
//
// A mistyped flag is compared with all flags, and with the names that other programs have for the same things. The
// distance of two words is the least number of changes that make one from the other: a letter is inserted, removed or
// replaced, or two neighbours are exchanged, which then stay as they are. (Damerau 1964; the table: Wagner & Fischer
// 1974)
#include "io/command_line.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <optional>

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Flags

// Is `part` the beginning of `whole` ("learning" of "learning-rate"), or its last word ("steps" of "num-steps")?
bool is_part(const std::string& part, const std::string& whole) {
    if (part.size() >= whole.size()) return false;
    const bool begins = whole.starts_with(part) && (part.size() >= 3 || whole[part.size()] == '-');
    return begins || whole.substr(whole.size() - part.size() - 1) == "-" + part;
}

// The flags whose names are nearest to this one, at most three.
std::vector<std::string> nearest_flags(const std::string& name, const std::vector<std::string>& flags,
                                       const std::vector<Synonym>& synonyms) {
    size_t least = std::max<size_t>(1, name.size() / 3);  // words that are further away are others
    std::vector<std::string> nearest;
    const auto consider = [&](const std::string& other, const std::string& meant) {
        size_t d = edit_distance(name, other);
        if (is_part(name, other) || is_part(other, name)) d = std::min<size_t>(d, 1);
        if (d > least) return;
        if (d < least) nearest.clear();
        least = d;
        if (nearest.size() < 3 && std::find(nearest.begin(), nearest.end(), meant) == nearest.end())
            nearest.push_back(meant);
    };
    for (const std::string& flag : flags) consider(flag.substr(2), flag);
    for (const Synonym& synonym : synonyms) consider(synonym.name, synonym.meant);
    return nearest;
}

// Text that was copied from a page may have a longer dash than a keyboard's: U+2013 or U+2014.
bool begins_with_dash(const std::string& word) {
    return word.starts_with('-') || word.starts_with("\u2013") || word.starts_with("\u2014");
}

// "--Learning_Rate=3e-3" -> "learning-rate".
std::string bare_name(std::string word) {
    word.erase(0, word.find_first_not_of("-\u2013\u2014"));
    word = word.substr(0, word.find('='));
    for (char& c : word) c = c == '_' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return word;
}

}  // namespace

size_t edit_distance(const std::string& a, const std::string& b) {
    // d[i][j]: of the first i letters of a and the first j of b.
    std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
    for (size_t i = 0; i <= a.size(); ++i) {
        for (size_t j = 0; j <= b.size(); ++j) {
            if (i == 0 || j == 0) {
                d[i][j] = i + j;
                continue;
            }
            d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
        }
    }
    return d[a.size()][b.size()];
}

std::string explain_unknown(const ProgramWords& program, const std::vector<std::string>& flags,
                            const std::vector<std::string>& words, const std::string& unknown) {
    const std::string help = where_flags_are(program), name = bare_name(unknown);
    if (begins_with_dash(unknown)) {
        std::string meant;
        const std::vector<std::string> nearest = nearest_flags(name, flags, program.synonyms);
        for (size_t i = 0; i < nearest.size(); ++i)
            meant += (i == 0 ? ": did you mean " : i + 1 < nearest.size() ? ", " : " or ") + nearest[i];
        return concat("unknown flag ", unknown.substr(0, unknown.find('=')), meant, meant.empty() ? "" : "?", help);
    }
    if (std::find(flags.begin(), flags.end(), "--" + name) != flags.end())
        return concat("\"", unknown, "\" is not a flag: did you mean --", name, "?", help);
    const auto at = std::find(words.begin(), words.end(), unknown);
    if (at != words.begin() && at != words.end() && *(at - 1) == "--resume")
        return concat("--resume takes no value: name the folder with --out ", unknown, " --resume");
    return concat("\"", unknown,
                  "\" belongs to no flag: a flag takes one value, in quotes if it has blanks or a *, as in ",
                  program.quoted_example, help);
}

// ---------------------------------------------------------------------------------------------------------------------
// Values

void expect_value(const std::string& flag, const std::string& text) {
    check(!text.starts_with("--"), flag, " needs a value, and the next word, ", text,
          ", is a flag (for a text that begins like this: ", flag, "=TEXT)");
}

void expect_number(const std::string& flag, const std::string& text) {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    check(!text.empty() && *end == 0 && std::isfinite(value), flag, " ", text, ": give a number, as in 0.003 or 3e-3");
}

namespace {

// digits * 10^power, without zeros at either end: "1.50e3" is 15 * 10^2. A double would hold only the first 16 digits
// of a seed, which may have 20.
struct Decimal {
    std::string digits;
    int64_t power = 0;
};
std::optional<Decimal> read_decimal(const std::string& text) {
    const size_t e = std::min(text.find_first_of("eE"), text.size());
    Decimal number{text.substr(0, e)};
    std::string& digits = number.digits;
    if (e < text.size()) {
        int32_t power = 0;
        const char* const end = text.data() + text.size();
        const char* const begin = text.data() + e + 1 + (text.compare(e + 1, 1, "+") == 0);
        const auto [next, error] = std::from_chars(begin, end, power);
        if (next != end || error != std::errc()) return {};
        number.power = power;
    }
    if (const size_t point = digits.find('.'); point < digits.size()) {
        number.power -= static_cast<int64_t>(digits.size() - point - 1);
        digits.erase(point, 1);
    }
    if (digits.empty() || digits.find_first_not_of("0123456789") < digits.size()) return {};
    for (; !digits.empty() && digits.back() == '0'; ++number.power) digits.pop_back();
    digits.erase(0, digits.find_first_not_of('0'));
    if (digits.empty()) return Decimal{"0"};
    return number;
}

struct WholeNumber {
    bool negative;
    uint64_t size;
};
WholeNumber read_whole_number(const std::string& flag, const std::string& text, uint64_t largest) {
    const bool negative = text.starts_with('-'), positive = text.starts_with('+');
    std::optional<Decimal> number = read_decimal(text.substr(negative || positive));
    check(number && number->power >= 0, flag, " ", text, ": give a whole number, as in 1000 or 1e3");
    std::string& digits = number->digits;
    uint64_t value = 0;
    bool fits = static_cast<int64_t>(digits.size()) + number->power <= std::numeric_limits<uint64_t>::digits10 + 1;
    if (fits) {
        digits.append(static_cast<size_t>(number->power), '0');
        const auto [next, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
        fits = error == std::errc() && value <= largest;
    }
    check(fits, flag, " ", text, " is too ", negative ? "small: the smallest is -" : "large: the largest is ", largest);
    return {negative, value};
}

}  // namespace

int64_t parse_whole_number(const std::string& flag, const std::string& text, int64_t largest) {
    const auto [negative, size] = read_whole_number(flag, text, static_cast<uint64_t>(largest));
    return negative ? -static_cast<int64_t>(size) : static_cast<int64_t>(size);
}

uint64_t parse_seed(const std::string& flag, const std::string& text) {
    const auto [negative, seed] = read_whole_number(flag, text, std::numeric_limits<uint64_t>::max());
    check(!negative || seed == 0, flag, " ", text, ": it must not be negative");
    return seed;
}
