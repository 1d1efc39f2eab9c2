// test/test_ranks.cu: train_gpt on many ranks against the same run on one.
//
// The loss curve is a function of the flags and the seed, not of the ranks. Two kinds of "the same":
//   to the bit    with the same number of ranks, ddp and ZeRO 1, 2, 3 add the same numbers in the same order, as long
//                 as a step is one micro-batch a rank: losses, norms and weights. naive does, too, but for the norm:
//                 rank 0 alone sums the squares. So its losses and weights are the same where no gradient is clipped
//   to 1e-5       over other numbers of ranks the batch is divided differently, so sums of gradients round
//                 differently. At a rate of 1e-3 this stays below 2e-7 in 20 steps; at 3e-3, where the first steps are
//                 chaotic, any two roundings (also two sizes of micro-batch on one rank) are 1e-4 apart
#include "io/io.h"
#include "parallel/data/data.h"
#include "program.h"
#include "run_models.h"

#include <cmath>

namespace {

const std::string kRun = " --steps 20 --seq 16 --lr 1e-3 --warmup 10 --sample 0 --val-every 10 --val-sequences 24 ";

const std::string& text_file() {
    static const TempFolder folder;
    static const std::string path = [] {
        std::string text;
        for (int i = 0; i < 1200; ++i)
            text += concat("Line ", i * i % 97, " of a text that a test made, with ", i % 7, " words.\n");
        spit(folder / "text.txt", text);
        return folder / "text.txt";
    }();
    return path;
}

// No number of ranks divides their sizes.
std::string odd_model(bool gpt2) { return model_file(gpt2 ? "odd-gpt2" : "odd-llama"); }

Outcome run_ranks(const std::string& flags, const std::string& run, const std::string& before = "") {
    return run_on_ranks("--data " + text_file() + kRun + flags + " --out " + run, before);
}
std::vector<LogRow> train(const std::string& flags, const std::string& run, const std::string& before = "") {
    INFO(flags);
    must_succeed(run_ranks(flags, run, before));
    return read_csv_log(run + "/log.csv");
}

// The largest relative difference of two curves: losses, validation losses, norms.
double difference(const std::vector<LogRow>& a, const std::vector<LogRow>& b) {
    REQUIRE(a.size() == b.size());
    double largest = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        REQUIRE(a[i].val_loss.has_value() == b[i].val_loss.has_value());
        largest = larger(largest, std::abs(*a[i].loss / *b[i].loss - 1));
        if (a[i].val_loss) largest = larger(largest, std::abs(*a[i].val_loss / *b[i].val_loss - 1));
    }
    return largest;
}
bool same_bits(const std::vector<LogRow>& a, const std::vector<LogRow>& b) {
    for (size_t i = 0; i < a.size(); ++i)
        if (a[i].loss != b[i].loss || a[i].val_loss != b[i].val_loss || a[i].grad_norm != b[i].grad_norm) return false;
    return a.size() == b.size();
}

const std::vector<std::string> kModes = {"--zero 0", "--dp-mode naive", "--zero 1", "--zero 2", "--zero 3"};

}  // namespace

TEST_CASE("1, 2, 3, 4 and 8 ranks in every mode give the curve of one process", "[program][ranks]") {
    const TempFolder folder;
    const std::string flags = " --batch 24 --model " + odd_model(false);
    const std::vector<LogRow> one = train(flags, folder / "one");
    CHECK(*one.back().loss < *one.front().loss - 0.05);  // there is something to get wrong
    int number = 0;
    for (int ranks : is_full() ? std::vector<int>{1, 2, 3, 4, 8} : std::vector<int>{1, 3, 8}) {
        std::string ddp;
        for (const std::string& mode : kModes) {
            const std::string run = folder / std::to_string(number++);
            INFO(ranks << " ranks, " << mode);
            const std::vector<LogRow> rows = train(flags + concat(" --ranks ", ranks, " ") + mode, run);
            CHECK(difference(rows, one) < 1e-5);
            if (mode == kModes[0]) ddp = run;  // the reference of the others
            else if (mode != "--dp-mode naive") {
                CHECK(same_bits(rows, read_csv_log(ddp + "/log.csv")));
                CHECK((weights_of(run) == weights_of(ddp)));
            }
        }
    }
}

#ifdef CUDA_ON_CPU
// Its NCCL (cpu/nccl.h) adds in another order. In strict mode, where streams are asynchronous, hosts and streams wait
// for each other as with GPUs.
TEST_CASE("by NCCL runs have the curve that they have by memory", "[program][ranks][nccl]") {
    const TempFolder folder;
    for (const char* mode : {"--ranks 3", "--ranks 3 --zero 3", "--ranks 4 --tp 2 --sp",
                             "--ranks 2 --pp 2 --micro-batch 1", "--ranks 2 --pp 2 --pipeline dualpipe --micro-batch 1",
                             "--ranks 2 --pp 2 --pipeline zb-v --micro-batch 1", "--ranks 2 --cp 2"}) {
        INFO(mode);
        const auto curve = [&](const char* comm, const char* before) {
            const std::string run = folder / concat(mode, comm, before);
            must_succeed(run_program(
                "train_gpt",
                concat("--data ", text_file(), kRun, "--steps 3 --warmup 1 --batch 12 --val-every 3 --val-sequences 4 ",
                       mode, " --model ", model_file("deep-gqa"), " --comm-timeout 60 --comm ", comm, " --out '", run,
                       "'"),
                before));
            return read_csv_log(run + "/log.csv");
        };
        const std::vector<LogRow> by_memory = curve("threads", "");
        CHECK(difference(curve("nccl", ""), by_memory) < 1e-5);
        CHECK(difference(curve("nccl", "CUDA_CPU_STRICT=1"), by_memory) < 1e-5);
    }
}
#endif

