// io/command_line.cu: command lines by CLI11.                                              (github.com/CLIUtils/CLI11)
//
// CLI11 splits argv into flags and values, converts them, and writes --help. What it says of a mistyped word, and which
// texts it takes for numbers, is replaced by mistyped.cu.
#include "io/command_line.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>

namespace {

// --help has a line for each flag, in every version of CLI11: doc/flags.md quotes them.
class Layout : public CLI::Formatter {
  public:
    Layout() { column_width(28); }
    std::string make_option(const CLI::Option* option, bool is_positional) const override {
        const std::string next_line = "\n" + std::string(get_column_width(), ' ');
        std::string text = "  " + make_option_name(option, is_positional) + make_option_opts(option);
        if (text.size() >= get_column_width()) text += next_line;
        else text.resize(get_column_width(), ' ');
        for (const char c : make_option_desc(option)) text += c == '\n' ? next_line : std::string(1, c);
        return text + "\n";
    }
    std::string make_group(std::string group, bool is_positional,
                           std::vector<const CLI::Option*> options) const override {
        std::string text = "\n" + group + ":\n";
        for (const CLI::Option* option : options) text += make_option(option, is_positional);
        return text;
    }
};

}  // namespace

struct CommandLine::Impl {
    CLI::App app;
    std::vector<std::string> words;              // of the command line
    std::vector<std::string>* others = nullptr;  // where those go that belong to no flag
    size_t most_others = 0;
    std::string name_of_others;
    explicit Impl(const std::string& description) : app(description) {
        app.formatter(std::make_shared<Layout>());
        app.option_defaults()->always_capture_default();
    }
};

