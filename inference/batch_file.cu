// inference/batch_file.cu: requests from a file of JSON lines, answers to another.
#include "inference/inference.h"
#include "io/json.h"
#include "io/lock.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

struct BatchFiles {
    explicit BatchFiles(const GenerateOptions& options);
    ~BatchFiles();
    std::ifstream in;
    bool out_is_new, begun = false;
    LockedFile out;
    // The answers that `out` has already: which samples of each request's id.
    using Done = std::map<std::string, std::set<uint64_t>>;
    Done done;
    const std::set<uint64_t>& done_of(const std::string& id) const {
        static const std::set<uint64_t> none;
        const auto at = done.find(id);
        return at == done.end() ? none : at->second;
    }
};

namespace {

// What names a request: its "id", or else the number of its line, from 1.
std::string id_of(const Json::Value& line, int64_t number) {
    const Json::Value& id = member(line, "id");
    check(id.isNull() || id.isString() || id.type() == Json::intValue || id.type() == Json::uintValue, "\"id\" is ",
          JsonText(id).str(), ": give a string, or a whole number of at most 64 bits");
    return id.isNull() ? std::to_string(number) : JsonText(id).str();
}

// The fields of a line. One that we do not know is refused: "temprature", ignored, would be noticed by nobody.
class Fields {
  public:
    explicit Fields(const Json::Value& line) : line_(line) {}

    // False if it is not there.
    template <class T>
    bool read(const std::string& name, T& to) {
        const char* const expected = std::is_same_v<T, bool>                       ? "true or false"
                                     : std::is_same_v<T, uint64_t>                 ? "a whole number from 0 to 2^64 - 1"
                                     : std::is_integral_v<T>                       ? "a whole number of at most 64 bits"
                                     : std::is_floating_point_v<T>                 ? "a number"
                                     : std::is_same_v<T, std::string>              ? "a string"
                                     : std::is_same_v<T, std::vector<std::string>> ? "a list of strings"
                                                                                   : "a list of whole numbers";
        const Json::Value* const value = find(name);
        if (value && !read_value(*value, to))
            fail("\"", name, "\" is ", JsonText(*value).str(), ": expected ", expected);
        return value != nullptr;
    }
    const Json::Value* find(const std::string& name) {
        known_.push_back(name);
        return has(line_, name) ? &member(line_, name) : nullptr;
    }
    void refuse_unknown() const {
        std::string all = "id";
        for (const std::string& name : known_) all += ", " + name;
        for (const std::string& name : line_.getMemberNames())
            check(name == "id" || std::ranges::count(known_, name) > 0, "\"", name,
                  "\": a request has no such field; it can have ", all);
    }

