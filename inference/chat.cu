// inference/chat.cu: a conversation in the terminal.
#include "inference/inference.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>

namespace {

// Linux keeps so many bytes of a line that is being typed (n_tty), and drops others.
constexpr size_t kMostTyped = 4095;

volatile std::sig_atomic_t g_interrupted = 0;

// While it exists Ctrl-C sets g_interrupted, and a poll ends early. A write goes on, as it must where the terminal
// takes nothing for a while: it would count as one that failed.
struct CatchInterrupts {
    struct sigaction before {};
    CatchInterrupts() {
        struct sigaction action {};
        action.sa_handler = [](int) { g_interrupted = 1; };
        action.sa_flags = SA_RESTART;
        sigaction(SIGINT, &action, &before);
    }
    ~CatchInterrupts() { sigaction(SIGINT, &before, nullptr); }
};

// The next line of stdin, without its end. False at the end of stdin; a Ctrl-C drops what was typed, and it reads on.
bool read_line(std::string& line) {
    line.clear();
    for (char c; true;) {
        pollfd input{STDIN_FILENO, POLLIN, 0};
        if (poll(&input, 1, -1) < 0) {
            if (!g_interrupted) return false;
            g_interrupted = 0;
            line.clear();
            std::printf("\n(Ctrl-D ends the conversation)\n> ");
            std::fflush(stdout);
            continue;
        }
        const ssize_t n = ::read(STDIN_FILENO, &c, 1);
        if (n < 0 && errno == EINTR) continue;
        check(n >= 0, "standard input cannot be read: ", std::strerror(errno));
        if (n == 0) return !line.empty();
        if (c == '\n') return true;
        line += c;
    }
}

// The request for the next answer. The model must have positions for it: the oldest exchanges are left out.
TextRequest next_request(const LoadedModel& model, const GenerateOptions& o, const ChatTemplate& chat,
                         std::vector<ChatMessage>& messages) {
    const std::ptrdiff_t first = messages[0].role == "system" ? 1 : 0;
    const int64_t room = model.engine->options().scheduler.max_length - 1;
    const int64_t most = room - std::min(o.tokens, room / 4);  // a quarter, or less, is left for the answer
    TextRequest request = chat_request(o, model, chat, messages);
    bool left_away = false;
    for (; std::ssize(messages) > first + 2 && std::ssize(request.prompt) > most; left_away = true) {
        messages.erase(messages.begin() + first, messages.begin() + first + 2);
        request = chat_request(o, model, chat, messages);
    }
    if (left_away && std::ssize(request.prompt) <= room)
        std::printf("(the beginning of the conversation is left out: the model has no room for it)\n");
    return request;
}

// Prints the answer as it comes, and returns it.
std::string answer(Requests& requests, TextRequest request) {
    std::string text;
    bool ended = false, failed = false;
    request.ready = [&](const AnswerPiece& piece) {
        print_text(piece.text);
        std::fflush(stdout);
        text += piece.text;
        ended = piece.finish_reason != nullptr;
        failed = piece.is_error();
    };
    const int64_t id = requests.add(std::move(request));
    g_interrupted = 0;
    while (!ended && !g_interrupted) requests.step();
    if (!ended) requests.cancel(id);  // what was said so far belongs to the conversation
    g_interrupted = 0;
    std::printf("%s\n", ended ? "" : " [stopped]");
    check(!failed, kNotFinite);
    return text;
}

}  // namespace

void run_chat(LoadedModel& model, const GenerateOptions& o) {
    const ChatTemplate& chat = find_chat_template(o.chat_template, model.folder);
    Requests requests(*model.engine, *model.tokenizer);
    std::vector<ChatMessage> messages;
    if (!o.system.empty()) messages.push_back({"system", o.system});
    const bool terminal = isatty(STDIN_FILENO);
    if (terminal)
        std::printf("A conversation with %s (template %s). Ctrl-C ends an answer, Ctrl-D the conversation.\n",
                    model.folder.c_str(), chat.name);
    const CatchInterrupts interrupts;
    for (std::string line; true;) {
        if (terminal) std::printf("> ");
        std::fflush(stdout);  // a program may read the whole answer before it writes the next message
        if (!read_line(line)) break;
        if (line.ends_with('\r')) line.pop_back();  // of a file from Windows
        if (line.empty()) continue;
        if (terminal && line.size() >= kMostTyped) {
            std::printf(
                "(a terminal passes on %zu bytes of a line, and this one may have had more: send it in parts, or "
                "through a pipe)\n",
                kMostTyped);
            continue;
        }
        const std::vector<ChatMessage> before = messages;
        messages.push_back({"user", line});
        try {
            messages.push_back({"assistant", answer(requests, next_request(model, o, chat, messages))});
        } catch (const Error& error) {  // a message that is too long is not a reason to end the conversation
            std::printf("(%s)\n", error.what());
            messages = before;  // also what was left out for it
        }
    }
    if (terminal) std::printf("\n");
}
