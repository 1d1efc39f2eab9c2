// inference/http_server.cu without a model: the connections of a server whose system refuses some of them. And the
// thread of the engine without connections.
#include "engine.h"
#include "inference/server.h"
#include "temp_folder.h"
#include "test.h"

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <future>
#include <new>
#include <thread>

namespace {

std::atomic<int> next_error = 0, next_send_error = 0;  // of the next accept4() and send()
// The next so many calls of poll() and recv() with a socket end as a signal ends them.
std::atomic<int> n_interrupted_polls = 0, n_interrupted_recvs = 0;
bool is_interrupted(std::atomic<int>& n) { return n > 0 && n-- > 0 && (errno = EINTR, true); }

std::string answer_to(int port, const std::string& request) {
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET, address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const timeval limit{20, 0};
    ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    std::string came;
    if (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) {
        char buffer[4096];
        ssize_t n = ::write(fd, request.data(), request.size());
        while (n > 0 && (n = ::read(fd, buffer, sizeof buffer)) > 0) came.append(buffer, static_cast<size_t>(n));
    }
    ::close(fd);
    return came;
}
std::string answer_of(int port, const std::string& path) {
    return answer_to(port, "GET " + path + " HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
}

// None where the program was built without cpp-httplib.
std::unique_ptr<HttpServer> server_of(
    const ServerOptions& options, const std::vector<Route>& routes, const std::function<void(int)>& sent = [](int) {}) {
    try {
        return std::make_unique<HttpServer>(options, routes, sent);
    } catch (const Error& error) {
        if (std::string_view(error.what()).find("without cpp-httplib") == std::string_view::npos) throw;
        return nullptr;
    }
}

}  // namespace

// In the place of the C library's.
extern "C" int accept4(int fd, sockaddr* address, socklen_t* bytes, int flags) {
    if (const int error = next_error.exchange(0)) return errno = error, -1;
    return static_cast<int>(::syscall(SYS_accept4, fd, address, bytes, flags));
}
extern "C" int poll(pollfd* fds, nfds_t n, int milliseconds) {
    if (is_interrupted(n_interrupted_polls)) return -1;
    const timespec limit{milliseconds / 1000, milliseconds % 1000 * 1000000L};
    return ::ppoll(fds, n, milliseconds < 0 ? nullptr : &limit, nullptr);
}
extern "C" ssize_t recv(int fd, void* data, size_t bytes, int flags) {
    if (is_interrupted(n_interrupted_recvs)) return -1;
    return ::recvfrom(fd, data, bytes, flags, nullptr, nullptr);
}
extern "C" ssize_t send(int fd, const void* data, size_t bytes, int flags) {
    if (const int error = next_send_error.exchange(0)) return errno = error, -1;
    return ::sendto(fd, data, bytes, flags, nullptr, 0);
}

TEST_CASE("a server goes on where the system could not give it one connection", "[server]") {
    const std::vector<Route> routes = {
        {"GET", "/health",
         [](const HttpRequest&) {
             return HttpReply{"text/plain", "well"};
         }},
        {"GET", "/memory", [](const HttpRequest&) -> HttpReply { throw std::bad_alloc(); }},
        {"GET", "/pieces", [](const HttpRequest&) {
             HttpReply reply{"text/plain", ""};
             reply.next_piece = [n = 0](std::string& piece) mutable { return piece = n == 1 ? "" : "ab", ++n < 3; };
             return reply;
         }}};
    ServerOptions options;
    options.port = 0;
    const std::unique_ptr<HttpServer> server = server_of(options, routes);
    if (!server) SKIP_TEST("built without cpp-httplib");
    server->start();
    for (const int error : {0, ENFILE, ENOMEM, ECONNABORTED, ENETDOWN, EMFILE, EINTR}) {
        INFO("accept() fails with " << error);
        next_error = error;
        CHECK(answer_of(server->port(), "/health").ends_with("\r\n\r\nwell"));
        CHECK(next_error == 0);
    }
    // A piece of no bytes is no chunk: that would be the last one.
    CHECK(answer_of(server->port(), "/pieces").ends_with("\r\n\r\n2\r\nab\r\n2\r\nab\r\n0\r\n\r\n"));
    const std::string answer = answer_of(server->port(), "/memory");
    CHECK(answer.starts_with("HTTP/1.1 500 "));
    CHECK(answer.find("the host has too little memory") != std::string::npos);
    n_interrupted_polls = 10, n_interrupted_recvs = 3;
    CHECK(answer_of(server->port(), "/health").ends_with("\r\n\r\nwell"));
    CHECK(n_interrupted_recvs == 0);
    next_send_error = ENOMEM;
    CHECK(answer_of(server->port(), "/health") == "");  // no body without its headers
    CHECK(answer_of(server->port(), "/health").ends_with("\r\n\r\nwell"));
}

TEST_CASE("a server goes on where there is no memory for one connection", "[server]") {
    const std::vector<Route> routes = {{"GET", "/health", [](const HttpRequest&) {
                                            return HttpReply{"text/plain", "well"};
                                        }}};
    ServerOptions options;
    options.port = 0;
    std::atomic<int> n_thrown = 0;
    const auto sent = [&](int status) {
        if (status == 400) ++n_thrown, throw std::bad_alloc();
    };
    const std::unique_ptr<HttpServer> server = server_of(options, routes, sent);
    if (!server) SKIP_TEST("built without cpp-httplib");
    server->start();
    CHECK(answer_to(server->port(), "no line of HTTP ends so\n\n") == "");
    CHECK(n_thrown == 1);
    CHECK(answer_of(server->port(), "/health").ends_with("\r\n\r\nwell"));
}

// A number for each name, all different; an observation that equals a bound belongs to it.
TEST_CASE("the metrics are what was counted", "[server]") {
    Metrics metrics;
    for (const double seconds : {0.01, 0.011, 121.0}) metrics.token(true, seconds);
    metrics.token(false, 1e-4);
    metrics.prompt(30), metrics.prompt(1);
    metrics.http_answer(200), metrics.http_answer(200), metrics.http_answer(404);
    metrics.answer_ends("stop");
    metrics.request_ends(Outcome::timed_out);
    EngineView view;
    view.use = {.n_pages = 10, .free_pages = 11, .kept_pages = 12, .owned_pages = 13, .shared_pages = 14};
    view.use.host_pages = 15, view.n_steps = 16, view.n_running = 17, view.n_waiting = 18, view.n_preemptions = 19;
    view.page_size = 23, view.use.used_rows = 24;
    view.speculation = {.proposed = 20, .accepted = 21, .steps = 22};
    const std::string text = metrics.text(view);
    for (const char* const line : {"llm_pages 10",
                                   "llm_pages_free 11",
                                   "llm_pages_kept 12",
                                   "llm_pages_used 13",
                                   "llm_pages_shared 14",
                                   "llm_pages_on_host 15",
                                   "llm_steps_total 16",
                                   "llm_running 17",
                                   "llm_waiting 18",
                                   "llm_preemptions_total 19",
                                   "llm_draft_tokens_total 20",
                                   "llm_draft_tokens_accepted_total 21",
                                   "llm_sequence_steps_total 22",
                                   "llm_page_rows 23",
                                   "llm_rows_used 24",
                                   "llm_prompt_tokens_total 31",
                                   "llm_answer_tokens_total 4",
                                   "llm_http_answers_total{status=\"200\"} 2",
                                   "llm_http_answers_total{status=\"404\"} 1",
                                   "llm_answers_total{finish_reason=\"stop\"} 1",
                                   "llm_requests_total{outcome=\"timed_out\"} 1",
                                   "llm_requests_total{outcome=\"failed\"} 0",
                                   "llm_time_to_first_token_seconds_bucket{le=\"0.005\"} 0",
                                   "llm_time_to_first_token_seconds_bucket{le=\"0.01\"} 1",
                                   "llm_time_to_first_token_seconds_bucket{le=\"0.025\"} 2",
                                   "llm_time_to_first_token_seconds_bucket{le=\"120\"} 2",
                                   "llm_time_to_first_token_seconds_bucket{le=\"+Inf\"} 3",
                                   "llm_time_to_first_token_seconds_count 3",
                                   "llm_time_per_token_seconds_bucket{le=\"0.0001\"} 1",
                                   "llm_time_per_token_seconds_count 1"})
        CHECK_THAT(text, ContainsSubstring(concat("\n", line, "\n")));
    const std::string sum = "llm_time_to_first_token_seconds_sum ";
    CHECK(std::stod(text.substr(text.find(sum) + sum.size())) == 0.01 + 0.011 + 121);
}

TEST_CASE("a server that ends as soon as it has started ends", "[server]") {
    const pid_t child = ::fork();
    if (child == 0) {
        ::alarm(20);  // ends a child that waits for ever
        ServerOptions options;
        options.port = 0;
        for (int i = 0; i < 50; ++i) {
            std::unique_ptr<HttpServer> server = server_of(options, {});
            if (server) server->start();
        }
        ::_exit(0);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    CHECK(status == 0);
}

TEST_CASE("who waits for the engine's thread is told why there is no answer", "[inference][server]") {
    const Config config = small_llama();
    ModelWithMemory m(config, config.T_max);
    const auto tokenizer = parse_tokenizer(
        R"({"decoder": {"type": "ByteLevel"}, "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}})", "t");
    // The status and the message of what f throws.
    const auto refusal = [](auto&& f) {
        try {
            f();
        } catch (const HttpError& error) {
            return concat(error.status, ": ", error.what());
        }
        return std::string("none");
    };
    const auto run = [&](double timeout, const std::function<void(Engine&)>& prepare, auto&& ask) {
        EngineOptions options;
        options.scheduler.max_sequences = 4;
        EngineWithMemory e(m.model, options);
        Requests requests(e.engine, *tokenizer);
        prepare(e.engine);
        ServerOptions server;
        server.request_timeout = timeout;
        Metrics metrics;
        std::atomic<bool> ending = false;
        EngineLoop loop(requests, server, metrics, ending);
        std::string thrown;
        std::thread thread([&] { thrown = error_of([&] { loop.run(); }); });
        TextRequest request;
        request.prompt = {1, 2, 3}, request.max_tokens = 5, request.n = 2;
        ask(loop, request);
        ending = true;
        thread.join();
        CHECK_THAT(refusal([&] { loop.view(); }), ContainsSubstring("503: "));
        CHECK(requests.unfinished().size() == (thrown.empty() ? 0 : 1));
        return thrown + metrics.text(view_of(requests));
    };
    const auto take_all = [&](EngineLoop& loop, const TextRequest& request) {
        const auto submission = loop.submit({request});
        return refusal([&] {
            while (submission->next([] { return false; })) {
            }
        });
    };
    const auto nothing = [](Engine&) {};
    const auto outcome = [](const char* name) { return concat("llm_requests_total{outcome=\"", name, "\"} 1\n"); };
    CHECK_THAT(run(20, nothing, [&](auto& loop, auto& request) { CHECK(take_all(loop, request) == "none"); }),
               ContainsSubstring(outcome("completed")));
    run(20, nothing, [&](auto& loop, auto&) {  // who asks is not heard only when an idle engine looks (0.1 s)
        double fastest = 1;
        for (int i = 0; i < 5; ++i) {
            std::this_thread::sleep_for(std::chrono::milliseconds(10));  // then it waits
            const double start = seconds_now();
            loop.view();
            fastest = std::min(fastest, seconds_now() - start);
        }
        CHECK(fastest < 0.05);
    });
    CHECK_THAT(run(0, nothing,
                   [&](auto& loop, auto& request) {
                       CHECK_THAT(take_all(loop, request),
                                  ContainsSubstring("504: the answer was not complete after 0 s"));
                   }),
               ContainsSubstring(outcome("timed_out")));
    const auto failing = [](Engine& engine) {
        engine.token_ready = [](Request&, Sequence&, const Sampled&) -> bool { fail("the device is lost"); };
    };
    const std::string ended = run(20, failing, [&](auto& loop, auto& request) {
        CHECK(take_all(loop, request) == "500: the engine has ended with an error");
        CHECK_THAT(refusal([&] { loop.submit({request}); }), ContainsSubstring("503: "));
        CHECK_THAT(refusal([&] { loop.view(); }), ContainsSubstring("503: "));
    });
    CHECK_THAT(ended, ContainsSubstring("the device is lost") && ContainsSubstring(outcome("failed")));
    // Also who asks while the engine ends.
    std::future<std::string> asked;
    EngineLoop* its = nullptr;
    const auto failing_asked = [&](Engine& engine) {
        engine.token_ready = [&](Request&, Sequence&, const Sampled&) -> bool {
            asked = std::async(std::launch::async, [&] { return refusal([&] { its->view(); }); });
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            fail("the device is lost");
        };
    };
    run(20, failing_asked, [&](auto& loop, auto& request) {
        its = &loop;
        CHECK(take_all(loop, request) == "500: the engine has ended with an error");
        CHECK(asked.wait_for(std::chrono::seconds(10)) == std::future_status::ready);
    });
    CHECK_THAT(asked.get(), ContainsSubstring("503: "));
    // Half of an answer, or none, is not told as a whole one.
    const Param& weight = m.model.params.back();
    m.model.write(weight, std::vector<float>(static_cast<size_t>(weight.value.n()), std::nanf("")));
    CHECK_THAT(run(20, nothing,
                   [&](auto& loop, auto& request) {
                       CHECK_THAT(take_all(loop, request), ContainsSubstring("500: the model's logits are not finite"));
                   }),
               ContainsSubstring(outcome("failed")));
}

