// test/test_composition.cu: every two ways to train together, on ranks, against one rank.
//
// There are too many combinations of all flags for a test, but few in which an error hides that needs three of them:
// most show where two meet. So the rows below are chosen such that every value of every axis meets every value of every
// other axis in one row at least. A row is a run on ranks; its losses are those of the same run on one.
//
// What cannot be combined is the table of doc/ranks.md, which this test reads: no row has such a pair, and each of
// these pairs is refused at the start with the names of both.
#include "io/io.h"
#include "optim/optim.h"
#include "run_models.h"
#include "train_runs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// The axes: a way to train is a line here

struct Value {
    std::string flags;
    // Of losses, in six steps, from those of one rank: the largest of a row's counts. 16 bits and fp8: each rank rounds
    // its part of a sum. A last bit of a gradient may choose another of adam8bit's codes. What compression drops comes
    // in later steps; 1bit leaves only the signs, which makes 6 % also where no layer is divided.
    double tolerance = 1e-5;
};
struct Axis {
    const char* name;
    bool on_one_rank;  // it is part of the run on one rank, too
    std::vector<Value> values;
};
const std::vector<Axis>& axes_of_all_devices() {
    static const std::vector<Axis> all = {
        {"optimizer",
         true,
         {{"--optimizer adamw --lr 1e-3 --eps 1e-4"},
          {"--optimizer adam --lr 1e-3 --eps 1e-4"},
          {"--optimizer sgd --lr 0.1"},
          {"--optimizer momentum --lr 0.02"},
          {"--optimizer nesterov --lr 0.02"},
          {"--optimizer adagrad --lr 1e-3 --eps 1e-4"},
          {"--optimizer rmsprop --lr 1e-3 --eps 1e-4"},
          {"--optimizer lion --lr 1e-4"},
          {"--optimizer adafactor --lr 1e-2"},
          {"--optimizer muon --lr 1e-2"},
          {"--optimizer adam8bit --lr 1e-3", 2e-4}}},
        {"dtype",
         true,
         {{"--dtype fp32"},
          {"--dtype bf16 --grad-dtype same", 5e-3},
          {"--dtype bf16 --grad-dtype fp32", 5e-3},
          {"--dtype bf16 --grad-dtype fp32 --master none", 5e-3},
          {"--dtype fp16 --grad-dtype fp32 --loss-scale-start 1024", 5e-3},
          {"--dtype fp8 --grad-dtype fp32 --fp8 delayed", 2e-2},
          {"--dtype fp8 --grad-dtype fp32 --fp8 block", 2e-2}}},
        {"compression",
         false,
         {{""},
          {"--compress bf16", 1e-3},
          {"--compress fp8", 1e-2},
          {"--compress 1bit", 0.15},
          {"--compress powersgd", 5e-2}}},
        {"zero", false, {{"--zero 0"}, {"--zero 1"}, {"--zero 2"}, {"--zero 3"}, {"--dp-mode naive"}}},
        {"offload", false, {{""}, {"--offload optimizer"}, {"--offload params"}, {"--offload unified"}}},
        {"recomputation",
         true,
         {{"--recompute none"}, {"--recompute selective"}, {"--recompute full"}, {"--recompute 2"}}},
        {"attention", true, {{"--model even-gqa"}, {"--model even-gpt2"}, {"--model even-mla"}, {"--model even-mfa"}}},
        {"tensor",
         false,
         {{"--tp 1"},
          {"--tp 2"},
          {"--tp 4"},
          {"--tp 4 --tp-mode 2d"},
          {"--tp 8 --tp-mode 2.5d"},
          {"--tp 8 --tp-mode 3d"}}},
        {"context", false, {{""}, {"--cp 2 --cp-mode ring"}, {"--cp 2 --cp-mode ulysses"}}},
        {"sequence", false, {{""}, {"--sp"}, {"--sp --tp-overlap"}}},
        {"accumulation", true, {{""}, {"--micro-batch 4"}}},
        {"documents", true, {{""}, {"--mask-documents"}}},
    };
    return all;
}
const std::vector<Axis>& axes() {
    static const std::vector<Axis> ours = [] {
        std::vector<Axis> axes = axes_of_all_devices();
        for (Axis& axis : axes) std::erase_if(axis.values, [](const Value& value) { return !can_train(value.flags); });
        return axes;
    }();
    return ours;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pairs that are refused: rows of the table of doc/ranks.md, in whose cells stand flags between back quotes

using Flags = std::vector<std::string>;
Flags quoted(const std::string& cell) {
    Flags flags;
    for (size_t at = cell.find('`'), end; at != std::string::npos; at = cell.find('`', end + 1)) {
        end = cell.find('`', at + 1);
        flags.push_back(cell.substr(at + 1, end - at - 1));
    }
    return flags;
}
const std::vector<std::array<Flags, 2>>& refused_flags() {
    static const std::vector<std::array<Flags, 2>> rows = [] {
        const std::string page = slurp("doc/ranks.md");
        const size_t begin = page.find("## What does not go together"), end = page.find("\n## ", begin + 3);
        REQUIRE(begin != std::string::npos);
        std::vector<std::array<Flags, 2>> found;
        std::istringstream lines(page.substr(begin, end - begin));
        for (std::string line; std::getline(lines, line);) {
            if (!line.starts_with("| `")) continue;
            const size_t second = line.find(" | ") + 3, third = line.find(" | ", second);
            found.push_back({quoted(line.substr(0, second)), quoted(line.substr(second, third - second))});
        }
        return found;
    }();
    return rows;
}
// The flag that both have, as words.
std::string common_flag(const std::string& flags, const Flags& listed) {
    for (const std::string& flag : listed)
        if ((flags + " ").find(flag + " ") != std::string::npos) return flag;
    return "";
}
// Which flags of the two values are refused together; none: two empty strings.
std::array<std::string, 2> refused(const Value& a, const Value& b) {
    for (const auto& [one, other] : refused_flags())
        for (const auto& [x, y] : {std::pair(&a, &b), {&b, &a}}) {
            const std::array<std::string, 2> both = {common_flag(x->flags, one), common_flag(y->flags, other)};
            if (!both[0].empty() && !both[1].empty()) return both;
        }
    return {};
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows that have every pair that is not refused, greedily: a row begins with the first pair that no row has yet, and
// each other axis then takes the value that meets most values for the first time.

constexpr size_t kOpen = static_cast<size_t>(-1);
using Row = std::vector<size_t>;  // by axis: its value

class Pairs {
  public:
    Pairs() {
        for (size_t a = 0; a < axes().size(); ++a)
            for (size_t i = 0; i < axes()[a].values.size(); ++i)
                for (size_t b = a + 1; b < axes().size(); ++b)
                    for (size_t j = 0; j < axes()[b].values.size(); ++j)
                        (refused(axes()[a].values[i], axes()[b].values[j])[0].empty() ? missing_ : refused_)
                            .insert({a, i, b, j});
    }
    const std::set<std::array<size_t, 4>>& refused_pairs() const { return refused_; }

    std::vector<Row> rows() {
        std::vector<Row> all;
        while (!missing_.empty()) {
            const auto [a, i, b, j] = *missing_.begin();
            Row row(axes().size(), kOpen);
            row[a] = i, row[b] = j;
            REQUIRE(fill(row, all.size()));
            for (size_t x = 0; x < row.size(); ++x)
                for (size_t y = x + 1; y < row.size(); ++y) missing_.erase({x, row[x], y, row[y]});
            all.push_back(row);
        }
        return all;
    }

  private:
    static std::array<size_t, 4> pair(size_t a, size_t i, size_t b, size_t j) {
        return a < b ? std::array{a, i, b, j} : std::array{b, j, a, i};
    }
    bool fits(const Row& row, size_t axis, size_t value) const {
        for (size_t b = 0; b < row.size(); ++b)
            if (b != axis && row[b] != kOpen && refused_.count(pair(axis, value, b, row[b])) > 0) return false;
        return true;
    }
    // Values for the open axes, from the first one on; false: there are none that fit. first: where ties begin.
    bool fill(Row& row, size_t first) const {
        const size_t axis = static_cast<size_t>(std::ranges::find(row, kOpen) - row.begin());
        if (axis == row.size()) return true;
        const size_t n = axes()[axis].values.size();
        std::vector<std::pair<int, size_t>> candidates;  // {pairs that are new, negative; value}
        for (size_t k = 0; k < n; ++k) {
            const size_t value = (first + k) % n;
            if (!fits(row, axis, value)) continue;
            int n_new = 0;
            for (size_t b = 0; b < row.size(); ++b)
                n_new += row[b] != kOpen && missing_.count(pair(axis, value, b, row[b])) > 0;
            candidates.push_back({-n_new, value});
        }
        std::ranges::stable_sort(candidates, {}, &std::pair<int, size_t>::first);
        for (const auto& candidate : candidates) {
            row[axis] = candidate.second;
            if (fill(row, first)) return true;
        }
        row[axis] = kOpen;
        return false;
    }
    std::set<std::array<size_t, 4>> missing_, refused_;
};

// ---------------------------------------------------------------------------------------------------------------------
// Runs

// Two files are two documents, of lengths that no sequence divides.
std::string data_folder() {
    static const TempFolder folder;
    static const bool written = [] {
        for (int i = 0; i < 40; ++i) spit(folder / concat("file", i, ".txt"), made_text(1 + i % 3));
        return true;
    }();
    static_cast<void>(written);
    return folder.path;
}
std::string flags_of(const Row& row, bool on_ranks) {
    std::string flags;
    size_t ranks = 2;  // that divide the batch; times those that divide the layers
    for (size_t a = 0; a < row.size(); ++a) {
        if (!on_ranks && !axes()[a].on_one_rank) continue;
        std::string value = axes()[a].values[row[a]].flags;
        if (value.starts_with("--model ")) value = "--model " + model_file(value.substr(8));
        if (value.starts_with("--tp ") || value.starts_with("--cp ")) ranks *= std::stoul(value.substr(5));
        flags += " " + value;
    }
    return flags + (on_ranks ? concat(" --ranks ", ranks) : "");
}
double tolerance_of(const Row& row) {
    double largest = 0;
    for (size_t a = 0; a < row.size(); ++a) largest = std::max(largest, axes()[a].values[row[a]].tolerance);
    return largest;
}
Outcome run(const std::string& flags, const std::string& out) {
    // Threads also where all is tested: up to 32 processes would wait for each other on a few cores.
    return run_program("train_gpt",
                       "--data " + data_folder() +
                           " --batch 16 --seq 32 --steps 6 --warmup 3 --val-every 0 --save-every 0 --sample 0" + flags +
                           " --out " + out);
}
std::vector<LogRow> losses_of(const std::string& flags, const std::string& out) {
    INFO(flags);
    const std::string said = must_succeed(run(flags, out));
    if (flags.find("--ranks") != std::string::npos) check_account(said, flags);
    return read_csv_log(out + "/log.csv");
}

// One quarter of the rows: quarters run at the same time where each test has a process (test/run_each.sh).
void check_quarter(size_t quarter) {
    const TempFolder folder;
    std::vector<Row> rows = Pairs().rows();
    // The first rows have most of the pairs.
    if (!is_full()) rows.resize(std::min<size_t>(rows.size(), 12));
    std::map<std::string, std::vector<LogRow>> of_one_rank;
    for (size_t r = quarter; r < rows.size(); r += 4) {
        const std::string flags = flags_of(rows[r], false), on_ranks = flags_of(rows[r], true);
        if (of_one_rank.count(flags) == 0) of_one_rank[flags] = losses_of(flags, folder / concat("one", r));
        const std::vector<LogRow>& expected = of_one_rank[flags];
        const std::vector<LogRow> found = losses_of(on_ranks, folder / concat("ranks", r));
        INFO("row " << r << ":" << on_ranks);
        REQUIRE(found.size() == expected.size());
        double difference = 0;
        for (size_t i = 0; i < found.size(); ++i)
            difference = larger(difference, std::abs(*found[i].loss / *expected[i].loss - 1));
        CHECK(difference <= tolerance_of(rows[r]));
        std::filesystem::remove_all(folder / concat("ranks", r));
    }
}

}  // namespace

TEST_CASE("every pair of ways to train gives the losses of one rank: a quarter", "[program][ranks][composition]") {
    check_quarter(0);
}
TEST_CASE("every pair of ways to train: the second quarter", "[program][ranks][composition]") { check_quarter(1); }
TEST_CASE("every pair of ways to train: the third quarter", "[program][ranks][composition]") { check_quarter(2); }
TEST_CASE("every pair of ways to train: the last quarter", "[program][ranks][composition]") { check_quarter(3); }

TEST_CASE("every optimizer is among the values that are combined", "[composition]") {
    const std::vector<Value>& values = axes()[0].values;
    for (const std::string& name : optimizer_names()) {
        INFO(name);
        CHECK(std::ranges::any_of(
            values, [&](const Value& value) { return value.flags.starts_with("--optimizer " + name + " "); }));
    }
}

TEST_CASE("every attention and feed-forward is among the values that are combined", "[composition]") {
    std::vector<std::string> files;
    for (const auto& axis : axes())
        for (const Value& value : axis.values)
            if (value.flags.starts_with("--model ")) files.push_back(model_file(value.flags.substr(8)));
    CHECK(attentions_without_model(files) == std::set<std::string>{});
    CHECK(feed_forwards_without_model(files) == std::set<std::string>{});
}

TEST_CASE("what does not go together is refused at the start, by both names", "[program][ranks][composition]") {
    const TempFolder folder;
    const Pairs pairs;
    CHECK(pairs.refused_pairs().size() > 40);
    for (const auto& [a, i, b, j] : pairs.refused_pairs()) {
        const Value &x = axes()[a].values[i], &y = axes()[b].values[j];
        Row row(axes().size(), 0);
        row[a] = i, row[b] = j;
        const Outcome outcome = run(flags_of(row, true), folder / "run");
        INFO(x.flags << " with " << y.flags << "\n" << outcome.err);
        CHECK(outcome.status == 2);
        for (const std::string& flag : refused(x, y))
            CHECK_THAT(outcome.err, ContainsSubstring(flag.substr(0, flag.find(' '))));
        CHECK(!std::filesystem::exists(folder / "run"));
    }
}
