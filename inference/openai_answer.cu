// inference/openai_answer.cu: answers as OpenAI's clients read them.
//
//     /v1/completions         {"object": "text_completion", "choices": [{"index", "text", "logprobs", ...}]}
//     /v1/chat/completions    {"object": "chat.completion", "choices": [{"index", "message", ...}]}
//
// both with "id", "created", "model" and "usage". As a stream, each piece is such an object in an event of its own,
// with the text that is new; in a conversation's stands "delta" in place of "message". Then comes the usage, if it was
// asked for, and "[DONE]".
#include "inference/server.h"

#include <nlohmann/json.hpp>

#include <ctime>
#include <random>

using nlohmann::ordered_json;

namespace {

// A token may end inside of a character: what is not UTF-8 becomes the replacement character.
std::string dumped(const ordered_json& value) {
    return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}
std::string event_of(const ordered_json& value) { return "data: " + dumped(value) + "\n\n"; }

std::string random_id() {
    static thread_local std::mt19937_64 random{std::random_device{}()};
    char text[25];
    std::snprintf(text, sizeof text, "%012llx%012llx", static_cast<unsigned long long>(random() >> 16),
                  static_cast<unsigned long long>(random() >> 16));
    return text;
}

// Characters that begin in these bytes.
int64_t count_characters(const std::string& text) {
    int64_t n = 0;
    for (const char c : text) n += (static_cast<unsigned char>(c) & 0xc0) != 0x80;
    return n;
}

ordered_json chat_token(const Tokenizer& tokenizer, int32_t token, float logprob) {
    const std::string text = tokenizer.decode({token});
    return {{"token", text}, {"logprob", logprob}, {"bytes", std::vector<unsigned char>(text.begin(), text.end())}};
}
ordered_json chat_logprobs(const Tokenizer& tokenizer, const std::vector<Sampled>& tokens) {
    ordered_json content = ordered_json::array();
    for (const Sampled& sampled : tokens) {
        ordered_json one = chat_token(tokenizer, sampled.token, sampled.logprob);
        one["top_logprobs"] = ordered_json::array();
        for (const TokenLogprob& top : sampled.top)
            one["top_logprobs"].push_back(chat_token(tokenizer, top.token, top.logprob));
        content.push_back(one);
    }
    return {{"content", content}, {"refusal", nullptr}};
}

// offset: characters of the answer before these tokens; afterwards behind them.
ordered_json text_logprobs(const Tokenizer& tokenizer, const std::vector<Sampled>& tokens, int64_t& offset) {
    ordered_json all = {{"tokens", ordered_json::array()},
                        {"token_logprobs", ordered_json::array()},
                        {"top_logprobs", ordered_json::array()},
                        {"text_offset", ordered_json::array()}};
    for (const Sampled& sampled : tokens) {
        const std::string text = tokenizer.decode({sampled.token});
        ordered_json top = ordered_json::object();
        for (const TokenLogprob& other : sampled.top) top[tokenizer.decode({other.token})] = other.logprob;
        top[text] = sampled.logprob;  // the chosen token is among them in any case
        all["tokens"].push_back(text);
        all["token_logprobs"].push_back(sampled.logprob);
        all["top_logprobs"].push_back(top);
        all["text_offset"].push_back(offset);
        offset += count_characters(text);
    }
    return all;
}

ordered_json or_null(const std::string& text) { return text.empty() ? ordered_json() : ordered_json(text); }

ordered_json described(const ServedModel& served) {
    return {{"id", served.name},
            {"object", "model"},
            {"created", served.created},
            {"owned_by", "llm.cu"},
            {"max_model_len", served.model.engine->options().scheduler.max_length}};
}

}  // namespace

ApiAnswer::ApiAnswer(const ServedModel& served, const ApiRequest& request)
    : served_(served), request_(request), id_((request.chat ? "chatcmpl-" : "cmpl-") + random_id()),
      created_(std::time(nullptr)) {
    for (size_t p = 0; p < request.requests.size(); ++p)
        for (int64_t k = 0; k < request.requests[p].n; ++k) {
            choices_.emplace_back();
            if (request.echo) choices_.back().text = request.prompts[p];
        }
}

ordered_json ApiAnswer::head(const char* object) const {
    return {{"id", id_}, {"object", object}, {"created", created_}, {"model", served_.name}};
}

ordered_json ApiAnswer::usage() const {
    int64_t prompt_n = 0;
    for (const TextRequest& request : request_.requests) prompt_n += std::ssize(request.prompt);
    return {{"prompt_tokens", prompt_n}, {"completion_tokens", n_tokens_}, {"total_tokens", prompt_n + n_tokens_}};
}