TEST_CASE("naive has ddp's losses and weights to the bit where nothing is clipped", "[program][ranks]") {
    const TempFolder folder;
    const std::string flags = " --batch 6 --clip 0 --ranks 3 --model " + odd_model(false);
    const std::vector<LogRow> ddp = train(flags, folder / "ddp"),
                              naive = train(flags + " --dp-mode naive", folder / "naive");
    REQUIRE(naive.size() == ddp.size());
    for (size_t i = 0; i < ddp.size(); ++i) {
        CHECK(naive[i].loss == ddp[i].loss);
        CHECK(naive[i].val_loss == ddp[i].val_loss);
    }
    CHECK((weights_of(folder / "naive") == weights_of(folder / "ddp")));
}

TEST_CASE("a run on many ranks repeats bit for bit, also with other buckets and under strict mode",
          "[program][ranks][strict]") {
    const TempFolder folder;
    int number = 0;
    for (const std::string& mode : kModes) {
        // Buffers are used again: by three blocks, and by the next micro-batch.
        const bool gpt2 = mode != "--zero 2";
        const std::string flags = " --steps 4 --warmup 2 --batch 6 --ranks 3 --val-every 2 --val-sequences 4 --model " +
                                  odd_model(gpt2) + (mode == "--zero 3" ? " --micro-batch 1 " : " ") + mode;
        const bool has_buckets = mode == "--zero 0";
        const std::vector<LogRow> first = train(flags, folder / std::to_string(number++));
        CHECK(same_bits(first,
                        train(flags + (has_buckets ? " --bucket-mib 0.01" : ""), folder / std::to_string(number++))));
        for (int seed : {1, 2}) {
            INFO(mode << ", seed " << seed);
            const std::vector<LogRow> strict =
                train(flags + (has_buckets ? " --bucket-mib 0.02" : ""), folder / std::to_string(number++),
                      concat("CUDA_CPU_STRICT=", seed, " "));
            CHECK(same_bits(first, strict));
        }
    }
}

TEST_CASE("ranks without a sequence to evaluate take part", "[program][ranks]") {
    const TempFolder folder;
    const std::string flags = " --steps 1 --warmup 0 --batch 3 --model ";
    train(flags + odd_model(false), folder / "model");
    const std::string model = newest_checkpoint(folder / "model");
    const std::string init = flags + model + "/config.json --val-sequences 1 --init " + model + " --ranks 3 ";
    // Before the first step nothing is in the memory of the micro-batches but what was there.
    CHECK(same_bits(train(init + "--zero 3", folder / "sharded", "MALLOC_PERTURB_=1 "),
                    train(init + "--zero 0", folder / "whole")));
}

// With muon a shard is at least one whole parameter, and this model has eleven.
TEST_CASE("ranks without a shard take part", "[program][ranks]") {
    const TempFolder folder;
    spit(folder / "config.json",
         R"({"model_type": "llama", "vocab_size": 256, "hidden_size": 8, "intermediate_size": 12,
             "num_hidden_layers": 1, "num_attention_heads": 1, "tie_word_embeddings": true})");
    const std::string flags =
        " --steps 2 --warmup 0 --batch 12 --ranks 12 --optimizer muon --model " + folder.path + "/config.json --zero ";
    const std::vector<LogRow> whole = train(flags + "0", folder / "whole");
    for (const std::string stage : {"2", "3"}) CHECK(same_bits(train(flags + stage, folder / stage), whole));
}

// What a method does to another shows only together. Everything is compared with one rank: float32 to 1e-5, and 16 bits
// to what their roundings make (the gradients of three ranks are rounded to 16 bits before they are added).
TEST_CASE("ZeRO with every optimizer, dtype, accumulation and recomputation", "[program][ranks]") {
    const TempFolder folder;
    struct Case {
        const char *flags, *modes;  // modes: stages to try
        double tolerance;
        bool bits = true;  // of all modes
    };
    const Case cases[] = {
        {"--optimizer sgd --lr 0.1", "0123", 1e-5},
        {"--optimizer nesterov --lr 0.05", "13", 1e-5},
        {"--optimizer adagrad", "2", 1e-5},
        {"--optimizer rmsprop", "3", 1e-5},
        {"--optimizer adam", "1", 1e-5},
        {"--optimizer lion --lr 1e-4", "23", 1e-5},
        {"--optimizer adafactor --lr 1e-2", "0123", 1e-5},
        {"--optimizer muon --lr 1e-2", "0123", 1e-5},
        {"--optimizer adam8bit", "0123", 2e-4},  // a last bit of a gradient may choose another of 256 codes
        {"--micro-batch 2", "0123", 1e-5, false},
        {"--micro-batch 1 --recompute selective", "3", 1e-5, false},
        {"--recompute full --clip 0.1 --head-chunks 5", "03", 1e-5},
        {"--recompute 2 --optimizer momentum --lr 0.05", "3", 1e-5},
        {"--dtype bf16", "0123", 5e-3},
        {"--dtype bf16 --grad-dtype fp32 --recompute full", "13", 5e-3},
        {"--dtype bf16 --micro-batch 2 --grad-dtype same", "023", 5e-3, false},
        {"--dtype bf16 --master none", "0123", 5e-3},
        {"--dtype bf16 --master none --optimizer muon --lr 1e-2", "03", 1e-2},
        {"--dtype fp16 --loss-scale-start 1024 --loss-scale-interval 5", "0123", 5e-3},
        {"--dtype fp16 --inject-overflow 7 --micro-batch 2", "023", 5e-3, false},
    };
    int number = 0;
    for (const Case& c : cases) {
        const bool gpt2 = number++ % 2;
        const std::string flags = concat(" --batch 12 --steps 12 --model ", odd_model(gpt2), " ", c.flags),
                          id = std::to_string(number);
        const std::vector<LogRow> one = train(flags, folder / (id + "-one"));
        std::string reference;
        for (const char* stage = c.modes; *stage; ++stage) {
            if (!is_full() && stage != c.modes && stage[1]) continue;  // the first and the last
            INFO(flags << " --zero " << *stage);
            const std::string run = folder / concat(id, "-", *stage);
            const std::vector<LogRow> rows = train(flags + concat(" --ranks 3 --zero ", *stage), run);
            CHECK(difference(rows, one) < c.tolerance);
            if (stage == c.modes) reference = run;  // the first one is what the others are compared with
            if (!c.bits || stage == c.modes) continue;
            CHECK(same_bits(rows, read_csv_log(reference + "/log.csv")));
            CHECK((weights_of(run) == weights_of(reference)));
        }
    }
}

