// inference/loaded_model.cu: a model that only computes.
#include "inference/inference.h"
#include "io/json.h"

namespace {

// eos_token_id of a JSON file: a number, a list of them, or null.
std::vector<int32_t> eos_tokens(const std::string& path, int64_t V) {
    if (!is_there(path)) return {};
    const Json::Value file = read_json_file(path);
    check(file.isObject(), path, ": this is no JSON object");
    const Json::Value& ids = member(file, "eos_token_id");
    std::vector<int32_t> tokens;
    const auto add = [&](const Json::Value& id) {
        int32_t token = -1;
        check(is_whole(id) && read_value(id, token) && token >= 0 && token < V, path, ": eos_token_id is ",
              JsonText(id).str(), ", expected one or more of the model's tokens, 0 to ", V - 1);
        tokens.push_back(token);
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
    take_all();
}

void LoadedModel::take_all() {
    take_memory(options_.scheduler.max_length);
    if (draft) draft->take_memory(options_.scheduler.max_length);
    if (!engine) engine = std::make_unique<Engine>(model, options_, draft ? &draft->model : nullptr);
    engine->take_memory(cache, activations, pinned);
    if (!tensor_parallel) return;
    const StepSizes largest = engine->largest_step();
    const DType dtype = model.precision.dtype;
    tensor_parallel->take_memory({.N = largest.tokens,
                                  .C = config.C,
                                  .dtype = dtype,
                                  .grad_dtype = dtype,
                                  .logits_n = largest.logits * vocabulary_rows(config, model.layout)},
                                 activations);
}

size_t LoadedModel::device_bytes() {
    return weights.bytes() + (draft ? draft->weights.bytes() : 0) + cache.bytes() + activations.bytes() +
           device().blas_workspace_bytes;
}

void LoadedModel::load() {
    size_t free_bytes = 0, all_bytes = 0;
    cudaCheck(cudaMemGetInfo(&free_bytes, &all_bytes));
    check(device_bytes() <= all_bytes, "this needs ", human_bytes(static_cast<double>(device_bytes())),
          ", and the device has ", human_bytes(static_cast<double>(all_bytes)),
          ": give fewer --cache-pages or --max-sequences, a smaller --max-length, or --dtype bf16");
    reserve();
    if (draft) draft->reserve();
    for (Arena* arena : {&cache, &activations, &pinned}) arena->reserve();
    take_all();
}
