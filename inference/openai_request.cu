// inference/openai_request.cu: a request as OpenAI's clients write it, checked field by field.
//
// Besides OpenAI's fields there are some that vLLM has, too: top_k, min_p, repetition_penalty, stop_token_ids,
// ignore_eos, skip_special_tokens. What a request does not say is as the program's flags are; only the seed, without
// --seed, differs from request to request. A field that we do not know is refused: otherwise a client whose
// "temprature" is ignored would never learn of it.
#include "inference/server.h"
#include "io/json.h"

#include <algorithm>
#include <random>
#include <set>

namespace {

constexpr int kMaxDepth = 32;  // of lists and objects in each other; OpenAI's requests have 6

[[noreturn]] void refuse(const std::string& field, const std::string& message, const std::string& code = "") {
    throw HttpError(400, message, code, field);
}

std::string shown(const Json::Value& value) {
    const std::string text = JsonText(value).str();
    return text.size() <= 60 ? text : text.substr(0, 57) + "...";
}

const char* const kWhole = "a whole number of at most 64 bits";

// The fields of an object. One that is null is as if it were not there.
class Fields {
  public:
    explicit Fields(const Json::Value& object) : object_(object) {}

    const Json::Value* find(const std::string& name) {
        known_.insert(name);
        const Json::Value& found = member(object_, name);
        return found.isNull() ? nullptr : &found;
    }
    // False if it is not there.
    template <class T>
    bool read(const std::string& name, T& to, const char* expected) {
        const Json::Value* value = find(name);
        if (value && !read_value(*value, to)) wrong_type(name, *value, expected);
        return value != nullptr;
    }
    [[noreturn]] static void wrong_type(const std::string& name, const Json::Value& value,
                                        const std::string& expected) {
        refuse(name, "\"" + name + "\" is " + shown(value) + ": expected " + expected);
    }
    // Fields that have no meaning here, and do no harm.
    void ignore(std::initializer_list<const char*> names) { known_.insert(names.begin(), names.end()); }
    // Fields that can only have this value, which changes nothing.
    void only(const char* name, const JsonText& value) {
        const Json::Value* given = find(name);
        if (given && JsonText(*given).str() != value.str())
            refuse(name, concat("\"", name, "\" is ", shown(*given), ": this server knows only ", value.str()));
    }
    void refuse_unknown() const {
        for (const std::string& name : object_.getMemberNames())
            if (!known_.contains(name)) refuse(name, JsonText(name).str() + ": this server has no such field");
    }

