// training/setup.cu: what a run settles before it takes memory: the model's configuration, the data, the folder, and
// that all ranks have been given the same.
#include "training/training.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <sstream>

namespace {

void check_text(const RunTokenizer& tokenizer, const TokenSource& source, const Config& config) {
    if (source.is_shards()) return;
    check(tokenizer.fault.empty(), tokenizer.fault,
          "; text needs the --tokenizer of another model with the same tokens, token shards *.bin as --data need none");
    check(!tokenizer.path.empty() || config.V <= kLargestByteVocabulary, source.description(),
          ": without a tokenizer each byte of text is a token, and the model has a vocabulary of ", config.V,
          ": give the model's --tokenizer tokenizer.json, or token shards *.bin as --data, or use --model tiny");
}

// part: "training" or "held-out". The description of a part is that of the whole text.
void check_tokens(const TrainOptions& o, const TokenSource& source, const char* part, int32_t largest,
                  const Config& config) {
    check(source.n() > o.seq, source.description(), ": the ", part, " part has ", source.n(), " tokens, and --seq ",
          o.seq, " needs ", o.seq + 1, ": use a smaller --seq or more text",
          o.val.empty() && o.val_fraction > 0 ? ", or another --val-fraction" : "");
    const bool chosen = !o.tokenizer.empty() && !o.init.empty() && !source.is_shards();
    check(largest < config.V, source.description(), ": holds token id ", largest, ", beyond the model's vocabulary of ",
          config.V, ": ",
          chosen ? "leave --tokenizer out, for the model's own, or train a model with this one from the beginning"
                 : "use the --tokenizer and --model that belong together");
}

// A resumed run visits the sequences that the uninterrupted one would: of other data they would be others.
void check_identity(const TrainOptions& o, const DataIdentity& data) {
    const std::optional<DataIdentity> saved = read_state(o.checkpoint).data;
    if (!saved || o.new_data) return;
    const auto check_same = [&](const char* what, int64_t n, uint64_t sum, int64_t saved_n, uint64_t saved_sum) {
        check(n == saved_n && sum == saved_sum, "--resume: the ", what, " data are not those of the run in ", o.out,
              ": ", n, " tokens with checksum ", checksum_text(sum), " now, ", saved_n, " tokens with checksum ",
              checksum_text(saved_sum), " then: give it the same data, or --new-data if they are meant to differ");
    };
    check_same("training", data.train_n, data.train_checksum, saved->train_n, saved->train_checksum);
    check_same("held-out", data.val_n, data.val_checksum, saved->val_n, saved->val_checksum);
}

void check_documents(const TokenMix& mix) {
    std::string descriptions;
    for (const MixedSource& source : mix) {
        const TokenSource& tokens = source.tokens;
        if (!tokens.document_starts(1, tokens.n() - 1).empty()) return;
        descriptions += tokens.description() + ": ";
    }
    fail("--mask-documents: ", descriptions,
         "all of it is one document: give a folder with a file for each, or text or shards with an end-of-text token "
         "before each (--eot names that of shards), or leave the flag out");
}

// Which build this is; the same for all where the system does not tell.
std::string program_hash() {
    const std::string path = "/proc/self/exe";
    return std::filesystem::exists(path) ? std::to_string(hash_name(read_text_file(path))) : "unknown";
}

// What a terminal can show: control characters and bytes that are not UTF-8 become dots.
std::string printable_text(const std::string& text) {
    std::string out;
    for (size_t i = 0; i < text.size();) {
        const Utf8Char c = utf8_char_at(text, i);
        const bool shown = c.code == '\n' || c.code == '\t' || (c.code >= 32 && c.code != 127 && c.code != 0xfffd);
        out += shown ? text.substr(i, c.bytes) : ".";
        i += c.bytes;
    }
    return out;
}

// --model beside --init may say again what the weights are, and nothing else.
void check_same_model(const TrainOptions& o, const Config& of_init) {
    std::istringstream model(config_to_json(load_config(o.model))), init(config_to_json(of_init));
    for (std::string a, b; std::getline(model, a) && std::getline(init, b);) {
        const auto trimmed = [](const std::string& line) {
            const size_t begin = std::min(line.find_first_not_of(' '), line.size());
            return line.substr(begin, line.find_last_not_of(',') + 1 - begin);
        };
        check(a == b, "--model ", o.model, " is a different model from --init ", o.init, ", whose config.json has ",
              trimmed(b), " and not ", trimmed(a), ": leave --model out");
    }
}

// The model's configuration: that of the checkpoint, of the weights to start from, or of the preset.
Config choose_config(const TrainOptions& o, int64_t vocab_size) {
    if (o.resume) return load_config(o.checkpoint);
    // Not --init alone: a folder may have the name of a preset.
    Config config = load_config(o.init.empty() ? o.model : o.init + "/config.json");
    if (!o.init.empty() && !o.model.empty()) check_same_model(o, config);
    if (o.init.empty() && o.model == "tiny") {  // the preset without a vocabulary and a length of its own
        config.V = vocab_size;
        config.T_max = std::max(config.T_max, o.seq);
    }
    return config;
}

// Checks each source of a mix, which is a part as in check_tokens; returns the checksum of all, with their shares.
uint64_t checked_checksum(const TrainOptions& o, const RunTokenizer& tokenizer, const TokenMix& mix, const char* part,
                          const Config& config) {
    std::vector<uint64_t> numbers;
    for (const MixedSource& source : mix) {
        check_text(tokenizer, source.tokens, config);
        const TokenSource::Summary summary = source.tokens.summary();
        check_tokens(o, source.tokens, part, summary.max_token, config);
        numbers.insert(numbers.end(), {summary.checksum, static_cast<uint64_t>(source.share)});
    }
    return mix.size() == 1 ? numbers[0] : checksum(numbers.data(), numbers.size() * sizeof(uint64_t));
}

RunData open_data(const TrainOptions& o, const Config& config, const RunTokenizer& tokenizer) {
    const int32_t eot = static_cast<int32_t>(o.eot);
    const auto [train, val] = open_train_and_val(o.data, o.val, *tokenizer.tokenizer, o.val_fraction, eot);
    const auto is_shards = [](const MixedSource& source) { return source.tokens.is_shards(); };
    check(eot < 0 || std::any_of(train.begin(), train.end(), is_shards), "--eot ", eot,
          ": it belongs to token shards; of text, the tokenizer knows where documents begin");
    check(eot < config.V, "--eot ", eot, ": the model has a vocabulary of ", config.V);
    const bool validates = token_count(val) > 0 || o.val_fraction > 0 || !o.val.empty();
    check(validates || !o.keep_best,
          "--keep-best looks at the validation loss: give --val, or a --val-fraction above 0");
    const DataIdentity identity{token_count(train), token_count(val),
                                checked_checksum(o, tokenizer, train, "training", config),
                                validates ? checked_checksum(o, tokenizer, val, "held-out", config) : 0};
    if (o.resume) check_identity(o, identity);
    if (o.mask_documents) check_documents(train);
    // The held-out text has an order that does not depend on --seed, so that runs can be compared.
    const bool has_tokenizer = !tokenizer.path.empty() && tokenizer.fault.empty();
    return {.tokenizer = tokenizer.tokenizer,
            .is_text = has_tokenizer || std::none_of(train.begin(), train.end(), is_shards),
            .train_tokens = train,
            .val_tokens = val,
            .train = BatchReader(train, o.seq, static_cast<uint64_t>(o.seed)),
            .val = validates ? std::optional(BatchReader(val, o.seq, 0)) : std::nullopt,
            .identity = identity};
}

// Error, with what to do, for sizes of the model that a kernel cannot have with these options.
void check_limits(const TrainOptions& o, const Config& config) {
    if (o.pp > 1) cut_stages(config, n_pipeline_stages(o), o.rank_seq(), o.stages);  // Error where it is not possible
    check(
        !(o.asynchronous && config.tied), "--pipeline ", o.pipeline,
        ": the model's embedding is its head, too, which ranks at both ends of the pipeline would update at different "
        "times: use a model with \"tie_word_embeddings\": false, or --pipeline 1f1b");
    check(o.recompute.every <= config.L, "--recompute ", o.recompute.every, ": the model has only ", config.L,
          config.L == 1 ? " block: use full or selective" : " blocks: use a smaller number, full or selective");
    expect_head_size(o.attention, o.precision.dtype, config.D, config.value_D());
    check(o.sample_tokens == 0 || config.V <= kMostSampledTokens, "--sample ", o.sample_tokens, ": the model has ",
          config.V, " tokens, and at most ", kMostSampledTokens, " can be sampled from; use --sample 0");
    const int64_t local_batch = o.batch / o.data_ranks();
    const int64_t micro_batch = o.micro_batch == 0 ? local_batch : o.micro_batch, tokens = micro_batch * o.rank_seq();
    check(o.recompute.head_chunks <= tokens, "--head-chunks ", o.recompute.head_chunks, ": a micro-batch has only ",
          tokens, " tokens; use a smaller number");
    if (o.precision.fp8 == Fp8Recipe::none) return;
    const Config of_rank = config_of_rank(config, tensor_layout(TensorMode::one_d, 0, static_cast<int>(o.tp)));
    for (const auto& [inputs, outputs] : block_linear_shapes(of_rank))
        expect_fp8_sizes(o.precision.fp8, tokens, inputs, outputs);
}

}  // namespace