ordered_json ApiAnswer::logprobs(const std::vector<Sampled>& tokens, int64_t& offset) const {
    if (request_.requests[0].sampling.logprobs < 0) return nullptr;
    const Tokenizer& tokenizer = *served_.model.tokenizer;
    return request_.chat ? chat_logprobs(tokenizer, tokens) : text_logprobs(tokenizer, tokens, offset);
}

void ApiAnswer::add(const IndexedPiece& indexed) {
    Choice& choice = choices_[static_cast<size_t>(indexed.index)];
    const AnswerPiece& piece = indexed.piece;
    choice.text += piece.text;
    choice.tokens.insert(choice.tokens.end(), piece.tokens.begin(), piece.tokens.end());
    if (piece.finish_reason) choice.finish_reason = piece.finish_reason;
    n_tokens_ += std::ssize(piece.tokens);
}

std::string ApiAnswer::whole() const {
    ordered_json answer = head(request_.chat ? "chat.completion" : "text_completion");
    for (size_t i = 0; i < choices_.size(); ++i) {
        const Choice& choice = choices_[i];
        ordered_json one = {{"index", i}};
        if (request_.chat) one["message"] = {{"role", "assistant"}, {"content", choice.text}, {"refusal", nullptr}};
        else one["text"] = choice.text;
        int64_t offset = 0;
        one["logprobs"] = logprobs(choice.tokens, offset);
        one["finish_reason"] = choice.finish_reason;
        answer["choices"].push_back(one);
    }
    answer["usage"] = usage();
    return dumped(answer);
}

std::string ApiAnswer::event(const IndexedPiece& indexed) {
    Choice& choice = choices_[static_cast<size_t>(indexed.index)];
    const AnswerPiece& piece = indexed.piece;
    n_tokens_ += std::ssize(piece.tokens);
    if (piece.text.empty() && piece.tokens.empty() && !piece.finish_reason) return "";
    ordered_json one = {{"index", indexed.index}};
    if (request_.chat) {
        one["delta"] = {{"content", piece.text}};
        if (!choice.begun) one["delta"] = {{"role", "assistant"}, {"content", piece.text}};
    } else {
        one["text"] = choice.begun ? piece.text : choice.text + piece.text;  // echo: the prompt first
    }
    choice.begun = true;
    one["logprobs"] = logprobs(piece.tokens, choice.n_characters);
    one["finish_reason"] = piece.finish_reason ? ordered_json(piece.finish_reason) : ordered_json();
    ordered_json answer = head(request_.chat ? "chat.completion.chunk" : "text_completion");
    answer["choices"].push_back(one);
    if (request_.include_usage) answer["usage"] = nullptr;
    return event_of(answer);
}

std::string ApiAnswer::last_events() const {
    std::string text;
    if (request_.include_usage) {
        ordered_json answer = head(request_.chat ? "chat.completion.chunk" : "text_completion");
        answer["choices"] = ordered_json::array();
        answer["usage"] = usage();
        text = event_of(answer);
    }
    return text + "data: [DONE]\n\n";
}

std::string model_json(const ServedModel& served) { return dumped(described(served)); }
std::string models_json(const ServedModel& served) {
    return dumped({{"object", "list"}, {"data", ordered_json::array({described(served)})}});
}

std::string error_json(const HttpError& error) {
    const char* type = error.status == 429   ? "rate_limit_error"
                       : error.status >= 500 ? "server_error"
                                             : "invalid_request_error";
    return dumped({{"error",
                    {{"message", error.what()},
                     {"type", type},
                     {"param", or_null(error.param)},
                     {"code", or_null(error.code)}}}});
}

std::string engine_json(const ServedModel& served, const EngineView& engine, int64_t answer_tokens) {
    ordered_json requests = ordered_json::array(), pages = ordered_json::array();
    for (const EngineView::Row& r : engine.requests)
        requests.push_back({{"id", r.id},
                            {"state", r.state},
                            {"prompt_tokens", r.prompt_tokens},
                            {"computed_tokens", r.computed_tokens},
                            {"answer_tokens", r.answer_tokens},
                            {"max_tokens", r.max_tokens},
                            {"n", r.n},
                            {"pages", r.pages}});
    for (const EngineView::PageRun& run : engine.pages) pages.push_back({run.owner, run.shared ? 1 : 0, run.n});
    return dumped({{"model", served.name},
                   {"steps", engine.n_steps},
                   {"answer_tokens", answer_tokens},
                   {"running", engine.n_running},
                   {"waiting", engine.n_waiting},
                   {"preemptions", engine.n_preemptions},
                   {"max_length", served.model.engine->options().scheduler.max_length},
                   {"page_size", engine.page_size},
                   {"pages_used", engine.use.owned_pages},
                   {"pages_shared", engine.use.shared_pages},
                   {"pages_kept", engine.use.kept_pages},
                   {"pages_free", engine.use.free_pages},
                   {"pages_all", engine.use.n_pages},
                   {"requests", requests},
                   {"pages", pages}});
}