namespace {

// The text of a flag's value, as CLI11 is to read it; Error if it is none.
template <class T>
std::string checked_text(const std::string& flag, const std::string& text, const std::vector<std::string>& words) {
    // As --flag "$NAME" gives it, of a variable that is not set.
    check(!text.empty(), flag, " is empty: give it a value, or leave it out");
    if (std::ranges::find(words, concat(flag, "=", text)) == words.end()) expect_value(flag, text);
    if constexpr (std::is_same_v<T, uint64_t>) return std::to_string(parse_seed(flag, text));
    else if constexpr (std::is_integral_v<T>)
        return std::to_string(parse_whole_number(flag, text, std::numeric_limits<T>::max()));
    if constexpr (std::is_convertible_v<double, T>) expect_number(flag, text);  // also std::optional<double>
    return text;
}

constexpr CLI::MultiOptionPolicy kSeveral = CLI::MultiOptionPolicy::TakeAll;  // of options that are lists

// Hidden options have no get_name().
std::string name_of(const CLI::Option& option) { return "--" + option.get_lnames().front(); }

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Options

template <class T>
void Heading::add(const std::string& flag, T& value, const std::string& help) {
    line.impl_->app.add_option(flag, value, help)
        ->group(name)
        ->transform(
            [flag, &words = line.impl_->words](const std::string& text) { return checked_text<T>(flag, text, words); });
}
void Heading::option(const std::string& flag, std::string& value, const std::string& help) { add(flag, value, help); }
void Heading::option(const std::string& flag, int& value, const std::string& help) { add(flag, value, help); }
void Heading::option(const std::string& flag, int64_t& value, const std::string& help) { add(flag, value, help); }
void Heading::option(const std::string& flag, uint64_t& value, const std::string& help) { add(flag, value, help); }
void Heading::option(const std::string& flag, double& value, const std::string& help) { add(flag, value, help); }
void Heading::option(const std::string& flag, std::optional<float>& value, const std::string& help) {
    add(flag, value, help);
}
void Heading::option(const std::string& flag, std::optional<double>& value, const std::string& help) {
    add(flag, value, help);
}
void Heading::option(const std::string& flag, std::vector<std::string>& values, const std::string& help) {
    add(flag, values, help);
    // One value each time. (Newer versions of CLI11 would make several of "[a,b]" otherwise.)
    line.impl_->app.get_option(flag)->expected(1)->allow_extra_args(false)->multi_option_policy(kSeveral);
}
void Heading::flag(const std::string& flag, bool& value, const std::string& help) {
    line.impl_->app.add_flag(flag, value, help)->group(name)->transform([flag](const std::string& text) {
        check(text == "true" || text == "false", flag, "=", text, ": ", flag, " takes no value");
        return text;
    });
}
void Heading::count(const std::string& flag, int64_t& value, const std::string& help, int64_t least) {
    add(flag, value, help);
    line.impl_->app.get_option(flag)->check([flag, least](const std::string& text) {
        parse_count(flag, text, least);
        return std::string();
    });
}
int64_t parse_count(const std::string& flag, const std::string& text, int64_t least) {
    const int64_t n = parse_whole_number(flag, text, INT32_MAX);
    check(n >= least, flag, ' ', text, ": give a whole number of at least ", least);
    return n;
}

// ---------------------------------------------------------------------------------------------------------------------
// The command line

std::string where_flags_are(const ProgramWords& program) {
    const bool is_path = std::string_view(program.name).find('/') != std::string_view::npos;
    return concat(" (", is_path ? "" : "./", program.name, " --help lists the flags)");
}

CommandLine::CommandLine(const std::string& description) : impl_(std::make_unique<Impl>(description)) {}
CommandLine::~CommandLine() = default;

void CommandLine::words(const std::string& name, std::vector<std::string>& words, size_t most) {
    impl_->others = &words;
    impl_->most_others = most;
    impl_->name_of_others = name;
}

void CommandLine::parse(const ProgramWords& program, int argc, char** argv, const std::function<void()>& settle) {
    CLI::App& app = impl_->app;
    impl_->words.assign(argv + 1, argv + argc);
    const std::string help = where_flags_are(program);
    if (impl_->others) app.name(concat(argv[0], ' ', impl_->name_of_others));  // in --help
    app.allow_extras();  // explain_unknown says more of them than CLI11
    std::vector<std::string> shown;
    for (CLI::Option* option : app.get_options()) {
        if (option->get_type_size() > 0) {
            const bool several = option->get_multi_option_policy() == kSeveral;
            if (!several) option->take_last();
            // CLI11 itself writes a default as "TEXT=tiny" in version 2.3, and as "TEXT [tiny]" from 2.4 on.
            const std::string value = several ? "" : option->get_default_str();
            option->option_text(
                concat(option->get_type_name(), value.empty() ? "" : "=", value, several ? " ..." : ""));
        }
        if (!option->get_group().empty()) shown.push_back(name_of(*option));
    }
    try {
        app.parse(argc, argv);
        for (const std::string& word : app.remaining()) {
            if (word.starts_with("--") || !impl_->others || impl_->others->size() == impl_->most_others)
                fail(explain_unknown(program, shown, impl_->words, word));
            impl_->others->push_back(word);
        }
        settle();
    } catch (const CLI::CallForHelp&) {
        std::printf("%s", app.help().c_str());
        check_output();
        std::exit(0);
    } catch (const CLI::ArgumentMismatch& error) {  // "--steps: 1 required INT missing"
        const std::string text = error.what();
        fail(text.substr(0, text.find(':')), " needs a value", help);
    } catch (const CLI::ParseError& error) {
        fail(error.what(), help);
    }
}

std::vector<std::string> CommandLine::flags() const {
    std::vector<std::string> names;
    for (const CLI::Option* option : std::as_const(impl_->app).get_options()) names.push_back(name_of(*option));
    return names;
}

bool CommandLine::knows(const std::string& flag) const { return impl_->app.get_option_no_throw(flag) != nullptr; }

bool CommandLine::given(const std::string& flag) const { return impl_->app.get_option(flag)->count() > 0; }

std::string CommandLine::value_of(const std::string& flag) const {
    const CLI::Option& option = *impl_->app.get_option(flag);
    return option.count() > 0 ? option.results().back() : option.get_default_str();
}

void CommandLine::give(const std::string& flag, const std::string& value) {
    CLI::Option& option = *impl_->app.get_option(flag);
    option.add_result(value);
    option.run_callback();
}
