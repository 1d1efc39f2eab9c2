// inference/server.h: the parts of --serve, for its own files alone.
//
//     http_server.cu   HTTP: connections (http_connection.h), keys, limits, errors
//     engine_loop.cu   the thread of the engine: what other threads want of it, and what they get from it
//     openai_request.cu, openai_answer.cu      OpenAI's JSON: requests that are read, answers that are written
//     metrics.cu       counts, and histograms of times, as Prometheus reads them
//     server.cu        what each path does
//     page.html        the page at /: a conversation with the model, and what the engine does meanwhile
//
// A request passes through two threads. That of its connection reads the JSON, hands the prompts over, and waits for
// pieces of the answers; that of the engine puts the prompts into Requests, steps, and hands the pieces over.
#pragma once

#include "inference/inference.h"

#include <atomic>
#include <condition_variable>
#include <mutex>

// An error that the client is told, with its HTTP status. code and param are OpenAI's: what kind of mistake, in which
// field.
struct HttpError : Error {
    int status;
    std::string code, param;
    HttpError(int status_, const std::string& message, std::string code_ = "", std::string param_ = "")
        : Error(message), status(status_), code(std::move(code_)), param(std::move(param_)) {}
};

// ---------------------------------------------------------------------------------------------------------------------
// http_server.cu

struct HttpRequest {
    std::string path, body;
    std::function<bool()> client_is_gone;
};
struct HttpReply {
    std::string type, body;
    // If it is there, the body comes from here piece by piece. It waits for the next one; false: that was the last.
    std::function<bool(std::string& piece)> next_piece = {};
};
struct Route {
    std::string method, path;  // a path that ends in /* is that of everything below it
    std::function<HttpReply(const HttpRequest& request)>
        handler;  // may throw HttpError, or Error: that is a status of 400
    bool needs_key = true;
};

// Errors are answered with OpenAI's {"error": {"message", "type", "param", "code"}}:
//     400  no HTTP, or no request that the handler understands       411  a body without its length
//     401  not the right key                                         413  a body that is too large
//     404  an unknown path                                           414  a path that is too long
//     405  a method that the path does not have                      415  not application/json, or unknown compression
//     408  it took too long to send the request                      431  headers that are too large
//                                                                    500  anything else that is thrown
// and by the handlers: 404 a model other than the one that is served; 429, 500, 503 and 504 are EngineLoop's.
class HttpServer {
  public:
    // Binds the port; clients that connect wait for start(). status_sent is called for every answer with its status.
    HttpServer(const ServerOptions& options, std::vector<Route> routes, std::function<void(int status)> status_sent);
    ~HttpServer();
    void start();  // from here on requests are answered
    int port() const;
    // Takes no further connections, and waits for those that there are: until their answers are sent, at most
    // options.client_timeout. Who has sent a part of a request has a second for the rest.
    void end();

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

// ---------------------------------------------------------------------------------------------------------------------
// metrics.cu

// Observations counted by upper bounds, as Prometheus has histograms.
class Histogram {
  public:
    explicit Histogram(std::vector<double> bounds) : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {}
    void observe(double value);
    std::string text(const std::string& name, const std::string& help) const;

  private:
    std::vector<double> bounds_;
    std::vector<int64_t> counts_;  // of each bound, and of what is above the last
    double sum_ = 0;
};

// How a request ended, besides what its answers ended with.
enum class Outcome { completed, cancelled, timed_out, failed };

struct EngineView;
// Called from any thread.
class Metrics {
  public:
    void http_answer(int status);
    void prompt(int64_t tokens);
    // A token of an answer. seconds: from the request, if it is the answer's first; otherwise from the one before.
    void token(bool first, double seconds);
    void answer_ends(const std::string& finish_reason);
    void request_ends(Outcome outcome);
    int64_t answer_tokens() const;
    std::string text(const EngineView& engine) const;  // the format of Prometheus, version 0.0.4

  private:
    mutable std::mutex mutex_;
    std::map<int, int64_t> http_answers_;
    std::map<Outcome, int64_t> outcomes_;
    std::map<std::string, int64_t> finish_reasons_;
    int64_t prompt_tokens_ = 0, answer_tokens_ = 0;
    // 1 ms to 2 minutes, and 0.1 ms to 10 s; three bounds in each power of ten but the last.
    Histogram first_token_{{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120}};
    Histogram next_token_{{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}};
};

// ---------------------------------------------------------------------------------------------------------------------
// engine_loop.cu

// What the engine does at one moment, between two steps.
struct EngineView {
    struct Row {  // a request
        int64_t id = 0;
        const char* state = "";  // "waits", "prompt" (it is computed), "answers", "swapped" (its pages are on the host)
        int64_t prompt_tokens = 0, computed_tokens = 0, answer_tokens = 0, max_tokens = 0, n = 0, pages = 0;
    };
    struct PageRun {    // neighbouring pages that have the same owner
        int64_t owner;  // a request's id; 0: free, -1: of nobody, but kept because it may be found again
        bool shared;    // by several sequences
        int64_t n;
    };
    std::vector<Row> requests = {};
    std::vector<PageRun> pages = {};
    CacheUse use;
    int64_t page_size = 0, n_steps = 0, n_running = 0, n_waiting = 0, n_preemptions = 0;
    SpeculationCount speculation = {};
};

EngineView view_of(const Requests& requests);

// A piece of one of the answers that a client waits for. index: which of them.
struct IndexedPiece {
    int64_t index;
    AnswerPiece piece;
};

// Pieces on their way from the engine's thread to another.
class PieceQueue {
  public:
    void put(IndexedPiece piece);
    std::optional<IndexedPiece> take(double seconds);  // waits for at most this long

