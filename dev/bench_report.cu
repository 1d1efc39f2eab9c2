// dev/bench_report.cu: from measured numbers to tables in Markdown and pictures,
// and the inputs that all subjects share.
//
//   bench_report config MODEL               the model's config.json, which bench_torch.py reads too
//   bench_report tokens MODEL FILE COUNT    a shard of uniformly random tokens
//   bench_report results FOLDER             FOLDER/results.tsv -> the tables; FOLDER/kernels.png, FOLDER/training.png
//   bench_report profile FOLDER             FOLDER/trace.tsv of one run, launches.tsv of its account -> the table of a
//                                           step; FOLDER/profile.png
//   debug: make DEBUG=1 DEVICE=cpu dev && gdb -x cpu/cuda.gdb --args build/cpu-debug/dev/bench_report results FOLDER
//
// results.tsv has a line for each number, tabs between:
//
//   info    <key> <value>
//   limit   <who> <copy, or matmul and the dtype> <bytes/s or flop/s>
//   size    <model> <batch> <seq>                          at which the kernels of that model are timed
//   kernel  <who> <model> <operation> <pass> <shape> <seconds> <bytes> <flops>
//   train   <who> <model> <seq> <batch> <tokens/s> <peak bytes, 0 if not known> <note>
//   step    <model> <batch> <seq> <dtype>                  of the run in trace.tsv
//
// "ours" is this project; every other name is an opponent. A ratio says how many times faster ours is.
#include "dev/program.h"
#include "io/io.h"
#include "llm.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <regex>
#include <sstream>

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Reading

using Row = std::vector<std::string>;

std::vector<Row> read_tsv(const std::string& path) {
    std::vector<Row> rows;
    std::istringstream text(read_text_file(path));
    for (std::string line; std::getline(text, line);) {
        Row row(1);
        for (const char c : line) {
            if (c == '\t') row.emplace_back();
            else row.back() += c;
        }
        if (!line.empty()) rows.push_back(row);
    }
    return rows;
}

double number(const std::string& text) {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    check(!text.empty() && *end == 0, "'", text, "' is not a number");
    return value;
}
int64_t integer(const std::string& text) { return std::llround(number(text)); }

struct Limits {
    double copy = 0, matmul = 0;  // bytes/s, flop/s; the best that any program measured in this run
    double seconds(double bytes, double flops) const {
        return std::max(copy > 0 ? bytes / copy : 0, matmul > 0 ? flops / matmul : 0);
    }
};

struct KernelTimes {
    std::string model, operation, pass, shape;
    double bytes = 0, flops = 0, ours_s = 0;
    std::map<std::string, double> others_s;
    // One tier of our attention ("attention hopper"). It is compared with the opponents' time for "attention", and left
    // out of the means, which contain "attention" itself.
    bool is_tier() const { return operation.starts_with("attention "); }
    // The fastest of those whose name starts with `who`; "" and 0 if there is none.
    std::pair<std::string, double> best(const std::string& who) const {
        std::pair<std::string, double> found{"", 0};
        for (const auto& [name, s] : others_s)
            if (name.starts_with(who) && (found.second == 0 || s < found.second)) found = {name, s};
        return found;
    }
};
struct Training {
    std::string who, model, note;
    int64_t seq = 0, batch = 0;
    double tokens_per_s = 0, peak_bytes = 0;
};
struct Results {
    std::vector<std::pair<std::string, std::string>> info;
    Limits limits;
    std::map<std::string, std::pair<int64_t, int64_t>> sizes;
    std::vector<KernelTimes> kernels;
    std::vector<Training> training;  // for each who, model and seq the fastest batch
    std::vector<Row> steps;
};

