// inference/http_server.cu: HTTP, by cpp-httplib: what is the same for all paths.
//
// The library parses and writes HTTP. Ours are the connections (http_connection.h), keys, limits, and errors as JSON.
// An error ends its connection, because the rest of the request may not have been read. Then the client first gets time
// to send that rest: closing earlier would make its system throw the answer away.
#include "inference/server.h"

#ifdef HAVE_HTTPLIB

#include "inference/http_connection.h"

#include <fcntl.h>

#include <algorithm>

namespace {

// In a time that tells nothing of where they differ.
bool same_key(const std::string& given, const std::string& wanted) {
    unsigned char difference = given.size() != wanted.size();
    for (size_t i = 0; i < given.size(); ++i)
        difference |= static_cast<unsigned char>(given[i] ^ wanted[i % wanted.size()]);
    return difference == 0;
}

bool matches(const Route& route, const std::string& path) {
    if (!route.path.ends_with("/*")) return path == route.path;
    const std::string folder = route.path.substr(0, route.path.size() - 1);
    return path.starts_with(folder) && path.size() > folder.size();
}

// As HTTP compares names: without case.
bool begins(const std::string& text, std::string_view words) {
    return ::strncasecmp(text.c_str(), words.data(), words.size()) == 0;
}

// Does a list like "keep-alive, Close" have this word?
bool lists(const std::string& text, const char* word) {
    for (size_t at = 0, end = 0; end < text.size(); at = end + 1) {
        end = std::min(text.find(',', at), text.size());
        const size_t first = std::min(text.find_first_not_of(" \t", at), end);
        const std::string one = text.substr(first, end - first);
        if (::strcasecmp(one.substr(0, one.find_last_not_of(" \t") + 1).c_str(), word) == 0) return true;
    }
    return false;
}

// The path of "GET http://host:8000/health", as clients write it for a proxy: a server must know it, too (RFC 9112,
// section 3.2.2).
std::string without_host(const std::string& path) {
    constexpr std::string_view scheme = "http://";
    if (!begins(path, scheme)) return path;
    const size_t end_of_host = path.find('/', scheme.size());
    return end_of_host == std::string::npos ? "/" : path.substr(end_of_host);
}

const char* reason_of(int status) {
    switch (status) {
        case 400: return "this is not an HTTP request that the server understands";
        case 408: return "the request was not complete in time (--client-timeout)";
        case 413: return "the body is too large (--max-body)";
        case 414: return "the path is too long";
        case 431: return "the headers are too large";
        default: return "the server cannot do this";
    }
}

}  // namespace

struct HttpServer::Impl : httplib::Server {
    Impl(const ServerOptions& options, std::vector<Route> routes, std::function<void(int)> status_sent)
        : options_(options), routes_(std::move(routes)), status_sent_(std::move(status_sent)) {
        set_tcp_nodelay(true);
        // Without the library's SO_REUSEPORT, with which two servers on one port would each get half of the requests.
        set_socket_options([](int fd) {
            const int yes = 1;
            ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
        });
        Post(".*",
             [this](const httplib::Request& request, httplib::Response& response, const httplib::ContentReader& body) {
                 if (const Route* const route = find_route(request, response))
                     respond(*route, request, response, &body);
             });
        // Before the body is read. Only a POST has one that matters.
        set_pre_routing_handler([this](const httplib::Request& request, httplib::Response& response) {
            if (!has_clear_length(request, response)) return HandlerResponse::Handled;
            const Route* const route = find_route(request, response);
            if (route && route->method == "POST") return HandlerResponse::Unhandled;
            if (route) respond(*route, request, response, nullptr);
            return HandlerResponse::Handled;
        });
        // Errors that the library finds.
        set_error_handler(HandlerWithResponse([](const httplib::Request&, httplib::Response& response) {
            if (response.body.empty()) explain(response);
            return HandlerResponse::Handled;
        }));
        set_post_routing_handler([this](const httplib::Request&, httplib::Response& response) {
            // The library tells limits of its own, which process_and_close_socket does not have.
            if (response.headers.erase("Keep-Alive") > 0)
                response.set_header("Keep-Alive", concat("timeout=", static_cast<int64_t>(options_.client_timeout)));
            if (response.status >= 400 || Connection::current()->ends()) {
                response.headers.erase("Connection"), response.headers.erase("Keep-Alive");
                response.set_header("Connection", "close");
                Connection::current()->end_after_answer();
            }
            status_sent_(response.status);
        });
        set_expect_100_continue_handler([this](const httplib::Request& request, httplib::Response& response) {
            if (declared_bytes(request) <= options_.max_body) return 100;
            write_error(response, too_large());
            return response.status;
        });
    }

