// inference/chat.cu: a conversation in the terminal.
#include "inference/inference.h"

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <iostream>

namespace {

volatile std::sig_atomic_t g_interrupted = 0;

// While it exists Ctrl-C sets g_interrupted, and a read from the terminal ends early.
struct CatchInterrupts {
    struct sigaction before {};
    CatchInterrupts() {
        struct sigaction action {};
        action.sa_handler = [](int) { g_interrupted = 1; };  // without SA_RESTART
        sigaction(SIGINT, &action, &before);
    }
    ~CatchInterrupts() { sigaction(SIGINT, &before, nullptr); }
};

// The next line of stdin, without its end. False at the end of stdin; a Ctrl-C gives an empty line.
bool read_line(std::string& line) {
    line.clear();
    for (char c; true;) {
        const ssize_t n = ::read(STDIN_FILENO, &c, 1);
        if (n == 0) return !line.empty();
        if (n < 0) {
            if (!g_interrupted) return false;
            g_interrupted = 0;
            line.clear();
            std::printf("\n(Ctrl-D ends the conversation)\n> ");
            std::fflush(stdout);
            continue;
        }
        if (c == '\n') return true;
        line += c;
    }
}

// What of the conversation the model has positions for, beside the answer: the oldest exchanges are left away.
std::vector<ChatMessage> fitting(const LoadedModel& model, const GenerateOptions& o, const ChatTemplate& chat,
                                 std::vector<ChatMessage> messages) {
    const size_t first = messages[0].role == "system" ? 1 : 0;
    const int64_t room = model.engine->options().scheduler.max_length - 1;
    bool left_away = false;
    while (messages.size() > first + 2 &&
           std::ssize(chat_request(o, model, chat, messages).prompt) > room - std::min(o.tokens, room / 4)) {
        messages.erase(messages.begin() + static_cast<std::ptrdiff_t>(first),
                       messages.begin() + static_cast<std::ptrdiff_t>(first + 2));
        left_away = true;
    }
    if (left_away) std::printf("(the beginning of the conversation is left away: the model has no room for it)\n");
    return messages;
}

// Prints the answer as it comes, and returns it.
std::string answer(Requests& requests, TextRequest request) {
    std::string text;
    bool ended = false;
    request.ready = [&](const AnswerPiece& piece) {
        std::printf("%s", piece.text.c_str());
        std::fflush(stdout);
        text += piece.text;
        ended = piece.finish_reason != nullptr;
    };
    const int64_t id = requests.add(std::move(request));
    g_interrupted = 0;
    while (!ended && !g_interrupted) requests.step();
    if (!ended) requests.cancel(id);  // what was said so far belongs to the conversation
    g_interrupted = 0;
    std::printf("%s\n", ended ? "" : " [stopped]");
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
        if (terminal) std::printf("> "), std::fflush(stdout);
        if (!read_line(line)) break;
        if (line.empty()) continue;
        messages.push_back({"user", line});
        messages = fitting(model, o, chat, messages);
        try {
            messages.push_back({"assistant", answer(requests, chat_request(o, model, chat, messages))});
        } catch (const Error& error) {  // a message that is too long is no reason to end the conversation
            std::printf("(%s)\n", error.what());
            messages.pop_back();
        }
    }
    if (terminal) std::printf("\n");
}
