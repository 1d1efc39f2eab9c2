// inference/engine_loop.cu: the engine's thread.
//
//     repeat
//         what other threads want of the engine: new requests, cancelled ones, a view of it
//         a step, whose pieces of answers go into the queues of those who wait for them
//
// Other threads put functions into a list, which this one calls between two steps: so the engine needs no locks. And a
// request whose client has gone is cancelled before the next step, which may use its pages.
#include "inference/server.h"

#include <algorithm>
#include <chrono>
#include <future>

namespace {

constexpr double kLookSeconds = 0.1;  // in which an idle engine looks whether it is to end; a waiting client, too

}  // namespace

void PieceQueue::put(IndexedPiece piece) {
    {
        const std::lock_guard lock(mutex_);
        pieces_.push_back(std::move(piece));
    }
    filled_.notify_one();
}

std::optional<IndexedPiece> PieceQueue::take(double seconds) {
    std::unique_lock lock(mutex_);
    if (!filled_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return !pieces_.empty(); })) return {};
    IndexedPiece piece = std::move(pieces_.front());
    pieces_.pop_front();
    return piece;
}

// ---------------------------------------------------------------------------------------------------------------------
// The thread of the engine

EngineLoop::EngineLoop(Requests& requests, const ServerOptions& options, Metrics& metrics,
                       const std::atomic<bool>& ending)
    : requests_(requests), options_(options), metrics_(metrics), ending_(ending) {}

bool EngineLoop::run_tasks() {
    std::vector<std::function<void()>> tasks;
    {
        const std::lock_guard lock(mutex_);
        tasks.swap(tasks_);
    }
    for (const auto& task : tasks) task();
    return !tasks.empty();
}

void EngineLoop::run() {
    const auto end = [&] {  // a task that is dropped here breaks its promise: whoever waits for it is told
        const std::lock_guard lock(mutex_);
        has_ended_ = true;
        tasks_.clear();
    };
    try {
        for (;;) {
            const bool last = ending_;  // before the tasks: a request that was taken is answered
            const bool did = run_tasks();
            if (requests_.step() || did) continue;
            if (last) break;
            std::unique_lock lock(mutex_);
            posted_.wait_for(lock, std::chrono::duration<double>(kLookSeconds), [&] { return !tasks_.empty(); });
        }
    } catch (...) {
        end();
        throw;
    }
    end();
}

// ---------------------------------------------------------------------------------------------------------------------
// Other threads

bool EngineLoop::has_ended() {
    const std::lock_guard lock(mutex_);
    return has_ended_;
}

void EngineLoop::post(std::function<void()> task) {
    {
        const std::lock_guard lock(mutex_);
        if (has_ended_) return;
        tasks_.push_back(std::move(task));
    }
    posted_.notify_one();
}

template <class F>
auto EngineLoop::between_steps(F f) -> decltype(f()) {
    auto task = std::make_shared<std::packaged_task<decltype(f())()>>(std::move(f));
    auto result = task->get_future();
    post([task = std::move(task)] { (*task)(); });
    try {
        return result.get();
    } catch (const std::future_error&) {
        throw HttpError(503, "the server is shutting down");
    }
}

// No request passes one that waits. Where none waits, a new one has to wait itself if there are too few places for all
// of its answers.
void EngineLoop::check_room(std::span<const TextRequest> added) const {
    if (ending_) throw HttpError(503, "the server is shutting down, and takes no further requests");
    const Scheduler& scheduler = requests_.engine().scheduler();
    const int64_t n_places = scheduler.options().max_sequences, n = added.front().n, n_added = std::ssize(added);
    int64_t places = n_places, n_waiting = 0;
    for (const Request* request : requests_.unfinished()) places -= request->n, n_waiting += places < 0;
    if (scheduler.is_full()) places = 0, n_waiting = scheduler.n_waiting();
    if (n_waiting + n_added - std::max<int64_t>(0, places) / n > options_.max_waiting)
        throw HttpError(429,
                        concat(n_waiting, " requests are waiting, and at most ", options_.max_waiting,
                               " may wait: try again later"),
                        "rate_limit_exceeded");
}

// The pieces of a request go to a queue, and their times to the metrics.
void EngineLoop::hand_over(TextRequest& request, int64_t first_index, std::shared_ptr<PieceQueue> queue) {
    std::vector<double> last(static_cast<size_t>(request.n), 0.0);  // when an answer got its last token
    request.ready = [this, first_index, queue, last, came = seconds_now()](const AnswerPiece& piece) mutable {
        double& before = last[piece.sample];
        for (size_t i = 0; i < piece.tokens.size(); ++i) {
            const double now = seconds_now();
            metrics_.token(before == 0, now - (before == 0 ? came : before));
            before = now;
        }
        if (piece.finish_reason) metrics_.answer_ends(piece.finish_reason);
        queue->put({first_index + static_cast<int64_t>(piece.sample), piece});
    };
}