  private:
    const Json::Value& line_;
    std::vector<std::string> known_;
};

// What beam search, which draws nothing, does not know.
void read_sampling(Fields& fields, TextRequest& request) {
    SamplingOptions& s = request.sampling;
    fields.read("stop", request.stop);
    for (const SamplingNumber& number : sampling_numbers()) fields.read(number.name, s.*number.value);
    fields.read("top_k", s.top_k);
    fields.read("seed", s.seed);
    fields.read("logprobs", s.logprobs);
    fields.read("prompt_logprobs", request.scores_prompt);
    check(!request.scores_prompt || s.logprobs >= 0,
          "\"prompt_logprobs\" needs \"logprobs\", too: how many other tokens to list");
    if (const Json::Value* bias = fields.find("logit_bias")) s.logit_bias = read_logit_bias(*bias);
}

TextRequest read_request(const Json::Value& line, const LoadedModel& model, const GenerateOptions& options) {
    TextRequest request = text_request(options, model);
    Fields fields(line);
    std::string prompt;
    const bool has_text = fields.read("prompt", prompt), has_ids = fields.read("prompt_ids", request.prompt);
    check(has_text != has_ids, "give \"prompt\" or \"prompt_ids\", one of them");
    if (has_text) request.prompt = encode_prompt(model, prompt);
    fields.read("tokens", request.max_tokens);
    fields.read("samples", request.n);
    std::vector<int32_t> stops;
    fields.read("stop_token_ids", stops);
    for (const int32_t token : stops)
        check(token >= 0 && token < model.config.V, "\"stop_token_ids\" has the token ", token,
              ", but the model knows 0 to ", model.config.V - 1);
    request.stop_tokens.insert(request.stop_tokens.end(), stops.begin(), stops.end());
    if (!request.beams) read_sampling(fields, request);
    fields.refuse_unknown();
    return request;
}

std::ifstream open_requests(const std::string& path, const std::string& out) {
    check(!is_folder(path), "--batch ", path, ": it is a folder, a file is needed");
    std::ifstream file(path, std::ios::binary);
    check(file.good(), "--batch ", path, ": cannot be read: ", std::strerror(errno));
    std::error_code ignored;
    check(!std::filesystem::equivalent(path, out, ignored), "--out ", out,
          ": this is the file of the requests; give another one for the answers");
    check(!is_folder(out), "--out ", out, ": it is a folder, a file is needed");
    return file;
}

// Has nothing this name, not even a link that leads nowhere?
bool is_free(const std::string& path) {
    struct stat status = {};
    return lstat(path.c_str(), &status) != 0;
}

// Is this the last line of a batch that was killed while it wrote it?
bool is_half_answer(const std::string& line) {
    constexpr std::string_view begins = "{\"id\":";  // what JsonText writes of an answer
    if (!line.starts_with(begins.substr(0, line.size()))) return false;
    try {
        return has(parse_json(line, "the line"), "finish_reason");  // only its line end is missing
    } catch (const Error&) {
        return true;
    }
}

// A process that was killed may have left half a line, which is removed. What no batch has written is never touched.
BatchFiles::Done read_done(const std::string& path) {
    BatchFiles::Done done;
    std::error_code error;
    const bool is_file = std::filesystem::is_regular_file(path, error);
    check(!error, "--out ", path, ": the answers that it has cannot be read: ", error.message());
    if (!is_file) return done;  // a pipe, which keeps nothing
    std::ifstream file(path, std::ios::binary);
    check(file.good(), "--out ", path, ": the answers that it has cannot be read: ", std::strerror(errno));
    std::string line;
    std::streamoff whole = 0;
    const auto check_ours = [&](bool is_ours) {
        check(is_ours, "--out ", path, ": this line is not an answer of a batch: ", line.substr(0, 80),
              "; give another file");
    };
    int64_t number = 0;
    while (std::getline(file, line) && !file.eof()) {
        const Json::Value answer = parse_json(line, concat("--out ", path, ", line ", ++number));
        check_ours(has(answer, "id") && has(answer, "finish_reason"));
        const std::string id = JsonText(member(answer, "id")).str();
        uint64_t sample = 0;
        Fields(answer).read("sample", sample);
        done[id].insert(sample);
        whole = file.tellg();
    }
    check(!file.bad(), "--out ", path, ": the answers that it has cannot be read: ", std::strerror(errno));
    if (line.empty()) return done;
    check_ours(is_half_answer(line));
    std::filesystem::resize_file(path, static_cast<uintmax_t>(whole), error);
    check(!error, "--out ", path, ": cannot be written: ", error.message());
    return done;
}

class BatchRun {
  public:
    BatchRun(LoadedModel& model, Requests& requests, const GenerateOptions& options, BatchFiles& files)
        : model_(model), requests_(requests), options_(options), files_(files) {}

    BatchCount run() {
        files_.begun = true;
        std::string text;
        int64_t number = 1;
        for (; next_line(text); ++number) {
            if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
            submit(text, number);
            // Enough wait that a step is always full; the rest of the file need not be in memory.
            while (model_.engine->scheduler().n_waiting() > 2 * options_.engine.scheduler.max_sequences) step();
        }
        while (step()) {
        }
        sync_answers();
        check(!is_too_long(text), "--batch ", options_.batch, ", line ", number, ": it has more than ",
              options_.server.max_body, " bytes (--max-body); the lines before it are answered: shorten it, and run ",
              "it again, which computes what is missing");
        check(!files_.in.bad(), "--batch ", options_.batch,
              ": it could not be read to the end; what was read of it is answered: check the disk, and run it again");
        return count_;
    }

