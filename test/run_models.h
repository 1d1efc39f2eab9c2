// test/run_models.h: the small models that whole runs on many ranks train, by name, as config.json.
#pragma once

#include "model/model.h"
#include "program.h"

#include <set>
#include <sstream>

// odd-llama, odd-gpt2   no number of ranks divides the vocabulary, the width or the number of parameters
// the others            2, 3, 4, 6 and 12 ranks can divide heads and columns, and none the vocabulary
// deep-...              5 blocks, for stages of a pipeline; gpt2's head is tied
// long-...              9 blocks, or 17, likewise
// even-...              2 or 4 ranks of --tp, beside 2 of --cp; each then has multiples of 16 inputs and outputs of a
//                       layer, as fp8 needs them
inline std::string model_json(const std::string& name) {
    const auto gpt2 = [](int V, int C, int F, int H, int L = 2) {
        return concat(R"({"model_type":"gpt2","n_positions":64,"activation_function":"gelu_new",)", "\"n_layer\":", L,
                      ",\"layer_norm_epsilon\":1e-5,\"vocab_size\":", V, ",\"n_embd\":", C, ",\"n_inner\":", F,
                      ",\"n_head\":", H, "}");
    };
    // H query and K key heads of D columns, and what else the attention has.
    const auto llama = [](const std::string& type, int C, int F, int H, int K, int D, const std::string& more = "",
                          int L = 2) {
        return concat("{\"model_type\":\"", type, "\",\"vocab_size\":257,\"hidden_size\":", C,
                      ",\"intermediate_size\":", F, ",\"num_hidden_layers\":", L, ",\"num_attention_heads\":", H,
                      ",\"num_key_value_heads\":", K, ",\"head_dim\":", D, ",", more,
                      R"("max_position_embeddings":64,"rms_norm_eps":1e-5,"rope_theta":10000.0,"hidden_act":"silu"})");
    };
    const auto latents = [](const std::string& q, int kv, int D, int D_rope, int D_v) {
        return concat("\"q_lora_rank\":", q, ",\"kv_lora_rank\":", kv, ",\"qk_nope_head_dim\":", D,
                      ",\"qk_rope_head_dim\":", D_rope, ",\"v_head_dim\":", D_v, ",\"first_k_dense_replace\":9,");
    };
    const std::map<std::string, std::string> models = {
        {"odd-llama", llama("llama", 40, 52, 5, 1, 8, "", 3)},
        {"odd-gpt2", gpt2(259, 24, 96, 3)},
        {"gpt2", gpt2(257, 48, 96, 12)},
        {"llama", llama("llama", 36, 48, 12, 12, 8)},
        {"biases",
         llama("llama", 36, 48, 12, 4, 8, R"("attention_bias":true,"mlp_bias":true,"tie_word_embeddings":true,)")},
        {"qwen3", llama("qwen3", 36, 48, 12, 2, 8, "\"attention_bias\":false,")},
        {"mfa", llama("mfa", 36, 48, 12, 1, 8, "\"share_q_dim\":20,")},
        {"deepseek", llama("deepseek_v3", 36, 48, 12, 12, 8, latents("24", 16, 8, 4, 6))},
        {"lite", llama("deepseek_v2", 36, 48, 12, 12, 8, latents("null", 16, 8, 4, 6))},
        {"deep-gpt2", gpt2(257, 48, 96, 6, 5)},
        {"deep-qwen3", llama("qwen3", 32, 48, 4, 2, 8, "\"attention_bias\":false,", 5)},
        {"even-gpt2", gpt2(257, 64, 128, 8)},
        {"even-gqa", llama("llama", 48, 128, 8, 2, 8)},
        {"even-mla", llama("deepseek_v3", 48, 128, 8, 8, 8, latents("32", 16, 8, 16, 8))},
        {"even-mfa", llama("mfa", 48, 128, 8, 1, 8, "\"share_q_dim\":32,")},
        {"long-gpt2", gpt2(257, 24, 40, 3, 9)},
        {"long-llama", llama("llama", 24, 32, 4, 2, 8, "", 9)},
        {"long-llama-17", llama("llama", 16, 24, 2, 1, 8, "", 17)},
        {"long-qwen3", llama("qwen3", 32, 48, 4, 2, 8, "\"attention_bias\":false,", 9)},
        {"long-deepseek", llama("deepseek_v3", 32, 48, 4, 4, 8, latents("16", 16, 8, 16, 8), 9)},
        {"long-mfa", llama("mfa", 32, 48, 4, 1, 8, "\"share_q_dim\":16,", 9)},
        {"deep-gqa", llama("llama", 32, 64, 4, 2, 16, "", 5)},
    };
    return models.at(name);
}