Results read_results(const std::string& folder) {
    Results r;
    for (const Row& row : read_tsv(folder + "/results.tsv")) {
        const std::string& kind = row[0];
        const auto expect_columns = [&](size_t n) {
            check(row.size() == n, folder, "/results.tsv: a '", kind, "' line has ", row.size(), " columns, expected ",
                  n);
        };
        if (kind == "info") {
            expect_columns(3);
            r.info.push_back({row[1], row[2]});
        } else if (kind == "limit") {
            expect_columns(4);
            double& limit = row[2] == "copy" ? r.limits.copy : r.limits.matmul;
            limit = std::max(limit, number(row[3]));
        } else if (kind == "size") {
            expect_columns(4);
            r.sizes[row[1]] = {integer(row[2]), integer(row[3])};
        } else if (kind == "step") {
            expect_columns(5);
            r.steps.push_back(row);
        } else if (kind == "kernel") {
            expect_columns(9);
            const auto same = [&](const KernelTimes& k) {
                return k.model == row[2] && k.operation == row[3] && k.pass == row[4];
            };
            auto at = std::find_if(r.kernels.begin(), r.kernels.end(), same);
            if (at == r.kernels.end()) {
                r.kernels.push_back({row[2], row[3], row[4], row[5], 0, 0, 0, {}});
                at = r.kernels.end() - 1;
            }
            check(at->shape == row[5], "bench: ", row[1], " timed ", row[3], " ", row[4], " at ", row[5],
                  ", another subject at ", at->shape);
            if (row[1] == "ours") at->ours_s = number(row[6]), at->bytes = number(row[7]), at->flops = number(row[8]);
            else at->others_s[row[1]] = number(row[6]);
        } else if (kind == "train") {
            expect_columns(8);
            const Training t{row[1], row[2], row[7], integer(row[3]), integer(row[4]), number(row[5]), number(row[6])};
            const auto same = [&](const Training& o) { return o.who == t.who && o.model == t.model && o.seq == t.seq; };
            auto at = std::find_if(r.training.begin(), r.training.end(), same);
            if (at == r.training.end()) r.training.push_back(t);
            else if (t.tokens_per_s > at->tokens_per_s) *at = t;
        } else {
            fail(folder, "/results.tsv: unknown line '", kind, "'");
        }
    }
    for (KernelTimes& tier : r.kernels)
        for (const KernelTimes& k : r.kernels)
            if (tier.is_tier() && k.operation == "attention" && k.model == tier.model && k.pass == tier.pass)
                tier.others_s = k.others_s;
    return r;
}

// ---------------------------------------------------------------------------------------------------------------------
// Numbers in tables

std::string microseconds(double s) { return s <= 0 ? "" : format(s < 1e-4 ? "%.1f" : "%.0f", 1e6 * s); }
std::string percent(double share) { return share <= 0 ? "" : format("%.0f %%", 100 * share); }
std::string ratio_text(double ratio) { return ratio <= 0 ? "" : format("%.2f", ratio); }
double divide(double a, double b) { return a > 0 && b > 0 ? a / b : 0; }

// ---------------------------------------------------------------------------------------------------------------------
// Bars: one row each, two panels side by side. The left one shows shares from 0 to 1, the right one ratios around 1 on
// a log axis from 1/4 to 4.

constexpr Canvas::Color kInk{40, 40, 40}, kGrid{215, 215, 215}, kBlue{0, 114, 178}, kOrange{230, 159, 0},
    kGreen{0, 158, 115}, kRed{213, 94, 0};

struct Bar {
    std::string label;
    double share = 0, ratio = 0;  // 0: nothing to show
    bool heading = false;
};

