// test/test_mistyped.cu: mistyped command lines, each with the words of the message that helps; and numbers as people
// write them.
//
//   run:   build/cpu/run_tests -# "[#test_mistyped]"
#include "program.h"
#include "reference.h"
#include "training/training.h"

namespace {

TrainOptions parse(std::vector<std::string> words) {
    words.insert(words.begin(), "train_gpt");
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    return parse_train_options(static_cast<int>(argv.size()), argv.data());
}

struct Mistyped {
    const char* arguments;
    std::vector<std::string> says;
};

const std::vector<Mistyped> kMistyped = {
    // Other programs' names
    {"--learning-rate 3e-4", {"unknown flag --learning-rate: did you mean --lr? (./train_gpt --help lists the flags)"}},
    {"--pipeline-model-parallel-size 4", {"unknown flag --pipeline-model-parallel-size: did you mean --pp?"}},
    {"--gradient-accumulation-steps 4", {"did you mean --micro-batches?"}},
    {"--learning 3e-4", {"did you mean --lr?"}},
    {"--batch-size 8", {"did you mean --batch?"}},
    {"--epochs 3", {"did you mean --steps?"}},
    {"--num-steps 100", {"did you mean --steps?"}},
    {"--seq-len 256", {"did you mean --seq?"}},
    {"--warmup-steps 10", {"did you mean --warmup?"}},
    {"--output-dir here", {"did you mean --out?"}},
    {"--eval-interval 10", {"did you mean --val-every?"}},
    {"--gradient-checkpointing", {"did you mean --recompute?"}},
    {"--fp16", {"did you mean --dtype fp16?"}},
    {"--fsdp", {"did you mean --zero 3?"}},
    // Slips
    {"--step 100", {"unknown flag --step: did you mean --steps?"}},
    {"--setps 100", {"did you mean --steps?"}},
    {"--save-evry=100", {"unknown flag --save-evry: did you mean --save-every?"}},
    {"--micro_batch 4", {"unknown flag --micro_batch: did you mean --micro-batch?"}},
    {"--LR 3e-4", {"unknown flag --LR: did you mean --lr?"}},
    {"-lr 3e-4", {"unknown flag -lr: did you mean --lr?"}},
    {"\u2014lr 3e-4", {"unknown flag \u2014lr: did you mean --lr?"}},  // a dash from a web page
    {"--sed 3", {"did you mean --seq or --seed?"}},
    {"--loss 1", {"did you mean --loss-scale, --loss-scale-start or --loss-scale-interval?"}},
    {"--frobnicate 3", {"unknown flag --frobnicate (./train_gpt --help lists the flags)"}},
    {"steps 100", {"\"steps\" is not a flag: did you mean --steps?"}},
    {"--val a.txt b.txt", {"\"b.txt\" belongs to no flag", "in quotes"}},
    {"--resume runs/3", {"--resume takes no value", "--out runs/3 --resume"}},
    {"--resume=runs/3", {"--resume=runs/3: --resume takes no value"}},
    {"--steps --lr 3e-4", {"--steps needs a value, and the next word, --lr, is a flag"}},
    {"--out --resume", {"--out needs a value, and the next word, --resume, is a flag"}},
    {"--steps", {"--steps needs a value (./train_gpt --help lists the flags)"}},
    // Numbers
    {"--steps many", {"--steps many: give a whole number, as in 1000 or 1e3"}},
    {"--steps 1.5e0", {"--steps 1.5e0: give a whole number"}},
    {"--batch 1e-1", {"--batch 1e-1: give a whole number"}},
    {"--steps 1,000", {"--steps 1,000: give a whole number"}},
    {"--seq 1k", {"--seq 1k: give a whole number"}},
    {"--lr 0,003", {"--lr 0,003: give a number, as in 0.003 or 3e-3"}},
    {"--clip nan", {"--clip nan: give a number"}},
    {"--seed 9223372036854775808", {"--seed 9223372036854775808 is too large: the largest is 9223372036854775807"}},
    {"--seed 1e30", {"--seed 1e30 is too large"}},
    {"--seed -1", {"--seed must not be negative"}},
    {"--beta1 0.999999999", {"--beta1: in float32 it is 1, and it must be from 0 to below 1"}},
    {"--eps 1e-50", {"--eps: in float32 it is 0, and it must be a number above 0"}},
    {"--lr 1e39", {"--lr: in float32 it is inf, and it must be a number >= 0"}},
    {"--lr=-1", {"the learning rate is -1: it must be a number >= 0"}},
    {"--clip 1e39", {"--clip 1e+39: it must be 0, for no clipping, or a float32 number above 0"}},
    {"--weight-decay 1e39", {"--weight-decay: in float32 it is inf, and it must be a number >= 0"}},
    {"--ranks 3e9", {"--ranks 3e9 is too large: the largest is 2147483647"}},
    // Names
    {"--dtype bf61", {"--dtype bf61: use fp32, bf16, fp16 or fp8"}},
    {"--optimizer adamm", {"--optimizer adamm: use sgd,"}},
    {"--schedule cosin", {"cosin", "cosine"}},
    {"--model gtp2", {"no model 'gtp2': use one of tiny, gpt2"}},
    {"--plan --device-spec h1000", {"--device-spec h1000: use h200, h100, a100, 4090, t4 or this"}},
    // Flags that would change nothing
    {"--fp8 block", {"--fp8 has no effect with --dtype fp32: add --dtype fp8"}},
    {"--loss-scale-interval 5", {"--loss-scale-interval has no effect", "use --dtype fp16"}},
    {"--compress-rank 2", {"--compress-rank has no effect with --compress none"}},
    {"--compress 1bit", {"--compress has no effect where no ranks divide the batch", "start 2 ranks"}},
    {"--ranks 4 --tp 2 --pp 2 --compress 1bit", {"--compress has no effect where", "start 8 ranks"}},
    {"--plan --trace 3", {"--trace has no effect with --plan or --account"}},
    {"--account --trace 3", {"--trace has no effect with --plan or --account"}},
    {"--momentum 0.95", {"--momentum has no effect with --optimizer adamw"}},
    {"--decay-fraction 0.1", {"--decay-fraction has no effect with --schedule cosine: use --schedule wsd"}},
    {"--schedule constant --min-lr-ratio 0.1", {"--min-lr-ratio has no effect with --schedule constant"}},
    {"--val a.txt --val-fraction 0.2", {"--val-fraction has no effect beside --val"}},
    {"--device-spec h100", {"--device-spec has no effect without --plan"}},
    {"--sample 0 --temperature 0.5", {"--temperature has no effect without a sample"}},
    {"--ranks 2 --zero 1 --bucket-mib 4", {"--bucket-mib has no effect with --zero"}},
    {"--ranks 2 --compress bf16 --grad-dtype fp32 --bucket-mib 4", {"--bucket-mib has no effect with --zero"}},
    {"--plan --params 7e9 --model gpt2", {"--model has no effect on the plan of --params"}},
    {"--head-chunks 0", {"--head-chunks 0: use 1"}},
    {"--head-chunks 4096", {"--head-chunks 4096: a micro-batch has only 2048 tokens"}},
    {"--head-chunks 2 --tp 2 --ranks 2", {"--head-chunks with --tp", "leave one of the two out"}},
    {"--recompute 99", {"--recompute 99: the model has only 4 blocks"}},
    {"--recompute 1e9", {"--recompute 1000000000: the model has only 4 blocks"}},
    {"--recompute 1e19", {"--recompute 1e19 is too large"}},
    {"--recompute 2 --model $ONE_BLOCK", {"--recompute 2: the model has only 1 block: use full or selective"}},
    {"--pp 2 --ranks 2 --pipeline interleaved --stages 1,1 --chunks 4611686018427387904",
     {"--chunks 4611686018427387904: a rank has at most 4194304 stages"}},
    {"--trace 5000", {"--trace 5000: step 5000 is not among those that will be made, 1 to 1000"}},
    {"--trace 2-4", {"--trace 2-4: give the numbers of the steps"}},
    {"--model gpt2 --init $GOLDEN/gpt2", {"--model gpt2 is a different model from --init", "leave --model out"}},
    {"--model tiny --init $GOLDEN/llama", {"--model tiny is a different model from --init", "leave --model out"}},
};

}  // namespace