TEST_CASE("fp8 on many ranks: one history, whatever the stage", "[program][ranks][fp8]") {
    if (!has_fp8()) SKIP_TEST(kNeedsFp8);
    const TempFolder folder;
    const std::string flags = " --batch 6 --model tiny --steps 8 --warmup 2 --dtype fp8 ";
    for (const std::string recipe : {"delayed", "block"}) {
        if (!has_fp8(recipe == "block")) continue;
        const std::vector<LogRow> one = train(flags + "--fp8 " + recipe, folder / (recipe + "-one"));
        const std::vector<LogRow> ddp = train(flags + "--ranks 3 --fp8 " + recipe, folder / (recipe + "-ddp"));
        CHECK(difference(ddp, one) < 2e-2);
        for (int zero : {1, 3}) {
            INFO(recipe << ", zero " << zero);
            const std::string run = folder / concat(recipe, zero);
            CHECK(same_bits(train(flags + concat("--ranks 3 --zero ", zero, " --fp8 ", recipe), run), ddp));
        }
    }
}

TEST_CASE("a checkpoint goes on with any number of ranks, stage and optimizer", "[program][ranks]") {
    const TempFolder folder;
    int number = 0;
    const auto resumed = [&](const std::string& flags, const std::string& before, const std::string& after) {
        const std::string run = folder / concat("run", number++);
        train(flags + before + " --stop-after 10", run);
        return train(flags + after + " --resume", run);
    };
    for (const std::string optimizer : {"adamw", "adam8bit", "muon", "adafactor"}) {
        const std::string flags = " --batch 12 --model " + odd_model(number % 2) + " --optimizer " + optimizer + " ";
        const std::vector<LogRow> whole = train(flags + " --ranks 3 --zero 1", folder / ("whole-" + optimizer));
        INFO(optimizer);
        CHECK(same_bits(resumed(flags, "--ranks 3 --zero 1", "--ranks 3 --zero 3"), whole));
        CHECK(same_bits(resumed(flags, "--ranks 3 --zero 3", "--ranks 3"), whole));
        const double tolerance = optimizer == "adam8bit" ? 2e-4 : 1e-5;
        CHECK(difference(resumed(flags, "--ranks 4 --zero 2", "--ranks 1"), whole) < tolerance);
        CHECK(difference(resumed(flags, " ", "--ranks 2 --zero 3"), whole) < tolerance);
        CHECK(difference(resumed(flags, "--ranks 3 --dp-mode naive", "--ranks 3 --zero 2"), whole) < tolerance);
    }
    const std::string flags = " --batch 12 --dtype bf16 --model " + odd_model(false) + " ";
    const std::vector<LogRow> whole = train(flags + " --ranks 2 --zero 2", folder / "whole-bf16");
    CHECK(same_bits(resumed(flags, "--ranks 2 --zero 3", "--ranks 2 --zero 1"), whole));
}

// ---------------------------------------------------------------------------------------------------------------------
// The account

namespace {

// "  weights   1115648   1114112   1118208": the numbers of a line.
std::vector<double> numbers_of(const std::string& output, const std::string& name) {
    const std::string text = output.substr(output.find("\naccount"));
    const size_t at = text.find("\n  " + name);
    REQUIRE(at != std::string::npos);
    std::istringstream line(text.substr(at + 3 + name.size(), text.find('\n', at + 1) - at - 3 - name.size()));
    std::vector<double> numbers;
    for (double x; line >> x;) numbers.push_back(x);
    return numbers;
}

}  // namespace

