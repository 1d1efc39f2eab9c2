// rewrite: turns a .cu file into C++ that g++ can compile. The only step between CUDA source and the CPU.
//
//     rewrite in.cu > out.cpp
//
// Three things in CUDA C++ are syntax, not library, and are rewritten in place (the rest is headers:
// cpu/cuda_runtime.h; and headers are not rewritten):
//
//     kernel<T><<<grid, block, shared, stream>>>(a, b);
//  -> ::cuda_cpu::launch({"kernel<T>", [=](auto of_) -> decltype(of_(kernel<T>)) { return of_(kernel<T>); }},
//                        __FILE__, __LINE__, ::cuda_cpu::Configuration(grid, block, shared, stream),
//                        [=](auto... arguments_) -> decltype(kernel<T>(arguments_...)) { kernel<T>(arguments_...); },
//                        a, b);
//
//     __shared__ float tile[32][33];
//  -> __shared__ float tile[32][33]; ::cuda_cpu::shared_declared(&tile, sizeof(tile));      (strict mode: fills it)
//     extern __shared__ float row[];
//  -> float* row = static_cast<float*>(::cuda_cpu::dynamic_shared_memory());
//
//     __global__ void __launch_bounds__(256) kernel(int* p) {
//  -> __global__ void __launch_bounds__(256) kernel(int* p) { CHECK_LAUNCH_BOUNDS(256);
//
// Nothing is moved to another line, so one #line at the top lets compiler errors and gdb show the .cu file.
#include <algorithm>
#include <cctype>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace {

std::string file, source;

[[noreturn]] void fail(size_t at, const std::string& what) {
    const auto line = 1 + std::count(source.begin(), source.begin() + static_cast<std::ptrdiff_t>(at), '\n');
    std::cerr << file << ":" << line << ": error: " << what << "\n";
    std::exit(1);
}

bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

// A copy of the source in which comments are blanks, and, if `literals`, also strings and character literals. It is
// what is searched for code. A backslash that continues a line is a blank as well.
std::string blanked(const std::string& s, bool literals) {
    std::string out = s;
    const auto blank = [&](size_t from, size_t to) {
        for (size_t i = from; i < to && i < s.size(); ++i)
            if (s[i] != '\n') out[i] = ' ';
    };
    for (size_t i = 0; i < s.size();) {
        size_t end = i + 1;
        if (s.compare(i, 2, "//") == 0) {
            do end = std::min(s.find('\n', end + 1), s.size());
            while (end < s.size() && s[end - 1] == '\\');  // the comment continues in the next line
            blank(i, end);
        } else if (s.compare(i, 2, "/*") == 0) {
            end = s.find("*/", i + 2);
            end = end == std::string::npos ? s.size() : end + 2;
            blank(i, end);
        } else if (s.compare(i, 2, "\\\n") == 0) {
            blank(i, end);
        } else if (is_name(s[i])) {  // a name or a number, whole: 1'000 has no character literal, and R"( may follow
            while (end < s.size() &&
                   (is_name(s[end]) || (s[end] == '\'' && std::isdigit(static_cast<unsigned char>(s[i])) &&
                                        end + 1 < s.size() && is_name(s[end + 1]))))
                ++end;
            const std::string name = s.substr(i, end - i);
            const bool raw = name == "R" || name == "u8R" || name == "uR" || name == "UR" || name == "LR";
            if (raw && end < s.size() && s[end] == '"') {
                const size_t open = s.find('(', end);
                if (open == std::string::npos) fail(i, "a raw string without (");
                const std::string close = ")" + s.substr(end + 1, open - end - 1) + "\"";
                end = s.find(close, open);
                end = end == std::string::npos ? s.size() : end + close.size();
                if (literals) blank(i, end);
            }
        } else if (s[i] == '"' || s[i] == '\'') {
            while (end < s.size() && s[end] != s[i] && s[end] != '\n') end += s[end] == '\\' ? 2 : 1;
            ++end;
            if (literals) blank(i, end);
        }
        i = end;
    }
    return out;
}

// The index of the bracket that closes the one at `open`.
size_t matching(const std::string& code, size_t open) {
    int depth = 0;
    for (size_t i = open; i < code.size(); ++i) {
        if (code[i] == '(' || code[i] == '{' || code[i] == '[') ++depth;
        if ((code[i] == ')' || code[i] == '}' || code[i] == ']') && --depth == 0) return i;
    }
    return std::string::npos;
}