// The message of the Error that f throws, or "".
static std::string fault_of(const std::function<void()>& f) {
    try {
        f();
        return "";
    } catch (const Error& error) {
        return error.what();
    }
}

std::string open_model(const TrainOptions& o, RunFiles& files) {
    std::call_once(files.model_once, [&] {
        files.model_fault = fault_of([&] {
            const RunTokenizer tokenizer = find_tokenizer(o);
            files.model = {tokenizer, choose_config(o, tokenizer.tokenizer->vocab_size())};
            check_limits(o, files.model->config);
        });
    });
    return files.model_fault;
}

// A new run does not write into the folder of another.
static void expect_no_run(const std::string& out) {
    check(!std::filesystem::exists(out + "/log.csv"), out,
          latest_checkpoint(out)
              ? " already holds a run: continue it with --resume, or choose another --out"
              : " holds a run that has saved no checkpoint: delete the folder, or choose another --out");
    const std::string checkpoints = out + "/checkpoints";
    check(!is_there(checkpoints) || is_folder(checkpoints), checkpoints,
          ": this is a file, and a run has a folder of this name: move it away, or choose another --out");
}

std::string open_run(const TrainOptions& o, RunFiles& files, Mesh& mesh, std::optional<Trainer>& trainer) {
    const auto& [tokenizer, config] = *files.model;
    std::string fault = fault_of([&] {
        trainer.emplace(o, config, mesh);
        trainer->take_memory();  // counts; the kernels' limits on sizes are checked here
    });
    if (o.plan || o.account) return fault;
    if (fault.empty()) {
        std::call_once(files.data_once,
                       [&] { files.data_fault = fault_of([&] { files.data = open_data(o, config, tokenizer); }); });
        fault = files.data_fault;
    }
    if (fault.empty()) {
        trainer->data = files.data->identity;
        if (trainer->world.rank == 0)
            fault = fault_of([&] { trainer->model_files = collect_model_files(o, config, tokenizer, *files.data); });
    }
    if (o.resume) return fault;
    // Rank 0's folder is that of all. A run in it is a fault of all ranks, and not of the one that sees it.
    const std::string its_fault = fault_of([&] {
        if (mesh.world().rank != 0 || o.out.empty()) return;
        check_not_written(o.out);
        expect_no_run(o.out);
    });
    const std::string of_folder = mesh.world().size == 1 ? its_fault : broadcast_text(mesh.world(), its_fault);
    return fault.empty() ? of_folder : fault;
}

