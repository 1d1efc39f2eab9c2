// Strict mode's check of races (cpu/races.cpp) on the product: a run of train_gpt in which one event wait is left out must be
// reported. (Pairs of operations that are made by hand are in wrong_kernels.cu.)
#include "program.h"

#ifdef CUDA_ON_CPU

#include <set>

namespace {

constexpr int kSeeds[] = {1, 2, 3};  // as late as possible, as early as possible, at random

// One wait of a run: its number among those of its device, and its line.
struct WaitCall {
    std::string number, place;
};

struct Mode {
    const char* name;
    const char* flags;
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
    {"zero 3, micro-batches", "--ranks 2 --zero 3 --micro-batch 1"},
    // Two ranks here, too: a unit that is gathered as soon as it is updated needs its own wait. On one rank the wait for the
    // last unit would do.
    {"offload optimizer", "--ranks 2 --zero 2 --offload optimizer --dtype bf16"},
    {"offload optimizer, no clipping", "--ranks 2 --zero 1 --offload optimizer --clip 0"},
    {"offload params", "--ranks 2 --zero 3 --offload params"},
    {"offload params, no clipping", "--ranks 2 --zero 3 --offload params --clip 0"},
    {"offload unified", "--ranks 2 --zero 1 --offload unified"},
};

// Waits that order no two accesses to the same bytes, in modes whose names begin so, by words of their lines; and why.
struct NotNeeded {
    std::string mode, words, why;
    bool always;  // or else only some of the line's waits
};
const std::vector<NotNeeded> kNotNeeded = {
    {"offload unified", "done_[unit - 2]", "it limits how many units' pages are on the device", true},
    {"zero 3", "comm_stream_, reached_", "the buffer's last readers come before an earlier wait: the other buffer's",
     false},
    {"offload params", "comm_stream_, reached_", "as in zero 3", false},
    {"offload params", "later, reached_",
     "new weights stay on the host: the next step reads them, after the last unit's wait", false},
    {"offload params", "stream, done_[u]", "the same", false},
};

// The last lines of what train_gpt prints on stderr, in strict mode with CUDA_CPU_STRICT_SKIP_WAIT=skip.
Outcome run_without(const Mode& mode, const std::string& skip, int seed) {
    static const TempFolder folder;
    static const bool written = [] {
        std::string text;
        for (int i = 0; i < 300; ++i) text += concat("Line ", i * i % 97, " of a text that a test made.\n");
        spit(folder / "text.txt", text);
        spit(folder / "model.json", kModel);
        return true;
    }();
    static_cast<void>(written);
    const TempFolder out;
    return run_program(
        "train_gpt",
        concat("--data ", folder / "text.txt", " --model ", folder / "model.json",
               " --batch 4 --seq 8 --steps 2 --warmup 1 --sample 0 --val-every 0 --val-sequences 2 ", mode.flags,
               " --out ", out / "run"),
        concat("ulimit -c 0; CUDA_CPU_STRICT_SKIP_WAIT=", skip, " CUDA_CPU_STRICT=", seed, " OMP_NUM_THREADS=1 "));
}

// The exception that a wait falls under; nullptr: none.
const NotNeeded* exception_for(const Mode& mode, const std::string& place) {
    const size_t colon = place.rfind(':');
    std::ifstream file(place.substr(0, colon));
    std::string line;
    for (int n = std::stoi(place.substr(colon + 1)); n > 0; --n) std::getline(file, line);
    for (const NotNeeded& each : kNotNeeded)
        if (std::string(mode.name).rfind(each.mode, 0) == 0 && line.find(each.words) != std::string::npos) return &each;
    return nullptr;
}

// Those that order something. All ranks make the same calls: device 0's are listed.
std::vector<WaitCall> waits_of(const Mode& mode) {
    const Outcome outcome = run_without(mode, "list", 1);
    INFO(mode.name << "\n" << outcome.err);
    REQUIRE(outcome.status == 0);
    std::vector<WaitCall> waits;
    std::istringstream lines(outcome.err);
    for (std::string line; std::getline(lines, line);) {
        const std::string before = "shown: wait ", between = " of device 0, at ", after = ", orders more";
        const size_t middle = line.find(between), end = line.rfind(after);
        if (line.rfind(before, 0) != 0 || middle == std::string::npos || end == std::string::npos) continue;
        const size_t place = middle + between.size();
        waits.push_back({line.substr(before.size(), middle - before.size()), line.substr(place, end - place)});
    }
    REQUIRE(!waits.empty());
    return waits;
}

bool is_reported(const Mode& mode, const std::string& skip, int seed) {
    const Outcome outcome = run_without(mode, skip, seed);
    const bool reported = outcome.err.find("race between streams") != std::string::npos;
    INFO(mode.name << " without wait " << skip << ", seed " << seed << ":\n" << outcome.err);
    CHECK_THAT(outcome.err, ContainsSubstring("skipped: wait "));
    CHECK(reported == (outcome.status != 0));
    return reported;
}

}  // namespace

TEST_CASE("a line that waits for an event and is left out is reported, in each mode of many ranks and of offloading",
          "[cpu][program]") {
    int n = 0;
    for (const Mode& mode : kModes) {
        std::set<std::string> places;
        for (const WaitCall& wait : waits_of(mode)) places.insert(wait.place);
        for (const std::string& place : places) {
            const NotNeeded* exception = exception_for(mode, place);
            if (exception && exception->always) continue;
            INFO(mode.name << " without the waits at " << place);
            CHECK(is_reported(mode, place, kSeeds[n++ % 3]));
        }
    }
}

TEST_CASE("each event wait that is left out is reported", "[.][ranks]") {
    if (!std::getenv("LLM_TEST_RANKS")) return;
    int n = 0;
    for (const Mode& mode : kModes)
        for (const WaitCall& wait : waits_of(mode)) {
            if (exception_for(mode, wait.place)) continue;
            INFO(mode.name << " without wait " << wait.number << " at " << wait.place);
            CHECK(is_reported(mode, wait.number, kSeeds[n++ % 3]));
        }
}

#endif