// Its file.
inline std::string model_file(const std::string& name) {
    static const TempFolder folder;
    const std::string path = folder / (name + ".json");
    if (!std::filesystem::exists(path)) spit(path, model_json(name));
    return path;
}

// The attentions, and the feed-forwards, of presets that none of these config.json has: a new one belongs to the models
// of the runs whose test asks.
inline std::set<std::string> parts_without_model(std::string Config::*part, const std::vector<std::string>& files) {
    std::set<std::string> parts;
    for (const std::string& name : preset_names()) parts.insert(find_preset(name)->*part);
    for (const std::string& file : files) parts.erase(load_config(file).*part);
    return parts;
}
inline std::set<std::string> attentions_without_model(const std::vector<std::string>& files) {
    return parts_without_model(&Config::attention, files);
}
inline std::set<std::string> feed_forwards_without_model(const std::vector<std::string>& files) {
    return parts_without_model(&Config::feed_forward, files);
}

// With --pp, a line a rank: the bytes of activations in flight, the messages and their bytes, planned and as they were.
inline void check_pipeline_traffic(const std::string& out) {
    const size_t table = out.find("activations in flight");
    if (table == std::string::npos) return;
    std::istringstream lines(out.substr(table));
    int n_ranks = 0;
    for (std::string line; std::getline(lines, line) && !line.starts_with("account");) {
        long long rank, activations[2], messages[2], bytes[2];
        if (std::sscanf(line.c_str(), "%lld %lld %lld %lld %lld %lld %lld", &rank, &activations[0], &activations[1],
                        &messages[0], &messages[1], &bytes[0], &bytes[1]) != 7)
            continue;
        INFO(line);
        CHECK(rank == n_ranks++);
        CHECK((activations[0] == activations[1] && messages[0] == messages[1] && bytes[0] == bytes[1]));
    }
    CHECK(n_ranks > 1);
}

// What is printed at the end of a run: memory taken is that of the plan; bytes sent are those of the formula.
inline void check_memory(const std::string& out) {
    long long taken = 0, planned = -1;
    const size_t memory = out.find("taken on the device (");
    if (memory == std::string::npos) return;  // stopped before its last step
    CHECK(std::sscanf(out.c_str() + memory, "taken on the device (%lld bytes; %lld planned)", &taken, &planned) == 2);
    CHECK(taken_as_planned(static_cast<double>(taken), static_cast<double>(planned)));
}
// Of a run with these flags. There is no formula for --compress, for other all-reduces than the library's, and where an
// update was undone.
inline void check_account(const std::string& out, const std::string& flags) {
    long long formula = 0, sent = -1;
    const size_t account = out.find("sent by all");
    REQUIRE(account != std::string::npos);
    check_pipeline_traffic(out);
    const bool known = std::sscanf(out.c_str() + account, "sent by all %lld %lld", &formula, &sent) == 2;
    const auto has = [&](const char* flag) { return flags.find(flag) != std::string::npos; };
    const std::string undone = "of all gradients was known: ";
    const size_t updates = out.find(undone);
    const bool undid = updates != std::string::npos && out[updates + undone.size()] != '0';
    CHECK(known == !(has("--compress") || has("--all-reduce") || undid));
    if (known) CHECK(sent == formula);
    check_memory(out);
}

// `make test-ranks`: all of what is tested on many ranks, as processes under mpirun. Otherwise a part of it, as threads
// of one process.
inline bool is_full() { return std::getenv("LLM_TEST_RANKS") != nullptr; }

// train_gpt with these flags: where they have --ranks N and all is tested, mpirun starts the ranks instead.
inline Outcome run_on_ranks(std::string flags, std::string before = "") {
    const std::string flag = "--ranks ";
    const size_t at = flags.find(flag);
    if (is_full() && at != std::string::npos) {
        const size_t end = flags.find_first_not_of("0123456789", at + flag.size());
        before += mpirun_command(std::stoi(flags.substr(at + flag.size())));
        flags.erase(at, end == std::string::npos ? end : end - at);
    }
    return run_program("train_gpt", flags, before);
}