TEST_CASE("memory is within 5 % of the formula, traffic equal to it", "[program][ranks]") {
    const TempFolder folder;
    int number = 0;
    for (const std::string mode :
         {"--zero 0", "--dp-mode naive", "--zero 1", "--zero 2", "--zero 3", "--zero 3 --recompute 2",
          "--zero 2 --micro-batch 2", "--zero 3 --micro-batch 1", "--zero 3 --dtype bf16", "--zero 1 --dtype fp16"}) {
        for (const std::string& model : {std::string("tiny"), odd_model(true)}) {
            INFO(mode << " " << model);
            const Outcome run =
                // The last step follows an evaluation, which leaves weights of ZeRO 3: the one before is counted.
                run_ranks("--batch 12 --steps 3 --warmup 1 --ranks 3 --val-every 2 --val-sequences 3 --model " + model +
                              " " + mode,
                          folder / std::to_string(number++));
            INFO(run.out << run.err);
            REQUIRE(run.status == 0);
            const auto traffic = numbers_of(run.out, "sent by all");
            REQUIRE(traffic.size() == 2);
            CHECK(traffic[0] == traffic[1]);
            if (model != "tiny") continue;  // of a few thousand elements, parts of whole tiles are not even to 5 %
            for (const std::string what : {"weights", "gradients", "masters, optimizer"}) {
                const auto row = numbers_of(run.out, what);  // formula, least, most
                REQUIRE(row.size() == 3);
                CHECK(row[2] == Approx(row[0]).epsilon(0.05));
                if (mode != "--dp-mode naive") CHECK(row[1] == Approx(row[0]).epsilon(0.05));
            }
        }
    }
}

// A step that only follows a sample, or the evaluation of --init: it finds weights of ZeRO 3 in their buffers, and
// sends less than the formula says.
TEST_CASE("where no step follows another one the account has no formula for ZeRO 3", "[program][ranks]") {
    const TempFolder folder;
    const std::string flags = "--batch 2 --steps 1 --warmup 0 --ranks 2 --zero 3 --val-sequences 2 --model ";
    const Outcome sampled = run_ranks(flags + odd_model(true) + " --sample 2", folder / "run"),
                  evaluated = run_ranks(flags + odd_model(true) + " --init " + (folder / "run"), folder / "evaluated");
    for (const Outcome& run : {sampled, evaluated}) {
        INFO(run.out << run.err);
        REQUIRE(run.status == 0);
        CHECK(numbers_of(run.out, "sent by all").size() == 1);
        CHECK(run.out.find("\ndone in ") == run.out.rfind("\ndone in "));  // of rank 0 alone
    }
    // Where no step is made there is no account.
    const Outcome none = run_program("train_gpt", "--resume --ranks 2 --zero 3 --out " + (folder / "run"));
    CHECK(none.status == 0);
    CHECK_THAT(none.out, ContainsSubstring("resumed after step 1") && !ContainsSubstring("sent by all"));
}

TEST_CASE("without ZeRO each rank has what the formula says, to the byte", "[program][ranks]") {
    const TempFolder folder;
    // A twelfth of its 1660 bytes of states, added up twelve times, is less.
    spit(folder / "config.json",
         R"({"model_type": "llama", "vocab_size": 256, "hidden_size": 8, "intermediate_size": 12,
             "num_hidden_layers": 1, "num_attention_heads": 1, "tie_word_embeddings": true})");
    const Outcome run = run_ranks(
        "--steps 1 --warmup 0 --batch 12 --ranks 12 --optimizer adafactor --model " + folder.path + "/config.json",
        folder / "run");
    INFO(run.out << run.err);
    CHECK(numbers_of(run.out, "masters, optimizer") == std::vector<double>{1660, 1660, 1660});
}

// Counted by hand, not by the program. odd_model(false): V 257 is padded to 384; C 40, F 52, 5 query heads and 1
// key/value head of 8; each parameter begins at a multiple of 64 elements.
TEST_CASE("traffic is what was counted by hand", "[program][ranks]") {
    constexpr int64_t E = 384 * 40;                                                    // embedding: wte
    constexpr int64_t B = 64 + 56 * 40 + 40 * 40 + 64 + 2 * 52 * 40 + (52 * 40 + 32);  // a block: norm1, qkv, attn_out,
                                                                                       // norm2, gate and up, down
    constexpr int64_t H = 64 + 384 * 40;                                               // head: final norm, lm_head
    constexpr int64_t P = E + 3 * B + H;
    static_assert(P == 61504);
    // ZeRO 3. Buffers: {block 0, block 2}, {block 1}, {embedding, head}. A step asks for E 0 1 2 H, H 2 1 0: block 0
    // comes twice, because block 2 has taken its buffer. A second micro-batch finds 0 and 1 in their buffers: E 2 H, 0.
    constexpr int64_t once = E + 3 * B + H + B, again = E + B + H + B;
    // Summed by all: for 5 units, the loss, and the request to stop, two f32 each.
    constexpr int64_t small = 2 * (5 + 2) * 2 * 4;
    struct Case {
        const char* flags;
        int64_t bytes;  // that one rank of two others would need: all three send twice that
    };
    const Case cases[] = {
        {"--zero 0", P * (4 + 4)},
        {"--zero 0 --micro-batch 2", P * (4 + 4)},
        {"--dp-mode naive", P * (4 + 4)},
        {"--zero 1", P * (4 + 4)},
        {"--zero 2", P * (4 + 4)},
        {"--zero 2 --micro-batch 2", P * (2 * 4 + 4)},
        {"--zero 3", P * 4 + once * 4},
        {"--zero 3 --micro-batch 2", P * 2 * 4 + (once + again) * 4},
        {"--zero 3 --dtype bf16", P * 2 + once * 2},
        {"--zero 0 --compress bf16", P * (2 + 2)},
    };
    const TempFolder folder;
    int number = 0;
    for (const Case& c : cases) {
        INFO(c.flags);
        const std::string run = must_succeed(run_ranks(
            concat("--batch 12 --steps 3 --warmup 1 --ranks 3 --val-every 0 --model ", odd_model(false), " ", c.flags),
            folder / std::to_string(number++)));
        INFO(run);
        CHECK(numbers_of(run, "sent by all").back() == static_cast<double>(2 * (c.bytes + small)));
    }
}