  private:
    bool is_too_long(const std::string& text) const { return std::ssize(text) > options_.server.max_body; }

    // False at the end, and at a line that is too long: of that, `text` is one byte more than a line may have.
    // As long as a pipe has no further request, those that have come are answered: who writes them may wait for that.
    bool next_line(std::string& text) {
        while (files_.in.rdbuf()->in_avail() <= 0 && step()) {
        }
        text.clear();
        for (char c; !is_too_long(text) && files_.in.get(c) && c != '\n';) text += c;
        return !is_too_long(text) && (files_.in || !text.empty());
    }

    bool step() {
        const bool did = requests_.step();
        const double now = seconds_now();
        if (did && now - told_ >= tell_every_) {
            tell_progress(now);
            told_ = now;
        }
        return did;
    }

    void tell_progress(double now) {
        const Engine& engine = *model_.engine;
        const CacheUse use = engine.cache().use();
        const double rows = static_cast<double>(use.owned_pages * engine.cache().sizes().page_size);
        std::fprintf(stderr,
                     "%lld answers | %lld requests run, %lld wait | %.1f tok/s | pages %lld of %lld, %lld shared, "
                     "%.1f %% hold tokens\n",
                     static_cast<long long>(count_.done), static_cast<long long>(engine.scheduler().n_running()),
                     static_cast<long long>(engine.scheduler().n_waiting()),
                     static_cast<double>(n_drawn_ - n_told_) / (now - told_), static_cast<long long>(use.owned_pages),
                     static_cast<long long>(use.n_pages), static_cast<long long>(use.shared_pages),
                     rows > 0 ? 100 * static_cast<double>(use.used_rows) / rows : 0.0);
        n_told_ = n_drawn_;
    }

    void submit(const std::string& text, int64_t number) {
        std::string id = std::to_string(number);
        try {
            const Json::Value line = parse_json(text, "the line");
            check(line.isObject(), "this is not a JSON object");
            id = id_of(line, number);
            check(ids_.insert(id).second, "a line before this one has the id ", id,
                  ", too; give each its own, so that answers can be told apart");
            int64_t n = options_.samples;
            Fields(line).read("samples", n);
            n = std::max<int64_t>(n, 1);
            // Not how many there are: a batch that was stopped may have written the last of more samples first.
            const auto is_wanted = [n](uint64_t sample) { return sample < static_cast<uint64_t>(n); };
            if (std::ranges::count_if(files_.done_of(id), is_wanted) == n) {
                ++count_.done_before;
                return;
            }
            TextRequest request = read_request(line, model_, options_);
            const int64_t prompt_n = std::ssize(request.prompt);
            std::optional<TextOffsets> prompt_offsets, answer_offsets;  // where they are asked for
            if (request.sampling.logprobs >= 0) answer_offsets.emplace(*model_.tokenizer, request);
            if (request.scores_prompt) {
                std::string prompt;
                if (!Fields(line).read("prompt", prompt)) prompt = text_of_tokens(*model_.tokenizer, request.prompt);
                prompt_offsets.emplace(*model_.tokenizer, request, &prompt);
            }
            struct Answer {
                std::string text;
                std::vector<Sampled> prompt, tokens;
            };
            auto answers = std::make_shared<std::map<uint64_t, Answer>>();
            request.ready = [this, id, answers, n = request.n, prompt_offsets,
                             answer_offsets](const AnswerPiece& piece) {
                Answer& answer = (*answers)[piece.sample];
                answer.text += piece.text;
                answer.prompt.insert(answer.prompt.end(), piece.prompt.begin(), piece.prompt.end());
                answer.tokens.insert(answer.tokens.end(), piece.tokens.begin(), piece.tokens.end());
                n_drawn_ += std::ssize(piece.tokens);
                if (!piece.finish_reason || files_.done_of(id).contains(piece.sample)) return;
                if (piece.is_error()) return void(++count_.failed);  // the next run asks for it again
                JsonText line = {{"id", parse_json(id, "id")}};
                if (n > 1) line.set("sample", piece.sample), line.set("samples", n);
                line.set("text", answer.text), line.set("ids", ids_of(answer.tokens));
                std::optional<TextOffsets> in_prompt = prompt_offsets, in_answer = answer_offsets;
                if (in_answer) line.set("logprobs", logprobs_json(*model_.tokenizer, answer.tokens, *in_answer));
                if (!answer.prompt.empty())
                    line.set("prompt_logprobs", logprobs_json(*model_.tokenizer, answer.prompt, *in_prompt));
                line.set("finish_reason", piece.finish_reason);
                write(line);
                ++count_.done;
                count_.tokens += std::ssize(answer.tokens);
            };
            requests_.add(std::move(request));
            count_.prompt_tokens += prompt_n;
        } catch (const Error& error) {  // one bad line is not a reason to lose the others
            ++count_.refused;
            std::fprintf(stderr, "generate: %s, line %lld: %s\n", options_.batch.c_str(),
                         static_cast<long long>(number), error.what());
        }
    }

