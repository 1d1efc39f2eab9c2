// test/test_pipeline_runs.cu: whole runs whose layers are divided among ranks (--pp), with every schedule.
//
// Synchronous schedules compute what one process does: the same kernels on the same micro-batches, whose gradients are
// added in the same order, on whatever rank. So a run with --pp has the bits of the run without, beside as many ranks
// of data, context and tensor parallelism. Two sums are in another order:
//     tied embeddings   the embedding's gradients of all micro-batches, plus the head's of all; and not by turns
//     dualpipe          half of the micro-batches are on other ranks: sums as those of two data-parallel ranks
//
// Asynchronous schedules compute something else, which an oracle in one process computes here, too.
#include "io/io.h"
#include "models.h"
#include "parallel/pipeline/pipeline.h"
#include "run_models.h"
#include "train_runs.h"
#include "training/training.h"

#include <algorithm>

namespace {

struct PipelineRuns {
    TempFolder folder;
    int number = 0;
    std::map<std::string, std::string> done;  // flags -> folder

    Outcome outcome(const std::string& model, const std::string& flags, const std::string& run,
                    const std::string& before = "") {
        const auto with_default = [&](const std::string& flag, const std::string& value) {
            return flags.find(flag + " ") == std::string::npos ? flag + " " + value + " " : "";
        };
        return run_program("train_gpt",
                           with_default("--data", text_file()) + "--model " + model_file(model) +
                               " --val-sequences 5 --sample 0 --warmup 2 --log-every 50 " +
                               with_default("--seq", "16") + with_default("--batch", "6") +
                               with_default("--steps", "20") + with_default("--val-every", "10") +
                               with_default("--save-every", "0") + flags + " --out " + run,
                           before);
    }
    std::string run(const std::string& model, const std::string& flags, const std::string& before = "") {
        std::string& path = done[model + " " + flags + before];
        if (!path.empty()) return path;
        path = folder / std::to_string(number++);
        const Outcome its = outcome(model, flags, path, before);
        INFO(model << " " << flags << "\n" << its.err);
        REQUIRE(its.status == 0);
        if (flags.find("--ranks") != std::string::npos && flags.find("--stop-after") == std::string::npos)
            check_account(its.out, flags);
        return path;
    }
};

void check_same_bits(const std::string& a, const std::string& b) {
    CHECK(log_without_times(a) == log_without_times(b));
    CHECK((weights_of(a) == weights_of(b)));  // not shown where they differ
}

std::vector<std::string> synchronous_schedules() {
    std::vector<std::string> names = schedule_names_of_pipelines();
    std::erase_if(names, is_asynchronous_pipeline);
    return names;
}

std::string on_pipeline(int pp, const std::string& schedule, int dp = 1) {
    return concat("--ranks ", dp * pp, " --pp ", pp, " --pipeline ", schedule, " ");
}
bool has_turn(const std::string& schedule) { return schedule == "zb-v" || schedule == "dualpipe-v"; }

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Synchronous schedules

TEST_CASE("the table of schedules knows their stages, and which have updates", "[pipeline]") {
    for (const std::string& name : schedule_names_of_pipelines()) {
        INFO(name << ": the table in parallel/pipeline/schedules.cu");
        ScheduleOptions options;
        options.name = name, options.p = 4, options.m = 8, options.per_update = 4;
        const PipelineSchedule table = make_schedule(options);
        CHECK(4 * stages_per_rank(options) == table.n_stages);
        CHECK(is_asynchronous_pipeline(name) == table.asynchronous);
    }
}

TEST_CASE("every synchronous schedule has the bits of one process", "[program][ranks][pipeline]") {
    struct Case {
        std::string model;
        int pp, dp;
        std::string flags;               // of the one process, too
        std::string more;                // --stages
        std::vector<std::string> quick;  // schedules that `make test` runs
    };
    const std::vector<Case> cases = {
        {"long-llama", 4, 1, "--micro-batch 1 ", "", {"1f1b", "zb-h2", "zb-v", "interleaved"}},
        {"long-llama", 3, 1, "--batch 5 --micro-batch 1 ", "--stages 2,3,4 ", {"gpipe", "zb-h1"}},
        {"long-llama", 2, 1, "--batch 3 --micro-batch 1 ", "", {"dualpipe-v"}},
        {"long-llama", 8, 1, "--batch 9 --micro-batch 1 ", "--stages 1,1,1,2,1,1,1,1 ", {"auto"}},
        {"long-llama-17", 8, 1, "--batch 17 --micro-batch 1 ", "", {"zb-v"}},
        {"long-llama-17", 8, 2, "--batch 16 --micro-batch 1 ", "", {}},
        {"long-llama", 4, 2, "--batch 12 --micro-batch 1 ", "", {"interleaved"}},
        {"long-qwen3", 3, 1, "--batch 7 --micro-batch 1 ", "", {"zb-v"}},
        {"long-deepseek", 2, 2, "--batch 12 --micro-batch 2 ", "", {"interleaved"}},
        {"long-deepseek", 4, 1, "--micro-batch 1 ", "", {}},
        {"long-mfa", 2, 1, "--micro-batch 2 ", "", {"naive"}},
        {"long-mfa", 3, 1, "--micro-batch 2 ", "", {"zb-h2"}},
        // Few micro-batches, one in all as well: ranks that wait most of the time.
        {"long-qwen3", 4, 1, "--batch 2 --micro-batch 1 ", "", {}},
        {"long-qwen3", 4, 1, "--batch 2 ", "", {"zb-v"}},
    };
    PipelineRuns runs;
    std::set<std::string> trained = {"dualpipe"};  // below
    for (const Case& c : cases)
        for (const std::string& schedule : is_full() ? synchronous_schedules() : c.quick) {
            if (schedule == "dualpipe" || (schedule == "interleaved" && c.pp == 8 && c.model == "long-llama")) continue;
            if (has_turn(schedule) && 2 * c.pp > (c.model == "long-llama-17" ? 17 : 9)) continue;
            const bool has_stages = !has_turn(schedule) && schedule != "interleaved";
            INFO(c.model << " " << c.flags << c.more << schedule << " on " << c.pp << ", dp " << c.dp);
            const std::string one = c.dp > 1 ? concat("--ranks ", c.dp, " ") : "";
            check_same_bits(runs.run(c.model, c.flags + on_pipeline(c.pp, schedule, c.dp) + (has_stages ? c.more : "")),
                            runs.run(c.model, c.flags + one));
            trained.insert(schedule);
        }
    for (const std::string& name : synchronous_schedules()) {
        INFO(name << " is in none of the lists of schedules that make test runs");
        CHECK(trained.count(name) == 1);
    }
}

TEST_CASE("with a tied embedding all synchronous schedules have the same bits, and one process's numbers",
          "[program][ranks][pipeline]") {
    PipelineRuns runs;
    // Momentum is linear in the gradients: what is 0 but for rounding stays so.
    const std::string flags = "--optimizer momentum --lr 0.01 --micro-batch 1 --batch ";
    for (const int pp : is_full() ? std::vector<int>{2, 3, 4, 8} : std::vector<int>{4})
        for (const int dp : is_full() ? std::vector<int>{1, 2} : std::vector<int>{1}) {
            const std::string batch = flags + (dp == 2 ? "10 " : "5 ");
            const std::string one = runs.run("long-gpt2", batch + (dp == 2 ? "--ranks 2 " : ""));
            std::string first;
            for (const std::string& schedule :
                 is_full() ? synchronous_schedules() : std::vector<std::string>{"1f1b", "interleaved", "zb-v"}) {
                if (schedule == "dualpipe" || (pp == 8 && (has_turn(schedule) || schedule == "interleaved"))) continue;
                INFO(batch << schedule << " on " << pp << ", dp " << dp);
                const std::string run = runs.run("long-gpt2", batch + on_pipeline(pp, schedule, dp));
                if (first.empty()) first = run, check_same_run(run, one, 1e-6);
                check_same_bits(run, first);
            }
        }
}

TEST_CASE("dualpipe has the bits of 1f1b with two data-parallel ranks", "[program][ranks][pipeline]") {
    // But for the norm: there the two ranks have its sums, here one of them has all of a unit's. So nothing is clipped.
    PipelineRuns runs;
    const std::string flags = "--micro-batch 1 --clip 0 ";
    const auto losses = [](const std::string& run) {
        std::vector<double> all;
        for (const LogRow& row : read_csv_log(run + "/log.csv"))
            all.insert(all.end(), {*row.loss, row.val_loss.value_or(0)});
        return all;
    };
    for (const std::string model : {"long-llama", "long-deepseek"})
        for (const int pp : is_full() ? std::vector<int>{2, 4, 6, 8} : std::vector<int>{4}) {
            if (!is_full() && model != "long-llama") continue;
            INFO(model << " on " << pp);
            const std::string run = runs.run(model, flags + on_pipeline(pp, "dualpipe")),
                              two = runs.run(model, flags + on_pipeline(2, "1f1b", 2));
            CHECK(losses(run) == losses(two));
            CHECK((weights_of(run) == weights_of(two)));
            check_same_run(run, two, 1e-6);
            // Of a tied embedding the two ends are on both ranks.
            const std::string more = "--optimizer momentum --lr 0.01 ", tied = "long-gpt2";
            check_same_run(runs.run(tied, flags + more + on_pipeline(pp, "dualpipe")), runs.run(tied, flags + more),
                           1e-6);
        }
    // fp8's scales follow from the largest values of all micro-batches, of which each of the two has seen half.
    const std::string fp8 = flags + "--dtype fp8 ";
    if (!can_train(fp8)) return;
    const std::string run = runs.run("deep-gqa", fp8 + on_pipeline(2, "dualpipe")),
                      two = runs.run("deep-gqa", fp8 + on_pipeline(2, "1f1b", 2));
    CHECK((weights_of(run) == weights_of(two)));
}

// ---------------------------------------------------------------------------------------------------------------------
// Together with everything else: the bits of the run without --pp (more in test_pipeline_meshes.cu)

TEST_CASE("pipelines in 8 and 16 bits, with recomputation, masks and every kind of optimizer have the bits of one rank",
          "[program][ranks][pipeline]") {
    struct Case {
        std::string flags, schedules;  // of the first rank alone
        std::string quick = "";        // the schedule that `make test` runs
    };
    const std::string recompute = "naive gpipe 1f1b interleaved";
    const std::vector<Case> cases = {
        {"--dtype bf16 ", "1f1b interleaved zb-h2 zb-v dualpipe-v"},
        {"--dtype bf16 --grad-dtype same --master none ", "1f1b zb-v"},
        {"--dtype fp16 --loss-scale-start 4096 ", "1f1b interleaved zb-h1 zb-v dualpipe-v"},
        {"--dtype fp8 ", "1f1b interleaved zb-h1 zb-v dualpipe-v", "dualpipe-v"},
        {"--dtype fp8 --fp8 current ", "1f1b zb-v"},
        {"--dtype fp8 --fp8 block ", "1f1b zb-v", "zb-v"},
        {"--recompute full ", recompute, ""},
        {"--recompute 2 --head-chunks 3 ", recompute, ""},
        {"--recompute selective ", recompute, ""},
        {"--recompute full --dtype fp8 ", "1f1b"},
        {"--mask-documents ", "1f1b interleaved zb-v", "zb-v"},
        {"--optimizer muon ", "1f1b zb-v"},
        {"--optimizer adafactor ", "1f1b zb-v"},
        {"--optimizer adam8bit ", "1f1b zb-v"},
        {"--optimizer lion --dtype bf16 --master none ", "1f1b zb-v"},
    };
    PipelineRuns runs;
    const TempFolder data;
    for (int i = 0; i < 40; ++i) spit(data / concat("file", i, ".txt"), made_text(1 + i % 3));
    for (const Case& c : cases) {
        if ((!is_full() && c.quick.empty()) || !can_train(c.flags)) continue;
        std::istringstream schedules(is_full() ? c.schedules : c.quick);
        for (std::string schedule; schedules >> schedule;) {
            INFO(c.flags << schedule);
            std::string flags = c.flags + "--steps 8 --val-every 4 --micro-batch 1 ";
            if (c.flags.find("--mask") != std::string::npos) flags += "--data " + data.path + " ";
            check_same_bits(runs.run("deep-gqa", flags + on_pipeline(2, schedule)), runs.run("deep-gqa", flags));
        }
    }
}

TEST_CASE("the account has the collectives of pipelines whose ranks are several steps ahead",
          "[program][ranks][pipeline]") {
    PipelineRuns runs;
    for (const std::string schedule : {"1f1b", "zb-h2", "2bw"}) {
        const Outcome its = runs.outcome(
            "long-llama", on_pipeline(2, schedule, 2) + "--micro-batches 3 --clip 0 --steps 3 --val-every 0",
            runs.folder / schedule);
        INFO(schedule << "\n" << its.err);
        CHECK_THAT(its.out, ContainsSubstring("  collectives took "));
    }
}

TEST_CASE("pipelines beside ranks that divide batches, sequences and layers have the bits of those ranks",
          "[program][ranks][pipeline]") {
    struct Case {
        int ranks;
        std::string model, flags;
        std::vector<std::string> quick = {};  // schedules that `make test` runs
    };
    const std::vector<Case> cases = {
        {2, "long-llama", "--zero 1 ", {"1f1b"}},
        {2, "long-deepseek", "--zero 1 --dtype bf16 "},
        {2, "long-llama", "--compress bf16 --grad-dtype fp32 "},
        {2, "long-llama", "--compress 1bit --clip 0 ", {"1f1b"}},
        {2, "long-llama", "--compress powersgd --clip 0 "},
        {2, "long-llama", "--cp 2 ", {"zb-h1"}},
        {2, "long-deepseek", "--cp 2 --cp-mode ulysses "},
        {2, "deep-gqa", "--tp 2 "},
        {2, "long-deepseek", "--tp 2 --sp --tp-overlap ", {"interleaved"}},
        {4, "deep-gqa", "--tp 2 --sp --zero 1 "},
        {4, "deep-gqa", "--tp 4 --tp-mode 2d --batch 12 --micro-batch 4 ", {"zb-v"}},
        {8, "deep-gqa", "--tp 2 --cp 2 --zero 1 --batch 12 "},
    };
    PipelineRuns runs;
    for (const Case& c : cases)
        for (const std::string& schedule :
             is_full() ? std::vector<std::string>{"1f1b", "interleaved", "zb-h1", "zb-v"} : c.quick) {
            INFO(c.model << " " << c.flags << schedule);
            std::string flags = c.flags + "--steps 8 --val-every 4 ";
            if (c.flags.find("--micro-batch") == std::string::npos) flags += "--micro-batch 1 ";
            const std::string with_pp = concat("--ranks ", 2 * c.ranks, " --pp 2 --pipeline ", schedule, " ");
            check_same_bits(runs.run(c.model, flags + with_pp), runs.run(c.model, concat(flags, "--ranks ", c.ranks)));
        }
}

TEST_CASE("an overflow in the last stage: all stages skip the step, as one process does",
          "[program][ranks][pipeline]") {
    PipelineRuns runs;
    const std::string flags =
        "--dtype fp16 --loss-scale-start 4096 --steps 6 --val-every 0 --micro-batch 1 --inject-overflow 3 ";
    const std::string one = runs.run("long-llama", flags);
    const std::vector<LogRow> rows = read_csv_log(one + "/log.csv");
    CHECK(*rows[1].loss_scale == 4096);
    CHECK(*rows[2].loss_scale == 2048);  // of the next step
    for (const std::string& schedule : is_full()
                                           ? std::vector<std::string>{"1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"}
                                           : std::vector<std::string>{"1f1b", "zb-v"}) {
        INFO(schedule);
        check_same_bits(runs.run("long-llama", flags + on_pipeline(3, schedule)), one);
    }
    // It is in one rank's gradients alone, which the other stages have not seen.
    const std::string dual = runs.run("long-llama", flags + on_pipeline(2, "dualpipe"));
    CHECK(*read_csv_log(dual + "/log.csv")[3].loss_scale == 2048);
}

TEST_CASE("where ranks do not wait between steps, a step that fails comes behind those before it",
          "[program][ranks][pipeline]") {
    PipelineRuns runs;
    struct Case {
        std::string flags;
        size_t steps;  // that are made before it
        std::string words, advice = "";
    };
    for (const Case& c :
         {Case{"zb-h2 --micro-batch 1 --clip 0 --inject-overflow 3", 2, "some ranks may have updated their weights by",
               "a longer --warmup, --clip 1, or"},
          {"zb-v --micro-batch 1 --clip 1 --inject-overflow 3", 2, "the weights are unchanged by this step",
           "a longer --warmup, a smaller --clip, or"},
          {"pipedream --clip 0 --lr 1e30 --flush-every 6", 1,
           "the loss is nan and the gradient norm nan. With --pipeline "
           "pipedream the weights have been updated with them. Nothing was saved yet: start again with a smaller --lr"},
          {"pipedream --clip 0 --lr 1e30 --flush-every 1 --save-every 1", 1,
           "checkpoints/step-00000001 --out OTHER, "}}) {
        INFO(c.flags);
        const std::string run = runs.folder / std::to_string(runs.number++);
        const Outcome outcome = runs.outcome("long-llama", on_pipeline(2, c.flags) + "--steps 6 --val-every 0 ", run);
        CHECK(outcome.status == 2);
        CHECK_THAT(outcome.err, ContainsSubstring(concat("step ", c.steps + 1, ": the loss is ")) &&
                                    ContainsSubstring(c.words) && ContainsSubstring(c.advice));
        CHECK(read_csv_log(run + "/log.csv").size() == c.steps);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Asynchronous schedules, against one process that keeps every version of the weights
//
// From the papers, and not from our tables. A pipeline is empty before the first micro-batch of a segment; version v of
// a stage's weights has v updates since then. Stage s of p, counted from 0; micro-batch i of the segment.
//     PipeDream (Narayanan et al. 2019, 3.2, 3.3). At the beginning a stage takes as many forwards as micro-batches are
//     under way behind it, p - s with its own; then one backward, which is followed by an update, and one forward by
//     turns. So it has made i - (p - s) + 1 updates before its forward of micro-batch i, and its backward uses the
//     weights of that forward (weight stashing). With vertical sync all stages use the number of the first one, s = 0.
//     PipeDream-2BW (Narayanan et al. 2020, 3.1). W(t + 1) = W(t) - lr grad(W(t - 1)) of the batches t of m >= p
//     micro-batches; the first two batches compute with W(0).

namespace {

struct AsyncRun {
    std::string pipeline;
    bool vertical_sync;
    std::string model;
    std::vector<int> stages;  // blocks of each
    int dp, micro_batches;    // data-parallel ranks; micro-batches of a step on each
    int flush_every, steps;
    std::string optimizer = "adamw";
    int p() const { return static_cast<int>(stages.size()); }
    int batch() const { return 2 * dp * micro_batches; }  // micro-batches of two sequences
    int version(int stage, int step) const {              // step of the segment
        if (pipeline == "2bw") return std::max(0, step - 1);
        return std::max(0, step - (p() - (vertical_sync ? 0 : stage)) + 1);
    }
    std::string flags() const {
        std::string blocks;
        for (const int n : stages) blocks += (blocks.empty() ? "" : ",") + std::to_string(n);
        // A loss scale that is a power of two changes no bit, of losses, norms or weights.
        return concat(on_pipeline(p(), pipeline, dp), "--stages ", blocks, vertical_sync ? " --vertical-sync" : "",
                      " --loss-scale 1024 --clip 0 --batch ", batch(), " --micro-batches ", micro_batches,
                      " --flush-every ", flush_every, " --save-every ", flush_every, " --steps ", steps,
                      " --keep 0 --val-every 0 --optimizer ", optimizer, " --lr 0.003 ");
    }
};

class Oracle {
  public:
    explicit Oracle(const AsyncRun& run)
        : run_(run), m_(load_config(model_file(run.model)), 2, kT),
          data_(open_train_and_val(text_file(), "", *make_byte_tokenizer(), 0.1).first, kT, 1) {
        for (int pass = 0; pass < 2; ++pass) {
            optimizer_ = make_optimizer(run.optimizer, states_, m_.model.params, m_.model.n,
                                        default_optimizer_options(run.optimizer));
            if (pass == 0) states_.reserve();
        }
        optimizer_->init(device().stream);
        init_weights(m_.model, 1);
        const float one[2] = {1, 1};  // no clipping
        copy_to_device(m_.norm, one);
        schedule_ = {.peak = 0.003, .warmup = 2, .steps = run.steps};
    }
    // Steps first to first + n - 1, of a pipeline that is empty before and after.
    void segment(int first, int n) {
        std::vector<std::vector<float>> versions = {to_floats(m_.model.weights)};
        for (int step = 0; step < n; ++step) {
            copy_to_device(m_.model.weights, mixed(versions, step).data());
            const std::vector<float> grads = gradients(first + step);
            copy_to_device(m_.model.grads, grads.data());
            copy_to_device(m_.model.weights, versions.back().data());
            optimizer_->step(m_.model.all_weights(1), m_.model.grads, m_.norm, learning_rate(schedule_, first + step),
                             first + step, device().stream);
            versions.push_back(to_floats(m_.model.weights));
        }
    }
    std::vector<double> losses, norms;
    const Model& model() const { return m_.model; }

  private:
    static constexpr int64_t kT = 16;

    // The weights with which a step's micro-batches compute: of each stage the version that it uses.
    std::vector<float> mixed(const std::vector<std::vector<float>>& versions, int step) const {
        std::vector<float> weights = versions[0];
        for (const Unit& unit : m_.model.units) {
            const auto& version = versions[static_cast<size_t>(run_.version(stage_of(unit), step))];
            std::copy_n(version.begin() + unit.offset, unit.n, weights.begin() + unit.offset);
        }
        return weights;
    }
    int stage_of(const Unit& unit) const {
        if (unit.number == 0) return 0;
        size_t end = 0;
        for (int stage = 0; stage < run_.p(); ++stage)
            if (unit.number <= (end += static_cast<size_t>(run_.stages[static_cast<size_t>(stage)]))) return stage;
        return run_.p() - 1;  // the head
    }
    // The ranks' sums over their micro-batches, added.
    std::vector<float> gradients(int step) {
        std::vector<float> sum;
        double loss = 0, squares = 0;
        int64_t sequence = static_cast<int64_t>(step - 1) * run_.batch();
        for (int rank = 0; rank < run_.dp; ++rank) {
            m_.zero_grads();
            for (int micro = 0; micro < run_.micro_batches; ++micro, sequence += 2) {
                std::vector<int32_t> tokens(2 * kT), targets(tokens.size());
                for (int64_t b = 0; b < 2; ++b)
                    data_.sequence(sequence + b, tokens.data() + b * kT, targets.data() + b * kT);
                m_.set_batch(tokens, targets);
                forward(m_.model, m_.acts, m_.workspace, device().stream);
                loss_backward(m_.model, m_.acts, static_cast<float>(1 / static_cast<double>(run_.batch() * kT)),
                              device().stream);
                backward(m_.model, m_.acts, m_.workspace, device().stream);
                for (const float x : to_floats(m_.acts.losses)) loss += x;
            }
            const std::vector<float> grads = to_floats(m_.model.grads);
            if (rank == 0) sum = grads;
            else
                for (size_t i = 0; i < sum.size(); ++i) sum[i] += grads[i];
        }
        for (const float x : sum) squares += static_cast<double>(x) * x;
        losses.push_back(loss / static_cast<double>(run_.batch() * kT));
        norms.push_back(std::sqrt(squares));
        return sum;
    }

    const AsyncRun run_;
    TinyTrainer m_;
    Arena states_{"states"};
    std::unique_ptr<Optimizer> optimizer_;
    BatchReader data_;
    Schedule schedule_;
};

void check_weights(const Model& expected, const std::string& checkpoint) {
    const SafetensorsReader saved(checkpoint + "/model.safetensors");
    CHECK(saved.tensors().size() == expected.params.size());
    for (const Param& param : expected.params) {
        INFO(param.name);
        CHECK((saved.at(param.name).floats() == in_file_layout(param, param.value)));
    }
}

void check_against_oracle(PipelineRuns& runs, const AsyncRun& its) {
    INFO(its.model << " " << its.flags());
    const std::string run = runs.run(its.model, its.flags());
    Oracle oracle(its);
    for (int first = 1; first <= its.steps; first += its.flush_every) {
        const int n = std::min(its.flush_every, its.steps - first + 1);
        oracle.segment(first, n);
        const std::string step = format("step-%08d", first + n - 1);
        INFO(step);
        check_weights(oracle.model(), run + "/checkpoints/" + step);
    }
    const std::vector<LogRow> rows = read_csv_log(run + "/log.csv");
    REQUIRE(rows.size() == oracle.losses.size());
    for (size_t i = 0; i < rows.size(); ++i) {
        INFO("step " << i + 1);
        // Nine digits; the sums of two ranks are added in float32.
        CHECK(*rows[i].loss == Approx(oracle.losses[i]).epsilon(its.dp == 1 ? 2e-9 : 0x1p-24));
        CHECK(*rows[i].grad_norm == Approx(oracle.norms[i]).epsilon(1e-6));
    }
}

}  // namespace

TEST_CASE("PipeDream and 2BW have the weights and losses of an oracle that keeps every version",
          "[program][ranks][pipeline]") {
    PipelineRuns runs;
    // Two segments, and a shorter one.
    std::vector<AsyncRun> cases = {
        {"pipedream", false, "long-llama", {2, 3, 2, 2}, 1, 1, 7, 16},
        {"pipedream", true, "long-llama", {2, 3, 2, 2}, 1, 1, 7, 16},
        {"2bw", false, "long-llama", {4, 2, 3}, 1, 4, 4, 9},
    };
    if (is_full()) {
        for (const std::string model : {"long-llama", "long-qwen3", "long-deepseek", "long-mfa"})
            for (const std::vector<int>& stages :
                 {std::vector<int>{4, 5}, {3, 3, 3}, {1, 4, 1, 3}, {1, 1, 1, 2, 1, 1, 1, 1}}) {
                const int p = static_cast<int>(stages.size());
                for (const bool sync : {false, true}) cases.push_back({"pipedream", sync, model, stages, 1, 1, 10, 23});
                cases.push_back({"2bw", false, model, stages, 1, p, 3, 7});
                cases.push_back({"2bw", false, model, stages, 1, p + 3, 1, 2});
            }
        for (const std::string optimizer : {"momentum", "adafactor", "muon", "lion", "adam8bit"})
            for (const std::string pipeline : {"pipedream", "2bw"})
                cases.push_back(
                    {pipeline, false, "long-llama", {3, 2, 4}, 1, pipeline == "2bw" ? 3 : 1, 6, 14, optimizer});
        cases.push_back({"pipedream", false, "long-llama", {3, 2, 4}, 2, 1, 5, 11});
        cases.push_back({"pipedream", true, "long-llama", {3, 2, 4}, 2, 1, 5, 11});
        cases.push_back({"2bw", false, "long-llama", {3, 2, 4}, 2, 4, 5, 11});
        // Segments shorter than the pipeline.
        for (const bool sync : {false, true})
            cases.push_back({"pipedream", sync, "long-llama", {2, 2, 2, 3}, 1, 1, 2, 5});
    }
    for (const AsyncRun& its : cases) check_against_oracle(runs, its);
}

TEST_CASE("PipeDream and 2BW with ZeRO 1 or rank 0's optimizer have the weights of all-reduced gradients",
          "[program][ranks][pipeline]") {
    PipelineRuns runs;
    for (const AsyncRun& its : {AsyncRun{"pipedream", false, "long-llama", {4, 5}, 2, 1, 3, 6},
                                AsyncRun{"2bw", false, "long-llama", {4, 5}, 2, 2, 3, 6}})
        for (const std::string mode : {"--zero 1 ", "--dp-mode naive "})
            CHECK(
                (weights_of(runs.run(its.model, its.flags() + mode)) == weights_of(runs.run(its.model, its.flags()))));
}

TEST_CASE("stale weights: where PipeDream, vertical sync, 2BW and one process differ", "[program][ranks][pipeline]") {
    PipelineRuns runs;
    const auto losses = [&](const std::string& pipeline, bool sync, int flush_every, int p = 3) {
        AsyncRun its{pipeline, sync, "long-llama", {3, 2, 4}, 1, 1, flush_every, 8};
        if (p == 2) its.stages = {4, 5};
        if (pipeline == "2bw") its.micro_batches = 3;
        std::vector<double> all;
        for (const LogRow& row : read_csv_log(runs.run(its.model, its.flags()) + "/log.csv")) all.push_back(*row.loss);
        return all;
    };
    const std::string plain = "--clip 0 --steps 8 --val-every 0 --lr 0.003 ";
    const auto one = [&](const std::string& flags) {
        std::vector<double> all;
        for (const LogRow& row : read_csv_log(runs.run("long-llama", plain + flags) + "/log.csv"))
            all.push_back(*row.loss);
        return all;
    };
    const std::vector<double> fresh = one("--batch 2 ");
    const auto first_difference = [](const std::vector<double>& a, const std::vector<double>& b) {
        return std::ranges::mismatch(a, b).in1 - a.begin() + 1;
    };
    // A segment of one step is a step of one process.
    CHECK(losses("pipedream", false, 1) == fresh);
    CHECK(losses("pipedream", true, 1) == fresh);
    CHECK(losses("2bw", false, 1) == one("--batch 6 --micro-batch 2 "));
    // The last stage has the newest weights without vertical sync: so it is the second step that differs.
    const std::vector<double> stashing = losses("pipedream", false, 8), sync = losses("pipedream", true, 8);
    CHECK(first_difference(stashing, sync) == 2);
    CHECK(first_difference(stashing, fresh) == 2);
    // With it, the first p micro-batches of a segment have version 0 in all stages.
    CHECK(first_difference(sync, fresh) == 2);
    CHECK(first_difference(losses("pipedream", true, 8, 2), losses("pipedream", false, 8, 2)) == 2);
    // 2BW: the first two batches have W(0).
    const std::vector<double> two = losses("2bw", false, 8);
    CHECK(first_difference(two, one("--batch 6 --micro-batch 2 ")) == 2);
}

TEST_CASE("an asynchronous pipeline refuses a tied embedding", "[program][ranks][pipeline]") {
    PipelineRuns runs;
    for (const std::string pipeline : {"pipedream", "2bw --micro-batches 2"}) {
        const std::string run = runs.folder / "wrong";
        const Outcome outcome =
            runs.outcome("long-gpt2", on_pipeline(2, pipeline) + "--clip 0 --flush-every 5 --val-every 0 ", run);
        CHECK_THAT(line_of(outcome), ContainsSubstring("--pipeline " + pipeline.substr(0, pipeline.find(' '))) &&
                                         ContainsSubstring("tie_word_embeddings"));
        CHECK(!std::filesystem::exists(run));
    }
}
