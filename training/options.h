// training/options.h: the command line of train_gpt. Names and meanings are a contract: tests and scripts rely on them.
#pragma once

#include "llm.h"
#include "optim/optim.h"
#include "parallel/data/data.h"

struct TrainOptions {
    std::string model = "tiny", init, data, val, tokenizer, out;
    int64_t batch = 16, micro_batch = 0, seq = 128, steps = 1000, seed = 1;
    Schedule schedule;  // its peak is --lr
    std::string optimizer = "adamw";
    OptimizerOptions optimizer_options;  // that optimizer's own defaults, but for what the flags say
    double clip = 1.0;
    std::string dtype = "fp32";
    Precision precision;  // from --dtype, --master and --grad-dtype
    FlashTier attention = FlashTier::automatic;
    LossScaleOptions loss_scale;
    Recompute recompute;
    RankOptions ranks;
    DataParallelOptions data_parallel;
    Offload offload = Offload::none;
    bool plan = false;  // print the plan, and end
    std::string device_spec = "this";
    double plan_parameters = 0;   // --params: the plan's states for this many parameters; 0: the model's
    int64_t inject_overflow = 0;  // test hook: the step in which one gradient becomes inf
    int64_t val_every = 100, val_sequences = 64, sample_tokens = 300, save_every = 250, keep = 2, stop_after = 0;
    double temperature = 0.8, val_fraction = 0.1;
    bool mask_documents = false;
    bool resume = false;

    // Must an update wait for the norm of all gradients? To clip by it, or because float16 may have overflowed.
    bool updates_after_norm() const { return clip > 0 || precision.dtype == DType::f16; }

    // What decides the loss curve, as flag -> value: kept in checkpoints, so that a resumed run is the same run.
    std::map<std::string, std::string> identity;
};

// Parses argv. Prints help and exits for --help. Bad input throws Error. With --resume the options that decide the loss
// curve come from the newest checkpoint in --out; giving one of them with another value is an Error.
TrainOptions parse_train_options(int argc, char** argv);
