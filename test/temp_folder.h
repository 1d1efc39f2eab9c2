// test/temp_folder.h: helpers for tests of files: a folder that is removed at the end, and the message of an error.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "core/core.h"

struct TempFolder {
    std::string path;
    TempFolder() {
        // Commands of the tests name files without quotes: $TMPDIR is for names that need none.
        std::string of_all = std::filesystem::temp_directory_path();
        if (of_all.find_first_of(" \t\n'\"\\$`&;|<>()*?[]#~{}!") != std::string::npos) of_all = "/tmp";
        std::string pattern = of_all + "/llm_test_XXXXXX";
        if (!::mkdtemp(pattern.data())) throw std::runtime_error("cannot make " + pattern);
        path = pattern;
    }
    ~TempFolder() {
        std::error_code ignored;
        std::filesystem::remove_all(path, ignored);
    }
    TempFolder(const TempFolder&) = delete;
    TempFolder& operator=(const TempFolder&) = delete;

    std::string operator/(const std::string& name) const { return path + "/" + name; }
    // The names in it, sorted and joined by blanks: what a test expects to be left behind.
    std::string listing() const {
        std::map<std::string, bool> names;
        for (const auto& entry : std::filesystem::directory_iterator(path))
            names[entry.path().filename().string()] = true;
        std::string joined;
        for (const auto& [name, unused] : names) joined += (joined.empty() ? "" : " ") + name;
        return joined;
    }
};

// Reading and writing files without the code that is tested.
inline std::string slurp(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}
inline void spit(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

// The text with `by` in the place of the first `what`.
inline std::string replaced(std::string text, const std::string& what, const std::string& by) {
    const size_t at = text.find(what);
    check(at != std::string::npos, "a text of the tests has no ", what);
    return text.replace(at, what.size(), by);
}

// The message of the Error that f() throws, "" if it throws none. Any other exception is passed on.
template <class F>
std::string error_of(F&& f) {
    try {
        f();
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

// True if `message` is one line that has every one of `parts` in it.
template <class... Parts>
bool one_line_with(const std::string& message, const Parts&... parts) {
    return !message.empty() && message.find('\n') == std::string::npos &&
           ((message.find(parts) != std::string::npos) && ...);
}