// The index of the bracket that is closed by the one at `close`: > or ) or ] or }. Inside round ones, < and > compare.
size_t matching_back(const std::string& code, size_t close) {
    const std::string opening = "<([{", closing = ">)]}";
    const size_t kind = closing.find(code[close]);
    for (size_t i = close; i-- > 0;) {
        if (code[i] == opening[kind]) return i;
        const size_t inner = closing.find(code[i]);
        if (inner == std::string::npos || (inner == 0 && kind != 0)) continue;
        i = matching_back(code, i);
        if (i == std::string::npos) break;
    }
    return std::string::npos;
}

size_t skip_blanks_back(const std::string& code, size_t end) {
    while (end > 0 && std::isspace(static_cast<unsigned char>(code[end - 1]))) --end;
    return end;
}

// Where the expression that names the kernel starts, read backwards from its end: name, name<...>, a::b<...>.
size_t kernel_start(const std::string& code, size_t end) {
    size_t i = skip_blanks_back(code, end);
    if (i > 0 && code[i - 1] == '>') {
        i = matching_back(code, i - 1);
        if (i == std::string::npos) return end;
        i = skip_blanks_back(code, i);
    }
    const size_t name_end = i;
    while (i > 0 && (is_name(code[i - 1]) || code[i - 1] == ':')) --i;
    return i == name_end ? end : i;
}

std::string trimmed(const std::string& s) {
    const size_t first = s.find_first_not_of(" \t\r\n"), last = s.find_last_not_of(" \t\r\n");
    return first == std::string::npos ? "" : s.substr(first, last - first + 1);
}

// Text for between the quotes of a string literal, on one line and with single blanks.
std::string quoted(const std::string& s) {
    std::string out;
    for (char c : s) {
        if (c == '"' || c == '\\') out += '\\';
        if (!std::isspace(static_cast<unsigned char>(c))) out += c;
        else if (!out.empty() && out.back() != ' ') out += ' ';
    }
    return out;
}

struct Edit {
    size_t from, to;
    std::string text;
};

void rewrite_launches(const std::string& code, const std::string& text, std::vector<Edit>& edits) {
    for (size_t at = 0; (at = code.find("<<<", at)) != std::string::npos; at += 3) {
        const size_t start = kernel_start(code, at), close = code.find(">>>", at);
        if (close == std::string::npos) fail(at, "kernel launch without >>>");
        const size_t open = code.find_first_not_of(" \t\r\n", close + 3);
        if (start == at || open == std::string::npos || code[open] != '(')
            fail(at, "expected kernel<<<grid, block, shared, stream>>>(arguments)");
        const size_t end = matching(code, open);
        if (end == std::string::npos) fail(open, "kernel launch without a closing parenthesis");
        const std::string kernel = trimmed(text.substr(start, at - start));
        const std::string configuration = text.substr(at + 3, close - at - 3);
        const bool no_arguments = trimmed(code.substr(open + 1, end - open - 1)).empty() &&
                                  trimmed(text.substr(open + 1, end - open - 1)).empty();
        edits.push_back({start, open + 1,
                         "::cuda_cpu::launch({\"" + quoted(kernel) + "\", [=](auto of_) -> decltype(of_(" + kernel +
                             ")) { return of_(" + kernel + "); }}, __FILE__, __LINE__, ::cuda_cpu::Configuration(" +
                             configuration + "), [=](auto... arguments_) -> decltype(" + kernel +
                             "(arguments_...)) { " + kernel + "(arguments_...); }" + (no_arguments ? "" : ", ")});
    }
}

// The name that ends at or before `end`; `from` is set to its first character.
std::string name_before(const std::string& code, size_t end, size_t& from) {
    end = from = skip_blanks_back(code, end);
    while (from > 0 && is_name(code[from - 1])) --from;
    return code.substr(from, end - from);
}