// The memory of the collectives differs with the algorithm, the number of ranks and what is sent.
TEST_CASE("on any number of ranks the memory taken is the memory planned, to the byte", "[program][ranks]") {
    if (!device().is_cpu) SKIP_TEST("a GPU hands out memory in pieces of 2 MiB");
    const char* cases[] = {"--ranks 1",
                           "--ranks 2",
                           "--ranks 3",
                           "--ranks 3 --dp-mode naive",
                           "--ranks 3 --zero 1 --dtype fp16",
                           "--ranks 2 --zero 2 --micro-batch 1",
                           "--ranks 3 --zero 3 --dtype bf16 --micro-batch 2",
                           "--ranks 3 --all-reduce ring --dtype bf16 --bucket-mib 0.03",
                           "--ranks 3 --all-reduce tree --dtype bf16",
                           "--ranks 3 --all-reduce halving --bucket-mib 0.01",
                           "--ranks 3 --all-reduce two-level --dtype bf16",
                           "--ranks 3 --all-reduce two-level --ranks-per-node 1",
                           "--ranks 3 --compress bf16",
                           "--ranks 3 --compress fp8",
                           "--ranks 2 --compress 1bit",
                           "--ranks 3 --compress powersgd --all-reduce tree"};
    const TempFolder folder;
    int number = 0;
    for (const std::string flags : cases) {
        if (is_full() && flags.find("--ranks-per-node") != std::string::npos) continue;  // for threads only
        INFO(flags);
        const std::string run = must_succeed(
            run_ranks("--batch 12 --steps 2 --warmup 1 --val-every 1 --model " + odd_model(true) + " " + flags,
                      folder / std::to_string(number++)));
        INFO(run);
        CHECK(count(run, "taken on the device (") == 1);
        check_memory(run);
    }
}

TEST_CASE("ranks that share a device are refused what together is more than it has", "[program][ranks]") {
    if (device_count() > 1) SKIP_TEST("each rank has a device of its own");
    const TempFolder folder;
    // One feed-forward as wide as it takes: 0.6 of the device's memory for each of two ranks.
    const auto command = [&](int64_t width) {
        spit(folder / "config.json",
             concat(R"({"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 1,
                 "num_attention_heads": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": true,
                 "max_position_embeddings": 128, "intermediate_size": )",
                    width, "}"));
        return concat("--model ", folder / "config.json", " --data ", text_file(),
                      " --seq 8 --batch 2 --sample 0 --out ", folder / "run", " --ranks 2");
    };
    const auto planned = [&](int64_t width) {
        return number_after(printed_by("train_gpt", command(width) + " --plan"), "\n  total ");
    };
    const int64_t unit = 65536;
    const double bytes_of_unit = planned(2 * unit) - planned(unit);
    const auto wide = static_cast<int64_t>(0.6 * static_cast<double>(device_memory().all) / bytes_of_unit) * unit;
    const auto fails_with = [&](const std::string& arguments, const std::string& ways) {
        const Outcome outcome = run_program("train_gpt", arguments);
        INFO(outcome.err);
        CHECK(outcome.status == 2);
        CHECK_THAT(outcome.err,
                   ContainsSubstring("for the 2 ranks that share a device, the device has ") &&
                       ContainsSubstring(concat("B: use fewer ranks, ", ways,
                                                "a shorter --seq, a smaller --model or another --optimizer\n")));
    };
    fails_with(command(wide), "--recompute, --dtype bf16, --zero 3, --offload, ");
    // What it has already is not advised. (The optimizer's states are half of all.)
    fails_with(command(2 * wide) + " --recompute full --offload unified", "--dtype bf16, --zero 3, ");
    CHECK_FALSE(std::filesystem::exists(folder / "run"));
}

TEST_CASE("the plan of a large model on many ranks takes seconds", "[program][ranks][plan]") {
    // LLaMA 70B: a pipeline of 80 ranks has a block on each. Where the places at which a block of states may be cut
    // were listed, and sorted, for each rank, this took minutes.
    const TempFolder folder;
    write_text_file(folder / "config.json",
                    R"({"model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "num_hidden_layers": 80,
                        "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672})");
    const double begin = seconds_now();
    printed_by("train_gpt",
               "--plan --dtype bf16 --seq 4096 --batch 160 --micro-batch 1 --ranks 160 --pp 80 --zero 1 "
               "--device-spec h100 --model " +
                   folder / "config.json");
    CHECK(seconds_now() - begin < 20);
}

TEST_CASE("the plan for many ranks is the ZeRO paper's table", "[program][ranks][plan]") {
    const std::string plan =
        printed_by("train_gpt", "--plan --ranks 64 --params 7.5e9 --dtype fp16 --device-spec h100");
    INFO(plan);
    for (const std::string gb : {"120 GB", "31.41 GB", "16.64 GB", "1.875 GB"})
        CHECK_THAT(plan, ContainsSubstring(" " + gb));
    // Of so many parameters no shape is known.
    CHECK_THAT(plan, !ContainsSubstring("a rank sends") && !ContainsSubstring("activations"));
}