void draw_bars(const std::string& path, const std::string& title, const std::string& left_title,
               const std::string& right_title, const std::vector<Bar>& bars) {
    const int row_px = 20, top = 76, label_px = 330, panel_px = 300, gap = 40;
    Canvas canvas(label_px + 2 * panel_px + 2 * gap + 40, top + row_px * static_cast<int>(bars.size()) + 24);
    const double left = label_px, right = label_px + panel_px + gap + 20, bottom = canvas.height() - 20;
    const auto at_ratio = [&](double ratio) {
        return right + panel_px * (std::log2(std::clamp(ratio, 0.25, 4.0)) + 2) / 4;
    };
    canvas.text({16, 26}, Canvas::shorten(title, 14, canvas.width() - 32), 14, kInk, Canvas::Align::left, true);
    canvas.text({left, 50}, left_title, 10, kInk);
    canvas.text({right, 50}, right_title, 10, kInk);
    for (int i = 0; i <= 4; ++i) {
        const double x = left + panel_px * i / 4.0;
        canvas.line({{x, top - 6}, {x, bottom}}, 1, kGrid);
        canvas.text({x, top - 10}, format("%.0f %%", 25.0 * i), 8, kInk, Canvas::Align::center);
    }
    for (const double ratio : {0.25, 0.5, 1.0, 2.0, 4.0}) {
        canvas.line({{at_ratio(ratio), top - 6}, {at_ratio(ratio), bottom}}, ratio == 1 ? 2 : 1,
                    ratio == 1 ? kInk : kGrid);
        canvas.text({at_ratio(ratio), top - 10}, format("%g", ratio), 8, kInk, Canvas::Align::center);
    }
    double y = top;
    for (const Bar& bar : bars) {
        canvas.text({bar.heading ? 16.0 : 30.0, y + 14}, Canvas::shorten(bar.label, 9, label_px - 46), 9, kInk,
                    Canvas::Align::left, bar.heading);
        if (bar.share > 0) {
            const double end = left + panel_px * std::min(bar.share, 1.0);
            canvas.fill(left, y + 4, end, y + 16, kBlue, 0.85);
            canvas.text({end + 4, y + 14}, percent(bar.share), 8, kInk);
        }
        if (bar.ratio > 0) {
            const double one = at_ratio(1), end = at_ratio(bar.ratio);
            canvas.fill(std::min(one, end), y + 4, std::max(one, end), y + 16, bar.ratio >= 1 ? kGreen : kRed, 0.85);
            const bool grows = bar.ratio >= 1;
            canvas.text({end + (grows ? 4 : -4), y + 14}, ratio_text(bar.ratio), 8, kInk,
                        grows ? Canvas::Align::left : Canvas::Align::right);
        }
        y += row_px;
    }
    canvas.save(path);
}

// ---------------------------------------------------------------------------------------------------------------------
// results

std::string info_of(const Results& r, const std::string& key) {
    for (const auto& [name, value] : r.info)
        if (name == key) return value;
    return "?";
}

void print_kernels(const Results& r, const std::string& folder) {
    std::vector<Bar> bars;
    std::string model;
    double log_sum = 0;
    int n_ratios = 0;
    for (const KernelTimes& k : r.kernels) {
        if (k.model != model) {
            model = k.model;
            const auto size = r.sizes.find(model);
            const std::string heading = size == r.sizes.end()
                                            ? model
                                            : concat(model, ", batch ", size->second.first, " x ", size->second.second);
            std::printf("\n### Kernels: %s\n\n", heading.c_str());
            std::printf(
                "| operation | pass | shape | ours, us | limit, us | share of the limit | eager, us | torch.compile, "
                "us | best SDPA, us | PyTorch's best / ours |\n");
            std::printf("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n");
            bars.push_back({heading, 0, 0, true});
        }
        const double limit_s = r.limits.seconds(k.bytes, k.flops), share = divide(limit_s, k.ours_s);
        const auto eager = k.best("eager"), compiled = k.best("compile"), sdpa = k.best("sdpa"), best = k.best("");
        const double ratio = divide(best.second, k.ours_s);
        if (ratio > 0 && !k.is_tier()) log_sum += std::log(ratio), ++n_ratios;
        const std::string sdpa_text = sdpa.second > 0 ? microseconds(sdpa.second) + sdpa.first.substr(4) : "";
        std::printf("| %s | %s | %s | %s | %s | %s | %s | %s | %s | %s |\n", k.operation.c_str(), k.pass.c_str(),
                    k.shape.c_str(), microseconds(k.ours_s).c_str(), microseconds(limit_s).c_str(),
                    percent(share).c_str(), microseconds(eager.second).c_str(), microseconds(compiled.second).c_str(),
                    sdpa_text.c_str(), ratio_text(ratio).c_str());
        bars.push_back({k.operation + " " + k.pass, share, ratio, false});
    }
    if (r.kernels.empty()) return;
    if (n_ratios > 0)
        std::printf("\nGeometric mean of the ratios: %.2f (%d operations).\n", std::exp(log_sum / n_ratios), n_ratios);
    draw_bars(folder + "/kernels.png", concat("layers/ on ", info_of(r, "device"), ", ", info_of(r, "dtype")),
              "share of the limit", "times faster than PyTorch's best", bars);
}

