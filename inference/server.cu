// inference/server.cu: what each path of --serve does.
#include "inference/server.h"

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <ctime>

namespace {

const char kPage[] =
#include "inference/page.inc"  // page.html as a string: the Makefile makes it
    ;

std::atomic<bool> g_ending = false;  // by a signal

void end_by_signal(int number) {
    if (g_ending.exchange(true)) _exit(128 + number);
}

// The name under which clients ask for the model: as a person names it on the command line.
std::string name_of(const GenerateOptions& options) {
    std::string name = options.model;
    while (name.size() > 1 && name.back() == '/') name.pop_back();
    return name;
}

// A client that closes its side of the connection has gone, as far as one can see. If it reads on, it is told so.
HttpError client_closed() {
    return {400, "the connection was closed for writing before the answer was complete: keep it open"};
}

HttpReply stream(const std::shared_ptr<EngineLoop::Submission>& submission, const std::shared_ptr<ApiAnswer>& answer,
                 const std::function<bool()>& client_is_gone) {
    HttpReply reply{"text/event-stream", ""};
    reply.next_piece = [=](std::string& events) {
        try {
            auto piece = submission->next(client_is_gone);
            if (!piece && !submission->ended()) throw client_closed();
            for (; piece; piece = submission->next_if_there()) events += answer->event(*piece);
        } catch (const HttpError& error) {  // the status is sent already
            events += "data: " + error_json(error) + "\n\n";
            return false;
        }
        if (submission->ended()) events += answer->last_events();
        return !submission->ended();
    };
    return reply;
}

HttpReply model_of_path(const ServedModel& served, const HttpRequest& http) {
    served.expect_name(http.path.substr(std::string("/v1/models/").size()));
    return {"application/json", model_json(served)};
}

HttpReply complete(const ServedModel& served, EngineLoop& engine, bool chat, const HttpRequest& http) {
    const ApiRequest request = read_api_request(served, chat, http.body);
    const auto answer = std::make_shared<ApiAnswer>(served, request);
    const auto submission = engine.submit(request.requests);
    if (request.stream) return stream(submission, answer, http.client_is_gone);
    while (const auto piece = submission->next(http.client_is_gone)) answer->add(*piece);
    if (!submission->ended()) throw client_closed();
    return {"application/json", answer->whole()};
}

std::vector<Route> routes(const ServedModel& served, EngineLoop& engine, const Metrics& metrics) {
    const auto get = [](const std::string& path, const char* type, bool needs_key,
                        const std::function<std::string()>& body) {
        return Route{"GET", path, [=](const HttpRequest&) { return HttpReply{type, body()}; }, needs_key};
    };
    const char* const json = "application/json";
    return {get("/", "text/html; charset=utf-8", false, [] { return kPage; }),
            get("/health", json, false,
                []() -> std::string {
                    if (g_ending) throw HttpError(503, "the server is shutting down");
                    return "{\"status\": \"ok\"}";
                }),
            get("/metrics", "text/plain; version=0.0.4", true, [&] { return metrics.text(engine.view()); }),
            get("/engine", json, true, [&] { return engine_json(served, engine.view(), metrics.answer_tokens()); }),
            get("/v1/models", json, true, [&] { return models_json(served); }),
            {"GET", "/v1/models/*", [&](const HttpRequest& http) { return model_of_path(served, http); }},
            {"POST", "/v1/completions", [&](const HttpRequest& http) { return complete(served, engine, false, http); }},
            {"POST", "/v1/chat/completions",
             [&](const HttpRequest& http) { return complete(served, engine, true, http); }}};
}

class Server {
  public:
    Server(LoadedModel& model, const GenerateOptions& options)
        : served_{model, options, find_chat_template(options.chat_template, model.folder), name_of(options),
                  std::time(nullptr)},
          requests_(*model.engine, *model.tokenizer), engine_(requests_, options.server, metrics_, g_ending),
          http_(options.server, routes(served_, engine_, metrics_),
                [this](int status) { metrics_.http_answer(status); }) {}

    void run() {
        for (const int number : {SIGINT, SIGTERM}) std::signal(number, end_by_signal);
        http_.start();
        const std::string& host = served_.options.server.host;
        const bool v6 = host.find(':') != std::string::npos;
        std::printf("%s at http://%s%s%s:%d/   (Ctrl-C ends it when its answers are complete)\n", served_.name.c_str(),
                    v6 ? "[" : "", host.c_str(), v6 ? "]" : "", http_.port());
        std::fflush(stdout);
        engine_.run();
        http_.end();
        std::printf("%s", served_.model.engine->cache_report().text().c_str());
    }

  private:
    const ServedModel served_;
    Requests requests_;
    Metrics metrics_;
    EngineLoop engine_;
    HttpServer http_;
};

}  // namespace

std::function<void()> open_server(LoadedModel& model, const GenerateOptions& options) {
    model.expect_text();
    return [server = std::make_shared<Server>(model, options)] { server->run(); };
}