// float row[]  ->  float* row = ...
Edit rewrite_dynamic_shared(const std::string& code, size_t extern_at, size_t from, size_t end) {
    const size_t bracket = code.find('[', from);
    size_t name_at = 0;
    if (bracket > end) fail(extern_at, "expected extern __shared__ type name[];");
    const std::string name = name_before(code, bracket, name_at);
    std::string type = code.substr(from, name_at - from);
    for (const char* word : {"__align__", "alignas"}) {  // dynamic shared memory is aligned for every type
        const size_t at = type.find(word);
        if (at != std::string::npos) type.erase(at, matching(type, type.find('(', at)) + 1 - at);
    }
    return {
        extern_at, end,
        trimmed(type) + "* " + name + " = static_cast<" + trimmed(type) + "*>(::cuda_cpu::dynamic_shared_memory())"};
}

// Each declarator's name is the last one before its first [ or , or the end. Commas inside brackets don't count.
Edit rewrite_static_shared(const std::string& code, size_t from, size_t end) {
    std::string calls;
    int depth = 0;
    bool named = false;
    for (size_t i = from; i <= end; ++i) {
        const char c = code[i];
        if (depth == 0 && !named && (c == '[' || c == ',' || c == ';')) {
            size_t unused = 0;
            const std::string name = name_before(code, i, unused);
            if (name.empty()) fail(from, "a __shared__ declaration that rewrite does not understand");
            calls += " ::cuda_cpu::shared_declared(&" + name + ", sizeof(" + name + "));";
            named = true;
        }
        if (c == '[' || c == '<' || c == '(') ++depth;
        if (c == ']' || c == '>' || c == ')') --depth;
        if (depth == 0 && c == ',') named = false;
    }
    return {end + 1, end + 1, calls};
}

void rewrite_shared(const std::string& code, std::vector<Edit>& edits) {
    const std::string keyword = "__shared__";
    for (size_t at = 0; (at = code.find(keyword, at)) != std::string::npos; at += keyword.size()) {
        const size_t line_start = code.rfind('\n', at) + 1, from = at + keyword.size(), end = code.find(';', at);
        if (trimmed(code.substr(line_start, at - line_start)).substr(0, 1) == "#") continue;  // #define X __shared__
        if (end == std::string::npos) fail(at, "__shared__ declaration without ;");
        size_t before = 0;
        if (name_before(code, at, before) == "extern") edits.push_back(rewrite_dynamic_shared(code, before, from, end));
        else edits.push_back(rewrite_static_shared(code, from, end));
    }
}

void rewrite_launch_bounds(const std::string& code, std::vector<Edit>& edits) {
    const std::string keyword = "__launch_bounds__";
    for (size_t at = 0; (at = code.find(keyword, at)) != std::string::npos; at += keyword.size()) {
        const size_t open = code.find('(', at), body = code.find_first_of("{;", at);
        if (open > body || body == std::string::npos || code[body] == ';') continue;  // it has no body here
        const std::string bounds = code.substr(open, matching(code, open) + 1 - open);
        edits.push_back({body + 1, body + 1, " CHECK_LAUNCH_BOUNDS" + bounds + ";"});
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) {
        std::cerr << "usage: rewrite in.cu > out.cpp\n";
        return 2;
    }
    file = argv[1];
    std::ifstream in(file, std::ios::binary);
    if (!in) {
        std::cerr << "rewrite: cannot read " << file << "\n";
        return 2;
    }
    std::stringstream contents;
    contents << in.rdbuf();
    source = contents.str();

    std::vector<Edit> edits;
    rewrite_launches(blanked(source, true), blanked(source, false), edits);
    rewrite_shared(blanked(source, true), edits);
    rewrite_launch_bounds(blanked(source, true), edits);
    std::sort(edits.begin(), edits.end(), [](const Edit& a, const Edit& b) { return a.from < b.from; });

    std::cout << "#line 1 \"" << quoted(file) << "\"\n";
    size_t at = 0;
    for (const Edit& edit : edits) {
        if (edit.from < at) fail(edit.from, "a kernel launch inside another one");
        // A launch over several lines becomes one line. Its newlines follow it, so that line numbers stay correct; in a
        // macro they remain continued lines.
        std::string text = edit.text, newlines;
        std::replace(text.begin(), text.end(), '\n', ' ');
        for (size_t i = edit.from; i < edit.to; ++i)
            if (source[i] == '\n') newlines += i > 0 && source[i - 1] == '\\' ? "\\\n" : "\n";
        std::cout << source.substr(at, edit.from - at) << text << newlines;
        at = edit.to;
    }
    std::cout << source.substr(at);
}
