// Strict mode's check of races (cpu/races.cpp) on the product: a run of train_gpt in which one event wait is left out
// must be reported. (Pairs of operations that are made by hand are in wrong_kernels.cu.)
#include "program.h"

#ifdef CUDA_ON_CPU

#include <set>
#include <sstream>

namespace {

constexpr int kSeeds[] = {1, 2, 3};  // as late as possible, as early as possible, at random

struct Mode {
    const char* name;
    const char* flags;  // train_gpt's
};

const std::string kModel =
    R"({"model_type":"llama","vocab_size":257,"hidden_size":16,"intermediate_size":24,"num_hidden_layers":3,
        "num_attention_heads":2,"num_key_value_heads":1,"head_dim":8,"max_position_embeddings":64,"rms_norm_eps":1e-5,
        "rope_theta":10000.0,"tie_word_embeddings":false,"hidden_act":"silu"})";

const std::vector<Mode> kModes = {
    {"ddp", "--ranks 2 --bucket-mib 0.004"},
    {"ddp, micro-batches", "--ranks 2 --bucket-mib 0.004 --micro-batch 1"},
    {"naive", "--ranks 2 --dp-mode naive"},
    {"compressed", "--ranks 2 --compress fp8"},
    {"power sgd", "--ranks 2 --compress powersgd --compress-rank 2"},
    {"zero 1", "--ranks 2 --zero 1"},
    {"zero 2", "--ranks 2 --zero 2 --micro-batch 1"},
    {"zero 3", "--ranks 2 --zero 3"},
    {"context parallel", "--ranks 3 --cp 3 --seq 12"},
    {"zero 3, micro-batches", "--ranks 2 --zero 3 --micro-batch 1"},
    // Two ranks here, too: a unit that is gathered as soon as it is updated needs its own wait. On one rank the wait
    // for the last unit would do.
    {"offload optimizer", "--ranks 2 --zero 2 --offload optimizer --dtype bf16"},
    {"offload optimizer, no clipping", "--ranks 2 --zero 1 --offload optimizer --clip 0"},
    {"offload params", "--ranks 2 --zero 3 --offload params"},
    {"offload params, no clipping", "--ranks 2 --zero 3 --offload params --clip 0"},
    {"offload unified", "--ranks 2 --zero 1 --offload unified"},
    {"offload unified, states in 8 bits", "--offload unified --optimizer adam8bit"},
    {"tp", "--ranks 4 --tp 2"},
    {"tp, sp", "--ranks 4 --tp 2 --sp"},
    {"tp, overlap", "--ranks 4 --tp 2 --sp --tp-overlap"},
    {"tp 2d", "--ranks 8 --tp 4 --tp-mode 2d"},
    {"pipeline", "--ranks 4 --pp 2 --micro-batch 1"},
    {"pipeline, zero bubble", "--ranks 4 --pp 2 --pipeline zb-h2 --zero 1 --micro-batch 1 --clip 0.01"},
    {"pipeline, both ways", "--ranks 4 --pp 2 --pipeline dualpipe --micro-batch 1"},
    {"pipeline, stale weights", "--ranks 4 --pp 2 --pipeline pipedream --clip 0 --flush-every 2"},
    {"pipeline, stale weights, zero 1", "--ranks 4 --pp 2 --pipeline pipedream --clip 0 --flush-every 2 --zero 1"},
    {"two streams", nullptr},  // comm_check two-streams
};

// Waits that order no two accesses to the same bytes in train_gpt, by words of their lines; and why they are there.
struct OrdersNoAccesses {
    std::string words, why;
};
const std::vector<OrdersNoAccesses> kExceptions = {
    {"done_[unit - 2]", "it limits how many units' pages are on the device at a time"},
    {"its->sent", "who waits for the end of a table waits for its last messages, too, which other ranks need"},
    {"last_call_", "the stream of the collectives is ordered already; two-streams needs it"},
};

// A run in strict mode with CUDA_CPU_STRICT_SKIP_WAIT=skip.
Outcome run_without(const Mode& mode, const std::string& skip, int seed) {
    static const TempFolder folder;
    static const bool written = [] {
        spit(folder / "text.txt", made_text(300));
        spit(folder / "model.json", kModel);
        return true;
    }();
    static_cast<void>(written);
    const std::string environment =
        concat("ulimit -c 0; CUDA_CPU_STRICT_SKIP_WAIT=", skip, " CUDA_CPU_STRICT=", seed, " ");
    if (!mode.flags) return run_program("comm_check", "--ranks 2 two-streams", environment);
    const TempFolder out;
    return run_program("train_gpt",
                       concat("--data ", folder / "text.txt", " --model ", folder / "model.json",
                              " --batch 4 --seq 8 --steps 2 --warmup 1 --sample 0 --val-every 0 --val-sequences 2 ",
                              mode.flags, " --out ", out / "run"),
                       environment);
}

bool is_exception(const Mode& mode, const std::string& place) {
    const size_t colon = place.rfind(':');
    std::ifstream file(place.substr(0, colon));
    std::string line;
    for (int n = std::stoi(place.substr(colon + 1)); n > 0; --n) std::getline(file, line);
    for (const OrdersNoAccesses& each : kExceptions)
        if (mode.flags && line.find(each.words) != std::string::npos) return true;
    return false;
}

// The lines that wait for events, as file:line.
std::set<std::string> waits_of(const Mode& mode) {
    const Outcome outcome = run_without(mode, "list", 1);
    INFO(mode.name << "\n" << outcome.err);
    REQUIRE(outcome.status == 0);
    std::set<std::string> places;
    std::istringstream lines(outcome.err);
    const std::string before = "wait at ";
    for (std::string line; std::getline(lines, line);)
        if (line.starts_with(before) && !is_exception(mode, line.substr(before.size())))
            places.insert(line.substr(before.size()));
    REQUIRE(!places.empty());
    return places;
}

void check_reported(const Mode& mode, const std::string& place, int seed) {
    const Outcome outcome = run_without(mode, place, seed);
    INFO(mode.name << " without the wait at " << place << ", seed " << seed << ":\n" << outcome.err);
    CHECK(outcome.status != 0);
    CHECK_THAT(outcome.err, ContainsSubstring("race between streams"));
}

}  // namespace

TEST_CASE("a wait for an event that is left out is reported, in each mode of many ranks and of offloading",
          "[cpu][program]") {
    int n = 0;
    for (const Mode& mode : kModes)
        for (const std::string& place : waits_of(mode)) check_reported(mode, place, kSeeds[n++ % 3]);
}

TEST_CASE("a wait for an event that is left out is reported under every seed", "[.][ranks]") {
    if (!std::getenv("LLM_TEST_RANKS")) return;
    for (const Mode& mode : kModes)
        for (const std::string& place : waits_of(mode))
            for (const int seed : kSeeds) check_reported(mode, place, seed);
}

#endif