    void bind() {
        addrinfo* found = nullptr;
        const char* const host = options_.host.c_str();
        const int unknown = ::getaddrinfo(host, nullptr, nullptr, &found);
        check(unknown == 0, "--host ", options_.host, ": no such address: ", ::gai_strerror(unknown),
              "; give an address of this machine, or 0.0.0.0 for all of them");
        ::freeaddrinfo(found);
        if (options_.port == 0) port = bind_to_any_port(host);
        else port = bind_to_port(host, static_cast<int>(options_.port)) ? static_cast<int>(options_.port) : -1;
        check(port > 0, "cannot listen on ", options_.host, " port ", options_.port, ": ", std::strerror(errno),
              "; give another --port (0: one that is free) or --host");
        ::listen(svr_sock_, SOMAXCONN);  // the library's queue is for 5 connections
    }
    void start() {
        listening_ = svr_sock_;
        try {
            thread_ = std::thread([this] { accept_connections(); });
        } catch (const std::system_error& error) {
            fail("cannot start a thread for clients: ", error.what(), "; allow more processes (ulimit -u)");
        }
    }
    void end() {
        if (!thread_.joinable()) return;
        ending_ = true;
        ::shutdown(listening_, SHUT_RDWR);  // ends the wait for a connection, and refuses those that come
        thread_.join();
        ::close(listening_);
    }
    int port = 0;

  private:
    // The library's own loop closes its socket where accept() fails, also for a reason that passes: no memory, no file
    // descriptor in the whole system, an error of the connection's network. Then clients would be refused for ever.
    void accept_connections() {
        ::fcntl(listening_, F_SETFL, O_NONBLOCK);  // a client may leave between poll() and accept()
        ConnectionThreads threads;
        while (!ending_) {
            pollfd p{listening_, POLLIN, 0};
            ::poll(&p, 1, static_cast<int>(1000 * kLookSeconds));
            const int fd = ::accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC);
            if (fd >= 0) threads.serve([this, fd] { process_and_close_socket(fd); });
            else std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        threads.wait(options_.client_timeout);  // the last pieces are on their way to clients
        svr_sock_ = INVALID_SOCKET;             // the library leaves out the rest
        threads.wait();
    }

    static void write_error(httplib::Response& response, const HttpError& error) {
        response.status = error.status;
        response.body = error_json(error);
        response.set_header("Content-Type", "application/json");
        if (error.status == 429) response.set_header("Retry-After", "1");
    }

    // Where two readers of a connection, as a proxy and this server, could find different lengths of a body, they would
    // find different requests after it (RFC 9112, section 6.3). False: the response says what is wrong.
    static bool has_clear_length(const httplib::Request& request, httplib::Response& response) {
        const std::string length = request.get_header_value("Content-Length"),
                          coding = request.get_header_value("Transfer-Encoding");
        const size_t n_lengths =
            request.get_header_value_count("Content-Length") + request.get_header_value_count("Transfer-Encoding");
        // "Content-Length : 5" is a length to some readers; the library does not know it.
        const bool has_blank = std::ranges::any_of(
            request.headers, [](const auto& its) { return its.first.find_first_of(" \t") != std::string::npos; });
        std::string wrong;
        if (has_blank) wrong = "a header has a blank in its name: write \"Name: value\"";
        else if (n_lengths > 1)
            wrong = "the length of the body is given twice: give one Content-Length, or \"Transfer-Encoding: chunked\"";
        else if (length.find_first_not_of("0123456789") != std::string::npos)  // the library reads -5 as 2^64 - 5
            wrong = "\"Content-Length: " + length + "\" is not a number of bytes";
        else if (!coding.empty() && ::strcasecmp(coding.c_str(), "chunked") != 0)
            wrong = "\"Transfer-Encoding: " + coding + "\": the server knows only \"chunked\"";
        if (!wrong.empty()) write_error(response, {400, wrong});
        return wrong.empty();
    }
    // nullptr: there is none, and the response tells why.
    const Route* find_route(const httplib::Request& request, httplib::Response& response) const {
        std::string methods;
        for (const Route& route : routes_) {
            if (!matches(route, request.path)) continue;
            if (route.method == (request.method == "HEAD" ? "GET" : request.method)) return &route;
            methods += (methods.empty() ? "" : ", ") + route.method;
        }
        if (methods.empty()) {
            write_error(response, {404, "there is nothing at " + request.path, "unknown_url"});
        } else {
            write_error(response, {405, request.path + " has no " + request.method + ": use " + methods});
            response.set_header("Allow", methods);
        }
        return nullptr;
    }
    static void explain(httplib::Response& response) {
        const int failure = Connection::current()->failure(), status = failure != 0 ? failure : response.status;
        write_error(response, {status, reason_of(status)});
    }

