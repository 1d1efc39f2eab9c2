// training/pretrained.cu: what lies beside the weights in a Hugging Face folder: the tokenizer, the ids of special
// tokens, the settings of text generation, the chat template. A run finds it beside the model that it starts from, and
// each of its checkpoints has a copy: AutoTokenizer and generate() of transformers work there as they do in the
// folder that the weights came from, and so does --init.
//
//     of the model's folder (--init, --model, or the checkpoint that is resumed)    into each checkpoint
//     tokenizer.json and the files that belong to it, chat templates                the same bytes
//     generation_config.json                                                        the same bytes
//     config.json: bos_token_id, eos_token_id, pad_token_id                         in config.json
//
// What is missing is made. Of a --tokenizer or of shards the token that stands before documents is known; a model of
// bytes has no special tokens.
//
// A model whose tokens change, by another --tokenizer or to bytes, loses the ids and settings of those it had.
#include "io/json.h"
#include "io/list_folder.h"
#include "training/training.h"

#include <filesystem>

namespace fs = std::filesystem;

namespace {

const char* const kTokenizerFiles[] = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt",     "tokenizer.model",       "chat_template.jinja",     "chat_template.json"};
const char* const kGenerationFile = "generation_config.json";
const char* const kTemplateFolder = "additional_chat_templates";  // those that have names: for tools, for example

// The folder that a run has its model from; "" for a preset.
std::string model_folder(const TrainOptions& o) {
    if (o.resume) return o.checkpoint;
    if (!o.init.empty()) return o.init;
    if (find_preset(o.model)) return "";
    return is_folder(o.model) ? o.model : folder_of(o.model);
}

// The tokenizer.json of a run, or "". A checkpoint has a copy of it, also where the original has moved.
std::string tokenizer_path(const TrainOptions& o) {
    const std::string folder = model_folder(o), beside = folder + "/tokenizer.json";
    const bool found = !folder.empty() && is_there(beside);
    if (o.tokenizer.empty() || (o.resume && found)) return found ? beside : "";
    return find_tokenizer_file(o.tokenizer);
}

// The ids of special tokens that the config.json of the run's model names, as JSON.
TokenIds read_token_ids(const TrainOptions& o) {
    const bool in_folder = o.resume || !o.init.empty() || is_folder(o.model);
    const Json::Value config = read_json_file(in_folder ? model_folder(o) + "/config.json" : o.model);
    TokenIds ids;
    for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"})
        if (has(config, key)) ids[key] = JsonText(member(config, key)).str();
    return ids;
}

// What is known of a run that starts from random weights: the token before documents begins a text; the same, or
// LLaMA 3's <|end_of_text|>, ends it. null keeps transformers from taking the ids of the original models.
TokenIds known_token_ids(const RunData& data, const Config& config) {
    const auto id_text = [&](int32_t id) {
        return id >= 0 && id < config.V ? std::to_string(id) : std::string("null");
    };
    const int32_t begin = data.train_tokens[0].tokens.document_token();
    const std::vector<int32_t> end = data.tokenizer->encode("<|end_of_text|>");
    return {{"bos_token_id", id_text(begin)}, {"eos_token_id", id_text(end.size() == 1 ? end[0] : begin)}};
}

// The text of a special token, as JSON; null where there is none. A list of ids: that of the first.
JsonText token_text(const Tokenizer& tokenizer, const ModelFiles& model, const char* key) {
    const auto found = model.token_ids.find(key);
    if (found == model.token_ids.end()) return nullptr;
    const Json::Value ids = parse_json(found->second, key), &first = ids.isArray() && !ids.empty() ? ids[0] : ids;
    int32_t id = -1;
    if (!is_whole(first) || !read_value(first, id) || id < 0 || id >= tokenizer.vocab_size()) return nullptr;
    try {
        return tokenizer.decode({id});
    } catch (const Error&) {  // ids may have gaps
        return nullptr;
    }
}

// PreTrainedTokenizerFast: what tokenizer.json says, and nothing that follows from the model's type.
std::string make_tokenizer_config(const Tokenizer& tokenizer, const ModelFiles& model, const Config& config) {
    const JsonText out = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                          {"model_max_length", config.T_max},
                          {"clean_up_tokenization_spaces", false},
                          {"bos_token", token_text(tokenizer, model, "bos_token_id")},
                          {"eos_token", token_text(tokenizer, model, "eos_token_id")},
                          {"pad_token", token_text(tokenizer, model, "pad_token_id")},
                          {"unk_token", nullptr}};
    return out.indented(2) + "\n";
}

std::string make_generation_config(const ModelFiles& model) {
    JsonText out = JsonText::object();
    for (const auto& [key, id] : model.token_ids)
        if (id != "null") out.set(key, parse_json(id, key));
    return out.indented(2) + "\n";
}

void copy_file(ModelFiles& model, const std::string& folder, const std::string& name) {
    if (is_there(folder + "/" + name)) model.files[name] = read_regular_file(folder + "/" + name);
}

void copy_tokenizer(ModelFiles& model, const std::string& folder) {
    for (const char* name : kTokenizerFiles) copy_file(model, folder, name);
    const std::string templates = concat(folder, "/", kTemplateFolder);
    if (!is_folder(templates)) return;
    for (const fs::path& path : list_folder(templates))
        if (path.extension() == ".jinja")
            copy_file(model, folder, concat(kTemplateFolder, "/", path.filename().string()));
}

}  // namespace

RunTokenizer find_tokenizer(const TrainOptions& o) {
    RunTokenizer found{make_byte_tokenizer(), tokenizer_path(o), ""};
    if (found.path.empty()) return found;
    try {
        found.tokenizer = load_tokenizer(found.path);
    } catch (const Error& error) {
        // Beside a model it may be of another kind: training on token shards can do without.
        if (!o.tokenizer.empty()) throw;
        found.fault = error.what();
    }
    return found;
}

ModelFiles collect_model_files(const TrainOptions& o, const Config& config, const RunTokenizer& found,
                               const RunData& data) {
    ModelFiles model;
    const std::string folder = model_folder(o), own = folder + "/tokenizer.json";
    const bool is_bytes = found.path.empty() && data.is_text;
    // With other tokens than its own, the model's ids and settings mean nothing.
    const bool has_other = is_bytes || (!found.path.empty() && found.path != own && is_there(own) &&
                                        read_regular_file(own) != read_regular_file(found.path));
    if (!folder.empty() && !has_other) {
        copy_file(model, folder, kGenerationFile);
        model.token_ids = read_token_ids(o);
    }
    if (model.token_ids.empty()) model.token_ids = known_token_ids(data, config);
    if (is_bytes) {
        if (config.V >= 256) model.files["tokenizer.json"] = byte_tokenizer_json();
    } else if (found.path.empty() || fs::path(found.path).filename() == "tokenizer.json") {
        const std::string from = found.path.empty() ? folder : folder_of(found.path);
        if (!from.empty()) copy_tokenizer(model, from);
    } else {  // a file with a name of its own: those beside it belong to others
        model.files["tokenizer.json"] = read_regular_file(found.path);
    }
    if (model.files.count("tokenizer.json") && found.fault.empty())
        model.files.try_emplace("tokenizer_config.json", make_tokenizer_config(*found.tokenizer, model, config));
    model.files.try_emplace(kGenerationFile, make_generation_config(model));
    return model;
}
