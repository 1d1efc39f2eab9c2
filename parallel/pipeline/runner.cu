// runner.cu: executes a schedule on one rank.
//
//     stream of rank 1      F0 | F1 |      B0 | F2 | B1 | ...
//     link 0 -> 1         [in 1] [in 2]
//     link 2 -> 1                   [dout 0]
//     link 1 -> 2               [out 0] [out 1]
//
// The host goes through the table once and puts everything on streams, without waiting: what waits for what is said by
// events. A message is received as soon as the table has come to its receive, and there is memory for it: while the
// rank computes something else. A message is sent when the action before it has been done. Each link has a stream and a
// communicator of its own: a message that waits for its other end holds up no other link.
//
// Where a receive would hold up the host (messages through the host's memory, without strict mode), it is put off until
// its message is needed: the message waits on the host meanwhile.
//
// The memory at the stages' borders is a pool of equal tensors ("rows"). Which row an action uses follows from the
// table alone (Borders), so that they can be counted before:
//
//     input of a stage                 from its receive (or the forward of the stage before, on the same rank; of stage
//                                      0 its own) to the end of its backward
//     output of a stage                from its forward to its send; of the last stage to its backward
//     gradient of the output, in       from its receive (or the backward of the stage after; of the last stage its
//     place that of the input          own) to the send of the gradient of the input; of stage 0 to the end of its
//                                      backward
//
// A row is used by one stream after the other; the next one waits for the end of the last use.
#include "parallel/pipeline/pipeline.h"

#include <algorithm>
#include <deque>
#include <set>

namespace {

using Key = std::pair<int, int>;  // (micro-batch, stage)

struct Rows {
    int in = -1, out = -1, dx = -1;
};

}  // namespace

// Which rows the actions of a rank use, one action after the other.
class Borders {
  public:
    Borders(const PipelineSchedule& schedule, int rank) : schedule_(schedule), rank_(rank) {
        for (const Action& a : schedule.ranks[static_cast<size_t>(rank)])
            if (is_weight_gradient(a.what)) has_backward_.insert({a.micro, a.stage});
    }

    Rows take(const Action& a) {
        const Key key{a.micro, a.stage};
        const bool first = a.stage == 0, last = a.stage + 1 == schedule_.n_stages;
        switch (a.what) {
            case Do::receive_activation: return {.in = in_[key] = acquire()};
            case Do::receive_gradient: return {.dx = dx_[key] = acquire()};
            case Do::forward: {
                if (first) in_[key] = acquire();
                return {.in = in_.at(key), .out = out_[key] = acquire()};
            }
            case Do::send_activation: return {.out = out_.at(key)};
            case Do::backward:
            case Do::backward_input:
                if (last) dx_[key] = acquire();
                return {.in = in_.at(key), .out = last ? out_.at(key) : -1, .dx = dx_.at(key)};
            case Do::send_gradient: return {.dx = dx_.at(key)};
            case Do::backward_weight: return {.in = in_.at(key), .dx = first ? dx_.at(key) : -1};
            case Do::update: return {};
        }
        return {};
    }

    // When the action is on its stream: what nobody needs any more, and what goes to a stage on the same rank.
    void give_back(const Action& a) {
        const Key key{a.micro, a.stage};
        const bool first = a.stage == 0, last = a.stage + 1 == schedule_.n_stages;
        if (a.what == Do::forward) {
            if (!last && schedule_.rank_of(a.stage + 1, a.micro) == rank_)
                in_[{a.micro, a.stage + 1}] = out_.extract(key).mapped();
            if (has_backward_.count(key) == 0) {
                release(in_, key);
                if (last) release(out_, key);
            }
        }
        if (a.what == Do::send_activation) release(out_, key);
        if (a.what == Do::send_gradient) release(dx_, key);
        const bool by_input = is_input_gradient(a.what), over = is_weight_gradient(a.what);
        if (by_input && !first && schedule_.rank_of(a.stage - 1, a.micro) == rank_)
            dx_[{a.micro, a.stage - 1}] = dx_.extract(key).mapped();
        if (by_input && last) release(out_, key);
        if (over) release(in_, key);
        if (over && first) release(dx_, key);
    }

    int count() const { return n_; }  // so far

  private:
    int acquire() {
        if (free_.empty()) return n_++;
        const int row = free_.front();  // the one that has been free for longest
        free_.pop_front();
        return row;
    }
    void release(std::map<Key, int>& rows, const Key& key) { free_.push_back(rows.extract(key).mapped()); }

    const PipelineSchedule& schedule_;
    const int rank_;
    std::set<Key> has_backward_;
    std::map<Key, int> in_, out_, dx_;
    std::deque<int> free_;
    int n_ = 0;
};