    HttpError too_large() const {
        return {413, concat("the body is larger than ", options_.max_body, " bytes (--max-body)")};
    }
    static int64_t declared_bytes(const httplib::Request& request) {
        const std::string text = request.get_header_value("Content-Length");
        return text.empty() ? 0 : std::strtoll(text.c_str(), nullptr, 10);
    }

    void respond(const Route& route, const httplib::Request& request, httplib::Response& response,
                 const httplib::ContentReader* body) const {
        try {
            answer(route, request, response, body);
        } catch (const HttpError& error) {
            write_error(response, error);
        } catch (const Error& error) {
            write_error(response, HttpError(400, error.what()));
        } catch (const std::exception& error) {
            write_error(response, HttpError(500, ::reason_of(error)));
        }
    }
    void answer(const Route& route, const httplib::Request& request, httplib::Response& response,
                const httplib::ContentReader* body) const {
        const std::string key = request.get_header_value("Authorization");
        constexpr std::string_view scheme = "Bearer ";
        if (route.needs_key && !options_.api_key.empty() &&
            !(begins(key, scheme) && same_key(key.substr(scheme.size()), options_.api_key)))
            throw HttpError(401, "the key is missing or wrong: send \"Authorization: Bearer KEY\"", "invalid_api_key");
        const HttpRequest mine{request.path, body ? read_body(request, *body) : "",
                               [fd = Connection::current()->socket()] { return client_is_gone(fd); }};
        HttpReply reply = route.handler(mine);
        if (!reply.next_piece) return response.set_content(reply.body, reply.type.c_str());
        response.set_header("Cache-Control", "no-cache");
        const auto send = [next_piece = reply.next_piece](size_t, httplib::DataSink& sink) {
            std::string piece;
            const bool more = next_piece(piece);
            if (!piece.empty() && !sink.write(piece.data(), piece.size())) return false;
            if (!more) sink.done();
            return true;
        };
        if (request.version != "HTTP/1.0") return response.set_chunked_content_provider(reply.type.c_str(), send);
        // Clients of HTTP/1.0 do not know chunks: their body ends with the connection.
        response.set_content_provider(reply.type.c_str(), send);
        Connection::current()->end_after_answer();
    }

    std::string read_body(const httplib::Request& request, const httplib::ContentReader& read) const {
        const std::string type = request.get_header_value("Content-Type");
        constexpr std::string_view json = "application/json";  // what may follow: "; charset=utf-8"
        if (!begins(type, json) || (type.size() > json.size() && type[json.size()] != ';' && type[json.size()] != ' '))
            throw HttpError(415, concat("the body is ", type.empty() ? "of no type" : type,
                                        ": send it with \"Content-Type: application/json\""));
        const std::string encoding = request.get_header_value("Content-Encoding");
        if (!encoding.empty() && encoding != "gzip" && encoding != "deflate" && encoding != "identity")
            throw HttpError(415, concat("the body is compressed with ", encoding, ": send it as it is, or with gzip"));
        if (!request.has_header("Content-Length") && !request.has_header("Transfer-Encoding"))
            throw HttpError(411, "the request has no Content-Length");
        if (declared_bytes(request) > options_.max_body) throw too_large();
        std::string body;
        bool fits = true;
        const bool whole = read([&](const char* data, size_t n) {
            fits = static_cast<int64_t>(body.size() + n) <= options_.max_body;  // also of what was compressed
            if (fits) body.append(data, n);
            return fits;
        });
        if (!fits) throw too_large();
        const int failure = Connection::current()->failure();
        if (!whole && failure == 0 && !encoding.empty())
            throw HttpError(400, "the body cannot be read as " + encoding + ", its Content-Encoding");
        if (!whole) throw HttpError(failure != 0 ? failure : 400, reason_of(failure != 0 ? failure : 400));
        return body;
    }