// Muon's states are one or two numbers a weight, so that ranks differ. Weights in 8 bits are not sharded.
TEST_CASE("the plan's table of stages is the same whichever the run has, and tells what its states take",
          "[program][ranks][plan]") {
    for (const std::string flags : {"--optimizer muon", "--dtype fp8"}) {
        if (flags == "--dtype fp8" && !has_fp8()) continue;
        const auto plan = [&](int zero) {
            return printed_by("train_gpt", concat("--plan --ranks 4 --zero ", zero, " --sample 0 ", flags));
        };
        const auto gigabytes = [](const std::string& text, const std::string& row) {
            const size_t line = text.find("\n  " + row + " "), end = text.find(" GB", line);
            REQUIRE(end != std::string::npos);
            return std::stod(text.substr(text.rfind(' ', text.find_last_not_of(' ', end - 1)), end));
        };
        const std::string ddp = plan(0);
        for (const int zero : {1, 3}) {
            const std::string text = plan(zero);
            INFO(flags << "\n" << text);
            for (const std::string row : {"--zero 0 (ddp)", "--zero 1", "--zero 2", "--zero 3", "sum"})
                CHECK(gigabytes(text, row) == gigabytes(ddp, row));
            if (zero == 1 && flags == "--dtype fp8")
                CHECK(gigabytes(text, "--zero 1") == Approx(gigabytes(text, "states")).epsilon(0.02));
            if (zero == 3 && flags == "--dtype fp8") {  // of the four blocks two have their weights in 8 bits
                const double fp8 = gigabytes(text, "fp8 weights, both ways");
                CHECK(gigabytes(text, "--zero 3") ==
                      Approx((gigabytes(text, "sum") - fp8) / 4 + fp8 / 2).epsilon(0.002));
            }
        }
    }
}

// A vocabulary of 257 is padded to a multiple of 128: a fifth of this model.
TEST_CASE("the plan's table of stages counts the padding that the table of states counts", "[program][ranks][plan]") {
    const std::string plan = printed_by("train_gpt", "--plan --ranks 2 --model " + model_file("odd-llama"));
    const auto row = [&](const std::string& name) {
        const size_t line = plan.find("\n  " + name + " "), end = plan.find(" GB", line);
        REQUIRE(end != std::string::npos);
        return plan.substr(end - 20, 20);  // the bytes, in two units
    };
    INFO(plan);
    CHECK(row("--zero 0 (ddp)") == row("sum"));
}

TEST_CASE("the plan's tokens a second are those of all ranks", "[program][ranks][plan]") {
    const auto line = [](const std::string& flags) {
        const std::string plan =
            printed_by("train_gpt", "--plan --model gpt2 --seq 64 --sample 0 --device-spec h100 " + flags);
        const size_t at = plan.find("  compute ");
        REQUIRE(at != std::string::npos);
        return plan.substr(at, plan.find('\n', at) - at);
    };
    // A rank has two sequences of a step.
    CHECK_THAT(line("--batch 2"), Catch::Matchers::EndsWith("a step takes 1.8 ms to 3.23 ms, 39.7k to 71.1k tokens/s"));
    CHECK_THAT(line("--batch 8 --ranks 4"),
               Catch::Matchers::EndsWith(
                   "a step takes 1.8 ms to 3.23 ms, 159k to 284k tokens/s, without messages and the copies for them"));
}

// What compressors and other algorithms send is not what the formula says, and the plan must not say so either.
TEST_CASE("a plan tells what a rank sends where the formula holds", "[program][ranks][plan]") {
    const std::string flags = "--plan --ranks 4 --batch 4 --sample 0 --data " + text_file() + " ";
    // 837k gradients of 4 bytes, twice, to 3 of 4 ranks; and a few numbers.
    CHECK_THAT(printed_by("train_gpt", flags),
               ContainsSubstring("a rank sends  ") && ContainsSubstring(" 0.005021 GB in a step"));
    for (const std::string other : {"--compress bf16", "--compress 1bit", "--all-reduce tree"}) {
        INFO(other);
        CHECK_THAT(printed_by("train_gpt", flags + other), !ContainsSubstring("a rank sends  "));
    }
}

// All together send more than 2^63 bytes. With as many sequences, a rank sends what one of 64 does, but for their own
// share.
TEST_CASE("a plan tells what each of 65536 ranks sends", "[program][ranks][plan]") {
    const auto sent = [](int64_t ranks, const std::string& flags) {
        const std::string plan =
            printed_by("train_gpt", concat("--plan --model llama-8b --device-spec h100 --seq 2048 --sample 0 ", flags,
                                           " --ranks ", ranks, " --batch ", 8192 * ranks));
        const size_t line = plan.find("  a rank sends"), unit = plan.find("iB", line);  // "TiB", and the number of GB
        REQUIRE(unit < plan.find('\n', line));
        return std::stod(plan.substr(unit + 2));
    };
    for (const std::string flags : {"--micro-batch 1 --zero 2", "--micro-batch 1 --zero 3",
                                    "--micro-batch 1 --zero 3 --cp 2", "--micro-batch 16 --tp 8 --pp 2"}) {
        INFO(flags);
        CHECK(sent(65536, flags) == Approx(sent(64, flags)).epsilon(1. / 32));  // --cp 2: shards of 32 ranks
    }
}

TEST_CASE("a bucket that is larger than all gradients holds them all", "[program][ranks][plan]") {
    const auto total = [](const std::string& mib) {
        const std::string flags = "--plan --ranks 4 --batch 4 --sample 0 --data " + text_file() + " --bucket-mib ";
        const std::string out = printed_by("train_gpt", flags + mib);
        const size_t at = out.find("  total ");
        REQUIRE(at != std::string::npos);
        return out.substr(at, out.find('\n', at) - at);
    };
    CHECK(total("1e18") == total("1000"));
}

// ---------------------------------------------------------------------------------------------------------------------
// What goes wrong