    void write(const JsonText& line) {
        const std::string text = line.str() + '\n';
        write_all(files_.out.fd(), text.data(), text.size(), files_.out.path());
    }

    // A file system of a network may take a write, and say only when it sends it that its disk is full.
    void sync_answers() const {
        const int error = sync_to_disk(files_.out.fd());
        const bool keeps_nothing = error == EINVAL || error == EROFS || error == ENOTSUP;  // a pipe, a terminal
        check(error == 0 || keeps_nothing, "--out ", options_.out,
              ": the answers could not be written to the disk: ", std::strerror(error),
              "; free some space and run it again, which computes what is missing");
    }

    LoadedModel& model_;
    Requests& requests_;
    const GenerateOptions& options_;
    BatchFiles& files_;
    std::set<std::string> ids_;  // of the lines so far
    BatchCount count_;
    const double tell_every_ = isatty(STDERR_FILENO) ? 1 : 10;  // seconds
    double told_ = seconds_now();                               // when progress was printed, and
    int64_t n_drawn_ = 0, n_told_ = 0;                          // how many tokens of answers there are, and were then
};

}  // namespace

BatchFiles::BatchFiles(const GenerateOptions& options)
    : in(open_requests(options.batch, options.out)), out_is_new(is_free(options.out)),
      out(options.out, O_WRONLY | O_APPEND) {
    check(out.lock() != LockedFile::Lock::others, "--out ", options.out,
          " is being written by another process: wait until it has ended or stop it with Ctrl-C, or give another file");
    struct stat answers = {}, output = {};
    if (fstat(out.fd(), &answers) == 0 && fstat(STDOUT_FILENO, &output) == 0 && !S_ISCHR(output.st_mode) &&
        answers.st_dev == output.st_dev && answers.st_ino == output.st_ino)
        dup2(STDERR_FILENO, STDOUT_FILENO);  // --out /dev/stdout: what is said about the answers would be among them
    done = read_done(options.out);
    out_is_new = out_is_new && done.empty();
}

// A file that was made for a batch that never began, because its model could not be read, is not left behind.
BatchFiles::~BatchFiles() {
    if (out_is_new && !begun) out.remove();
}

std::shared_ptr<BatchFiles> open_batch(const GenerateOptions& options) { return std::make_shared<BatchFiles>(options); }

BatchCount run_batch(LoadedModel& model, Requests& requests, const GenerateOptions& options, BatchFiles& files) {
    return BatchRun(model, requests, options, files).run();
}