void print_training(const Results& r, const std::string& folder) {
    if (r.training.empty()) return;
    std::printf("\n### Training, %s\n\n", info_of(r, "dtype").c_str());
    std::printf("| model | sequence | who | batch | tokens/s | MFU | peak memory | ours is faster by | note |\n");
    std::printf("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | --- |\n");
    std::vector<Bar> bars;
    for (const Training& t : r.training) {
        const std::string config = folder + "/" + t.model + ".json";
        const double mfu = divide(flops_per_token(load_config(config), t.seq) * t.tokens_per_s, r.limits.matmul);
        double ratio = 0;
        for (const Training& o : r.training)
            if (o.who == "ours" && t.who != "ours" && o.model == t.model && o.seq == t.seq)
                ratio = divide(o.tokens_per_s, t.tokens_per_s);
        std::printf("| %s | %lld | %s | %lld | %s | %s | %s | %s | %s |\n", t.model.c_str(),
                    static_cast<long long>(t.seq), t.who.c_str(), static_cast<long long>(t.batch),
                    t.tokens_per_s > 0 ? human_count(t.tokens_per_s).c_str() : "failed",
                    mfu > 0 ? format("%.1f %%", 100 * mfu).c_str() : "",
                    t.peak_bytes > 0 ? human_bytes(t.peak_bytes).c_str() : "", ratio_text(ratio).c_str(),
                    t.note.c_str());
        bars.push_back({concat(t.model, ", ", t.seq, " tokens: ", t.who), mfu, ratio, false});
    }
    std::printf(
        "\nMFU: operations of the model (causal attention counted half) per second over the matmul rate measured in "
        "this run; empty where it measured none. "
        "Peak memory: the most that the device said was in use while the program ran, less what was in use before; on "
        "the CPU "
        "the program's resident set.\n");
    draw_bars(folder + "/training.png", concat("training on ", info_of(r, "device"), ", ", info_of(r, "dtype")),
              "MFU (of the measured matmul rate)", "times that ours is faster", bars);
}

void results(const std::string& folder) {
    const Results r = read_results(folder);
    std::printf("## %s, %s\n\n", info_of(r, "date").c_str(), info_of(r, "device").c_str());
    for (const auto& [key, value] : r.info)
        if (key != "date" && key != "device") std::printf("- %s: %s\n", key.c_str(), value.c_str());
    if (r.limits.copy > 0)
        std::printf("- limits, measured: copy %.4g GB/s (read + written), matmul %.4g TFLOP/s\n", r.limits.copy / 1e9,
                    r.limits.matmul / 1e12);
    print_kernels(r, folder);
    print_training(r, folder);
}

// ---------------------------------------------------------------------------------------------------------------------
// profile: the kernels of a training step

