// training/setup.cu: what a run settles before it takes memory: the model's configuration, the data, the folder, and that
// all ranks have been given the same.
#include "training/training.h"

#include <algorithm>
#include <filesystem>

namespace {

void check_tokens(const TokenSource& source, const Config& config, int64_t T) {
    check(source.n() > T, source.description(), ": ", source.n(), " tokens are too short a text for --seq ", T,
          ": use a smaller --seq or more text");
    const int32_t largest = source.max_token();
    check(largest < config.V, source.description(), ": holds token id ", largest, ", beyond the model's vocabulary of ",
          config.V, ": use the --tokenizer and --model that belong together");
}

void check_documents(const TokenSource& source) {
    check(
        source.n() < 2 || !source.document_starts(1, source.n() - 1).empty(),
        "--mask-documents: ", source.description(),
        ": all of it is one document: give a folder with a file for each, or text or shards with an end-of-text token "
        "before each, or leave the flag away");
}

// runs/1, runs/2, ...: the first that does not exist.
std::string fresh_run_folder() {
    for (int i = 1;; ++i)
        if (const std::string folder = "runs/" + std::to_string(i); !std::filesystem::exists(folder)) return folder;
}

// Which build this is; the same for all where the system does not tell.
std::string program_hash() {
    const std::string path = "/proc/self/exe";
    return std::filesystem::exists(path) ? std::to_string(hash_name(read_text_file(path))) : "unknown";
}

// What must not differ between ranks. Options are typed once, but mpirun may start different programs on different machines, and
// each rank opens its own files.
std::vector<std::pair<std::string, std::string>> what_must_agree(const Trainer& t, const RunData& data) {
    std::vector<std::pair<std::string, std::string>> things;
    if (started_by_mpirun()) things.push_back({"the program", program_hash()});  // threads are one process
    for (const auto& [flag, value] : t.options.identity) things.push_back({flag, value});
    const DataParallelOptions& d = t.options.data_parallel;
    things.push_back({"--zero", std::to_string(d.zero)});
    things.push_back({"--dp-mode", d.naive ? "naive" : "ddp"});
    things.push_back({"--offload", concat(static_cast<int>(t.options.offload))});
    things.push_back({"--bucket-mib", std::to_string(d.bucket_mib)});
    things.push_back({"--all-reduce", t.options.ranks.all_reduce});
    things.push_back({"--resume", t.options.resume ? "given" : "absent"});
    things.push_back({"config.json", config_to_json(t.config)});
    things.push_back({"the length of the data in tokens", concat(data.train_tokens.n(), " and ", data.val_tokens.n())});
    return things;
}

}  // namespace

std::unique_ptr<Tokenizer> open_tokenizer(const TrainOptions& o) {
    return o.tokenizer.empty() ? make_byte_tokenizer() : load_tokenizer(o.tokenizer);
}

Config choose_config(const TrainOptions& o, int64_t vocab_size) {
    if (o.resume) return load_config(latest_checkpoint(o.out).value());
    Config config = load_config(o.init.empty() ? o.model : o.init);
    if (o.init.empty() && o.model == "tiny") {  // the preset without a vocabulary and a length of its own
        config.V = vocab_size;
        config.T_max = std::max(config.T_max, o.seq);
    }
    return config;
}

RunData open_data(const TrainOptions& o, const Config& config, std::unique_ptr<Tokenizer> tokenizer) {
    const auto [train_tokens, val_tokens] = open_train_and_val(o.data, o.val, *tokenizer, o.val_fraction);
    for (const TokenSource& tokens : {train_tokens, val_tokens}) check_tokens(tokens, config, o.seq);
    if (o.mask_documents) check_documents(train_tokens);
    // The held-out text has an order that does not depend on --seed, so that runs can be compared.
    return {std::move(tokenizer), train_tokens, val_tokens,
            BatchReader(train_tokens, o.seq, static_cast<uint64_t>(o.seed)), BatchReader(val_tokens, o.seq, 0)};
}

void settle_folder(Trainer& t, const RunData& data) {
    const bool first = t.world.rank == 0;
    std::string& out = t.options.out;
    if (t.world.size > 1) check_same_everywhere(t.world, what_must_agree(t, data));
    if (out.empty() && first) out = fresh_run_folder();
    if (t.world.size > 1) out = broadcast_text(t.world, out);
    check(t.options.resume || !first || !std::filesystem::exists(out + "/log.csv"), out,
          " already holds a run: continue it with --resume, or choose another --out");
}
