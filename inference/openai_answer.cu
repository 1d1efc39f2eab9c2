// inference/openai_answer.cu: answers as OpenAI's clients read them.
//
//     /v1/completions         {"object": "text_completion", "choices": [{"index", "text", "logprobs", ...}]}
//     /v1/chat/completions    {"object": "chat.completion", "choices": [{"index", "message", ...}]}
//
// both with "id", "created", "model" and "usage". As a stream, each piece is such an object in an event of its own,
// with the text that is new; in a conversation "delta" takes the place of "message". Then comes the usage, if it was
// asked for, and "[DONE]".
#include "inference/server.h"
#include "io/json.h"

#include <ctime>
#include <random>
#include <utility>

namespace {

std::string event_of(const JsonText& value) { return "data: " + value.str() + "\n\n"; }

std::string random_id() {
    static thread_local std::mt19937_64 random{std::random_device{}()};
    return format("%012llx%012llx", static_cast<unsigned long long>(random() >> 16),
                  static_cast<unsigned long long>(random() >> 16));
}

JsonText chat_token(const Tokenizer& tokenizer, int32_t token, float logprob) {
    const std::string text = text_of(tokenizer, token).value_or("");
    return {{"token", text}, {"logprob", logprob}, {"bytes", std::vector<unsigned char>(text.begin(), text.end())}};
}
JsonText chat_logprobs(const Tokenizer& tokenizer, const std::vector<Sampled>& tokens) {
    JsonText content = JsonText::array();
    for (const Sampled& sampled : tokens) {
        JsonText one = chat_token(tokenizer, sampled.token, sampled.logprob), tops = JsonText::array();
        for (const TokenLogprob& top : sampled.top) tops.push_back(chat_token(tokenizer, top.token, top.logprob));
        one.set("top_logprobs", tops);
        content.push_back(one);
    }
    return {{"content", content}, {"refusal", nullptr}};
}

JsonText or_null(const std::string& text) { return text.empty() ? JsonText() : text; }

JsonText described(const ServedModel& served) {
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
            Choice& choice = choices_.emplace_back();
            if (request.echo) choice.text = request.prompts[p];
            if (!request.chat && request.requests[p].sampling.logprobs >= 0)
                choice.offsets.emplace(*served.model.tokenizer, request.requests[p],
                                       request.echo ? &request.prompts[p] : nullptr);
        }
}

JsonText ApiAnswer::head(const char* object) const {
    return {{"id", id_}, {"object", object}, {"created", created_}, {"model", served_.name}};
}

JsonText ApiAnswer::usage() const {
    int64_t prompt_n = 0;
    for (const TextRequest& request : request_.requests) prompt_n += std::ssize(request.prompt);
    return {{"prompt_tokens", prompt_n}, {"completion_tokens", n_tokens_}, {"total_tokens", prompt_n + n_tokens_}};
}

JsonText ApiAnswer::logprobs(const std::vector<Sampled>& tokens, std::optional<TextOffsets>& offsets) const {
    if (request_.requests[0].sampling.logprobs < 0) return nullptr;
    const Tokenizer& tokenizer = *served_.model.tokenizer;
    return request_.chat ? chat_logprobs(tokenizer, tokens) : logprobs_json(tokenizer, tokens, *offsets);
}

void ApiAnswer::add(const IndexedPiece& indexed) {
    Choice& choice = choices_[static_cast<size_t>(indexed.index)];
    const AnswerPiece& piece = indexed.piece;
    choice.text += piece.text;
    choice.tokens.insert(choice.tokens.end(), piece.prompt.begin(), piece.prompt.end());
    choice.tokens.insert(choice.tokens.end(), piece.tokens.begin(), piece.tokens.end());
    if (piece.finish_reason) choice.finish_reason = piece.finish_reason;
    n_tokens_ += std::ssize(piece.tokens);
}

