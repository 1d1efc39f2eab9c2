// inference/loaded_model.cu: a model that only computes.
#include "inference/inference.h"
#include "io/json.h"

namespace {

// eos_token_id of a JSON file: a number, a list of them, or null. An id beyond the vocabulary ends no answer:
// transformers writes GPT-2's 50256 also for a model with a smaller one.
std::vector<int32_t> eos_tokens(const std::string& path, int64_t V) {
    if (!is_there(path)) return {};
    const Json::Value file = read_json_file(path);
    check(file.isObject(), path, ": this is not a JSON object");
    const Json::Value& ids = member(file, "eos_token_id");
    std::vector<int32_t> tokens;
    const auto add = [&](const Json::Value& id) {
        int32_t token = -1;
        check(is_whole(id) && read_value(id, token) && token >= 0, path, ": eos_token_id is ", JsonText(id).str(),
              ", expected one or more of the model's tokens, 0 to ", V - 1);
        if (token < V) tokens.push_back(token);
    };
    if (ids.isArray())
        for (const Json::Value& id : ids) add(id);
    else if (!ids.isNull()) add(ids);
    return tokens;
}

// A token of the draft is proposed as the model's with the same id.
void check_same_tokens(const LoadedWeights& draft, const LoadedWeights& model) {
    if (!draft.is_text || !model.is_text) return;
    const int n = std::max(draft.tokenizer->vocab_size(), model.tokenizer->vocab_size());
    for (int32_t id = 0; id < n; ++id)
        check(text_of(*draft.tokenizer, id) == text_of(*model.tokenizer, id), draft.folder, ": token ", id,
              " of the draft model's tokenizer is not that of the model's; give a draft model with the same tokenizer");
}

// Of the memory that is free when the program starts. What is left is for graphs, for the kernels' code, and on a CPU
// for the rest of the program.
constexpr double kShareOfFree = 0.9;

}  // namespace

LoadedWeights::LoadedWeights(const std::string& folder_, const std::string& tokenizer_path, DType dtype,
                             WeightFormat format)
    : folder(folder_), config(load_config(folder_ + "/config.json")), dtype_(dtype), format_(format) {
    const std::string beside = folder + "/tokenizer.json";
    const std::string path = !tokenizer_path.empty() ? find_tokenizer_file(tokenizer_path)
                             : is_there(beside)      ? beside
                                                     : "";
    is_text = !path.empty() || config.V <= kLargestByteVocabulary;
    tokenizer = path.empty() ? make_byte_tokenizer() : load_tokenizer(path);
    if (format_ != WeightFormat::none)
        unquantised_ = std::make_unique<Arena>("weights before they are quantised", MemoryKind::pinned);
}

void LoadedWeights::take_memory(int64_t max_length) {
    const TensorLayout layout = tensor_parallel ? tensor_parallel->layout() : TensorLayout{};
    Model read = build_model(config, {dtype_, DType::f32, false}, max_length, unquantised_ ? *unquantised_ : weights,
                             gradients_, masters_, {}, layout);
    read.tensor_parallel = tensor_parallel.get();
    const bool reads = !weights.counting();
    if (reads) load_weights(read, folder);
    model = unquantised_ ? quantised_copy(read, format_, weights) : read;
    if (reads) unquantised_.reset();
}

void LoadedWeights::reserve() {
    weights.reserve();
    if (unquantised_) unquantised_->reserve();
}

void LoadedWeights::expect_text() const {
    check(is_text, folder, ": there is no tokenizer.json in this folder: give --tokenizer");
}

