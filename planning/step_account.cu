// planning/step_account.cu: where the time of a training step goes (--account).
//
// A kernel has to move bytes and to compute. The device does both at the same time, each at its own rate, so that a
// launch takes at least
//
//     roofline = max(bytes / copy rate, FLOPs / matrix rate)          (Williams, Waterman & Patterson 2009)
//
// Which of the two it is follows from its arithmetic intensity, FLOPs / bytes, and from the device's, rate / rate: 266
// FLOPs a byte on an H100. A product of 65536 x 768 x 2304 numbers of 16 bits computes 571 FLOPs for each byte, and
// waits for the tensor cores. A norm computes about one, and waits for memory, whatever the multiprocessors could do.
// Attention computes T / 4 FLOPs or more for each byte as long as its scores stay on the chip; written out and read
// again, as in the papers before flash attention, they would make it wait for memory, too.
//
// The launches are not written down here a second time: a step of this run is captured, as for a CUDA graph, and never
// runs. Launchers state what each launch costs (launched(), core/core.h). On the CPU device the memory of the run does
// not even exist (only its addresses do), so that a laptop has the account of a step that fills an H100. It stands in
// for the GPU of --device-spec: with as many multiprocessors, and on Hopper with the products that are chosen there.
// (One difference is left: of many heads in float32 it computes attention's backward in one kernel, a GPU in two.)
//
// predicted = roofline / (the share of it that such kernels reach) + the time between two launches. The shares are
// those that an H100 reached, as the table kGroups says; `make profile` prints what a GPU measures beside them.
#include "planning/planning.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <regex>
#include <string_view>

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Groups

struct Group {
    const char* name;
    const char* kernels;  // of forward and backward, a regular expression: the first group that one matches has them
    double share;         // of the roofline that these kernels reach
    const char* source;
};
// Products come first, and are told apart by their place; the kernels of the norm and of the update by when they are
// launched, because an optimizer may have sums of squares and copies, too. Shares are of the rates that are reached
// (DeviceSpec), not of the data sheet. Measured: by `make profile` of GPT-2 124M, 64 x 1024, bf16, the last of three
// times (of the head's products their mean) on an H100 SXM (dev/RESULTS.md), which in such a step takes all of its
// 700 W, and therefore runs at 1.4 to 1.6 GHz instead of 1.98.
constexpr double kRowKernel = 0.9;
constexpr Group kGroups[] = {
    {"block products", "^$", 600.0 / 798, "600 TFLOP/s, measured: cuBLASLt, and ours with epilogues"},
    {"head products", "^$", 755.0 / 798, "755 TFLOP/s, measured"},
    {"optimizer's products", "^$", 600.0 / 798, "as block products"},
    {"attention backward", "flash_.*(d[qkv]|delta|backward)|delta_kernel", 0.265, "measured, head size 64, 1k tokens"},
    {"attention forward", "flash_|attention", 0.315, "measured, head size 64, 1k tokens"},
    {"norms", "layernorm|rmsnorm", 0.91, "measured"},
    {"activation function", "gelu|swiglu", kRowKernel, "row kernels reach 0.9 of a copy"},
    {"rotations and heads", "rope|heads|latent|residual", kRowKernel, "as row kernels"},
    {"column sums", "column_sum", 0.73, "measured"},
    {"cross-entropy", "cross_entropy|losses", 0.90, "measured"},
    {"embedding", "embedding|ids_from", 0.62, "measured"},
    {"8-bit casts", "quantise|amax|advance", kRowKernel, "as row kernels"},
    {"gradient norm", "^$", 0.55, "measured"},
    {"optimizer", "^$", 0.99, "measured: AdamW"},
    {"copies and fills", "memset|memcpy", kRowKernel, "as row kernels"},
    {"others", "", kRowKernel, "as row kernels"},
};
constexpr size_t kNGroups = sizeof kGroups / sizeof kGroups[0];
constexpr size_t group_named(std::string_view name) {
    size_t group = 0;
    while (kGroups[group].name != name) ++group;
    return group;
}
constexpr size_t kBlockProducts = group_named("block products"), kHeadProducts = group_named("head products"),
                 kOptimizerProducts = group_named("optimizer's products"),
                 kAttentionBackward = group_named("attention backward"),
                 kAttentionForward = group_named("attention forward"), kCasts = group_named("8-bit casts"),
                 kGradientNorm = group_named("gradient norm"), kOptimizer = group_named("optimizer");