std::string ApiAnswer::whole() const {
    JsonText answer = head(request_.chat ? "chat.completion" : "text_completion"), choices = JsonText::array();
    for (size_t i = 0; i < choices_.size(); ++i) {
        const Choice& choice = choices_[i];
        JsonText one = {{"index", i}};
        if (request_.chat) one.set("message", {{"role", "assistant"}, {"content", choice.text}, {"refusal", nullptr}});
        else one.set("text", choice.text);
        std::optional<TextOffsets> offsets = choice.offsets;
        one.set("logprobs", logprobs(choice.tokens, offsets));
        one.set("finish_reason", choice.finish_reason);
        choices.push_back(one);
    }
    answer.set("choices", choices);
    answer.set("usage", usage());
    return answer.str();
}

std::string ApiAnswer::event(const IndexedPiece& indexed) {
    Choice& choice = choices_[static_cast<size_t>(indexed.index)];
    const AnswerPiece& piece = indexed.piece;
    n_tokens_ += std::ssize(piece.tokens);
    std::vector<Sampled> tokens = piece.prompt;
    tokens.insert(tokens.end(), piece.tokens.begin(), piece.tokens.end());
    JsonText one = {{"index", indexed.index}};
    // echo: before the answer's first text the prompt, which may end inside of a character that this text completes.
    std::string text = piece.text;
    if (!text.empty() || piece.finish_reason) text.insert(0, std::exchange(choice.text, ""));
    if (!request_.chat) one.set("text", text);
    else if (choice.begun) one.set("delta", {{"content", text}});
    else one.set("delta", {{"role", "assistant"}, {"content", text}});
    choice.begun = true;
    one.set("logprobs", logprobs(tokens, choice.offsets));
    one.set("finish_reason", piece.finish_reason ? JsonText(piece.finish_reason) : nullptr);
    JsonText answer = head(request_.chat ? "chat.completion.chunk" : "text_completion");
    answer.set("choices", JsonText::array({one}));
    if (request_.include_usage) answer.set("usage", nullptr);
    return event_of(answer);
}

std::string ApiAnswer::last_events() const {
    std::string text;
    if (request_.include_usage) {
        JsonText answer = head(request_.chat ? "chat.completion.chunk" : "text_completion");
        answer.set("choices", JsonText::array());
        answer.set("usage", usage());
        text = event_of(answer);
    }
    return text + "data: [DONE]\n\n";
}

std::string model_json(const ServedModel& served) { return described(served).str(); }
std::string models_json(const ServedModel& served) {
    return JsonText{{"object", "list"}, {"data", JsonText::array({described(served)})}}.str();
}

std::string error_json(const HttpError& error) {
    const char* type = error.status == 429   ? "rate_limit_error"
                       : error.status >= 500 ? "server_error"
                                             : "invalid_request_error";
    const JsonText described = {
        {"message", error.what()}, {"type", type}, {"param", or_null(error.param)}, {"code", or_null(error.code)}};
    return JsonText{{"error", described}}.str();
}

std::string engine_json(const ServedModel& served, const EngineView& engine, int64_t answer_tokens) {
    JsonText requests = JsonText::array(), pages = JsonText::array();
    for (const EngineView::Row& r : engine.requests)
        requests.push_back({{"id", r.id},
                            {"state", r.state},
                            {"prompt_tokens", r.prompt_tokens},
                            {"computed_tokens", r.computed_tokens},
                            {"answer_tokens", r.answer_tokens},
                            {"max_tokens", r.max_tokens},
                            {"n", r.n},
                            {"pages", r.pages}});
    for (const EngineView::PageRun& run : engine.pages)
        pages.push_back(JsonText::array({run.owner, run.shared ? 1 : 0, run.n}));
    return JsonText{{"model", served.name},
                    {"steps", engine.n_steps},
                    {"answer_tokens", answer_tokens},
                    {"running", engine.n_running},
                    {"waiting", engine.n_waiting},
                    {"preemptions", engine.n_preemptions},
                    {"max_length", served.model.engine->options().scheduler.max_length},
                    {"page_size", engine.page_size},
                    {"pages_used", engine.use.owned_pages},
                    {"rows_used", engine.use.used_rows},
                    {"pages_shared", engine.use.shared_pages},
                    {"pages_kept", engine.use.kept_pages},
                    {"pages_free", engine.use.free_pages},
                    {"pages_all", engine.use.n_pages},
                    {"requests", requests},
                    {"pages", pages}}
        .str();
}