TEST_CASE("who waits for a piece has it when it comes", "[server]") {
    PieceQueue queue;
    std::thread other([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        queue.put({3, {}});
    });
    const double start = seconds_now();
    const std::optional<IndexedPiece> piece = queue.take(60);
    CHECK((piece && piece->index == 3));
    CHECK(seconds_now() - start < 30);
    other.join();
    CHECK(!queue.take(0));
}

TEST_CASE("the view tells whose pages are where", "[inference][server]") {
    const Config config = small_llama();
    ModelWithMemory m(config, config.T_max);
    const auto tokenizer = make_byte_tokenizer();
    EngineOptions options;
    options.cache = {.page_size = 2, .n_pages = 8};
    options.scheduler.max_sequences = 2, options.scheduler.preemption = Preemption::swap;
    EngineWithMemory e(m.model, options);
    Requests requests(e.engine, *tokenizer);
    for (int32_t id = 1; id <= 2; ++id) {  // each ends with seven pages
        TextRequest request;
        request.prompt = {id, 2, 3, 4}, request.max_tokens = 10;
        requests.add(std::move(request));
    }
    std::set<std::string> states;
    for (bool more = true; more; more = requests.step()) {
        const EngineView view = view_of(requests);
        int64_t n_pages = 0, n_swapped = 0;
        for (const EngineView::PageRun& run : view.pages) n_pages += run.n;
        CHECK(n_pages == 8);
        for (const EngineView::Row& row : view.requests) {
            int64_t its_pages = 0;
            for (const EngineView::PageRun& run : view.pages) its_pages += run.owner == row.id ? run.n : 0;
            CHECK(row.pages == its_pages);
            const bool on_device = row.state == std::string("prompt") || row.state == std::string("answers");
            CHECK((row.pages > 0) == on_device);
            states.insert(row.state);
            n_swapped += row.state == std::string("swapped");
        }
        CHECK((view.use.host_pages > 0) == (n_swapped > 0));
    }
    CHECK(states == std::set<std::string>{"answers", "swapped", "waits"});
}