// A line of launches.tsv, which ./train_gpt --account writes: a launch of the step, in order, with what it must cost.
struct Launch {
    std::string kernel, group;
    double bytes, flops, predicted_s;
};
std::vector<Launch> read_launches(const std::string& path) {
    const std::vector<Row> rows = read_tsv(path);
    check(rows.size() > 1 && rows[0].size() == 12 && rows[0][0] == "kernel", path, " has no launches of a step");
    std::vector<Launch> launches;
    for (size_t i = 1; i < rows.size(); ++i) {
        const Row& row = rows[i];
        check(row.size() == 12, path, ": line ", i + 1, " has ", row.size(), " columns, expected 12");
        launches.push_back({row[0], row[1], number(row[5]) + number(row[6]), number(row[9]), number(row[11])});
    }
    return launches;
}

// Launches of one group.
struct Part {
    std::string name;
    double limit_s = 0, predicted_s = 0;  // of a step: at this device's measured rates; as the account predicts
    double seconds = 0;                   // measured, per step
    double explained_s() const { return std::min(limit_s, seconds); }  // by the limit; the rest might be gained
};

// "void (anonymous namespace)::rope_kernel<__nv_bfloat16>(...)" -> "rope_kernel<__nv_bfloat16>"
std::string tidy_name(std::string name) {
    for (const char* noise : {"(anonymous namespace)::", "void "})
        for (size_t at; (at = name.find(noise)) != std::string::npos;) name.erase(at, std::string(noise).size());
    int depth = 0;
    for (size_t i = 0; i < name.size(); ++i) {
        if (name[i] == '<') ++depth;
        if (name[i] == '>') --depth;
        if (name[i] == '(' && depth == 0) return name.substr(0, i);
    }
    return name;
}

struct Event {
    double start_ns, duration_ns;
    std::string name;
    bool ours;  // our kernels are all in anonymous namespaces, the libraries' are not

    std::string base() const { return name.substr(0, name.find('<')); }
};

// The CPU device gives the kernel the optimizer's name; nvcc gives it that of its template's argument.
bool is_adamw(const std::string& name) {
    return std::regex_search(name, std::regex("adamw|adamupdate", std::regex::icase));
}

bool is_copy(const std::string& name) { return name.starts_with("mem"); }  // memset, memcpy

// Of each event of a step the launch of the account that it belongs to, or launches.size(). Our kernels have the names
// that the account gives them; a product has any name of the library's. But one product is a row of several events on a
// GPU: cuBLASLt may fill its workspace first, and add up parts of K or sum a bias' gradient afterwards. And the CPU
// device's trace has no copies. So the two rows are aligned, in order, such that most events find a launch (the longest
// common subsequence, weighted); then the events that are left go to the product that they stand beside, or to a launch
// of their name.
std::vector<size_t> match(const std::vector<Event>& events, const std::vector<Launch>& launches) {
    const size_t n_events = events.size(), n_launches = launches.size();
    // Names as numbers, which are compared n_events * n_launches times. Zero is a product.
    constexpr int kProduct = 0, kUnknown = -1;
    std::map<std::string, int> known{{"matmul", kProduct}};
    std::vector<int> launch_ids, event_ids;
    for (const Launch& launch : launches)
        launch_ids.push_back(known.try_emplace(launch.kernel, static_cast<int>(known.size())).first->second);
    std::vector<int> weights;  // our names are sure; a fill is as likely to be the library's
    for (const Event& event : events) {
        const auto at = known.find(event.base());
        const bool library = at == known.end() && !event.ours && !is_copy(event.name);
        event_ids.push_back(at != known.end() ? at->second : library ? kProduct : kUnknown);
        weights.push_back(is_copy(event.name) ? 1 : !library ? 4 : event.name.starts_with("cublasLt::") ? 2 : 3);
    }
    check((n_events + 1) * (n_launches + 1) < size_t{1} << 29, "a step of ", n_events,
          " kernels is too long to compare with its account: profile one with fewer micro-batches");
    // best(i, j): the most that events from i on can have with launches from j on.
    std::vector<int> table((n_events + 1) * (n_launches + 1));
    const auto best = [&](size_t i, size_t j) -> int& { return table[i * (n_launches + 1) + j]; };
    for (size_t i = n_events; i-- > 0;)
        for (size_t j = n_launches; j-- > 0;) {
            best(i, j) = std::max(best(i + 1, j), best(i, j + 1));
            if (event_ids[i] == launch_ids[j]) best(i, j) = std::max(best(i, j), weights[i] + best(i + 1, j + 1));
        }
    std::vector<size_t> found(n_events, n_launches);
    for (size_t i = 0, j = 0; i < n_events && j < n_launches;) {
        if (event_ids[i] == launch_ids[j] && best(i, j) == weights[i] + best(i + 1, j + 1)) found[i++] = j++;
        else if (best(i, j) == best(i, j + 1)) ++j;
        else ++i;
    }
    const auto is_product = [&](size_t launch) { return launch < n_launches && launch_ids[launch] == kProduct; };
    for (size_t i = 1; i < n_events; ++i)  // after its product
        if (found[i] == n_launches && event_ids[i] == kProduct && is_product(found[i - 1])) found[i] = found[i - 1];
    for (size_t i = n_events; i-- > 1;)  // before it
        if (found[i - 1] == n_launches && is_copy(events[i - 1].name) && is_product(found[i])) found[i - 1] = found[i];
    for (size_t i = 0; i < n_events; ++i)
        if (found[i] == n_launches && event_ids[i] > kProduct)
            found[i] =
                static_cast<size_t>(std::find(launch_ids.begin(), launch_ids.end(), event_ids[i]) - launch_ids.begin());
    return found;
}