// Flags are typed once, but mpirun may start different programs on different machines.
void check_same_flags(Comm& world, const TrainOptions& o) {
    std::vector<std::pair<std::string, std::string>> things = {
        {"the program", program_hash()}, {"--plan", o.plan ? "on" : "off"}, {"--account", o.account ? "on" : "off"}};
    for (const auto& [flag, value] : o.identity) things.push_back({flag, value});
    for (const auto& [flag, value] : o.of_this_call)
        if (flag != "--out") things.push_back({flag, value});  // rank 0's is that of all
    check_same_everywhere(world, things);
}

bool agree_to_start(Comm& world, const std::string& fault) {
    bool everywhere = true;
    if (world.size > 1)
        for (const auto& row : gather_numbers(world, {!fault.empty()})) everywhere = everywhere && row[0] != 0;
    if (fault.empty()) return true;  // if another rank has a fault, it ends the job
    if (!everywhere)
        fail(fault,
             " (this is so on some ranks, and not on others: do their hosts have the same files, and the same "
             "memory?)");
    // Here, and not at the program's end: mpirun ends the other processes when the first one has ended.
    if (world.rank == 0) std::fprintf(stderr, "train_gpt: %s\n", fault.c_str());
    return false;
}

std::string RunData::show(const std::vector<int32_t>& tokens) const {
    // A model may have more ids than its tokenizer, where its vocabulary was rounded up.
    bool known = is_text;
    for (const int32_t token : tokens) known = known && token < tokenizer->vocab_size();
    if (known) return printable_text(tokenizer->decode(tokens));
    std::string ids = is_text ? "token ids:" : "token ids (there is no --tokenizer to show them as text):";
    for (const int32_t token : tokens) ids += concat(" ", token);
    return ids;
}