int border_tensors(const PipelineSchedule& schedule, int rank) {
    Borders borders(schedule, rank);
    for (const Action& action : schedule.ranks[static_cast<size_t>(rank)]) {
        borders.take(action);
        borders.give_back(action);
    }
    return borders.count();
}

int64_t messages_sent(const PipelineSchedule& schedule, int rank) {
    return std::ranges::count_if(schedule.ranks[static_cast<size_t>(rank)],
                                 [](const Action& action) { return sends(action.what); });
}

std::vector<size_t> places_before_backward(const PipelineSchedule& schedule) {
    std::vector<size_t> places;
    // Of a receive (what, micro-batch, stage) the rank and place of its send.
    std::map<std::tuple<Do, int, int>, std::pair<size_t, size_t>> sent;
    for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
        const std::vector<Action>& actions = schedule.ranks[rank];
        for (size_t i = 0; i < actions.size(); ++i)
            if (sends(actions[i].what)) {
                const Action receive = receive_of(actions[i], static_cast<int>(rank));
                sent[{receive.what, receive.micro, receive.stage}] = {rank, i};
            }
        const auto first = std::ranges::find_if(actions, is_input_gradient, &Action::what);
        places.push_back(static_cast<size_t>(first - actions.begin()));
    }
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t rank = 0; rank < places.size(); ++rank) {
            for (size_t i = 0; i < places[rank]; ++i) {
                const Action& a = schedule.ranks[rank][i];
                if (!receives(a.what)) continue;
                const auto [from, place] = sent.at({a.what, a.micro, a.stage});
                if (place >= places[from]) places[rank] = i, changed = true;
            }
        }
    }
    return places;
}

// ---------------------------------------------------------------------------------------------------------------------

struct PipelineRunner::Link {
    std::unique_ptr<Comm> comm;  // {from, to}
    cudaStream_t stream = make_stream();
    cudaEvent_t sent = make_event();  // the last message from here
    std::deque<int> put_off;          // rows whose messages are still to be received, in the order of the messages
    ~Link() {
        cudaStreamSynchronize(stream);
        cudaEventDestroy(sent);
        cudaStreamDestroy(stream);
    }
};

PipelineRunner::PipelineRunner(Comm& pp, const PipelineSchedule& schedule) : pp_(pp) {
    check(pp.size == schedule.p, "a pipeline of ", schedule.p, " ranks on a communicator of ", pp.size);
    std::set<std::pair<int, int>> links;
    for (int rank = 0; rank < schedule.p; ++rank)
        for (const Action& action : schedule.ranks[static_cast<size_t>(rank)])
            if (sends(action.what)) links.insert({rank, action.peer});
    // Every rank takes part in each split; those that are not an end of the link are alone there. The two ends meet at
    // once: with NCCL their hosts wait for each other in the first message, and the first ones of a table may cross.
    for (const auto& [from, to] : links) {
        const bool mine = from == pp.rank || to == pp.rank;
        auto comm =
            pp.split(mine ? std::vector<int>{from, to} : std::vector<int>{pp.rank}, concat("pp ", from, " -> ", to));
        if (!mine) continue;
        auto& link = links_[{from, to}] = std::make_unique<Link>();
        link->comm = std::move(comm);
        if (pp.is_plan()) continue;
        link->comm->barrier(link->stream);
        cudaCheck(cudaStreamSynchronize(link->stream));
    }
}

PipelineRunner::~PipelineRunner() {
    links_.clear();  // waits for their streams
    for (cudaEvent_t event : used_) cudaEventDestroy(event);
}

PipelineRunner::Link& PipelineRunner::link(int from, int to) { return *links_.at({from, to}); }

void PipelineRunner::take_memory(int n, int64_t rows, int64_t columns, DType dtype, Arena& arena) {
    rows_.clear();
    for (int i = 0; i < n; ++i) rows_.push_back(arena.take("borders of stages", dtype, {rows, columns}));
    while (used_.size() < static_cast<size_t>(n)) used_.push_back(make_event());
    awaited_.assign(static_cast<size_t>(n), nullptr);
}

void PipelineRunner::begin_use(int row, cudaStream_t stream) {
    cudaCheck(cudaStreamWaitEvent(stream, used_[static_cast<size_t>(row)]));
}
void PipelineRunner::end_use(int row, cudaStream_t stream) {
    cudaCheck(cudaEventRecord(used_[static_cast<size_t>(row)], stream));
}