// One bar per part: its length is the time, its dark end is the limit.
void draw_parts(const std::string& path, const std::string& title, double step_s, const std::vector<Part>& parts) {
    const int row_px = 30, top = 90, label_px = 180, panel_px = 720;
    double longest = 0;
    int n_rows = 0;
    for (const Part& part : parts) longest = std::max(longest, part.seconds), n_rows += part.seconds > 0;
    Canvas canvas(label_px + panel_px + 120, top + row_px * n_rows + 20);
    canvas.text({16, 26}, Canvas::shorten(title, 14, canvas.width() - 32.0), 14, kInk, Canvas::Align::left, true);
    canvas.text({16, 48}, format("%.2f ms per step; sorted by the time above the limit", 1e3 * step_s), 10, kInk);
    canvas.fill(label_px, 58, label_px + 14, 70, kBlue, 1);
    canvas.text({label_px + 20, 69}, "what bytes and operations need at this device's measured rates", 9, kInk);
    canvas.fill(label_px + 470, 58, label_px + 484, 70, kOrange, 1);
    canvas.text({label_px + 490, 69}, "above that, or no limit known", 9, kInk);
    double y = top;
    for (const Part& part : parts) {
        if (part.seconds <= 0) continue;
        const double end = label_px + panel_px * part.seconds / longest,
                     dark = label_px + panel_px * part.explained_s() / longest;
        canvas.text({label_px - 8.0, y + 17}, part.name, 10, kInk, Canvas::Align::right);
        canvas.fill(label_px, y + 4, dark, y + 24, kBlue, 1);
        canvas.fill(dark, y + 4, end, y + 24, kOrange, 1);
        const std::string text = format("%.1f %%", 100 * part.seconds / step_s);
        canvas.text({end + 6, y + 17}, text, 10, kInk);
        y += row_px;
    }
    canvas.save(path);
}

