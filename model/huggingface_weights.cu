// model/huggingface_weights.cu: weights in Hugging Face folders: safetensors, whole or in shards.
//
// Their files and our memory differ in two things: GPT-2's Conv1D stores weights as (C, O), transposed; and our
// embedding and head have rows of padding, which are never written.
#include "io/json.h"
#include "model/model.h"

#include <algorithm>
#include <cstring>
#include <set>

namespace {

// (rows, cols) -> (cols, rows)
std::vector<float> transpose(const std::vector<float>& in, int64_t rows, int64_t cols) {
    std::vector<float> out(in.size());
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < cols; ++c)
            out[static_cast<size_t>(c * rows + r)] = in[static_cast<size_t>(r * cols + c)];
    return out;
}

// The shape the file has for a parameter.
std::vector<int64_t> stored_shape(const Param& param) {
    std::vector<int64_t> shape(param.value.shape, param.value.shape + param.value.ndim);
    shape[0] -= param.padded_rows;
    if (param.cut.exists()) shape[0] = param.cut.rows;
    if (param.cut.exists() && shape.size() > 1) shape[1] = param.cut.cols;
    if (param.transposed) std::reverse(shape.begin(), shape.end());
    return shape;
}

std::string shape_text(const std::vector<int64_t>& shape) {
    std::string text = "(";
    for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + ")";
}

// Buffers that old checkpoints carry beside the weights: attention masks and rotary frequencies.
bool is_known_extra(const std::string& name) {
    return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") || name.ends_with("rotary_emb.inv_freq");
}

// A head in the file of a model whose head is the embedding: as a copy it says nothing new. Otherwise config.json and
// the file contradict each other, and transformers has taken the one or the other: version 4 ties, version 5 does not.
void check_tied_head(const SafetensorsReader& file, const std::string& embedding, const std::string& folder) {
    if (!file.has("lm_head.weight")) return;
    const StoredTensor &head = file.at("lm_head.weight"), &tokens = file.at(embedding);
    check(head.dtype == tokens.dtype && head.bytes == tokens.bytes &&
              std::memcmp(head.data, tokens.data, head.bytes) == 0,
          folder, ": tensor 'lm_head.weight' is not '", embedding, "', but config.json says that the head is the ",
          "embedding; write \"tie_word_embeddings\": false there, or leave the tensor out");
}

}  // namespace

void load_weights(Model& model, const std::string& folder) {
    const SafetensorsReader file(folder);
    const bool gpt2 = model.config.family == Family::gpt2;
    // A model that was saved without its head has no "transformer." or "model." in front of the names: GPT-2's original
    // files, and what AutoModel saves.
    const std::string prefix = gpt2 ? "transformer." : "model.",
                      short_name = gpt2 ? "wte.weight" : "embed_tokens.weight", embedding = prefix + short_name;
    const bool short_names = !file.has(embedding) && file.has(short_name);
    // Of the two names of a tied matrix safetensors.torch.save_model keeps the first in the alphabet, the head's.
    const bool head_alone = model.config.tied && !short_names && !file.has(embedding) && file.has("lm_head.weight");
    const auto in_file = [&](const std::string& name) {
        if (head_alone && name == embedding) return std::string("lm_head.weight");
        return short_names && name.starts_with(prefix) ? name.substr(prefix.size()) : name;
    };
    for (const Param& param : model.params) {
        const std::string name = in_file(param.file_name());
        const StoredTensor& stored = file.at(name);
        const std::vector<int64_t> wanted = stored_shape(param);
        check(stored.shape == wanted, folder, ": tensor '", name, "' has shape ", shape_text(stored.shape),
              ", config.json asks for ", shape_text(wanted));
        check(stored.dtype == "F32" || stored.dtype == "F16" || stored.dtype == "BF16", folder, ": tensor '", name,
              "' has dtype ", stored.dtype, ", expected F32, F16 or BF16");
        file.verify(name);
        std::vector<float> values = stored.floats();
        if (param.transposed) values = transpose(values, wanted[0], wanted[1]);
        model.write(param, values);
    }
    if (model.config.tied) check_tied_head(file, in_file(embedding), folder);
    std::set<std::string> known;  // also parameters that other ranks have
    for (const std::string& name : parameter_names(model.config)) known.insert(in_file(name));
    for (const auto& [name, tensor] : file.tensors()) {
        const bool tied_head = model.config.tied && name == "lm_head.weight";
        check(known.count(name) || tied_head || is_known_extra(name), folder, ": tensor ", JsonText(name).str(),
              " belongs to no parameter of this ", gpt2 ? "GPT-2" : hugging_face_type(model.config).second,
              " configuration; is config.json the right one?");
    }
}

namespace {

// The most precise values of a parameter, on the first of all ranks, without padding. Collective.
std::vector<float> read_whole(const Model& model, const Param& param) {
    DataParallel* const data = model.data_parallel;
    const std::vector<float> its =
        data ? data->read(model, param) : to_floats(param.exact().slice(0, param.value.shape[0] - param.padded_rows));
    if (!model.tensor_parallel || (data && data->comm().rank != 0)) return its;
    return model.tensor_parallel->collect(param, its);
}

// The same of a parameter of the whole model, which may be on other ranks of a pipeline.
std::vector<float> read_from_owner(const Model& model, const Model& whole, const Param& param) {
    PipelineRanks* const ranks = model.pipeline_ranks;
    const int owner = ranks ? ranks->owner(whole.units[whole.unit_of(param)].number) : 0;
    std::vector<float> values;
    if (!ranks || ranks->rank() == owner)
        values = read_whole(model, *std::ranges::find(model.params, param.name, &Param::name));
    const bool first = model.sharding.rank == 0 && model.layout.rank == 0;  // of those with this part of the model
    if (!ranks || owner == 0 || !first || (ranks->rank() != owner && ranks->rank() != 0)) return values;
    int64_t n = 1;
    for (const int64_t size : stored_shape(param)) n *= size;
    return ranks->bring(values, n, owner);
}

}  // namespace

void save_model(const Model& model, const std::string& folder, const TokenIds& token_ids) {
    const bool first = model.sharding.rank == 0 && model.layout.rank == 0 &&
                       (!model.pipeline_ranks || model.pipeline_ranks->rank() == 0);
    const Model whole = whole_without_memory(model.config, model.layout);
    if (!first) {  // sends what it has, in the order in which the first rank writes
        for (const Param& param : whole.params) read_from_owner(model, whole, param);
        return;
    }
    size_t n_read = 0;  // parameters that the other ranks have sent their parts of
    std::vector<TensorToStore> tensors;
    for (const Param& param : whole.params) {
        const auto fill = [&](void* bytes) {
            ++n_read;
            std::vector<float> values = read_from_owner(model, whole, param);
            const std::vector<int64_t> stored = stored_shape(param);
            if (param.transposed) values = transpose(values, stored[1], stored[0]);
            std::copy(values.begin(), values.end(), static_cast<float*>(bytes));
        };
        tensors.push_back({param.name, "F32", stored_shape(param), fill});
    }
    const bool alone = !model.data_parallel && !model.pipeline_ranks;
    try {
        make_folder(folder);
        write_text_file(folder + "/config.json", config_to_json(model.config, token_ids));
        write_safetensors(folder + "/model.safetensors", tensors, {{"format", "pt"}});
    } catch (const Error&) {  // a full disk, for example: the run may go on, so what the others send is received
        for (; !alone && n_read < whole.params.size(); ++n_read) read_from_owner(model, whole, whole.params[n_read]);
        throw;
    }
}