  private:
    const Json::Value& object_;
    std::set<std::string, std::less<>> known_;
};

void read_sampling(Fields& fields, bool has_seed, SamplingOptions& s) {
    for (const SamplingNumber& number : sampling_numbers()) fields.read(number.name, s.*number.value, "a number");
    fields.read("top_k", s.top_k, kWhole);
    static thread_local std::mt19937_64 random{std::random_device{}()};
    const Json::Value* const seed = fields.find("seed");
    // Those of OpenAI may be negative: -1 is 2^64 - 1.
    if (int64_t signed_seed = 0; seed && read_value(*seed, signed_seed)) s.seed = static_cast<uint64_t>(signed_seed);
    else if (!fields.read("seed", s.seed, kWhole) && !has_seed) s.seed = random();
    const Json::Value* bias = fields.find("logit_bias");
    try {
        if (bias) s.logit_bias = read_logit_bias(*bias);
    } catch (const Error& error) {
        refuse("logit_bias", error.what());
    }
}

void read_logprobs(Fields& fields, bool chat, SamplingOptions& s) {
    if (!chat) return void(fields.read("logprobs", s.logprobs, kWhole));
    bool wanted = false;
    int64_t top = 0;
    const bool given = fields.read("logprobs", wanted, "true or false");
    if (fields.read("top_logprobs", top, kWhole) && !wanted)
        refuse("top_logprobs", "\"top_logprobs\" needs \"logprobs\": true");
    if (top < 0 || top > kMostLogprobs)
        refuse("top_logprobs", concat("\"top_logprobs\" is ", top, ": it must be from 0 to ", kMostLogprobs));
    if (given) s.logprobs = wanted ? top : -1;
}

void check_token(const ServedModel& served, const char* field, int32_t token) {
    const int64_t V = served.model.config.V;
    if (token < 0 || token >= V)
        refuse(field, concat('"', field, "\" has the token ", token, ": the model knows 0 to ", V - 1));
}

// How many answers, how long, and where they end.
// length: the field that says how long, or "".
void read_ends(Fields& fields, const ServedModel& served, bool chat, TextRequest& request, std::string& length) {
    if (fields.read("max_tokens", request.max_tokens, kWhole)) length = "max_tokens";
    if (chat && fields.read("max_completion_tokens", request.max_tokens, kWhole)) length = "max_completion_tokens";
    if (request.max_tokens < (request.scores_prompt ? 0 : 1))
        refuse(length, concat("an answer of ", request.max_tokens, " tokens: ask for at least 1",
                              chat ? "" : ", or for 0 with \"echo\" and \"logprobs\""));
    fields.read("n", request.n, kWhole);
    const int64_t most = served.options.engine.scheduler.most_answers();
    if (request.n < 1 || request.n > most)
        refuse("n", concat(request.n, " answers: ask for 1 to ", most, " (--max-sequences, --step-tokens)"));
    if (const Json::Value* stop = fields.find("stop")) {
        if (stop->isString()) request.stop = {stop->asString()};
        else if (!read_value(*stop, request.stop)) Fields::wrong_type("stop", *stop, "a string or a list of strings");
        if (std::find(request.stop.begin(), request.stop.end(), "") != request.stop.end())
            refuse("stop", "a stop text is empty");
    }
    bool ignore_eos = false;
    const bool given = fields.read("ignore_eos", ignore_eos, "true or false");
    fields.read("skip_special_tokens", request.skip_special_tokens, "true or false");
    std::vector<int32_t>& stops = request.stop_tokens;  // of a conversation also the end of its template
    if (given && ignore_eos) stops.clear();
    else if (given && served.options.ignore_eos)
        stops.insert(stops.end(), served.model.stop_tokens.begin(), served.model.stop_tokens.end());
    std::vector<int32_t> more;
    fields.read("stop_token_ids", more, "a list of tokens");
    for (const int32_t token : more) check_token(served, "stop_token_ids", token);
    stops.insert(stops.end(), more.begin(), more.end());
}

void check_length(const ServedModel& served, const TextRequest& request, const std::string& length, const char* field) {
    const int64_t longest = served.model.engine->options().scheduler.max_length, prompt_n = std::ssize(request.prompt);
    const int64_t room = longest - prompt_n;
    if (prompt_n == 0) refuse(field, concat("\"", field, "\" has no token: give at least one"));
    if (room < 1)
        refuse(field,
               concat("the prompt has ", prompt_n, " tokens, and the model has room for ", longest,
                      ", of prompt and answer"),
               "context_length_exceeded");
    if (!length.empty() && request.max_tokens > room)
        refuse(length,
               concat("the prompt has ", prompt_n, " tokens, and the answer is to have ", request.max_tokens,
                      ": the model has room for ", longest),
               "context_length_exceeded");
}

std::string text_of(const Json::Value& content, const std::string& field) {
    std::string text, of_part;
    if (read_value(content, text)) return text;
    if (!content.isArray()) Fields::wrong_type(field, content, "a string, or a list of parts of the type \"text\"");
    for (const Json::Value& part : content) {
        if (member(part, "type") != Json::Value("text") || !read_value(member(part, "text"), of_part))
            Fields::wrong_type(field, part, "{\"type\": \"text\", \"text\": ...}: the model reads text only");
        text += of_part;
    }
    return text;
}

std::vector<ChatMessage> read_messages(const Json::Value* list) {
    if (!list) refuse("messages", "\"messages\" is missing");
    if (!list->isArray() || list->empty()) Fields::wrong_type("messages", *list, "a list of messages");
    std::vector<ChatMessage> messages;
    for (Json::ArrayIndex i = 0; i < list->size(); ++i) {
        const Json::Value& message = (*list)[i];
        const std::string field = concat("messages[", i, "]");
        if (!message.isObject()) Fields::wrong_type(field, message, "{\"role\": ..., \"content\": ...}");
        std::string role;
        read_value(member(message, "role"), role);
        if (role != "system" && role != "developer" && role != "user" && role != "assistant")
            Fields::wrong_type(field + ".role", member(message, "role"), "\"system\", \"user\" or \"assistant\"");
        const bool is_system = role == "system" || role == "developer";
        if (is_system && i > 0)
            refuse(field + ".role", "\"" + field + "\" is a system message: only the first one can be");
        messages.push_back({is_system ? "system" : role, text_of(member(message, "content"), field + ".content")});
    }
    if (messages.back().role != "user")
        refuse("messages", "the last message is not the user's: there is nothing to answer");
    return messages;
}

// Each prompt becomes a request, which keeps stop texts, stop tokens and logit_bias of its own: a small body must not
// become a large one. And what can never run and wait at the same time would be told to try again for ever.
void check_prompts(int64_t n_prompts, const ServedModel& served, const TextRequest& like) {
    const ServerOptions& server = served.options.server;
    const int64_t most = served.options.engine.scheduler.max_sequences / like.n + server.max_waiting;
    if (n_prompts > most)
        refuse("prompt", concat(n_prompts, " prompts in one request: send at most ", most,
                                " at a time (--max-sequences, --max-waiting)"));
    int64_t bytes = std::ssize(like.sampling.logit_bias) * static_cast<int64_t>(sizeof(LogitBias::value_type)) +
                    std::ssize(like.stop_tokens) * static_cast<int64_t>(sizeof(int32_t));
    for (const std::string& stop : like.stop) bytes += std::ssize(stop) + static_cast<int64_t>(sizeof stop);
    if (n_prompts > 1 && bytes > server.max_body / n_prompts)
        refuse("prompt", concat(n_prompts, " prompts with ", bytes,
                                " bytes of \"stop\", \"stop_token_ids\" and \"logit_bias\" each: together more than ",
                                server.max_body, " (--max-body); send fewer at a time"));
}

// "prompt" is a string, a list of strings, a list of tokens, or a list of lists of tokens.
void read_prompts(const Json::Value* prompt, const ServedModel& served, const TextRequest& like, ApiRequest& api) {
    if (!prompt) refuse("prompt", "\"prompt\" is missing");
    std::vector<std::string> texts;
    std::vector<std::vector<int32_t>> lists;
    std::vector<int32_t> tokens;
    const bool empty = prompt->isArray() && prompt->empty();
    if (prompt->isString()) texts = {prompt->asString()};
    else if (!empty && read_value(*prompt, tokens)) lists = {tokens};
    else if (empty || (!read_value(*prompt, texts) && !read_value(*prompt, lists)))
        Fields::wrong_type("prompt", *prompt,
                           "a string, a list of strings, a list of tokens, or a list of lists of tokens");
    check_prompts(lists.empty() ? std::ssize(texts) : std::ssize(lists), served, like);
    if (lists.empty())
        for (const std::string& text : texts) lists.push_back(encode_prompt(served.model, text));
    else texts.clear();
    for (size_t i = 0; i < lists.size(); ++i) {
        for (const int32_t token : lists[i]) check_token(served, "prompt", token);
        api.requests.push_back(like);
        api.requests.back().prompt = lists[i];
        if (!api.echo) continue;
        api.prompts.push_back(texts.empty() ? text_of_tokens(*served.model.tokenizer, lists[i]) : texts[i]);
    }
}

// What OpenAI has and we do not.
void refuse_unsupported(Fields& fields, bool chat, const TextRequest& request) {
    fields.ignore({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"});
    fields.only("best_of", request.n);
    if (chat) {
        fields.only("response_format", JsonText{{"type", "text"}});
        fields.only("modalities", JsonText::array({"text"}));
        fields.only("tools", JsonText::array());
        fields.only("tool_choice", "none");
        fields.ignore({"parallel_tool_calls"});
    } else {
        fields.only("suffix", "");
    }
    fields.refuse_unknown();
}

}  // namespace

void ServedModel::expect_name(const std::string& asked) const {
    if (asked == name) return;
    throw HttpError(
        404, concat("there is no model ", JsonText(asked).str(), " here: this server has ", JsonText(name).str()),
        "model_not_found", "model");
}

ApiRequest read_api_request(const ServedModel& served, bool chat, const std::string& body) {
    const Json::Value object = parse_json(body, "the body", kMaxDepth);
    if (!object.isObject()) throw HttpError(400, "the body is not a JSON object");
    Fields fields(object);
    std::string model = served.name;
    fields.read("model", model, "a string");
    served.expect_name(model);
    ApiRequest api;
    api.chat = chat;
    fields.read("stream", api.stream, "true or false");
    if (const Json::Value* stream = fields.find("stream_options")) {
        if (!stream->isObject()) Fields::wrong_type("stream_options", *stream, "an object");
        if (!api.stream) refuse("stream_options", "\"stream_options\" needs \"stream\": true");
        Fields inner(*stream);
        inner.read("include_usage", api.include_usage, "true or false");
        inner.ignore({"include_obfuscation"});
        inner.refuse_unknown();
    }
    std::vector<ChatMessage> messages;
    if (chat) messages = read_messages(fields.find("messages"));
    TextRequest request = chat ? chat_request(served.options, served.model, served.chat_template, messages)
                               : text_request(served.options, served.model);
    const std::vector<std::string> template_stop(request.stop.begin() + std::ssize(served.options.stop),
                                                 request.stop.end());
    std::string length;
    read_sampling(fields, served.options.has_seed, request.sampling);
    read_logprobs(fields, chat, request.sampling);
    if (!chat) fields.read("echo", api.echo, "true or false");
    request.scores_prompt = api.echo && request.sampling.logprobs >= 0;
    read_ends(fields, served, chat, request, length);
    for (const std::string& stop : template_stop)
        if (std::find(request.stop.begin(), request.stop.end(), stop) == request.stop.end())
            request.stop.push_back(stop);
    try {
        special_stops(*served.model.tokenizer, request);
    } catch (const Error& error) {
        refuse("stop", error.what());
    }
    if (chat) {
        api.requests.push_back(request);
    } else {
        read_prompts(fields.find("prompt"), served, request, api);
    }
    refuse_unsupported(fields, chat, request);
    try {
        check_sampling(request.sampling, served.model.config.V);
    } catch (const Error& error) {  // it begins with the name of the field
        const std::string message = error.what();
        refuse(message.substr(0, message.find(' ')), message);
    }
    for (const TextRequest& one : api.requests) check_length(served, one, length, chat ? "messages" : "prompt");
    return api;
}
