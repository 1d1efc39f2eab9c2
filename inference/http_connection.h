// inference/http_connection.h: connections of the server, for http_server.cu alone.
//
// Each has a thread, which reads a request, has it answered, and waits for the next one. The library reads and writes
// through a Stream of ours, for what its own does not have: a time limit for a request as a whole (its own is for each
// read, so that a client that sends a byte a second would keep a thread for hours), a limit on the size of the headers,
// and the question whether the client is still there.
#pragma once

#include "io/io.h"

#include <httplib.h>

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

constexpr size_t kMaxFirstLine = CPPHTTPLIB_REQUEST_URI_MAX_LENGTH;  // some versions wait for more behind a longer one
constexpr size_t kMaxHeaderBytes = 64 << 10;  // of one of them at most CPPHTTPLIB_HEADER_MAX_LENGTH
constexpr size_t kMaxChunkLine = 1000;
constexpr int kMaxConnections = 500;   // more wait in the system's queue; often a process may have 1024 files
constexpr double kLookSeconds = 0.25;  // in which a connection that waits looks whether the server is ending
constexpr double kLastSeconds = 1;     // what a client has left then to send the rest of a request

inline bool client_is_gone(int fd) {
    pollfd p{fd, POLLRDHUP, 0};
    return ::poll(&p, 1, 0) > 0;  // POLLERR and POLLHUP come unasked
}

// A socket as the library's Stream.
class Connection final : public httplib::Stream {
  public:
    Connection(int fd, double timeout, const std::atomic<bool>& ending) : fd_(fd), timeout_(timeout), ending_(ending) {
        current_ = this;
    }
    ~Connection() override { current_ = nullptr; }
    static Connection* current() { return current_; }  // the one that this thread serves

    // Waits for the first byte of a request.
    bool wait_for_request() {
        const double until = seconds_now() + timeout_;
        while (first_ == last_ && !wait(POLLIN, kLookSeconds))
            if (ending_ || seconds_now() > until) return false;
        deadline_ = seconds_now() + timeout_;
        header_bytes_ = 0, in_headers_ = true, before_ = '\0', has_written_ = false;
        has_first_line_ = false, line_bytes_ = 0;
        chunked_ = false, chunk_left_ = 0, chunk_line_ = "", behind_chunk_ = false;
        return true;
    }
    // chunked: the body is sent as "5\r\nhello\r\n0\r\n\r\n".
    void headers_are_read(bool chunked) { in_headers_ = false, chunked_ = chunked; }
    // The status that tells why a request could not be read, or 0.
    int failure() const { return failure_; }
    bool has_written() const { return has_written_; }
    void end_after_answer() { ends_ = true; }
    bool ends() const { return ends_; }
    // Reads on until the client closes its side, or its time is over.
    void drain() {
        ::shutdown(fd_, SHUT_WR);
        const double start = seconds_now();
        for (double passed = 0; passed < (ending_ ? kLastSeconds : timeout_); passed = seconds_now() - start)
            if (wait(POLLIN, kLookSeconds) && receive() <= 0) return;
    }

    // The library's names. What other versions of it have is without `override`.
    bool is_readable() const override { return first_ < last_ || wait(POLLIN, deadline_ - seconds_now()); }
    bool is_writable() const { return wait(POLLOUT, timeout_); }
    bool wait_readable() const { return is_readable(); }
    bool wait_writable() const { return is_writable(); }
    bool is_peer_alive() const { return true; }  // HttpReply::next_piece asks client_is_gone, and may tell it so
    time_t duration() const { return 0; }
    socket_t socket() const override { return fd_; }
    void get_remote_ip_and_port(std::string& ip, int& port) const override { address(::getpeername, ip, port); }
    void get_local_ip_and_port(std::string& ip, int& port) const { address(::getsockname, ip, port); }