void PipelineRunner::send(const Action& action, int index) {
    Link& its = link(pp_.rank, action.peer);
    begin_use(index, its.stream);
    its.comm->send(row(index), 1, its.stream);
    end_use(index, its.stream);
    cudaCheck(cudaEventRecord(its.sent, its.stream));
    ++messages_sent_;
}

void PipelineRunner::receive(const Action& action, int index) {
    Link& its = link(action.peer, pp_.rank);
    its.put_off.push_back(index);
    awaited_[static_cast<size_t>(index)] = &its;
    if (!its.comm->recv_waits_on_host(its.stream)) await(index);
}

// Puts the receive of this row on its stream, and before it those of the messages that come first on the link.
void PipelineRunner::await(int index) {
    Link* const its = awaited_[static_cast<size_t>(index)];
    if (!its) return;
    for (int next = -1; next != index;) {
        next = its->put_off.front();
        its->put_off.pop_front();
        begin_use(next, its->stream);
        its->comm->recv(row(next), 0, its->stream);
        end_use(next, its->stream);
        awaited_[static_cast<size_t>(next)] = nullptr;
    }
}

void PipelineRunner::execute(const Action& action, StageWork& work, cudaStream_t stream) {
    const Rows rows = borders_->take(action);
    const auto tensor = [&](int index) { return index < 0 ? Tensor{} : row(index); };
    if (sends(action.what)) send(action, std::max(rows.out, rows.dx));
    if (receives(action.what)) receive(action, std::max(rows.in, rows.dx));
    if (computes(action.what) || action.what == Do::update) {
        for (const int index : {rows.in, rows.out, rows.dx}) {
            if (index < 0) continue;
            await(index);
            begin_use(index, stream);
        }
        pp_.trace_computing(action_text(action), stream);
        if (action.what == Do::forward) work.forward(action, tensor(rows.in), tensor(rows.out), stream);
        if (is_input_gradient(action.what)) work.backward(action, tensor(rows.dx), stream);
        if (action.what == Do::backward_weight) work.backward_weight(action, stream);
        if (action.what == Do::update) work.update(action, stream);
        pp_.trace_computing("", stream);
        for (const int index : {rows.in, rows.out, rows.dx})
            if (index >= 0) end_use(index, stream);
    }
    borders_->give_back(action);
    if (!schedule_->forward_only) most_borders_ = std::max(most_borders_, borders_->count());
}

void PipelineRunner::begin(const PipelineSchedule& schedule) {
    schedule_ = &schedule;
    done_ = 0;
    borders_ = std::make_unique<Borders>(schedule, pp_.rank);
}

void PipelineRunner::advance(size_t until, StageWork& work, cudaStream_t stream) {
    const std::vector<Action>& actions = schedule_->ranks[static_cast<size_t>(pp_.rank)];
    for (until = std::min(until, actions.size()); done_ < until; ++done_) execute(actions[done_], work, stream);
    if (done_ < actions.size()) return;
    // Who waits for what comes next on this stream, a sum over all ranks for example, waits for the messages, too,
    // without which other ranks do not get there.
    for (const auto& [ends, its] : links_) cudaCheck(cudaStreamWaitEvent(stream, its->sent));
}

void PipelineRunner::run(const PipelineSchedule& schedule, StageWork& work, cudaStream_t stream) {
    begin(schedule);
    advance(schedule.ranks[static_cast<size_t>(pp_.rank)].size(), work, stream);
}

void PipelineRunner::begin_again(const std::vector<size_t>& until, cudaStream_t stream) {
    // Of each link to this rank: what the other end has sent, less what has been received here.
    std::map<int, int64_t> left;
    const auto count = [&](int rank, bool (*is_one)(Do), int64_t by) {
        const std::vector<Action>& actions = schedule_->ranks[static_cast<size_t>(rank)];
        for (size_t i = 0; i < until[static_cast<size_t>(rank)]; ++i)
            if (is_one(actions[i].what) && (rank == pp_.rank || actions[i].peer == pp_.rank))
                left[rank == pp_.rank ? actions[i].peer : rank] += by;
    };
    for (int rank = 0; rank < schedule_->p; ++rank)
        if (rank != pp_.rank) count(rank, sends, 1);
    count(pp_.rank, receives, -1);
    for (int index = 0; index < std::ssize(awaited_); ++index) await(index);
    for (const auto& [from, n] : left) {
        if (n == 0) continue;
        Link& its = link(from, pp_.rank);
        begin_use(0, its.stream);  // any row: nothing in them is needed any more
        cudaCheck(cudaEventRecord(used_[0], stream));
        begin_use(0, its.stream);
        for (int64_t i = 0; i < n; ++i) its.comm->recv(row(0), 0, its.stream);
        end_use(0, its.stream);
    }
    begin(*schedule_);
}
