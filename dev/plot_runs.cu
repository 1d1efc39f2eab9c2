// dev/plot_runs.cu: the training losses of several runs in one picture, and below them their difference from the first
// run.
//
//   run      make dev && build/cpu/dev/plot_runs losses.png runs/fp32 runs/bf16     (--smooth 50: means over 50)
//   debug    make DEBUG=1 DEVICE=cpu dev && gdb --args build/cpu-debug/dev/plot_runs losses.png runs/1
//
// The distance of a run from the first one is   max over steps of |loss - first| / first,   for single steps and for
// means over the last steps. Runs in two precisions see the same batches, so most of the noise of their losses is the
// same; but the weights become more and more different through rounding, and single steps then differ by more than the
// runs do: compare the means.
#include "dev/program.h"
#include "io/io.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>

namespace {

struct Run {
    std::string folder, name;
    std::vector<int64_t> steps;
    std::vector<double> losses, means;  // means[i]: of losses[i + 1 - n_smooth .. i]; NaN before there are so many
};

Run read_run(const std::string& folder, int64_t n_smooth) {
    Run run;
    run.folder = folder;
    while (run.folder.size() > 1 && run.folder.back() == '/') run.folder.pop_back();
    run.name = std::filesystem::path(run.folder).filename().string();
    const std::string log = run.folder + "/log.csv";
    double sum = 0;
    for (const LogRow& row : read_csv_log(log)) {
        if (row.step == 0) continue;  // --init: the validation before the first step
        check(row.loss.has_value(), log, ": step ", row.step, " has no loss");
        check(std::isfinite(*row.loss) && *row.loss > 0, log, ": the loss of step ", row.step, " is ", *row.loss,
              ", which cannot be compared");
        run.steps.push_back(row.step);
        run.losses.push_back(*row.loss);
        const size_t n = run.losses.size(), window = static_cast<size_t>(n_smooth);
        sum += *row.loss - (n > window ? run.losses[n - 1 - window] : 0);
        run.means.push_back(n < window ? std::nan("") : sum / static_cast<double>(window));
    }
    check(std::ssize(run.steps) >= n_smooth, log, " has ", run.steps.size(), " steps, too few for means over ",
          n_smooth, ": give a smaller --smooth");
    return run;
}

void check_same_steps(const Run& run, const Run& first) {
    check(run.steps.size() == first.steps.size(), run.folder, " has ", run.steps.size(), " steps and ", first.folder,
          " has ", first.steps.size(), ": compare runs of the same length");
    for (size_t i = 0; i < run.steps.size(); ++i)
        check(run.steps[i] == first.steps[i], run.folder, " and ", first.folder, " log different steps: ", run.steps[i],
              " and ", first.steps[i], " in line ", i + 2);
}

struct Difference {
    double relative = 0;
    int64_t step = 0;
};
Difference largest_difference(const std::vector<double>& losses, const std::vector<double>& first,
                              const std::vector<int64_t>& steps) {
    Difference largest{0, steps.front()};
    for (size_t i = 0; i < losses.size(); ++i)
        if (const double relative = std::fabs(losses[i] - first[i]) / first[i];
            relative > largest.relative)  // no NaN is
            largest = {relative, steps[i]};
    return largest;
}

// How far a run is from the first one, in percent of the first one's loss. Where both have no mean yet, neither has
// this.
std::vector<double> percent_from(const std::vector<double>& first, const std::vector<double>& losses) {
    std::vector<double> percent;
    for (size_t i = 0; i < losses.size(); ++i) percent.push_back(100 * (losses[i] - first[i]) / first[i]);
    return percent;
}

// The losses; and below them their distance from the first run, which shows differences that are too small to see in
// the losses.
void draw(const std::string& path, const std::vector<Run>& runs, int64_t n_smooth) {
    const Run& first = runs.front();
    const std::string mean = n_smooth == 1 ? "" : concat(", and its mean over ", n_smooth, " steps");
    Plot losses{concat("Training loss", mean), "step", "loss (nats per token)", {}};
    Plot differences{
        concat("Difference from ", first.name, n_smooth == 1 ? "" : concat(" of the mean over ", n_smooth, " steps")),
        "step",
        "difference (%)",
        {}};
    for (size_t i = 0; i < runs.size(); ++i) {
        const Run& run = runs[i];
        const std::vector<double> steps(run.steps.begin(), run.steps.end());
        const int color = static_cast<int>(i);
        if (n_smooth > 1) losses.series.push_back({"", steps, run.losses, false, false, color});
        losses.series.push_back({run.name, steps, run.means, true, false, color});
        differences.series.push_back({"", steps, percent_from(first.means, run.means), true, false, color});
    }
    if (runs.size() == 1) return write_png(path, losses);
    differences.height = 400;
    write_png(path, {losses, differences});
}

void run(const std::vector<std::string>& words, int64_t n_smooth) {
    check(words.size() >= 2, "give a picture to write and the folders of runs: plot_runs losses.png runs/1 runs/2");
    const std::string& out = words[0];
    const std::vector<std::string> folders(words.begin() + 1, words.end());
    check(!std::filesystem::is_directory(out), out, " is a folder: the first argument is the picture to write");
    check(folders.size() <= 8, folders.size(), " runs: a picture has colours for 8");

    std::vector<Run> runs;
    for (const std::string& folder : folders) {
        runs.push_back(read_run(folder, n_smooth));
        check_same_steps(runs.back(), runs.front());
    }
    // Two runs/1 of different places are told apart by their paths.
    for (size_t i = 0; i < runs.size(); ++i)
        for (size_t j = 0; j < i; ++j)
            if (runs[i].name == runs[j].name)
                for (Run& run : runs) run.name = run.folder;
    draw(out, runs, n_smooth);

    int width = 4;
    for (const Run& run : runs) width = std::max(width, static_cast<int>(run.name.size()));
    const Run& first = runs.front();
    const std::string means = concat("mean over ", n_smooth, " steps");
    std::printf("%-*s  %10s  %-26s  largest difference from %s in a\n", width, "run", "steps",
                concat("last ", means).c_str(), first.name.c_str());
    std::printf("%-*s  %10s  %-26s  %-24s  %s\n", width, "", "", "", "single step", means.c_str());
    for (const Run& run : runs) {
        std::printf("%-*s  %10zu  %-26.4f", width, run.name.c_str(), run.steps.size(), run.means.back());
        for (const auto& [losses, of_first] :
             {std::pair{&run.losses, &first.losses}, std::pair{&run.means, &first.means}}) {
            const Difference d = largest_difference(*losses, *of_first, run.steps);
            const std::string text = format("%.3f %% at step %lld", 100 * d.relative, static_cast<long long>(d.step));
            std::printf("  %-24s", &run == &first ? "-" : text.c_str());
        }
        std::printf("\n");
    }
    std::printf("%s shows them\n", out.c_str());
}

}  // namespace

int main(int argc, char** argv) {
    std::vector<std::string> words;
    int64_t n_smooth = 20;
    CommandLine line{"plot_runs: the training losses of several runs in one picture"};
    line.words("OUT.png RUN_FOLDER ...", words, SIZE_MAX);
    Heading h{line, "Options"};
    h.count("--smooth", n_smooth, "means over so many steps");
    return run_program("plot_runs", line, argc, argv, [&] { run(words, n_smooth); });
}