  private:
    std::mutex mutex_;
    std::condition_variable filled_;
    std::deque<IndexedPiece> pieces_;
};

// Only the thread that calls run() touches the engine; the other functions may be called from any thread.
class EngineLoop {
  public:
    // ending: when it becomes true, no further request is taken.
    EngineLoop(Requests& requests, const ServerOptions& options, Metrics& metrics, const std::atomic<bool>& ending);
    // Steps until `ending`, and until the requests that run or wait then are answered. What the engine throws ends it,
    // too.
    void run();

    // Prompts that one client sent; their answers are numbered through, those of the first prompt first.
    class Submission {
      public:
        Submission(EngineLoop& loop, std::vector<int64_t> ids, std::shared_ptr<PieceQueue> queue, int64_t n_answers);
        ~Submission();  // cancels what has not ended
        Submission(const Submission&) = delete;
        // The next piece, in the order in which the engine made them; nothing after the last. HttpError 500 if the
        // engine has ended before, or the logits of an answer are not finite, 504 if the request took too long;
        // nothing, too, when client_is_gone.
        std::optional<IndexedPiece> next(const std::function<bool()>& client_is_gone);
        std::optional<IndexedPiece> next_if_there(double seconds = 0);  // waits for at most this long
        bool ended() const { return n_left_ == 0; }

      private:
        EngineLoop& loop_;
        std::vector<int64_t> ids_;
        std::shared_ptr<PieceQueue> queue_;
        int64_t n_left_;
        double deadline_;
        Outcome outcome_ = Outcome::cancelled;
    };
    // Error if what is asked cannot be done, as by Requests::add: a status of 400. HttpError 429 if too many wait, 503
    // if the server is ending.
    std::shared_ptr<Submission> submit(std::vector<TextRequest> requests);
    EngineView view();  // HttpError 503 if the engine has ended

  private:
    // Runs f between two steps and gives what it returns, or throws what it throws.
    template <class F>
    auto between_steps(F f) -> decltype(f());
    void post(std::function<void()> task);
    bool run_tasks();
    void check_room(std::span<const TextRequest> added) const;
    void hand_over(TextRequest& request, int64_t first_index, std::shared_ptr<PieceQueue> queue);
    bool has_ended();

    Requests& requests_;
    ServerOptions options_;
    Metrics& metrics_;
    const std::atomic<bool>& ending_;
    std::mutex mutex_;  // of the three below
    std::condition_variable posted_;
    std::vector<std::function<void()>> tasks_;
    bool has_ended_ = false;
};

// ---------------------------------------------------------------------------------------------------------------------
// openai_request.cu, openai_answer.cu

// The model as clients see it.
struct ServedModel {
    const LoadedModel& model;
    const GenerateOptions& options;  // what a request does not say is as the flags are
    const ChatTemplate& chat_template;
    std::string name;
    int64_t created;                                   // seconds since 1970
    void expect_name(const std::string& asked) const;  // HttpError 404 for another model
};

struct ApiRequest {
    bool chat = false, stream = false, include_usage = false, echo = false;
    std::vector<std::string> prompts;   // with echo: their texts
    std::vector<TextRequest> requests;  // one for each prompt
};
// The body of /v1/completions (chat: of /v1/chat/completions). HttpError that names the field which is wrong.
ApiRequest read_api_request(const ServedModel& served, bool chat, const std::string& body);

class JsonText;
// The answers to a request, from their pieces: whole, or as server-sent events.
class ApiAnswer {
  public:
    ApiAnswer(const ServedModel& served, const ApiRequest& request);
    // For all pieces, either the one,
    void add(const IndexedPiece& piece);
    std::string whole() const;
    // or the other: "data: {...}\n\n" for a piece, and what follows the last one.
    std::string event(const IndexedPiece& piece);
    std::string last_events() const;

  private:
    struct Choice {
        std::string text, finish_reason;
        std::vector<Sampled> tokens;
        std::optional<TextOffsets> offsets;  // of the next token that is written
        bool begun = false;
    };
    JsonText head(const char* object) const;
    JsonText usage() const;
    JsonText logprobs(const std::vector<Sampled>& tokens, std::optional<TextOffsets>& offsets) const;
    const ServedModel& served_;
    ApiRequest request_;
    std::string id_;
    int64_t created_;
    std::vector<Choice> choices_;
    int64_t n_tokens_ = 0;
};
std::string models_json(const ServedModel& served);
std::string model_json(const ServedModel& served);
std::string error_json(const HttpError& error);
// For the page: {"steps": .., "running": .., "requests": [..], "pages": ..}, as EngineView has it.
std::string engine_json(const ServedModel& served, const EngineView& engine, int64_t answer_tokens);