LoadedModel::LoadedModel(const std::string& folder_, const std::string& tokenizer_path, DType dtype,
                         WeightFormat format, const EngineOptions& options, const std::string& draft_folder)
    : LoadedWeights(folder_, tokenizer_path, dtype, format), options_(options) {
    stop_tokens = eos_tokens(folder + "/generation_config.json", config.V);
    if (stop_tokens.empty()) stop_tokens = eos_tokens(folder + "/config.json", config.V);
    if (!draft_folder.empty()) {
        draft = std::make_unique<LoadedWeights>(draft_folder, "", dtype, format);
        if (draft->config.V == config.V) check_same_tokens(*draft, *this);  // the engine says what is wrong otherwise
    }
    if (Comm* const ranks = options.ranks) {
        const TensorLayout layout = tensor_layout(TensorMode::one_d, ranks->rank, ranks->size);
        config_of_rank(config, layout);  // Error where it cannot be divided
        tensor_parallel = std::make_unique<TensorParallel>(*ranks, layout, config.K);
    }
    options_.scheduler.max_length =
        longest_sequence(config, draft ? &draft->config : nullptr, options_.scheduler.max_length);
    take_weights();
    if (options_.cache.n_pages == 0) options_.cache.n_pages = pages_that_fit();
    engine = std::make_unique<Engine>(model, options_, draft ? &draft->model : nullptr);
    take_beside(*engine, cache, activations, pinned);
}

void LoadedModel::take_weights() {
    take_memory(options_.scheduler.max_length);
    if (draft) draft->take_memory(options_.scheduler.max_length);
}

void LoadedModel::take_beside(Engine& its, Arena& cache_, Arena& activations_, Arena& pinned_) {
    its.take_memory(cache_, activations_, pinned_);
    if (!tensor_parallel) return;
    const StepSizes largest = its.largest_step();
    const DType dtype = model.precision.dtype;
    tensor_parallel->take_memory({.N = largest.tokens,
                                  .C = config.C,
                                  .dtype = dtype,
                                  .grad_dtype = dtype,
                                  .logits_n = largest.logits * vocabulary_rows(config, model.layout)},
                                 activations_);
}

int64_t LoadedModel::pages_that_fit() {
    // What an engine takes that has room for one sequence.
    EngineOptions one = options_;
    one.cache.n_pages = ceil_div(options_.scheduler.max_length, std::max<int64_t>(1, options_.cache.page_size));
    Arena its_cache("cache"), its_activations("activations"), its_pinned("on the host", MemoryKind::pinned);
    Engine its(model, one, draft ? &draft->model : nullptr);
    take_beside(its, its_cache, its_activations, its_pinned);
    const int64_t wanted = std::min(options_.scheduler.max_sequences * one.cache.n_pages, one.cache.most_pages());

    double room = kShareOfFree * static_cast<double>(device_memory().free);
    if (options_.ranks) room /= options_.ranks->sharers_of_device();
    room -= static_cast<double>(device_bytes() + its_activations.bytes());
    // On a CPU the pages that are swapped out lie in the same memory.
    const bool twice = device().is_cpu && options_.scheduler.preemption == Preemption::swap;
    const double page =
        static_cast<double>((twice ? 2 : 1) * its_cache.bytes()) / static_cast<double>(one.cache.n_pages);
    int64_t pages = static_cast<int64_t>(std::clamp(room / page, 1.0, static_cast<double>(wanted)));
    if (options_.ranks && !options_.ranks->is_plan()) {  // all have the same pages
        options_.ranks->meet_hosts();
        for (const std::vector<int64_t>& other : gather_numbers(*options_.ranks, {pages}))
            pages = std::min(pages, other[0]);
    }
    return pages;
}

size_t LoadedModel::device_bytes() {
    return weights.bytes() + (draft ? draft->weights.bytes() : 0) + cache.bytes() + activations.bytes() +
           device().blas_workspace_bytes;
}

void LoadedModel::load() {
    const size_t all_bytes = device_memory().all;
    check(device_bytes() <= all_bytes, "this needs ", human_bytes(static_cast<double>(device_bytes())),
          ", and the device has ", human_bytes(static_cast<double>(all_bytes)),
          ": give fewer --cache-pages or --max-sequences, or a smaller --max-length",
          model.precision.dtype == DType::f32 ? ", or --dtype bf16" : "");
    reserve();
    if (draft) draft->reserve();
    for (Arena* arena : {&cache, &activations, &pinned}) arena->reserve();
    take_weights();
    take_beside(*engine, cache, activations, pinned);
}
