// Pipelines beside everything else that a run may have: the other axes of the mesh, precisions, recomputation, what
// data-parallel ranks do. A pipeline has the bits of the same run without it: each sum has the same terms in the same
// order. (Not with a tied head, whose two gradients are added in another order; and not in DualPipe.)
#include "tensor_runs.h"

TEST_CASE("a run with --pp has the bits of the same run without it", "[program][ranks][pipeline]") {
    Runs runs;
    // A model, what both have, the mesh without a pipeline, and with one. --clip 100: no update of ZB-H2 and ZB-V is
    // undone, with forwards that are made again and whose messages the formula does not count.
    const std::array<std::string, 4> cases[] = {
        {"deep-qwen3", "--tp 2 --sp --micro-batch 2 --clip 100 ", "--ranks 2 ", "--ranks 4 --pp 2 --pipeline zb-v "},
        {"deep-qwen3", "--tp 2 --sp --micro-batch 4 --tp-overlap ", "--ranks 2 ", "--ranks 4 --pp 2 --pipeline zb-h1 "},
        {"deep-qwen3", "--cp 2 --micro-batch 2 --clip 100 ", "--ranks 2 ", "--ranks 6 --pp 3 --pipeline zb-h2 "},
        {"deep-qwen3", "--zero 1 --micro-batch 2 --optimizer muon --lr 0.01 --clip 100 ", "--ranks 2 ",
         "--ranks 4 --pp 2 --pipeline zb-v "},
        {"deep-qwen3", "--dp-mode naive --micro-batch 1 --optimizer adafactor ", "--ranks 2 ", "--ranks 8 --pp 4 "},
        {"deep-qwen3", "--zero 1 --micro-batch 2 --optimizer adam8bit --lr 1e-3 ", "--ranks 3 ",
         "--ranks 6 --pp 2 --pipeline gpipe "},
        {"deep-qwen3", "--compress 1bit --micro-batch 3 ", "--ranks 2 ", "--ranks 4 --pp 2 "},
        {"deep-qwen3", "--compress powersgd --micro-batch 3 ", "--ranks 2 ", "--ranks 4 --pp 2 "},
        {"deep-qwen3", "--dtype bf16 --micro-batch 2 ", "", "--ranks 5 --pp 5 --pipeline zb-h1 "},
        {"deep-qwen3", "--dtype fp16 --recompute selective --micro-batch 2 ", "",
         "--ranks 2 --pp 2 --pipeline interleaved "},
        {"deep-qwen3", "--dtype fp8 --recompute 2 --micro-batch 2 ", "", "--ranks 2 --pp 2 --stages 4,1 "},
        {"even-gqa", "--dtype fp8 --tp 2 --micro-batch 2 ", "--ranks 2 ", "--ranks 4 --pp 2 --pipeline zb-h1 "},
        {"even-gqa", "--tp 8 --tp-mode 3d --micro-batch 4 ", "--ranks 8 ", "--ranks 16 --pp 2 "}};
    for (const auto& [model, common, without, with] : cases) {
        if (!can_train(common)) continue;
        const std::string whole = runs.run(model, common + without), run = runs.run(model, common + with);
        INFO(model << " " << common << with);
        CHECK(log_without_times(run) == log_without_times(whole));
        CHECK((weights_of(run) == weights_of(whole)));
    }
}

TEST_CASE("the queue of gradients by weight in 2D, and a tied head on two ranks", "[program][ranks][pipeline]") {
    Runs runs;
    const std::string one = runs.run("deep-gpt2", "--micro-batch 2 ");
    for (const std::string mesh : {"--ranks 8 --pp 2 --tp 4 --tp-mode 2d --pipeline zb-h1 ",
                                   "--ranks 8 --pp 2 --tp 4 --tp-mode 2d --recompute 1 ",
                                   "--ranks 4 --pp 2 --tp 2 --pipeline dualpipe ", "--ranks 5 --pp 5 "})
        check_same_run(runs.run("deep-gpt2", "--micro-batch 2 " + mesh), one, 2e-6);
}

TEST_CASE("a run with --pp has the same bits in strict mode", "[program][ranks][pipeline]") {
    if (!device().is_cpu) SKIP_TEST("strict mode is the CPU device's");
    Runs runs;
    int seed = 0;
    for (const auto& [model, mesh] :
         {std::pair<std::string, std::string>{"deep-gpt2", "--ranks 3 --pp 3 --pipeline zb-h1 "},
          {"deep-gpt2", "--ranks 4 --pp 2 --tp 2 --sp --pipeline zb-v "},
          {"deep-gpt2", "--ranks 4 --pp 2 --zero 1 --recompute 1 "},
          // Updates that are undone, and made again; and those of several versions of the weights.
          {"deep-gpt2", "--ranks 4 --pp 2 --zero 1 --pipeline zb-v --clip 0.1 --steps 3 --val-every 0 "},
          {"deep-qwen3",
           "--ranks 4 --pp 2 --zero 1 --pipeline 2bw --clip 0 --steps 3 --flush-every 3 --val-every 0 --save-every "
           "0 "}}) {
        const std::string flags = "--micro-batch 3 --steps 2 --warmup 1 --val-every 1 --comm-timeout 30 " + mesh;
        INFO(flags << "seed " << ++seed);
        const std::string strict = runs.run(model, flags, concat("CUDA_CPU_STRICT=", seed, " "));
        CHECK(log_without_times(strict) == log_without_times(runs.run(model, flags)));
    }
}