TEST_CASE("ranks that were started differently are refused by name", "[program][ranks]") {
    if (!have_mpirun()) SKIP_TEST("no MPI");
    const TempFolder folder;
    spit(folder / "other.txt", slurp(text_file()) + "one line more\n");
    const std::string program = program_path("train_gpt"), common = kRun + " --batch 4 --out " + (folder / "run");
    std::filesystem::copy_file(program_file("train_gpt"), folder / "train_gpt");
    run_shell("printf x >> " + (folder / "train_gpt"));
    const std::string data = " --data " + text_file();
    const std::tuple<std::string, std::string, std::string> others[] = {
        {program, data + common + " --lr 2e-3", "--lr is '0.002' here"},
        {program, data + common + " --zero 1", "--zero is '1' here"},
        {program, data + common + " --stop-after 1", "--stop-after is '1' here"},
        {program, data + common + " --model mfa-tiny", "--model is 'mfa-tiny' here"},
        // These make another mesh, or end where the others begin.
        {program, data + common + " --tp 2", "--tp is '2' here"},
        {program, data + common + " --plan", "--plan is 'on' here"},
        {program, " --data " + (folder / "other.txt") + common, "--data is "},
        {folder / "train_gpt", data + common, "the program is "}};
    for (const auto& [its_program, flags, words] : others) {
        const Outcome run =
            run_shell(mpirun_of_two(concat("exec ", program, data, common), concat("exec ", its_program, flags)));
        INFO(run.out << run.err);
        CHECK(run.status != 0);
        CHECK_THAT(run.err, ContainsSubstring("rank 1: " + words));
        CHECK(!std::filesystem::exists(folder / "run/log.csv"));
    }
    // Their hosts have files of the same names and lengths.
    for (const std::string host : {"a", "b"}) {
        std::filesystem::create_directories(folder / host);
        spit(folder / host + "/text.txt", slurp(text_file()) + host);
        std::filesystem::copy_file("test/golden/llama/config.json", folder / host + "/config.json");
        std::string weights = slurp("test/golden/llama/model.safetensors");
        weights[weights.size() - 3] = host[0];
        spit(folder / host + "/model.safetensors", weights);
    }
    std::string digits;  // for the 101 tokens of that model
    for (int i = 0; i < 1000; ++i) digits += std::to_string(i);
    spit(folder / "digits.txt", digits);
    for (const auto& [flags, words] :
         {std::pair<std::string, std::string>{" --data text.txt", "the checksum of the data is "},
          {" --init . --data " + (folder / "digits.txt"), "the checksum of the weights of --init is "}}) {
        const std::string here = concat(" && exec ", program, flags, common);
        const Outcome run = run_shell(mpirun_of_two("cd " + (folder / "a") + here, "cd " + (folder / "b") + here));
        INFO(run.out << run.err);
        CHECK(run.status != 0);
        CHECK_THAT(run.err, ContainsSubstring("rank 1: " + words));
    }
    for (const auto& [flags, words] : {std::pair("--ranks 3 --batch 16", "--batch 16 cannot be divided among 3 ranks"),
                                       {"--ranks 2 --zero 4", "--zero 4"},
                                       {"--ranks 2 --zero 1 --dp-mode naive", "leave --zero out"},
                                       {"--ranks -1", "--ranks"},
                                       {"--ranks 2 --ranks-per-node -1", "--ranks-per-node -1: use 1 or more"},
                                       {"--ranks 4 --ranks-per-node 2 --all-reduce ring",
                                        "--ranks-per-node has no effect with --all-reduce ring: use --all-reduce two-"},
                                       {"--ranks 4 --tp 4 --tp-depth 2", "--tp-depth belongs to --tp-mode 2.5d"},
                                       {"--comm pigeon", "--comm pigeon"}}) {
        const Outcome run =
            run_program("train_gpt", "--data " + text_file() + kRun + flags + " --out " + (folder / "run"));
        INFO(flags << run.err);
        CHECK(run.status == 2);
        CHECK(run.out.empty());  // no rank was started
        CHECK_THAT(run.err, ContainsSubstring(words));
    }
}

// Their hosts have different files, and the stages of a pipeline meet when they are made.
TEST_CASE("a file that one rank does not find is its reason, also with a pipeline", "[program][ranks]") {
    if (!have_mpirun()) SKIP_TEST("no MPI");
    const TempFolder folder;
    for (const char* host : {"a", "b"}) std::filesystem::create_directories(folder / host);
    std::filesystem::copy_file(model_file("deep-gqa"), folder / "a/config.json");
    const std::string here = concat(" && exec ", program_path("train_gpt"), " --model config.json --data ", text_file(),
                                    " --pp 2 --comm-timeout 30 --out ", folder / "run");
    const Outcome run = run_shell(mpirun_of_two("cd " + (folder / "a") + here, "cd " + (folder / "b") + here));
    INFO(run.err);
    CHECK(run.status != 0);
    CHECK_THAT(run.err, ContainsSubstring("rank 1: ") && ContainsSubstring("config.json"));
    CHECK_THAT(run.err, ContainsSubstring("this is so on some ranks, and not on others"));
    CHECK_THAT(run.err, !ContainsSubstring("has waited"));
}