TEST_CASE("mistyped command lines, each with the message that helps", "[program][mistyped]") {
    const TempFolder folder;  // in which all of them start, and which stays empty
    const TempFolder link;    // without the blanks that the path of this folder may have
    const std::string golden = link / "golden";
    std::filesystem::create_directory_symlink(std::filesystem::absolute("test/golden"), golden);
    Config one_block = load_config("tiny");
    one_block.L = 1;
    spit(link / "one_block.json", config_to_json(one_block));
    for (const Mistyped& line : kMistyped) {
        const Outcome outcome =
            run_shell(concat("cd ", folder.path, " && GOLDEN=", golden, " && ONE_BLOCK=", link / "one_block.json",
                             " && ", program_path("train_gpt"), " ", line.arguments));
        INFO(line.arguments << "\nstderr: " << outcome.err);
        CHECK(outcome.status == 2);
        CHECK(outcome.out == "");
        CHECK(folder.listing() == "");
        CHECK(outcome.err.starts_with("train_gpt: "));
        for (const std::string& words : line.says) CHECK(one_line_with(line_of(outcome), words));
    }
}

TEST_CASE("whole numbers may be written with an exponent", "[mistyped]") {
    const TrainOptions options =
        parse({"--steps", "1e3", "--batch", "1.6e1", "--seq", "64.0", "--keep", "+3", "--val-every", "0e5", "--warmup",
               "-1", "--sample", "010", "--seed", "9.223372036854775807E+18"});
    CHECK(options.steps == 1000);
    CHECK(options.batch == 16);
    CHECK(options.seq == 64);
    CHECK(options.keep == 3);
    CHECK(options.val_every == 0);
    CHECK(options.schedule.warmup == 50);  // of -1: a twentieth
    CHECK(options.sample_tokens == 10);
    CHECK(options.seed == INT64_MAX);  // to the last digit
    CHECK(options.identity.at("--steps") == "1000");
    CHECK(options.identity.at("--seed") == "9223372036854775807");
    for (const std::string wrong : {"", " ", "-", ".", "e3", "1e", "1e+", "1e3e3", "1.2.3", "0x10", "1e99999999999",
                                    "12e-1", "--5", "1 000", "inf"}) {
        INFO("\"" << wrong << "\"");
        CHECK(one_line_with(error_of([&] { parse_whole_number("--steps", wrong, INT64_MAX); }), "--steps " + wrong,
                            "whole number"));
    }
    CHECK(parse_whole_number("--steps", "1200e-2", 12) == 12);
    CHECK(parse_whole_number("--steps", "-12", 12) == -12);
    for (const std::string large : {"13", "-13", "1e19", "99999999999999999999", "1e2147483647"})
        CHECK(one_line_with(error_of([&] { parse_whole_number("--steps", large, 12); }), large + " is too "));
    CHECK(parse_seed("--seed", "18446744073709551615") == UINT64_MAX);
    CHECK(parse_seed("--seed", "-0") == 0);
    CHECK(one_line_with(error_of([&] { parse_seed("--seed", "-1"); }), "--seed -1: it must not be negative"));
    CHECK(one_line_with(error_of([&] { parse_seed("--seed", "18446744073709551616"); }),
                        "is too large: the largest is 18446744073709551615"));
}