// Neither products nor attention: kernels that read and write rows.
bool moves_rows(size_t group) { return group > kAttentionForward; }

constexpr double kBetweenLaunches = 1.0e-6;  // seconds: the last blocks of one kernel, the first of the next
constexpr double kBetweenSteps = 0.2e-3;     // the start of a graph, and uploads that wait

// The parts of a step, as train_step has them.
enum class StepPart { gradients, norm, update };

// The head's products by their place among the launches: the logits, whose loss comes next, and its two gradients
// after it. Their sizes do not tell: a block may have the same ones, and the last of --head-chunks has fewer rows.
std::vector<bool> products_of_head(const std::vector<NotedLaunch>& launches) {
    std::vector<bool> is_head(launches.size());
    size_t before = 0, after = 0;  // the last product; how many after a loss are still to come
    for (size_t i = 0; i < launches.size(); ++i) {
        if (launches[i].kernel == "cross_entropy_kernel") is_head[before] = true, after = 2;
        if (launches[i].cost.product[0] == 0) continue;
        is_head[before = i] = after > 0;
        after -= after > 0;
    }
    return is_head;
}

size_t group_of(const NotedLaunch& launch, StepPart part, bool is_head) {
    if (launch.cost.product[0] > 0)
        return part == StepPart::update ? kOptimizerProducts : is_head ? kHeadProducts : kBlockProducts;
    size_t group = 0;
    while (!std::regex_search(launch.kernel, std::regex(kGroups[group].kernels))) ++group;
    if (part == StepPart::gradients || group == kCasts) return group;
    return part == StepPart::norm ? kGradientNorm : kOptimizer;
}

// ---------------------------------------------------------------------------------------------------------------------
// Recording a step