std::vector<int32_t> RunData::prompt() const {
    if (is_text) return tokenizer->encode("\n");
    int32_t token = 0;  // the first of the held-out data: in most shards, the one that begins a document
    (val ? val_tokens : train_tokens)[0].tokens.read(0, 1, &token);
    return {token};
}

// Of the first bytes of each tensor: to read all of a large model once more would take long, and weights that were
// trained otherwise differ everywhere.
static std::string checksum_of_init(const TrainOptions& o) {
    constexpr size_t most_bytes = 4096;
    if (o.init.empty() || o.resume) return "";
    const SafetensorsReader weights(o.init);
    std::vector<uint64_t> sums;
    for (const auto& [name, tensor] : weights.tensors())
        sums.push_back(checksum(tensor.data, std::min(tensor.bytes, most_bytes)));
    return checksum_text(checksum(sums.data(), sums.size() * sizeof(uint64_t)));
}

// Ranks that write a part of each checkpoint write it into rank 0's folder, which they know by its lock. Where they do
// not see it, on a host with a disk of its own, the first save would fail, after hours. Collective.
static void check_shared(const Trainer& t, const std::string& folder) {
    const std::string lock = broadcast_text(t.world, t.world.rank == 0 ? lock_text(folder) : "");
    const bool lacks_it = writes_checkpoint_files(t) && lock_text(folder) != lock;
    const auto faults = gather_numbers(t.world, {lacks_it});
    for (size_t rank = 0; rank < faults.size() && t.world.rank == 0; ++rank)
        check(!faults[rank][0], folder, ", the folder of the run, is not the one that rank ", rank,
              " finds there, and each rank would write its part of a checkpoint into it: give an --out that all hosts "
              "share, as on a network file system, by its whole path");
}

std::unique_ptr<RunFolder> settle_folder(Trainer& t, const RunData& data) {
    const bool first = t.world.rank == 0;
    std::string& out = t.options.out;
    // Each rank has opened its own files.
    const DataIdentity& its = data.identity;
    if (t.world.size > 1)
        check_same_everywhere(t.world, {{"config.json", config_to_json(t.config)},
                                        {"the checksum of the weights of --init", checksum_of_init(t.options)},
                                        {"the length of the data in tokens", concat(its.train_n, " and ", its.val_n)},
                                        {"the checksum of the data", concat(checksum_text(its.train_checksum), " and ",
                                                                            checksum_text(its.val_checksum))}});
    check_disk_space(t);
    std::unique_ptr<RunFolder> folder;
    if (first) {
        folder = std::make_unique<RunFolder>(out);
        out = folder->path();
        if (!t.options.resume) expect_no_run(out);  // with the lock: no other process begins one now
    }
    if (t.world.size > 1) {
        out = broadcast_text(t.world, out);
        check_shared(t, out);
    }
    return folder;
}
