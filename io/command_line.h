// io/command_line.h: command lines of the programs: flags under headings, numbers as people write them, and one line
// that helps for what is mistyped (mistyped.cu). Apart from io.h because only the programs' options need it.
#pragma once

#include "io/io.h"

#include <memory>
#include <optional>

// Flags, where their values go, and --help. CLI11 reads them, behind `impl_`: its header takes seconds to compile.
class CommandLine {
  public:
    explicit CommandLine(const std::string& description);  // the first lines of --help
    ~CommandLine();

    // Words that belong to no flag, at most so many; `name` is what --help calls them. Without this they are an Error,
    // as one that begins with "--" always is.
    void words(const std::string& name, std::vector<std::string>& words, size_t most);

    // Reads argv into the options, then calls `settle`, whose conversions may fail as those of argv may. Prints the
    // help and ends for --help; Error, in one line, for what cannot be read.
    void parse(const ProgramWords& program, int argc, char** argv, const std::function<void()>& settle);

    std::vector<std::string> flags() const;  // "--lr" and so on, in the order of --help; hidden ones too
    bool knows(const std::string& flag) const;
    bool given(const std::string& flag) const;            // in argv, or by give()
    std::string value_of(const std::string& flag) const;  // as text; one that is not given has its default
    // As if argv had it. In `settle` only.
    void give(const std::string& flag, const std::string& value);

  private:
    friend struct Heading;
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

// Adds options under one heading of --help; with the name "", hidden ones. The value that a variable has then is the
// default. Of a flag that is given several times the last one counts. Numbers: "1e3" is whole, too.
struct Heading {
    CommandLine& line;
    const char* name;

    void option(const std::string& flag, std::string& value, const std::string& help);
    void option(const std::string& flag, int& value, const std::string& help);
    void option(const std::string& flag, int64_t& value, const std::string& help);
    void option(const std::string& flag, uint64_t& value, const std::string& help);
    void option(const std::string& flag, double& value, const std::string& help);
    void option(const std::string& flag, std::optional<float>& value, const std::string& help);
    void option(const std::string& flag, std::optional<double>& value, const std::string& help);
    // May be given several times: all values count.
    void option(const std::string& flag, std::vector<std::string>& values, const std::string& help);
    void flag(const std::string& flag, bool& value, const std::string& help);  // takes no value
    // What counts something: Error for a value below `least`.
    void count(const std::string& flag, int64_t& value, const std::string& help, int64_t least = 1);

  private:
    template <class T>
    void add(const std::string& flag, T& value, const std::string& help);
};

// A number that counts something, as `count` above takes it; for one that is a part of a flag's value.
int64_t parse_count(const std::string& flag, const std::string& text, int64_t least = 1);

// Behind an error of the command line: " (./train_gpt --help lists the flags)". A name that is a path stays as it is.
std::string where_flags_are(const ProgramWords& program);