void profile(const std::string& folder) {
    const Results r = read_results(folder);
    check(r.steps.size() == 1, folder, "/results.tsv must have one 'step' line");
    const std::string model = r.steps[0][1];
    const int64_t B = integer(r.steps[0][2]), T = integer(r.steps[0][3]);
    const DType dtype = dtype_from_name(r.steps[0][4]);
    const std::vector<Launch> launches = read_launches(folder + "/launches.tsv");

    std::vector<Event> events;
    for (const Row& row : read_tsv(folder + "/trace.tsv"))
        if (row.size() == 3)
            events.push_back({number(row[0]), number(row[1]), tidy_name(row[2]),
                              row[2].find("(anonymous namespace)::") != std::string::npos});
    std::stable_sort(events.begin(), events.end(),
                     [](const Event& a, const Event& b) { return a.start_ns < b.start_ns; });

    // A step ends with the last of a row of AdamW's kernels. The first two steps warm up.
    std::vector<size_t> ends;
    for (size_t i = 0; i + 1 < events.size(); ++i)
        if (is_adamw(events[i].name) && !is_adamw(events[i + 1].name)) ends.push_back(i);
    check(ends.size() >= 4, folder, "/trace.tsv has ", ends.size(), " whole training steps, at least 4 are needed");
    const size_t first = ends[1], last = ends.back(), n_steps = ends.size() - 2;
    const auto end_ns = [&](size_t i) { return events[i].start_ns + events[i].duration_ns; };
    const double step_s = 1e-9 * (end_ns(last) - end_ns(first)) / static_cast<double>(n_steps);

    std::vector<Part> parts;
    const auto part_of = [&](const std::string& name) {
        for (size_t i = 0; i < parts.size(); ++i)
            if (parts[i].name == name) return i;
        parts.push_back({name});
        return parts.size() - 1;
    };
    for (const Launch& launch : launches) {
        Part& part = parts[part_of(launch.group)];
        part.limit_s += r.limits.seconds(launch.bytes, launch.group.find("products") != std::string::npos ||
                                                               launch.group.find("attention") != std::string::npos
                                                           ? launch.flops
                                                           : 0);
        part.predicted_s += launch.predicted_s;
    }
    struct Kernel {
        std::string name;
        size_t part = 0;
        double seconds = 0, launches = 0;
        Part of;  // its part, with the part's whole time
    };
    std::map<std::pair<std::string, size_t>, Kernel> by_name;
    double busy_s = 0;
    for (size_t step = 1; step + 1 < ends.size(); ++step) {
        const auto begin = events.begin() + static_cast<std::ptrdiff_t>(ends[step] + 1),
                   end = events.begin() + static_cast<std::ptrdiff_t>(ends[step + 1] + 1);
        const std::vector<Event> step_events(begin, end);
        const std::vector<size_t> launch = match(step_events, launches);
        for (size_t i = 0; i < launch.size(); ++i) {
            const Event& event = step_events[i];
            const size_t part = part_of(launch[i] < launches.size() ? launches[launch[i]].group : "not in the account");
            Kernel& kernel = by_name[{event.name, part}];
            kernel.name = event.name, kernel.part = part;
            kernel.seconds += 1e-9 * event.duration_ns / static_cast<double>(n_steps);
            kernel.launches += 1.0 / static_cast<double>(n_steps);
        }
    }
    std::vector<Kernel> kernels;
    for (const auto& [name, kernel] : by_name) {
        parts[kernel.part].seconds += kernel.seconds;
        busy_s += kernel.seconds;
        kernels.push_back(kernel);
    }
    for (Kernel& kernel : kernels) kernel.of = parts[kernel.part];
    parts.push_back({"no kernel runs", 0, 0, std::max(0.0, step_s - busy_s)});

    // The largest possible gain comes first.
    std::sort(parts.begin(), parts.end(),
              [](const Part& a, const Part& b) { return a.seconds - a.explained_s() > b.seconds - b.explained_s(); });

    std::printf("## A training step of %s, %lld x %lld, %s, on %s\n\n", model.c_str(), static_cast<long long>(B),
                static_cast<long long>(T), dtype_name(dtype), info_of(r, "device").c_str());
    std::printf(
        "%.3f ms per step (mean of %zu), %s tokens/s under the profiler; limits: copy %.4g GB/s, matmul %.4g "
        "TFLOP/s.\n\n",
        1e3 * step_s, n_steps, human_count(static_cast<double>(B * T) / step_s).c_str(), r.limits.copy / 1e9,
        r.limits.matmul / 1e12);
    std::printf(
        "| part | measured, ms | share of the step | predicted, ms | limit, ms | share of the limit | above the limit, "
        "ms "
        "|\n| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n");
    for (const Part& part : parts) {
        if (part.seconds <= 0) continue;
        const double limit = part.limit_s;
        const auto ms = [](double s) { return s > 0 ? format("%.3f", 1e3 * s) : ""; };
        std::printf("| %s | %.3f | %.1f %% | %s | %s | %s | %.3f |\n", part.name.c_str(), 1e3 * part.seconds,
                    100 * part.seconds / step_s, ms(part.predicted_s).c_str(), ms(limit).c_str(),
                    percent(divide(limit, part.seconds)).c_str(), 1e3 * (part.seconds - part.explained_s()));
    }
    std::sort(kernels.begin(), kernels.end(), [](const Kernel& a, const Kernel& b) { return a.seconds > b.seconds; });
    std::printf(
        "\n| kernel | part | launches | ms | share of the step | share of the limit |\n| --- | --- | ---: | ---: | "
        "---: | ---: |\n");
    for (const Kernel& kernel : kernels) {
        if (kernel.seconds < 0.002 * step_s) continue;
        // If a kernel takes at least 99 % of its part's time, the part's limit is also the kernel's.
        const double limit = kernel.seconds > 0.99 * kernel.of.seconds ? kernel.of.limit_s : 0;
        std::printf("| `%s` | %s | %.0f | %.3f | %.1f %% | %s |\n", kernel.name.substr(0, 90).c_str(),
                    kernel.of.name.c_str(), kernel.launches, 1e3 * kernel.seconds, 100 * kernel.seconds / step_s,
                    percent(divide(limit, kernel.seconds)).c_str());
    }

    draw_parts(
        folder + "/profile.png",
        concat("a training step of ", model, ", ", B, " x ", T, ", ", dtype_name(dtype), ", on ", info_of(r, "device")),
        step_s, parts);
}