// Hosts with a disk each: the other ranks have no place for their part of a checkpoint, or one of their own.
TEST_CASE("a folder of the run that the ranks do not share is refused before the first step", "[program][ranks]") {
    if (!have_mpirun()) SKIP_TEST("no MPI");
    const TempFolder folder;
    for (const char* host : {"a", "b"}) std::filesystem::create_directories(folder / host);
    const auto run = [&](const std::string& flags) {
        const std::string here = concat(" && exec ", program_path("train_gpt"), " --data ", text_file(), kRun,
                                        "--batch 4 --out run ", flags);
        return run_shell(mpirun_of_two("cd " + (folder / "a") + here, "cd " + (folder / "b") + here));
    };
    std::filesystem::create_directories(folder / "b/run/checkpoints");
    const Outcome refused = run("--zero 1");
    INFO(refused.out << refused.err);
    CHECK(refused.status == 2);
    CHECK_THAT(refused.err, ContainsSubstring("rank 0: run, the folder of the run, is not the one that rank 1 "));
    CHECK(!std::filesystem::exists(folder / "a/run"));
    CHECK(run("").status == 0);  // rank 0 alone writes
}

TEST_CASE("a fault that all ranks find is one line under mpirun, too", "[program][ranks]") {
    if (!have_mpirun()) SKIP_TEST("no MPI");
    const TempFolder folder;
    const std::string run = " --out " + (folder / "run"), data = " --data " + text_file();
    std::filesystem::create_directory(folder / "other");
    spit(folder / "other/log.csv", "");
    for (const auto& [flags, says] : {std::pair<std::string, std::string>{data + " --batch 3", "--batch 3"},
                                      {data + " --seq 1000000", "--seq 1000000"},
                                      {data + " --ranks 3", "--ranks 3 under an mpirun of 2"},
                                      {data + " --comm threads", "--comm threads under mpirun"},
                                      {data + " --out " + (folder / "other"), "holds a run"},
                                      {" --data " + (folder / "absent"), "no data at"}}) {
        const Outcome outcome =
            run_shell(concat("OMP_NUM_THREADS=1 ", mpirun_command(2), program_path("train_gpt"), run, flags));
        INFO(outcome.err);
        CHECK(outcome.status == 2);
        const size_t at = outcome.err.find("train_gpt: ");
        REQUIRE(at != std::string::npos);
        CHECK(one_line_with(outcome.err.substr(at, outcome.err.find('\n', at) - at), says));
        CHECK(outcome.err.find("train_gpt: ", at + 1) == std::string::npos);
        CHECK(outcome.err.find("MPI_ABORT") == std::string::npos);
    }
}

TEST_CASE("--draw under mpirun is one drawing", "[program][ranks]") {
    if (!have_mpirun()) SKIP_TEST("no MPI");
    const Outcome drawn = run_shell(concat("NO_COLOR=1 ", mpirun_command(2), program_path("train_gpt"),
                                           " --pipeline 1f1b --pp 2 --micro-batches 2 --draw"));
    CHECK(drawn.status == 0);
    CHECK(drawn.out == printed_by("train_gpt", "--pipeline 1f1b --pp 2 --micro-batches 2 --draw"));
}

TEST_CASE("a killed rank ends the job; its last checkpoint goes on with the same curve", "[program][ranks]") {
    if (!have_mpirun()) SKIP_TEST("no MPI");
    const TempFolder folder;
    struct Case {
        int ranks, steps, save_every;
        std::string flags;
    };
    const Case cases[] = {
        {3, is_full() ? 600 : 200, 50, "--zero 2 --batch 6 --model " + odd_model(false)},
        {4, is_full() ? 400 : 100, 10, "--tp 2 --sp --zero 1 --batch 4 --model " + model_file("llama")}};
    const int n_kills = is_full() ? 20 : 1;
    for (const Case& c : cases) {
        const std::string id = std::to_string(c.ranks), flags = concat(c.flags, " --steps ", c.steps, " --save-every ",
                                                                       c.save_every, " --val-every ", c.steps / 3, " ");
        const std::vector<LogRow> whole = train(flags + concat(" --ranks ", c.ranks, " "), folder / ("whole" + id));
        for (int i = 0; i < n_kills; ++i) {
            const std::string run = folder / concat("run", id, "-", i);
            // The victim is found by its --out; ranks are started in order, so the last process is the last rank. It is
            // killed up to 0.6 s after the first checkpoint is there, of a run that takes some seconds.
            const std::string first_checkpoint = format("step-%08d", c.save_every);
            const std::string killer =
                concat("( for i in $(seq 6000); do [ -e ", run, "/checkpoints/", first_checkpoint,
                       " ] && break; sleep 0.02; done; sleep 0.", i * 37 % 60 / 10, i * 37 % 10,
                       "; kill -9 $(pgrep -f -- '^", program_path("train_gpt"), " .*", run, "' | tail -n 1) ) & ");
            const std::string command =
                concat("OMP_NUM_THREADS=1 ", mpirun_command(c.ranks, 300), program_path("train_gpt"), kUntimed,
                       " --data ", text_file(), kRun, flags, " --out ", run);
            Outcome killed;
            double seconds = 0;
            // Again where it had ended before it was to be killed.
            for (int tries = 0; tries < 3 && killed.status <= 0; ++tries) {
                std::filesystem::remove_all(run);
                const double start = seconds_now();
                killed = run_shell(killer + command + "; status=$?; wait; exit $status");
                seconds = seconds_now() - start;
            }
            INFO(flags << i << ": " << killed.out << killed.err);
            CHECK(seconds < 100);  // less than ranks wait for each other
            CHECK(killed.status != 0);
            CHECK_THAT(killed.err, ContainsSubstring("signal 9"));
            must_succeed(run_shell(command + " --resume"));
            CHECK(same_bits(read_csv_log(run + "/log.csv"), whole));
        }
    }
}