TEST_CASE("a value with line ends in it is refused in one line", "[mistyped]") {
    for (const std::vector<std::string>& words :
         {std::vector<std::string>{"--dtype", "fp32\n"}, {"--steps", "1\r\n2"}, {"a.txt\nb.txt"}, {"--st\neps", "2"}}) {
        const std::string error = error_of([&] { parse(words); });
        INFO(error);
        CHECK((error.size() > 20 && error.find_first_of("\r\n") == std::string::npos));
    }
    CHECK(error_of([] { parse({"--dtype", "fp32\nbf16"}); }) == "--dtype fp32\\nbf16: use fp32, bf16, fp16 or fp8");
}

TEST_CASE("a program is named by its path, or as one of this folder", "[mistyped]") {
    for (const auto& [name, command] : {std::pair("train_gpt", "./train_gpt"), {"/build/dev/gelu", "/build/dev/gelu"}})
        CHECK(explain_unknown({name, {}, ""}, {}, {}, "--no") ==
              concat("unknown flag --no (", command, " --help lists the flags)"));
}

TEST_CASE("flags that say the same twice are no mistake", "[mistyped]") {
    CHECK(parse({"--init", "test/golden/gpt2"}).model == "");  // the weights bring their own
    CHECK(parse({"--init", "test/golden/gpt2", "--model", "test/golden/gpt2"}).model == "test/golden/gpt2");
    CHECK(parse({"--optimizer", "muon", "--momentum", "0.9"}).optimizer_options.momentum == 0.9f);
    CHECK(parse({"--optimizer", "muon"}).optimizer_options.ns_dtype == DType::f32);
    CHECK(parse({"--optimizer", "muon", "--dtype", "fp16"}).optimizer_options.ns_dtype == DType::bf16);
    CHECK(parse({"--plan", "--device-spec", "h100"}).device_spec == "h100");
    // A loss scale that starts above the largest of others may stay there.
    CHECK(parse({"--dtype", "fp16", "--loss-scale-start", "33554432"}).loss_scale.largest == 0x1p25);
    CHECK(parse({"--steps", "20", "--trace", "1,20"}).ranks.trace == "1,20");
    // The end of a folder's name that a shell completes.
    CHECK(parse({"--out", "runs/a//"}).out == "runs/a");
    CHECK(parse({"--out", "/"}).out == "/");
}