    // The library's own, with our Stream and time limits.
    bool process_and_close_socket(socket_t fd) override {
        try {
            serve(fd);
        } catch (const std::exception&) {  // no memory for this connection: the others go on
        }
        ::close(fd);
        return true;
    }
    void serve(int fd) {
        Connection connection(fd, options_.client_timeout, ending_);
        while (connection.wait_for_request()) {
            bool last = false;
            const bool answered = process(*this, connection, last);
            if (!answered && !connection.has_written() && connection.failure() != 0) write_failure(connection);
            if (!answered || last || connection.ends()) break;
        }
        if (connection.ends()) connection.drain();
    }
    void write_failure(Connection& connection) const {  // of a request whose first line did not come
        const int status = connection.failure();
        status_sent_(status);
        const std::string body = error_json({status, reason_of(status)});
        const char* const name = status == 400   ? " Bad Request"
                                 : status == 408 ? " Request Timeout"
                                 : status == 414 ? " URI Too Long"
                                                 : " Request Header Fields Too Large";
        const std::string text =
            concat("HTTP/1.1 ", status, name,
                   "\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: ", body.size(),
                   "\r\n\r\n", body);
        connection.write(text.data(), text.size());
        connection.end_after_answer();
    }
    template <class Self>
    static bool process(Self& self, Connection& connection, bool& last) {
        const auto headers_read = [&](httplib::Request& request) {
            connection.headers_are_read(request.has_header("Transfer-Encoding"));
            request.path = without_host(request.path);
            request.headers.erase("Accept-Encoding");  // answers are too small to be worth compressing
            request.headers.erase("Range"), request.ranges.clear();
            // The library knows no other spelling than "close".
            for (const auto& [name, value] : request.headers)
                if (::strcasecmp(name.c_str(), "Connection") == 0 && lists(value, "close"))
                    connection.end_after_answer();
            // The library reads no body of a GET, and would take it for the next request.
            if (request.method != "POST" && (declared_bytes(request) != 0 || request.has_header("Transfer-Encoding")))
                connection.end_after_answer();
        };
        if constexpr (requires { self.process_request(connection, false, last, headers_read); }) {
            return self.process_request(connection, false, last, headers_read);
        } else {  // versions from 0.16 on
            std::string remote, local;
            int remote_port = 0, local_port = 0;
            connection.get_remote_ip_and_port(remote, remote_port);
            connection.get_local_ip_and_port(local, local_port);
            return self.process_request(connection, remote, remote_port, local, local_port, false, last, headers_read);
        }
    }

    ServerOptions options_;
    std::vector<Route> routes_;
    std::function<void(int)> status_sent_;
    std::atomic<bool> ending_ = false;
    int listening_ = INVALID_SOCKET;
    std::thread thread_;
};

HttpServer::HttpServer(const ServerOptions& options, std::vector<Route> routes, std::function<void(int)> status_sent)
    : impl_(std::make_unique<Impl>(options, std::move(routes), std::move(status_sent))) {
    impl_->bind();
}
HttpServer::~HttpServer() { impl_->end(); }
void HttpServer::start() { impl_->start(); }
int HttpServer::port() const { return impl_->port; }
void HttpServer::end() { impl_->end(); }

#else

struct HttpServer::Impl {};
HttpServer::HttpServer(const ServerOptions&, std::vector<Route>, std::function<void(int)>) {
    fail("--serve: this program was built without cpp-httplib: run ./install.sh, then make");
}
HttpServer::~HttpServer() = default;
void HttpServer::start() {}
int HttpServer::port() const { return 0; }
void HttpServer::end() {}

#endif
