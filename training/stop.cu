// training/stop.cu: how a run ends before its last step, and how it goes on.
//
// The first Ctrl-C (or SIGTERM, or SIGHUP of a terminal that is closed) asks for the end: the step that is going on is
// finished and saved. The second ends the process at once. SIGUSR1 asks for the end, and only that, however often it
// comes: mpirun passes it on to its ranks. (mpirun's own Ctrl-C kills them one second after it has passed that on.)
// SIGPIPE does, too: nobody reads the output any more (`| head`, a `| tee` that ended).
//
// Signals are answered by the signal handler itself, so the answer does not wait for the step. A handler
// may call only a few functions (signal-safety(7)); write(2) is one, printf is not. So the text is put together by
// hand, from numbers that the run keeps up to date in lock-free atomics.
#include "training/training.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <fstream>
#include <mutex>

namespace {

bool answers = true;       // one process of an mpirun is enough
bool in_terminal = false;  // then an answer begins on a line of its own
bool under_mpirun = false;
std::atomic<bool> asked = false;
std::atomic<int> ends = 0;           // signals that end the process when they come again
std::atomic<int64_t> finishing = 1;  // the step that would be the last if a signal came now
std::atomic<int64_t> saved = 0;      // step of the newest checkpoint; 0: there is none
static_assert(std::atomic<int64_t>::is_always_lock_free);

// A line put together without memory from the heap.
struct Line {
    char text[256];
    size_t n = 0;
    Line& operator<<(const char* s) {
        while (*s && n < sizeof text) text[n++] = *s++;
        return *this;
    }
    Line& operator<<(int64_t number) {
        char digits[20];
        int i = sizeof digits;
        digits[--i] = 0;
        do digits[--i] = static_cast<char>('0' + number % 10);
        while ((number /= 10) > 0);
        return *this << digits + i;
    }
};

void answer(int signal) {
    const int error = errno;
    const int64_t step = finishing, newest = saved;
    const bool only_asks = signal == SIGUSR1 || signal == SIGPIPE;
    if (signal == SIGPIPE && asked) return;  // comes with each line that is printed
    Line line;
    if (in_terminal) line << "\n";  // after the ^C that the terminal shows, and a line that changes
    asked = true;
    const bool first = only_asks || ends++ == 0, all_saved = step <= newest;
    const char* const what_else = only_asks   ? "\n"
                                  : all_saved ? "; press Ctrl-C again to end at once\n"
                                              : "; press Ctrl-C again to stop without saving\n";
    // mpirun's signal also comes where another rank has failed.
    if (first && under_mpirun && !only_asks) {
        line << "mpirun ends its ranks in one second: ";
        if (all_saved) line << "all steps are saved\n";
        else line << "step " << step << " is saved if they all finish it in that time (kill -USR1 gives them more)\n";
    } else if (first && all_saved) line << "all steps are saved; ending the sample" << what_else;
    else if (first) line << "finishing step " << step << ", then saving" << what_else;
    else if (all_saved) line << "stopped; all steps are saved\n";
    else if (newest == 0) line << "stopped without saving: nothing of this run was saved\n";
    else line << "stopped without saving: what came after step " << newest << ", the newest checkpoint, is lost\n";
    if (answers && ::write(STDERR_FILENO, line.text, line.n) < 0) errno = 0;  // nobody can be told
    if (!first) {
        std::signal(signal, SIG_DFL);
        std::raise(signal);  // comes when this handler returns: the shell sees that a signal ended the process
    }
    errno = error;
}

void answer_to(int signal) {
    struct sigaction action = {};
    action.sa_handler = answer;
    action.sa_flags = SA_RESTART;
    ::sigaction(signal, &action, nullptr);
}

// The words of the command that started this process's parent: mpirun with its own flags, then the program.
std::vector<std::string> command_of_parent() {
    std::ifstream file(concat("/proc/", ::getppid(), "/cmdline"));
    std::vector<std::string> words;
    for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
    if (!words.empty() && words[0] == "prterun") words[0] = "mpirun";  // as which Open MPI 5's goes on
    return words;
}

// "mpirun --oversubscribe -np 4 ./train_gpt", as it was typed where the system tells.
std::string start_of_command(const std::string& program) {
    if (!started_by_mpirun()) return shell_quoted(program);
    std::string text;
    for (const std::string& word : command_of_parent()) {
        text += shell_quoted(word);
        if (word == program) return text;
        text += " ";
    }
    return concat("mpirun -np ", rank_count({}), " ", shell_quoted(program));
}

}  // namespace

std::string shell_quoted(const std::string& word) {
    const bool plain = !word.empty() && word.find_first_not_of(
                                            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                            "0123456789_-./=:,@%+") == std::string::npos;
    if (plain) return word;
    std::string out = "'";
    for (const char c : word) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return out + "'";
}

void answer_signals() {
    static std::once_flag once;  // ranks that are threads of one process call this, each
    std::call_once(once, [] {
        answers = is_first_process();
        in_terminal = ::isatty(STDERR_FILENO) != 0;
        under_mpirun = started_by_mpirun();
        for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGPIPE}) answer_to(signal);
        struct sigaction before = {};
        ::sigaction(SIGHUP, nullptr, &before);
        if (before.sa_handler != SIG_IGN) answer_to(SIGHUP);  // nohup ignores it
    });
}

bool stop_requested() { return asked; }

bool take_stop_request(const TrainOptions& o, int64_t step) {
    const bool stop = stop_requested();
    // A signal from here on comes too late for this step.
    finishing = last_step_at_once(o, std::min(step + 1, o.last_step()));
    return stop;
}

void note_saved(const TrainOptions& o, int64_t step, bool last) {
    saved = step;
    finishing = last ? step : last_step_at_once(o, step + 1);
}

std::string resume_command(const TrainOptions& o) {
    std::string text = concat(start_of_command(o.program), " --out ", shell_quoted(o.out), " --resume");
    for (const std::string& word : o.repeated) text += " " + shell_quoted(word);
    return text;
}