TEST_CASE("what several flags mean together", "[mistyped]") {
    CHECK(parse({"--init", "test/golden/gpt2"}).schedule.peak == 3e-4);  // a tenth, and the number that reads so
    // Gradients are in float32 where they are added up, of micro-batches of a rank or of chunks of the head.
    const auto grad_dtype = [](std::vector<std::string> flags) {
        flags.insert(flags.end(), {"--dtype", "bf16"});
        return parse(flags).precision.grad_dtype;
    };
    CHECK(grad_dtype({"--ranks", "2", "--batch", "4", "--micro-batch", "2"}) == DType::bf16);
    CHECK(grad_dtype({"--ranks", "2", "--batch", "4", "--micro-batch", "1"}) == DType::f32);
    CHECK(grad_dtype({"--head-chunks", "2"}) == DType::f32);
    CHECK(parse({"--plan", "--params", "7e9", "--ranks", "3"}).batch == 3);  // any that the ranks can share
    CHECK(parse({"--optimizer", "muon", "--eps", "1e-6"}).optimizer_options.eps == 1e-6f);
    CHECK(parse({"--batch", "65535"}).batch == 65535);
    CHECK(parse({"--seq", "1"}).sample_tokens == 0);
    const std::pair<std::vector<std::string>, const char*> refused[] = {
        {{"--optimizer", "lion", "--eps", "1e-6"},
         "--eps has no effect with --optimizer lion: use --optimizer adagrad,"},
        {{"--batch", "65536"}, "a micro-batch can have at most 65535 sequences"},
        {{"--dtype", "bf16", "--grad-dtype", "fp16"}, "--grad-dtype fp16 with --dtype bf16: use fp32, same or auto"},
        {{"--ranks", "2", "--compress", "powersgd", "--compress-rank", "17"}, "--compress-rank 17: use 1 to 16"},
        {{"--ranks", "2", "--compress", "1bit", "--dtype", "fp16", "--grad-dtype", "fp32"}, "--compress 1bit adds the"},
        {{"--ranks", "2", "--compress", "fp8", "--dtype", "bf16"}, "--compress fp8 compresses float32 gradients"},
        {{"--plan", "--params", "7e9", "--ranks", "2", "--tp", "2"}, "--params with --tp or --pp"},
        {{"--plan", "--account"}, "--plan and --account: give one of them"},
        {{"--ranks", "2", "--dp-mode", "naive", "--zero", "1"}, "--dp-mode naive keeps all states with rank 0"},
        {{"--ranks", "2", "--offload", "params", "--compress", "bf16"}, "--offload params with --compress"},
        {{"--offload", "optimizer", "--dtype", "bf16", "--master", "none"}, "--offload optimizer with --master none"},
        {{"--ranks", "2", "--tp", "2", "--tp-overlap"}, "--tp-overlap is about the rows that travel with --sp"},
        {{"--ranks", "2", "--tp", "2", "--sp", "--tp-overlap", "--dtype", "fp8"},
         has_fp8() ? "--tp-overlap with --dtype fp8" : "fp8 matrix products need"},
        {{"--dtype", "fp8", "--seq", "24"}, has_fp8() ? "is not a multiple of 16" : "fp8 matrix products need"},
    };
    for (const auto& [arguments, words] : refused)
        CHECK(one_line_with(error_of([&, its = arguments] { parse(its); }), words));
}