std::shared_ptr<EngineLoop::Submission> EngineLoop::submit(std::vector<TextRequest> requests) {
    auto queue = std::make_shared<PieceQueue>();
    int64_t n_answers = 0, n_tokens = 0;
    for (TextRequest& request : requests) {
        hand_over(request, n_answers, queue);
        n_answers += request.n;
        n_tokens += std::ssize(request.prompt);
    }
    const std::vector<int64_t> ids = between_steps([&] {
        check_room(requests);
        std::vector<int64_t> added;
        try {
            for (TextRequest& request : requests) added.push_back(requests_.add(std::move(request)));
        } catch (...) {
            for (const int64_t id : added) requests_.cancel(id);
            throw;
        }
        return added;
    });
    metrics_.prompt(n_tokens);
    return std::make_shared<Submission>(*this, ids, queue, n_answers);
}

EngineLoop::Submission::Submission(EngineLoop& loop, std::vector<int64_t> ids, std::shared_ptr<PieceQueue> queue,
                                   int64_t n_answers)
    : loop_(loop), ids_(std::move(ids)), queue_(std::move(queue)), n_left_(n_answers),
      deadline_(seconds_now() + loop.options_.request_timeout) {}

EngineLoop::Submission::~Submission() {
    loop_.metrics_.request_ends(ended() ? Outcome::completed : outcome_);
    if (ended()) return;
    loop_.post([&requests = loop_.requests_, ids = ids_] {
        for (const int64_t id : ids) requests.cancel(id);
    });
}

std::optional<IndexedPiece> EngineLoop::Submission::next(const std::function<bool()>& client_is_gone) {
    while (!ended()) {
        if (client_is_gone()) return {};
        if (seconds_now() > deadline_) {
            outcome_ = Outcome::timed_out;
            throw HttpError(504, concat("the answer was not complete after ", loop_.options_.request_timeout,
                                        " seconds (--request-timeout)"));
        }
        // Before the queue is looked into: the last pieces may come while nobody looks, and the engine end after them.
        const bool has_ended = loop_.has_ended();
        if (auto piece = next_if_there(kLookSeconds)) return piece;
        if (has_ended) {
            outcome_ = Outcome::failed;
            throw HttpError(500, "the engine has ended with an error");
        }
    }
    return {};
}

std::optional<IndexedPiece> EngineLoop::Submission::next_if_there(double seconds) {
    std::optional<IndexedPiece> piece = queue_->take(seconds);
    if (piece && piece->piece.is_error()) {  // clients would take an answer that ends like this for a whole one
        outcome_ = Outcome::failed;
        throw HttpError(500, kNotFinite);
    }
    if (piece && piece->piece.finish_reason) --n_left_;
    return piece;
}

// ---------------------------------------------------------------------------------------------------------------------
// The view

EngineView EngineLoop::view() {
    return between_steps([&] { return view_of(requests_); });
}

namespace {

EngineView::Row row_of(const Request& request, const PagedCache& cache) {
    EngineView::Row row{.id = request.id,
                        .prompt_tokens = std::ssize(request.prompt),
                        .answer_tokens = request.ended_tokens,
                        .max_tokens = request.max_tokens,
                        .n = request.n};
    bool swapped = false, waits = true;
    for (const auto& sequence : request.sequences) {
        row.answer_tokens += std::ssize(sequence->tokens) - row.prompt_tokens;
        row.computed_tokens = std::max(row.computed_tokens, sequence->computed_n);
        if (!sequence->cached) continue;
        waits = false;
        if (cache.is_swapped(*sequence->cached)) swapped = true;
        else row.pages += std::ssize(cache.page_table(*sequence->cached));
    }
    row.state = waits ? "waits" : swapped ? "swapped" : row.computed_tokens < row.prompt_tokens ? "prompt" : "answers";
    return row;
}

}  // namespace

EngineView view_of(const Requests& requests) {
    const Engine& engine = requests.engine();
    const PagedCache& cache = engine.cache();
    EngineView view{.use = cache.use(),
                    .page_size = cache.sizes().page_size,
                    .n_steps = engine.n_steps(),
                    .n_running = engine.scheduler().n_running(),
                    .n_waiting = engine.scheduler().n_waiting(),
                    .n_preemptions = engine.scheduler().n_preemptions(),
                    .speculation = engine.speculation()};
    std::vector<int64_t> owner(static_cast<size_t>(cache.sizes().n_pages)), tables(owner.size());
    for (const Request* request : requests.unfinished()) {
        view.requests.push_back(row_of(*request, cache));
        for (const auto& sequence : request->sequences) {
            if (!sequence->cached || cache.is_swapped(*sequence->cached)) continue;
            for (const int32_t page : cache.page_table(*sequence->cached))
                if (tables[static_cast<size_t>(page)]++ == 0) owner[static_cast<size_t>(page)] = request->id;
        }
    }
    for (size_t p = 0; p < owner.size(); ++p) {
        if (tables[p] == 0 && cache.is_kept(static_cast<int32_t>(p))) owner[p] = -1;
        const bool shared = tables[p] > 1;
        if (!view.pages.empty() && view.pages.back().owner == owner[p] && view.pages.back().shared == shared)
            ++view.pages.back().n;
        else view.pages.push_back({owner[p], shared, 1});
    }
    return view;
}
