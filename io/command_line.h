// io/command_line.h: command lines of the programs, by CLI11: flags under headings, numbers as people write them, and
// one line that helps for what is mistyped (mistyped.cu). Apart from io.h because it draws in CLI11.
#pragma once

#include "io/io.h"

#include <CLI/CLI.hpp>

#include <limits>

// The text of a flag's value, as CLI11 is to read it; Error if it is none.
template <class T>
std::string checked_text(const char* flag, const std::string& text) {
    expect_value(flag, text);
    if constexpr (std::is_integral_v<T>) {
        // parse_whole_number counts in int64_t, also for a seed of 64 bits without a sign.
        constexpr int64_t kLargest = sizeof(T) < 8 ? static_cast<int64_t>(std::numeric_limits<T>::max()) : INT64_MAX;
        const int64_t value = parse_whole_number(flag, text, kLargest);
        check(std::is_signed_v<T> || value >= 0, flag, " ", text, ": it must not be negative");
        return std::to_string(value);
    }
    if constexpr (std::is_convertible_v<double, T>) expect_number(flag, text);  // also std::optional<double>
    return text;
}

// Adds options under one heading of --help.
struct Heading {
    CLI::App& app;
    const char* name;
    template <class T>
    void option(const char* flag, T& value, const std::string& help) {
        app.add_option(flag, value, help)->group(name)->transform([flag](const std::string& text) {
            return checked_text<T>(flag, text);
        });
    }
    void flag(const char* flag, bool& value, const char* help) {
        app.add_flag(flag, value, help)->group(name)->transform([flag](const std::string& text) {
            check(text == "true" || text == "false", flag, "=", text, ": ", flag, " takes no value");
            return text;
        });
    }
};

// Reads argv into the options of `app`, then calls `settle`, whose conversions may fail as those of argv may. Prints
// the help and ends for --help; Error, in one line, for what cannot be read.
inline void parse_command_line(CLI::App& app, const ProgramWords& program, int argc, char** argv,
                               const std::function<void()>& settle) {
    app.allow_extras();  // explain_unknown says more of them than CLI11
    app.get_formatter()->column_width(28);
    std::vector<std::string> flags;
    for (CLI::Option* option : app.get_options()) {
        if (option->get_type_size() > 0) option->take_last();
        if (!option->get_group().empty()) flags.push_back("--" + option->get_lnames().front());
    }
    try {
        app.parse(argc, argv);
        if (!app.remaining().empty())
            fail(explain_unknown(program, flags, {argv + 1, argv + argc}, app.remaining().front()));
        settle();
    } catch (const CLI::CallForHelp&) {
        std::cout << app.help();
        std::exit(0);
    } catch (const CLI::ParseError& error) {
        fail(error.what(), " (./", program.name, " --help lists the flags)");
    }
}