TEST_CASE("the smallest and the largest value of a flag are taken, and what lies beyond is refused", "[mistyped]") {
    const std::pair<std::vector<std::string>, const char*> refused[] = {
        {{"--batch", "0"}, "--batch, --seq and --steps must be positive"},
        {{"--seq", "0"}, "--batch, --seq and --steps must be positive"},
        {{"--micro-batch", "-1"}, "--micro-batch must not be negative"},
        {{"--compress-rank", "0"}, "--compress-rank 0: use 1 to 16"},
        {{"--zero", "-1"}, "--zero -1: use 0, 1, 2 or 3"},
        {{"--zero", "4"}, "--zero 4: use 0, 1, 2 or 3"},
        {{"--bucket-mib", "0"}, "--bucket-mib must be positive"},
        {{"--dp-mode", "zero"}, "--dp-mode zero: use ddp or naive"},
        {{"--beta1", "-0.1"}, "it must be from 0 to below 1"},
        {{"--weight-decay", "-0.1"}, "--weight-decay: in float32 it is -0.1, and it must be a number >= 0"},
        {{"--temperature", "1.1e6", "--sample", "1"}, "it must lie between 1e-6 and 1e6"},
        {{"--eot", "2147483648"}, "--eot 2147483648: a token id, or -1"},
        {{"--val-fraction", "-0.1"}, "--val-fraction -0.1: it must be 0, or lie between 0 and 1"},
        {{"--val-every", "-1"}, "must not be negative"},
        {{"--val-sequences", "0"}, "--val-sequences must be positive"},
        {{"--sample", "-1"}, "must not be negative"},
        {{"--save-every", "-1"}, "must not be negative"},
        {{"--keep", "-1"}, "must not be negative"},
        {{"--plan", "--params", "-1"}, "--params"},
        {{"--plan", "--params", "1.1e18"}, "--params 1.1e+18: at most 1e18 parameters can be planned"},
        {{"--plan", "--tp", "100000000"}, "ranks can be planned"},
        {{"--plan", "--tp-mode", "2.5d", "--tp-depth", "100000000"}, "ranks can be planned"},
        {{"--draw", "--pp", "0", "--micro-batches", "2"}, "--pp must be at least 1"},
        {{"--draw", "--pp", "2", "--micro-batches", "-1"}, "--micro-batches must not be negative"},
        {{"--draw", "--pp", "2", "--micro-batches", "0"}, "--micro-batches must be at least 1"},
        {{"--draw", "--pp", "1025", "--micro-batches", "2"}, "--pp 1025 with --draw: at most 1024"},
        {{"--ranks", "2", "--pp", "2", "--memory-limit", "2"}, "--memory-limit has no effect with --pipeline 1f1b"},
        {{"--ranks", "2", "--pp", "2", "--times", "1,1,1,0"}, "--times has no effect with --pipeline 1f1b"},
        {{"--ranks", "2", "--all-reduce", "ring", "--ranks-per-node", "1"},
         "--ranks-per-node has no effect with --all-reduce ring"},
    };
    for (const auto& [arguments, words] : refused) {
        INFO(arguments.front() << " " << arguments.back());
        CHECK(one_line_with(error_of([&, its = arguments] { parse(its); }), words));
    }
    for (const std::string rank : {"1", "16"})
        CHECK(parse({"--ranks", "2", "--compress", "powersgd", "--compress-rank", rank}).data_parallel.compress.rank ==
              std::stoi(rank));
    CHECK(parse({"--plan", "--params", "1e18"}).plan_parameters == 1e18);
    CHECK(parse({"--beta1", "0"}).optimizer_options.beta1 == 0);
    CHECK(parse({"--seed", "0"}).seed == 0);
    CHECK(parse({"--eot", "2147483647"}).eot == 2147483647);
    for (const auto& [text, number] : {std::pair("1e-6", 1e-6), {"1e6", 1e6}})
        CHECK(parse({"--temperature", text, "--sample", "1"}).temperature == number);
    CHECK_NOTHROW(parse({"--draw", "--pp", "1024", "--micro-batches", "1", "--times", "1e6,1e6,1e6,1e6"}));
    CHECK_NOTHROW(parse({"--dtype", "bf16", "--master", "fp32"}));
    // Their names in PyTorch.
    for (const auto& [name, dtype] :
         {std::pair("float32", DType::f32), {"bfloat16", DType::bf16}, {"float16", DType::f16}})
        CHECK(parse({"--dtype", name}).precision.dtype == dtype);
}