// ---------------------------------------------------------------------------------------------------------------------
// Inputs

// llm.c's token shard (io.h), filled with random tokens: each a number of Philox, so that every run has the same.
void write_tokens(const std::string& model, const std::string& path, int64_t n) {
    const int64_t V = load_config(model).V;
    const bool narrow = V <= 65536;
    std::string bytes(1024, '\0');
    const int32_t header[3] = {narrow ? 20240520 : 20240801, narrow ? 1 : 7, static_cast<int32_t>(n)};
    std::memcpy(bytes.data(), header, sizeof header);
    for (int64_t i = 0; i < n; ++i) {
        const uint64_t token = uniform_below(1, 1, static_cast<uint64_t>(i), static_cast<uint64_t>(V));
        bytes.append(reinterpret_cast<const char*>(&token), narrow ? 2 : 4);  // little-endian, as the file
    }
    write_text_file(path, bytes);
}

void run(const std::vector<std::string>& arguments) {
    const auto is = [&](const char* command, size_t n) { return arguments.size() == n + 1 && arguments[0] == command; };
    if (is("config", 1)) std::printf("%s\n", config_to_json(load_config(arguments[1])).c_str());
    else if (is("tokens", 3)) write_tokens(arguments[1], arguments[2], parse_count("COUNT", arguments[3]));
    else if (is("results", 1)) results(arguments[1]);
    else if (is("profile", 1)) profile(arguments[1]);
    else fail("usage: bench_report config MODEL | tokens MODEL FILE COUNT | results FOLDER | profile FOLDER");
}

}  // namespace

int main(int argc, char** argv) {
    return run_program("bench_report", [&] { run({argv + 1, argv + argc}); });
}
