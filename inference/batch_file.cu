// inference/batch_file.cu: requests from a file of JSON lines, answers to another.
#include "inference/inference.h"
#include "io/json.h"

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>

namespace {

// What names a request: its "id", or else the number of its line, from 1.
std::string id_of(const Json::Value& line, int64_t number) {
    return has(line, "id") ? JsonText(member(line, "id")).str() : std::to_string(number);
}

template <class T>
void read_field(const Json::Value& line, const char* name, T& value) {
    const char* const expected = std::is_integral_v<T>                         ? "a whole number"
                                 : std::is_floating_point_v<T>                 ? "a number"
                                 : std::is_same_v<T, std::vector<std::string>> ? "a list of texts"
                                                                               : "a list of whole numbers";
    check(!has(line, name) || read_value(member(line, name), value), "\"", name, "\" is ",
          JsonText(member(line, name)).str(), ": expected ", expected);
}

TextRequest read_request(const Json::Value& line, const LoadedModel& model, const GenerateOptions& options) {
    TextRequest request = text_request(options, model);
    check(has(line, "prompt") != has(line, "prompt_ids"), "give \"prompt\" or \"prompt_ids\", one of them");
    if (has(line, "prompt")) {
        std::string prompt;
        check(read_value(member(line, "prompt"), prompt),
              "\"prompt\" is no text: ", JsonText(member(line, "prompt")).str());
        request.prompt = encode_prompt(model, prompt);
    } else {
        read_field(line, "prompt_ids", request.prompt);
    }
    SamplingOptions& s = request.sampling;
    read_field(line, "tokens", request.max_tokens);
    read_field(line, "samples", request.n);
    read_field(line, "stop", request.stop);
    read_field(line, "temperature", s.temperature);
    read_field(line, "top_k", s.top_k);
    read_field(line, "top_p", s.top_p);
    read_field(line, "min_p", s.min_p);
    read_field(line, "repetition_penalty", s.repetition_penalty);
    read_field(line, "presence_penalty", s.presence_penalty);
    read_field(line, "frequency_penalty", s.frequency_penalty);
    read_field(line, "seed", s.seed);
    return request;
}

// The answers that the file has already, as (id, sample), and the ids of requests that have all of theirs. A process
// that was killed may have left half a line, which is removed.
struct Done {
    std::set<std::pair<std::string, uint64_t>> answers;
    std::map<std::string, int64_t> n_answers;
    std::set<std::string> requests;
};
Done read_done(const std::string& path) {
    Done done;
    std::ifstream file(path, std::ios::binary);
    std::string line;
    std::streamoff whole = 0;
    int64_t number = 0;
    while (std::getline(file, line) && !file.eof()) {
        const Json::Value answer = parse_json(line, concat("--out ", path, ", line ", ++number));
        check(has(answer, "id"), "--out ", path, ": this line is no answer of a batch: ", line.substr(0, 80),
              "; give another file");
        const std::string id = JsonText(member(answer, "id")).str();
        uint64_t sample = 0;
        int64_t samples = 1;
        read_field(answer, "sample", sample);
        read_field(answer, "samples", samples);
        done.answers.insert({id, sample});
        if (++done.n_answers[id] >= samples) done.requests.insert(id);
        whole = file.tellg();
    }
    if (file.is_open()) file.close(), std::filesystem::resize_file(path, static_cast<uintmax_t>(whole));
    return done;
}

class BatchRun {
  public:
    BatchRun(LoadedModel& model, Requests& requests, const GenerateOptions& options)
        : model_(model), requests_(requests), options_(options), done_(read_done(options.out)),
          out_(options.out, std::ios::binary | std::ios::app) {
        check(out_.good(), "--out ", options.out, ": cannot be written");
    }

    BatchCount run() {
        std::ifstream file(options_.batch);
        check(file.good(), "--batch ", options_.batch, ": cannot be read");
        std::string text;
        for (int64_t number = 1; std::getline(file, text); ++number) {
            if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
            submit(text, number);
            // Enough wait that a step is always full; the rest of the file need not be in memory.
            while (model_.engine->scheduler().n_waiting() > 2 * options_.engine.scheduler.max_sequences) step();
        }
        while (step()) {
        }
        return count_;
    }

  private:
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
            check(line.isObject(), "this is no JSON object");
            id = id_of(line, number);
            if (done_.requests.count(id)) {
                ++count_.done_before;
                return;
            }
            TextRequest request = read_request(line, model_, options_);
            count_.prompt_tokens += std::ssize(request.prompt);
            struct Answer {
                std::string text;
                std::vector<int32_t> ids;
            };
            auto answers = std::make_shared<std::map<uint64_t, Answer>>();
            request.ready = [this, id, answers, n = request.n](const AnswerPiece& piece) {
                Answer& answer = (*answers)[piece.sample];
                answer.text += piece.text;
                for (const Sampled& token : piece.tokens) answer.ids.push_back(token.token);
                n_drawn_ += std::ssize(piece.tokens);
                if (!piece.finish_reason || done_.answers.count({id, piece.sample})) return;
                JsonText line = {{"id", parse_json(id, "id")}};
                if (n > 1) line.set("sample", piece.sample), line.set("samples", n);
                line.set("text", answer.text), line.set("ids", answer.ids);
                line.set("finish_reason", piece.finish_reason);
                write(line);
                ++count_.done;
                count_.tokens += std::ssize(answer.ids);
            };
            requests_.add(std::move(request));
        } catch (const Error& error) {  // one bad line is no reason to lose the others
            ++count_.refused;
            std::fprintf(stderr, "generate: %s, line %lld: %s\n", options_.batch.c_str(),
                         static_cast<long long>(number), error.what());
        }
    }

    void write(const JsonText& line) {
        out_ << line.str() << '\n' << std::flush;
        check(out_.good(), "--out ", options_.out, ": cannot be written (is the disk full?)");
    }

    LoadedModel& model_;
    Requests& requests_;
    const GenerateOptions& options_;
    const Done done_;
    std::ofstream out_;
    BatchCount count_;
    const double tell_every_ = isatty(STDERR_FILENO) ? 1 : 10;  // seconds
    double told_ = seconds_now();                               // when progress was printed, and
    int64_t n_drawn_ = 0, n_told_ = 0;                          // how many tokens of answers there are, and were then
};

}  // namespace

BatchCount run_batch_file(LoadedModel& model, Requests& requests, const GenerateOptions& options) {
    return BatchRun(model, requests, options).run();
}
