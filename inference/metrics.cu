// inference/metrics.cu: what the server counts, in Prometheus' text format:
//
//     # HELP name what it is
//     # TYPE name counter | gauge | histogram
//     name{label="value"} number
//
// A histogram has a counter for each bound, of the observations that are at most as large.
#include "inference/server.h"

#include <algorithm>

namespace {

std::string head(const std::string& name, const char* type, const std::string& help) {
    return "# HELP " + name + " " + help + "\n# TYPE " + name + " " + type + "\n";
}
template <class T>
std::string single(const std::string& name, const char* type, const std::string& help, T value) {
    return concat(head(name, type, help), name, " ", value, "\n");
}

constexpr std::pair<Outcome, const char*> kOutcomes[] = {{Outcome::completed, "completed"},
                                                         {Outcome::cancelled, "cancelled"},
                                                         {Outcome::timed_out, "timed_out"},
                                                         {Outcome::failed, "failed"}};

}  // namespace

void Histogram::observe(double value) {
    ++counts_[static_cast<size_t>(std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin())];
    sum_ += value;
}

std::string Histogram::text(const std::string& name, const std::string& help) const {
    std::string text = head(name, "histogram", help);
    int64_t so_far = 0;
    for (size_t i = 0; i < bounds_.size(); ++i) {
        so_far += counts_[i];
        text += concat(name, "_bucket{le=\"", bounds_[i], "\"} ", so_far, "\n");
    }
    so_far += counts_.back();
    const std::string sum = format("%.17g", sum_);  // a small observation changes the last digits of a large sum
    return text +
           concat(name, "_bucket{le=\"+Inf\"} ", so_far, "\n", name, "_sum ", sum, "\n", name, "_count ", so_far, "\n");
}

void Metrics::http_answer(int status) {
    const std::lock_guard lock(mutex_);
    ++http_answers_[status];
}
void Metrics::prompt(int64_t tokens) {
    const std::lock_guard lock(mutex_);
    prompt_tokens_ += tokens;
}
void Metrics::token(bool first, double seconds) {
    const std::lock_guard lock(mutex_);
    ++answer_tokens_;
    (first ? first_token_ : next_token_).observe(seconds);
}
void Metrics::request_ends(Outcome outcome) {
    const std::lock_guard lock(mutex_);
    ++outcomes_[outcome];
}
void Metrics::answer_ends(const std::string& finish_reason) {
    const std::lock_guard lock(mutex_);
    ++finish_reasons_[finish_reason];
}
int64_t Metrics::answer_tokens() const {
    const std::lock_guard lock(mutex_);
    return answer_tokens_;
}

std::string Metrics::text(const EngineView& engine) const {
    const std::lock_guard lock(mutex_);
    std::string text = head("llm_requests_total", "counter", "requests that have ended, by outcome");
    for (const auto& [outcome, name] : kOutcomes) {
        const auto found = outcomes_.find(outcome);
        text +=
            concat("llm_requests_total{outcome=\"", name, "\"} ", found == outcomes_.end() ? 0 : found->second, "\n");
    }
    text += head("llm_answers_total", "counter", "answers that are complete, by their finish_reason");
    for (const auto& [reason, n] : finish_reasons_)
        text += concat("llm_answers_total{finish_reason=\"", reason, "\"} ", n, "\n");
    text += head("llm_http_answers_total", "counter", "HTTP answers by status");
    for (const auto& [status, n] : http_answers_)
        text += concat("llm_http_answers_total{status=\"", status, "\"} ", n, "\n");
    text += single("llm_prompt_tokens_total", "counter", "tokens of prompts", prompt_tokens_);
    text += single("llm_answer_tokens_total", "counter", "tokens of answers", answer_tokens_);
    text += single("llm_steps_total", "counter", "steps of the engine", engine.n_steps);
    text += single("llm_sequence_steps_total", "counter",
                   "steps in which an answer drew a token after its first, for each answer", engine.speculation.steps);
    text += single("llm_draft_tokens_total", "counter", "tokens that speculation proposed and a step computed",
                   engine.speculation.proposed);
    text += single("llm_draft_tokens_accepted_total", "counter", "those of them that the model drew, too",
                   engine.speculation.accepted);
    text += single("llm_preemptions_total", "counter", "requests that had to give their pages to older ones",
                   engine.n_preemptions);
    text += single("llm_running", "gauge", "requests that run", engine.n_running);
    text += single("llm_waiting", "gauge", "requests that wait, or were preempted", engine.n_waiting);
    text += single("llm_pages", "gauge", "pages of the cache", engine.use.n_pages);
    text += single("llm_pages_used", "gauge", "pages of requests that run", engine.use.owned_pages);
    text += single("llm_page_rows", "gauge", "rows of a page, each for a token", engine.page_size);
    text += single("llm_rows_used", "gauge",
                   "rows of used pages that hold tokens; the others are internal fragmentation", engine.use.used_rows);
    text += single("llm_pages_shared", "gauge", "used pages that several sequences share", engine.use.shared_pages);
    text += single("llm_pages_kept", "gauge", "pages of no request, kept because they may be found again",
                   engine.use.kept_pages);
    text += single("llm_pages_free", "gauge", "free pages", engine.use.free_pages);
    text += single("llm_pages_on_host", "gauge", "pages on the host, of requests that are swapped out",
                   engine.use.host_pages);
    return text +
           first_token_.text("llm_time_to_first_token_seconds", "from a request to the first token of its answer") +
           next_token_.text("llm_time_per_token_seconds", "from a token of an answer to the next one");
}