    ssize_t read(char* to, size_t n) override {
        if (in_headers_ && !has_first_line_ && line_bytes_ >= kMaxFirstLine) return failure_ = 414, -1;
        if (in_headers_ && has_first_line_ &&
            (header_bytes_ >= kMaxHeaderBytes || line_bytes_ >= CPPHTTPLIB_HEADER_MAX_LENGTH))
            return failure_ = 431, -1;
        if (first_ == last_) {
            if (!wait_for_rest()) return failure_ = 408, -1;
            const ssize_t got = receive();
            if (got <= 0) return got;
            first_ = 0, last_ = static_cast<size_t>(got);
        }
        n = std::min(n, last_ - first_);
        std::memcpy(to, buffer_ + first_, n);
        for (size_t i = 0; (in_headers_ || chunked_) && i < n; ++i)
            if (!(in_headers_ ? fits_headers(to[i]) : fits_chunks(to[i]))) return failure_ = 400, -1;
        first_ += n;
        header_bytes_ += n;
        return static_cast<ssize_t>(n);
    }
    ssize_t write(const char* from, size_t n) override {
        has_written_ = true;
        // The library writes the body also where the headers could not be written.
        if (write_failed_ || !wait(POLLOUT, timeout_)) return write_failed_ = true, -1;
        const ssize_t sent = ::send(fd_, from, n, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
        write_failed_ = sent < 0;
        return sent;
    }

  private:
    bool wait_for_rest() {
        while (true) {
            if (ending_) deadline_ = std::min(deadline_, seconds_now() + kLastSeconds);
            const double left = deadline_ - seconds_now();
            if (left <= 0) return false;
            if (wait(POLLIN, std::min(left, kLookSeconds))) return true;
        }
    }
    // A signal ends neither of the two.
    bool wait(short event, double seconds) const {
        const double until = seconds_now() + seconds;
        pollfd p{fd_, event, 0};
        int n = 0;
        for (double left = seconds; left > 0; left = until - seconds_now())
            if ((n = ::poll(&p, 1, static_cast<int>(std::min(left * 1000, 1e9)) + 1)) >= 0 || errno != EINTR) break;
        return n > 0;
    }
    ssize_t receive() {
        return uninterrupted([&] { return ::recv(fd_, buffer_, sizeof buffer_, 0); });
    }
    template <class F>
    void address(F ask, std::string& ip, int& port) const {
        sockaddr_storage storage{};
        socklen_t bytes = sizeof storage;
        char host[NI_MAXHOST] = "", service[NI_MAXSERV] = "0";
        auto* general = reinterpret_cast<sockaddr*>(&storage);
        if (ask(fd_, general, &bytes) == 0)
            ::getnameinfo(general, bytes, host, sizeof host, service, sizeof service, NI_NUMERICHOST | NI_NUMERICSERV);
        ip = host, port = std::atoi(service);
    }

    // A line ends with \r\n, and has neither of them elsewhere.
    bool fits_line(char c) { return (c == '\n') == (std::exchange(before_, c) == '\r'); }
    // A line that begins with a blank goes on with the one before it, which HTTP has given up: the library would leave
    // it out, as it does with one that ends with \n alone.
    bool fits_headers(char c) {
        const bool begins_line = before_ == '\n';
        has_first_line_ |= c == '\n';
        line_bytes_ = c == '\n' ? 0 : line_bytes_ + 1;
        return fits_line(c) && !(begins_line && (c == ' ' || c == '\t'));
    }
    // The library reads a length as strtoul() does, "0x5", "-5" or "5 or so", takes a chunk that is longer than its
    // length says for the last one, and keeps lines of any length.
    bool fits_chunks(char c) {
        if (chunk_left_ > 0) return chunk_left_--, true;
        chunk_line_ += c;
        if (!fits_line(c) || chunk_line_.size() > kMaxChunkLine) return false;
        if (c != '\n') return true;
        const std::string line = std::exchange(chunk_line_, "");
        if (std::exchange(behind_chunk_, !behind_chunk_)) return line.size() == 2;
        const size_t n_digits = line.find_first_not_of("0123456789abcdefABCDEF");
        if (n_digits == 0 || n_digits > 15 || (line[n_digits] != '\r' && line[n_digits] != ';')) return false;
        chunk_left_ = std::stoull(line, nullptr, 16);
        return true;
    }

    static thread_local Connection* current_;
    int fd_;
    double timeout_, deadline_ = 0;
    const std::atomic<bool>& ending_;
    char buffer_[16 << 10];
    size_t first_ = 0, last_ = 0;               // what of the buffer is not yet handed on
    size_t header_bytes_ = 0, line_bytes_ = 0;  // of all headers, and of the last line
    bool in_headers_ = false, has_first_line_ = false, has_written_ = false, write_failed_ = false, ends_ = false;
    char before_ = '\0';  // the last byte of a line
    // Of a body in chunks: the bytes of a chunk that are still to come, or else what has come of the line with the
    // length of the next, or of the empty line after one.
    bool chunked_ = false, behind_chunk_ = false;
    uint64_t chunk_left_ = 0;
    std::string chunk_line_;
    int failure_ = 0;
};
inline thread_local Connection* Connection::current_ = nullptr;

// A thread for each connection, as long as there are fewer than kMaxConnections.
class ConnectionThreads {
  public:
    void serve(const std::function<void()>& serve_connection) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return n_ < kMaxConnections; });
        // Where the system has no memory or number for one more thread, the connection waits until another has ended.
        while (!start(serve_connection)) changed_.wait_for(lock, std::chrono::milliseconds(100));
        ++n_;
    }
    // Until all have ended, or for this many seconds.
    void wait(double seconds = INFINITY) {
        const double until = seconds_now() + seconds;
        std::unique_lock lock(mutex_);
        while (n_ > 0 && seconds_now() < until)
            changed_.wait_for(lock, std::chrono::duration<double>(std::min(until - seconds_now(), 1.0)));
    }

  private:
    bool start(const std::function<void()>& serve_connection) {
        try {
            std::thread([this, serve_connection] {
                serve_connection();
                const std::lock_guard ending(mutex_);
                --n_;
                changed_.notify_all();
            }).detach();
        } catch (const std::exception&) {  // std::system_error or std::bad_alloc
            return false;
        }
        return true;
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    int n_ = 0;
};
