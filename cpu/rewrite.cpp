// rewrite: turns a .cu file into C++ that g++ can compile. The only step between CUDA source and the CPU.
//
//     rewrite in.cu > out.cpp
//
// Two things in CUDA C++ are syntax, not library, and are rewritten in place (the rest is headers: cpu/cuda_runtime.h):
//
//     kernel<T><<<grid, block, shared, stream>>>(a, b);
//  -> ::cuda_cpu::launch("kernel<T>", __FILE__, __LINE__, {grid, block, shared, stream},
//                        [](auto... arguments) { kernel<T>(arguments...); }, a, b);
//
//     __shared__ float tile[32][33];
//  -> __shared__ float tile[32][33]; ::cuda_cpu::shared_declared(&tile, sizeof(tile));      (strict mode fills it with NaN)
//
// Nothing is moved to another line, so one #line at the top lets compiler errors and gdb show the .cu file.
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace {

[[noreturn]] void fail(const std::string& file, const std::string& source, size_t at, const std::string& what) {
    size_t line = 1;
    for (size_t i = 0; i < at && i < source.size(); ++i) line += source[i] == '\n';
    std::cerr << file << ":" << line << ": error: " << what << "\n";
    std::exit(1);
}

bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

// A copy of the source in which comments, strings and character literals are blanks: what is searched.
std::string blank_literals(const std::string& s) {
    std::string out = s;
    const auto blank = [&](size_t from, size_t to) {
        for (size_t i = from; i < to && i < s.size(); ++i)
            if (s[i] != '\n') out[i] = ' ';
    };
    for (size_t i = 0; i < s.size();) {
        size_t end = i + 1;
        if (s.compare(i, 2, "//") == 0) {
            end = std::min(s.find('\n', i), s.size());
            blank(i, end);
        } else if (s.compare(i, 2, "/*") == 0) {
            end = s.find("*/", i + 2);
            end = end == std::string::npos ? s.size() : end + 2;
            blank(i, end);
        } else if (s.compare(i, 2, "R\"") == 0 && (i == 0 || !is_name(s[i - 1]))) {
            const size_t open = s.find('(', i);
            const std::string close = ")" + s.substr(i + 2, open - i - 2) + "\"";
            end = s.find(close, open);
            end = end == std::string::npos ? s.size() : end + close.size();
            blank(i, end);
        } else if (s[i] == '"' || (s[i] == '\'' && !(i > 0 && std::isxdigit(static_cast<unsigned char>(s[i - 1]))))) {
            while (end < s.size() && s[end] != s[i] && s[end] != '\n') end += s[end] == '\\' ? 2 : 1;
            blank(i, ++end);
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
        if (code[i] == ')' || code[i] == '}' || code[i] == ']')
            if (--depth == 0) return i;
    }
    return std::string::npos;
}

// Where the expression that names the kernel starts, read backwards from its end: name, name<...>, a::b<...>.
size_t kernel_start(const std::string& code, size_t end) {
    size_t i = end;
    while (i > 0 && std::isspace(static_cast<unsigned char>(code[i - 1]))) --i;
    if (i > 0 && code[i - 1] == '>') {
        int depth = 0;
        do {
            --i;
            if (code[i] == '>') ++depth;
            if (code[i] == '<') --depth;
        } while (i > 0 && depth > 0);
    }
    while (i > 0 && (is_name(code[i - 1]) || code[i - 1] == ':')) --i;
    return i;
}

std::string trimmed(const std::string& s) {
    const size_t first = s.find_first_not_of(" \t\n"), last = s.find_last_not_of(" \t\n");
    return first == std::string::npos ? "" : s.substr(first, last - first + 1);
}

std::string escaped(const std::string& s) {
    std::string out;
    for (char c : s) {
        if (c == '"' || c == '\\') out += '\\';
        out += c == '\n' ? ' ' : c;
    }
    return out;
}

struct Edit {
    size_t from, to;
    std::string text;
};

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) {
        std::cerr << "usage: rewrite in.cu > out.cpp\n";
        return 2;
    }
    const std::string file = argv[1];
    std::ifstream in(file, std::ios::binary);
    if (!in) {
        std::cerr << "rewrite: cannot read " << file << "\n";
        return 2;
    }
    std::stringstream text;
    text << in.rdbuf();
    const std::string source = text.str(), code = blank_literals(source);
    std::vector<Edit> edits;

    for (size_t at = 0; (at = code.find("<<<", at)) != std::string::npos; at += 3) {
        const size_t start = kernel_start(code, at), close = code.find(">>>", at);
        if (close == std::string::npos) fail(file, source, at, "kernel launch without >>>");
        const size_t open = code.find_first_not_of(" \t\n", close + 3);
        if (start == at || open == std::string::npos || code[open] != '(')
            fail(file, source, at, "expected kernel<<<grid, block, shared, stream>>>(arguments)");
        const size_t end = matching(code, open);
        if (end == std::string::npos) fail(file, source, open, "kernel launch without a closing parenthesis");
        const std::string kernel = trimmed(source.substr(start, at - start));
        const std::string arguments = source.substr(open + 1, end - open - 1);
        edits.push_back({start, open + 1,
                         "::cuda_cpu::launch(\"" + escaped(kernel) + "\", __FILE__, __LINE__, {" +
                             source.substr(at + 3, close - at - 3) + "}, [](auto... arguments_) { " + kernel +
                             "(arguments_...); }" + (trimmed(arguments).empty() ? "" : ", ")});
    }

    const std::string keyword = "__shared__";
    for (size_t at = 0; (at = code.find(keyword, at)) != std::string::npos; at += keyword.size()) {
        const size_t line_start = code.rfind('\n', at) + 1;
        const std::string before = code.substr(line_start, at - line_start);
        if (before.find('#') != std::string::npos || before.find("extern") != std::string::npos) continue;
        const size_t end = code.find(';', at);
        if (end == std::string::npos) fail(file, source, at, "__shared__ declaration without ;");
        // Each declarator's name: the last name before its first '[', ',' or the end. Commas inside <> or [] don't count.
        std::string calls;
        int depth = 0;
        size_t name_end = 0;
        for (size_t i = at + keyword.size(); i <= end; ++i) {
            const char c = code[i];
            if (depth == 0 && name_end == 0 && (c == '[' || c == ',' || c == ';')) {
                name_end = i;
                while (!is_name(code[name_end - 1])) --name_end;
                size_t name = name_end;
                while (is_name(code[name - 1])) --name;
                const std::string variable = code.substr(name, name_end - name);
                calls += " ::cuda_cpu::shared_declared(&" + variable + ", sizeof(" + variable + "));";
            }
            if (c == '[' || c == '<' || c == '(') ++depth;
            if (c == ']' || c == '>' || c == ')') --depth;
            if (depth == 0 && c == ',') name_end = 0;
        }
        edits.push_back({end + 1, end + 1, calls});
    }

    std::sort(edits.begin(), edits.end(), [](const Edit& a, const Edit& b) { return a.from < b.from; });
    std::cout << "#line 1 \"" << escaped(file) << "\"\n";
    size_t at = 0;
    for (const Edit& edit : edits) {
        if (edit.from < at) fail(file, source, edit.from, "a kernel launch inside another one's arguments");
        // Newlines inside the replaced text are kept, so that line numbers stay true.
        size_t newlines = 0;
        for (size_t i = edit.from; i < edit.to; ++i) newlines += source[i] == '\n';
        for (char c : edit.text) newlines -= c == '\n';
        std::cout << source.substr(at, edit.from - at) << edit.text << std::string(newlines, '\n');
        at = edit.to;
    }
    std::cout << source.substr(at);
}