// Asks for work that is recorded and never runs; returns how many pieces it has. After an Error the stream is of no
// use, and the program ends.
size_t capture(const std::function<void()>& work) {
    const cudaStream_t stream = device().stream;
    cudaCheck(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    work();
    cudaGraph_t graph = nullptr;
    cudaCheck(cudaStreamEndCapture(stream, &graph));
    size_t n_nodes = 0;
    cudaCheck(cudaGraphGetNodes(graph, nullptr, &n_nodes));
    cudaCheck(cudaGraphDestroy(graph));
    return n_nodes;
}

void check_can_account(const Trainer& t) {
    const TrainOptions& o = t.options;
    const char* reason = nullptr;
    if (o.offload != Offload::none)
        reason = "with --offload the host works, too, and the step is not a row of launches: leave --offload out";
    if (o.data_parallel.zero > 0 || o.data_parallel.naive)
        reason = "it is that of one rank, which divides nothing: leave --zero and --dp-mode out";
    if (o.attention == FlashTier::hopper && o.device_spec != "this" &&
        !device_spec(o.device_spec, DType::f32).is_hopper)
        reason = "--attention hopper needs an H100 or H200: leave it out";
    if (reason) fail("--account: ", reason);
}

// ---------------------------------------------------------------------------------------------------------------------
// Time

struct Row {  // a launch, or the sum of many
    int64_t launches = 0;
    double least = 0, moved = 0, flops = 0;  // bytes that it must move, and does move
    double roofline = 0, predicted = 0;      // seconds
    void add(const Row& other) {
        launches += other.launches, least += other.least, moved += other.moved, flops += other.flops;
        roofline += other.roofline, predicted += other.predicted;
    }
    double intensity() const { return flops / moved; }
};

struct Account {
    DeviceSpec spec;
    // FLOP/s that are reached, also by Muon's products: they are in bf16 where the model's are in 16 bits. By the
    // products of blocks, which --fp8 has in 8 bits.
    double rate = 0, block_rate = 0;
    double rate_of(size_t group) const { return group == kBlockProducts ? block_rate : rate; }
    bool on_tensor_cores = true;  // which multiply no float32, and which a CPU has not
    std::vector<NotedLaunch> launches = {};
    std::vector<Row> rows = {};       // one for each launch
    std::vector<size_t> groups = {};  // likewise
    double tokens = 0, model_flops = 0;
    std::vector<Row> by_group() const {
        std::vector<Row> sums(kNGroups);
        for (size_t i = 0; i < rows.size(); ++i) sums[groups[i]].add(rows[i]);
        return sums;
    }
    Row all() const {
        Row sum;
        for (const Row& row : rows) sum.add(row);
        return sum;
    }
    double seconds() const { return all().predicted + kBetweenSteps; }
};

Row row_of(const NotedLaunch& launch, size_t group, const Account& account) {
    const LaunchCost& cost = launch.cost;
    Row row{.launches = 1,
            .least = static_cast<double>(cost.reads + cost.writes - cost.scratch),
            .moved = static_cast<double>(cost.reads + cost.writes + cost.again),
            .flops = cost.flops};
    // What is not a product of matrices computes on other units, but too little to wait for them.
    const double computing = moves_rows(group) ? 0 : row.flops / account.rate_of(group);
    // The sums of a product's factor, of which an H100's cuBLASLt makes a kernel of its own, after the product.
    const double sums = moves_rows(group) ? 0 : static_cast<double>(cost.again) / account.spec.reached_bytes;
    row.roofline = std::max(row.moved / account.spec.reached_bytes - sums, computing);
    // Attention's delta, which has no product, reads rows.
    const double share = moves_rows(group) || computing > 0 ? kGroups[group].share : kRowKernel;
    row.predicted = row.roofline / share + sums / kRowKernel + kBetweenLaunches;
    return row;
}

Account account_of(Trainer& t) {
    const TrainOptions& o = t.options;
    Account account{.spec = device_spec(o.device_spec, o.precision.dtype)};
#ifdef CUDA_ON_CPU
    cuda_cpu::take_addresses_alone(true);
#endif
    const DType dtype = o.precision.dtype;
    account.rate = account.block_rate = account.spec.reached_rate(dtype);
    account.on_tensor_cores =
        dtype != DType::f32 && (dtype != DType::bf16 || account.spec.multiplies_bf16) && account.spec.rest_most == 0;
    if (o.precision.fp8 != Fp8Recipe::none && account.spec.fp8 > 0)
        account.block_rate *= account.spec.fp8 / account.spec.rate(dtype);  // the same share of the peak
    t.reserve();
    recall_matmuls(o);
    LaunchNotes notes;
    size_t first_of_norm = 0, first_of_update = 0;
    const size_t n_nodes = capture([&] {
        accumulate_gradients(t, 1);
        first_of_norm = notes.launches.size();
        clip_gradients(t, 1);
        first_of_update = notes.launches.size();
        update_weights(t, 1);
    });
    // A GPU may do one product in two kernels; on the CPU device each piece of work is one node.
    check(!device().is_cpu || n_nodes == notes.launches.size(), "the account: ", n_nodes,
          " pieces of work were asked for, ", notes.launches.size(),
          " of them with their cost: a launcher does not call launched()");
    account.launches = std::move(notes.launches);
    const std::vector<bool> is_head = products_of_head(account.launches);
    for (size_t i = 0; i < account.launches.size(); ++i) {
        const StepPart part = i < first_of_norm     ? StepPart::gradients
                              : i < first_of_update ? StepPart::norm
                                                    : StepPart::update;
        account.groups.push_back(group_of(account.launches[i], part, is_head[i]));
        account.rows.push_back(row_of(account.launches[i], account.groups.back(), account));
    }
    account.tokens = static_cast<double>(o.batch * o.seq);
    account.model_flops = account.tokens * flops_per_token(t.config, o.seq);
    return account;
}

// ---------------------------------------------------------------------------------------------------------------------
// Tables

std::string table_row(const char* name, const Row& row, const std::string& why) {
    return concat("| ", name, " | ", row.launches, " | ", format("%.3f", row.least / 1e9), " | ",
                  format("%.3f", row.moved / 1e9), " | ", row.flops > 0 ? format("%.3f", row.flops / 1e12) : "", " | ",
                  row.flops > 0 ? format("%.3g", row.intensity()) : "", " | ", format("%.2f", 1e3 * row.roofline),
                  " | ", format("%.2f", 1e3 * row.predicted), " | ", why, " |\n");
}

std::string title_of(const Trainer& t) {
    const TrainOptions& o = t.options;
    return concat("A step of ", o.model, ", ", o.dtype, ", ", o.batch, " x ", o.seq, " tokens in micro-batches of ",
                  t.micro_batch, ", --attention ", o.identity.at("--attention"));
}

std::string text_of(const Trainer& t, const Account& account) {
    const DeviceSpec& spec = account.spec;
    std::string text = concat("# ", title_of(t), "\n\n");
    text += concat("Predicted for ", spec.name, ": products at up to ", human_count(account.rate), "FLOP/s",
                   account.block_rate > account.rate ? ", in fp8 " + human_count(account.block_rate) + "FLOP/s," : "",
                   " and copies at ", human_count(spec.reached_bytes), "B/s (", spec.reached_source, ").\n\n");
    text +=
        "| group | launches | must move, GB | moves, GB | TFLOP | FLOP a byte | roofline, ms | predicted, ms | waits "
        "for |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |\n";
    const std::vector<Row> groups = account.by_group();
    Row rest;
    for (size_t g = 0; g < kNGroups; ++g) {
        if (groups[g].launches == 0) continue;
        const bool attends = g == kAttentionForward || g == kAttentionBackward,
                   computes = !moves_rows(g) && groups[g].intensity() > account.rate_of(g) / spec.reached_bytes;
        // Attention's scores each take an exponential, for which there are fewer units: half of the roof of the tensor
        // cores is out of reach.
        text += table_row(kGroups[g].name, groups[g],
                          attends && account.on_tensor_cores ? "exponentials, tensor cores"
                          : !computes                        ? "memory"
                          : account.on_tensor_cores          ? "tensor cores"
                                                             : "arithmetic");
        if (moves_rows(g)) rest.add(groups[g]);
    }
    text += concat("| between steps |  |  |  |  |  |  | ", format("%.2f", 1e3 * kBetweenSteps), " | host |\n");
    Row all = account.all();
    all.predicted += kBetweenSteps;
    text += table_row("all", all, "");
    const double seconds = account.seconds();
    text += concat("\n", human_count(account.tokens / seconds), " tokens/s predicted; MFU ",
                   format("%.1f", 100 * account.model_flops / seconds / spec.rate(t.options.precision.dtype)), " % of ",
                   std::string_view(spec.source) == spec.reached_source ? "the measured " : "the data sheet's ",
                   human_count(spec.rate(t.options.precision.dtype)), "FLOP/s. ", account.launches.size(),
                   " launches. What is neither a product nor attention moves ", format("%.2f", rest.moved / rest.least),
                   " times the bytes that it must.\n");
    return text;
}

// Every launch, in order: what scripts read.
std::string tsv_of(const Account& account) {
    std::string text = "kernel\tgroup\tM\tN\tK\treads\twrites\tscratch\tagain\tflops\troofline_s\tpredicted_s\n";
    for (size_t i = 0; i < account.launches.size(); ++i) {
        const auto& [kernel, cost] = account.launches[i];
        text += concat(kernel, "\t", kGroups[account.groups[i]].name);
        for (const int64_t n :
             {cost.product[0], cost.product[1], cost.product[2], cost.reads, cost.writes, cost.scratch, cost.again})
            text += concat("\t", n);
        text += concat("\t", format("%.6g", cost.flops), "\t", format("%.6g", account.rows[i].roofline), "\t",
                       format("%.6g", account.rows[i].predicted), "\n");
    }
    return text;
}

// Why each group's share is what it is.
std::string notes_of(const Account& account) {
    std::string text =
        "\nMust move: each input once and each output once. Moves: with intermediate results, and with what is read a "
        "second\n"
        "time because no cache holds it. Roofline: the longer of bytes / copy rate and FLOPs / matrix rate, launch by "
        "launch.\n"
        "Predicted: the roofline divided by the share of it that such kernels reach, and 1 us between launches:\n\n";
    const std::vector<Row> groups = account.by_group();
    for (size_t g = 0; g < kNGroups; ++g)
        if (groups[g].launches > 0)
            text +=
                concat("- ", kGroups[g].name, ": ", format("%.2f", kGroups[g].share), " (", kGroups[g].source, ")\n");
    text +=
        "\nA launch whose FLOPs for each byte are below matrix rate / copy rate waits for memory, however fast the "
        "cores are: a\n"
        "norm computes about one FLOP a byte. A product reads each of its numbers once and uses it hundreds of times, "
        "and\n"
        "attention keeps its scores on the chip: these wait for ";
    return text + (account.on_tensor_cores ? "the tensor cores.\n" : "arithmetic.\n");
}

// ---------------------------------------------------------------------------------------------------------------------
// The roofline: FLOP/s over FLOPs a byte, both on log axes. Under the roof an operation's launches are a disc, where
// they are predicted to be.

constexpr Canvas::Color kInk{40, 40, 40}, kSoft{110, 110, 110}, kGrid{226, 226, 226};
constexpr Canvas::Color kColors[] = {{0, 114, 178}, {86, 180, 233},  {213, 94, 0}, {230, 159, 0},
                                     {0, 158, 115}, {204, 121, 167}, {40, 40, 40}, {140, 140, 140}};

struct Operation {
    std::string name;
    size_t group = 0;
    Row sum;
};

// Launches of a group that have one kernel, or are products of one size, are one operation. The longest come first.
std::vector<Operation> operations_of(const Account& account) {
    std::map<std::pair<std::string, size_t>, Operation> by_name;
    for (size_t i = 0; i < account.launches.size(); ++i) {
        const auto& [kernel, cost] = account.launches[i];
        const auto& [M, N, K] = cost.product;
        std::string name = std::regex_replace(kernel, std::regex("_kernel$"), "");
        if (M > 0) name = concat(M, " x ", N, " x ", K);
        Operation& operation = by_name[{name, account.groups[i]}];
        operation.name = name, operation.group = account.groups[i];
        operation.sum.add(account.rows[i]);
    }
    std::vector<Operation> operations;
    for (const auto& [name, operation] : by_name) operations.push_back(operation);
    std::stable_sort(operations.begin(), operations.end(),
                     [](const Operation& a, const Operation& b) { return a.sum.predicted > b.sum.predicted; });
    return operations;
}

struct LogAxis {
    double low, high, first, last;  // values, and their pixels
    double at(double value) const {
        return first + (last - first) * std::log(std::clamp(value, low, high) / low) / std::log(high / low);
    }
};

void write_roofline(const std::string& path, const std::string& title, const Account& account) {
    const std::vector<Operation> operations = operations_of(account);
    const size_t n_listed = std::min<size_t>(operations.size(), 30);
    Canvas canvas(1240, 660);
    const double most = std::max(account.rate, account.block_rate), decade = std::pow(10, std::floor(std::log10(most)));
    const LogAxis x{1.0 / 16, 4096, 80, 780}, y{decade / 1e3, 2 * decade * 10, 600, 80};
    canvas.text({16, 26}, Canvas::shorten(title, 13, canvas.width() - 32.0), 13, kInk, Canvas::Align::left, true);
    canvas.text({16, 48},
                concat("predicted for ", account.spec.name, ": ", format("%.1f", 1e3 * account.seconds()), " ms, ",
                       human_count(account.tokens / account.seconds()), " tokens/s"),
                10, kInk);
    for (double value = 0.0625; value <= 4096; value *= 4) {
        canvas.line({{x.at(value), y.first}, {x.at(value), y.last}}, 1, kGrid);
        canvas.text({x.at(value), y.first + 18}, format("%g", value), 9, kSoft, Canvas::Align::center);
    }
    for (double value = y.low; value <= y.high; value *= 10) {
        canvas.line({{x.first, y.at(value)}, {x.last, y.at(value)}}, 1, kGrid);
        canvas.text({x.first - 8, y.at(value) + 4}, human_count(value), 9, kSoft, Canvas::Align::right);
    }
    canvas.text({(x.first + x.last) / 2, y.first + 42}, "FLOPs for each byte moved", 10, kInk, Canvas::Align::center);
    canvas.text({22, (y.first + y.last) / 2}, "FLOP/s", 10, kInk, Canvas::Align::center, false, true);
    const auto roof = [&](const char* what, double rate, double label) {
        const double bytes = account.spec.reached_bytes, first = std::max(x.low, y.low / bytes);
        canvas.line({{x.at(first), y.at(first * bytes)}, {x.at(rate / bytes), y.at(rate)}, {x.at(x.high), y.at(rate)}},
                    2, kInk);
        canvas.text({x.at(x.high) - 4, y.at(rate) + label}, concat(what, ": ", human_count(rate), "FLOP/s"), 9, kInk,
                    Canvas::Align::right);
    };
    const bool has_8_bits = account.block_rate > account.rate;
    roof("products", account.rate, has_8_bits ? 16 : -8);
    if (has_8_bits) roof("in 8 bits", account.block_rate, -8);
    canvas.text({x.at(0.3), y.at(0.3 * account.spec.reached_bytes) - 14},
                concat("memory: ", human_count(account.spec.reached_bytes), "B/s"), 9, kInk, Canvas::Align::right);
    canvas.text({820, 76}, "operation, launches", 9, kSoft);
    canvas.text({1224, 76}, "ms, share", 9, kSoft, Canvas::Align::right);
    for (size_t i = operations.size(); i-- > 0;) {  // the longest are painted last
        const Operation& operation = operations[i];
        const Canvas::Color color = kColors[operation.group % (sizeof kColors / sizeof kColors[0])];
        const double share = operation.sum.predicted / account.seconds();
        if (operation.sum.flops > 0) {
            const Canvas::Point at{x.at(operation.sum.intensity()),
                                   y.at(operation.sum.flops / operation.sum.predicted)};
            canvas.disc(at, 4 + 30 * std::sqrt(share), color, 0.55);
            canvas.text({at.x, at.y + 3}, concat(i + 1), 8, kInk, Canvas::Align::center);
        }
        if (i >= n_listed) continue;
        const double row = 94 + 17.5 * static_cast<double>(i);
        canvas.disc({826, row - 3}, 5, color, 0.7);
        canvas.text({838, row}, concat(i + 1, "  ", Canvas::shorten(operation.name, 9, 220)), 9, kInk);
        canvas.text({1120, row}, concat(operation.sum.launches), 9, kInk, Canvas::Align::right);
        const double ms = 1e3 * operation.sum.predicted;
        canvas.text({1224, row}, format(ms < 100 ? "%.2f" : "%.0f", ms) + format(", %.1f %%", 100 * share), 9, kInk,
                    Canvas::Align::right);
    }
    canvas.save(path);
}

}  // namespace

void print_step_account(Trainer& t) {
    check_can_account(t);
    const Account account = account_of(t);
    const std::string text = text_of(t, account);
    std::printf("%s", text.c_str());
    const std::string& folder = t.options.out;
    if (folder.empty()) return;
    make_folder(folder);
    write_text_file(folder + "/account.md", text + notes_of(account));
    write_text_file(folder + "/launches.tsv", tsv_of(account));
    write_roofline(folder + "/account.png", title_of(t), account);
    std::printf("written: %s/account.md, account.png, launches.tsv\n", folder.c_str());
}