TEST_CASE("ranks that are threads of one process read the model's files once", "[mistyped]") {
    const TempFolder folder;
    const std::string model = folder / "model";
    std::filesystem::copy("test/golden/gpt2", model);
    const TrainOptions options = parse({"--init", model});
    RunFiles files;
    CHECK(open_model(options, files) == "");
    const Tokenizer* const tokenizer = files.model->tokenizer.tokenizer.get();
    std::filesystem::remove_all(model);
    CHECK(open_model(options, files) == "");
    CHECK(files.model->tokenizer.tokenizer.get() == tokenizer);
}

TEST_CASE("the preset tiny is as long as --seq; what its sizes allow at most", "[mistyped]") {
    const auto fault = [](const std::vector<std::string>& flags) {
        RunFiles files;
        return open_model(parse(flags), files);
    };
    RunFiles files;
    CHECK(open_model(parse({"--seq", "4000"}), files) == "");
    CHECK(files.model.value().config.T_max == 4000);
    const std::string blocks = concat(files.model->config.L);
    CHECK(fault({"--recompute", blocks}) == "");
    CHECK(fault({"--batch", "2", "--seq", "64", "--head-chunks", "128"}) == "");
    CHECK_THAT(fault({"--batch", "2", "--seq", "64", "--head-chunks", "129"}),
               ContainsSubstring("has only 128 tokens"));
}

TEST_CASE("a graph and a step ahead are refused where they cannot be, and left out where nobody asks", "[mistyped]") {
    const std::pair<std::vector<std::string>, const char*> refused[] = {
        {{"--graph", "maybe"}, "--graph maybe: use on, off or auto"},
        {{"--graph", "on", "--ranks", "2"}, "--graph on: ranks wait for each other"},
        {{"--graph", "on", "--zero", "1"}, "--graph on: --zero"},
        {{"--graph", "on", "--offload", "unified"}, "--graph on: --offload"},
        {{"--graph", "on", "--trace", "1"}, "--graph on: --trace"},
        {{"--run-ahead", "on", "--ranks", "2"}, "--run-ahead on: ranks agree"},
        {{"--run-ahead", "on", "--dtype", "fp16"}, "--run-ahead on: an overflow"},
        {{"--run-ahead", "on", "--dtype", "fp8"},
         has_fp8() ? "--run-ahead on: the scales of fp8" : "fp8 matrix products need"},
        {{"--run-ahead", "on", "--offload", "unified"}, "--run-ahead on: with --offload"},
    };
    for (const auto& [arguments, words] : refused)
        CHECK(one_line_with(error_of([&, its = arguments] { parse(its); }), words));
    for (const bool is_auto : {true, false}) {
        const TrainOptions two = is_auto ? parse({"--ranks", "2"}) : parse({"--graph", "off", "--run-ahead", "off"});
        CHECK((!two.graph && !two.run_ahead));
    }
    const TrainOptions one = parse({}), both = parse({"--graph", "on", "--run-ahead", "on"});
    CHECK((one.graph == !device().is_cpu && one.run_ahead == !device().is_cpu && !one.needs_graph));
    CHECK((both.graph && both.run_ahead && both.needs_graph));
}
