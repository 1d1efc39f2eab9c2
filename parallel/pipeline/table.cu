// table.cu: what a table of actions says: names, the messages that follow from its computing, and what is alive when.
#include "parallel/pipeline/pipeline.h"

#include <algorithm>

int PipelineSchedule::rank_of(int stage, int micro) const {
    switch (placement) {
        case Placement::loop: return stage % p;
        case Placement::vee: return stage < p ? stage : 2 * p - 1 - stage;
        case Placement::both_ways: return micro < (m + 1) / 2 ? stage : p - 1 - stage;
    }
    fail("placement ", static_cast<int>(placement), " is none of loop, vee and both_ways");
}

std::vector<int> PipelineSchedule::stages_of(int rank) const {
    std::vector<int> stages;
    for (int stage = 0; stage < n_stages; ++stage)
        if (rank_of(stage, 0) == rank || (placement == Placement::both_ways && p - 1 - stage == rank))
            stages.push_back(stage);
    return stages;
}

// The other rank that has the stage one step further on a micro-batch's way, down in a forward and up in a backward.
static int rank_further_on(const PipelineSchedule& s, const Action& a, int step) {
    if (a.what != Do::forward && !is_input_gradient(a.what)) return -1;
    const int stage = a.what == Do::forward ? a.stage + step : a.stage - step;
    if (stage < 0 || stage == s.n_stages) return -1;
    const int there = s.rank_of(stage, a.micro);
    return there == s.rank_of(a.stage, a.micro) ? -1 : there;
}
int PipelineSchedule::sender_to(const Action& a) const { return rank_further_on(*this, a, -1); }
int PipelineSchedule::receiver_of(const Action& a) const { return rank_further_on(*this, a, 1); }

Action PipelineSchedule::receive_for(const Action& a) const {
    return {.what = a.what == Do::forward ? Do::receive_activation : Do::receive_gradient,
            .micro = a.micro,
            .stage = a.stage,
            .peer = sender_to(a)};
}

Action PipelineSchedule::send_of(const Action& a) const {
    return {.what = a.what == Do::forward ? Do::send_activation : Do::send_gradient,
            .micro = a.micro,
            .stage = a.stage,
            .peer = receiver_of(a)};
}

Action receive_of(const Action& send, int from) {
    const bool activation = send.what == Do::send_activation;
    return {.what = activation ? Do::receive_activation : Do::receive_gradient,
            .micro = send.micro,
            .stage = activation ? send.stage + 1 : send.stage - 1,
            .peer = from};
}

std::string action_text(const Action& a) {
    const auto name = [](Do what) {
        switch (what) {
            case Do::forward:
            case Do::send_activation:
            case Do::receive_activation: return "F";
            case Do::backward: return "BW";
            case Do::backward_weight: return "W";
            default: return "B";
        }
    };
    if (a.what == Do::update) return concat("update ", a.version, " of stage ", a.stage);
    const std::string text = concat(name(a.what), a.micro, " of stage ", a.stage);
    if (sends(a.what)) return concat("send ", text, " to rank ", a.peer);
    if (receives(a.what)) return concat("receive ", text, " from rank ", a.peer);
    return text;
}

// ---------------------------------------------------------------------------------------------------------------------
// Messages

// Where a message is received follows from a simulation with equal durations: before the action that its receiver
// computes when it is sent. So the rank that sends does not wait, and the message has come when it is needed.
//
// So messages cannot wait for each other in a cycle either. (With NCCL a send may end only with its receive, and a
// receive may need memory that an earlier send still reads.) What a rank computes and sends before a receive ends at an
// earlier moment of the simulation.
void add_messages(PipelineSchedule& s) {
    struct Message {
        double sent;
        Action receive;
    };
    std::vector<std::vector<Message>> messages(s.ranks.size());  // by receiver
    const Simulation simulation = simulate(s, {});
    for (int rank = 0; rank < s.p; ++rank)
        for (const Span& span : simulation.ranks[static_cast<size_t>(rank)])
            if (const int to = s.receiver_of(span.action); to >= 0)
                messages[static_cast<size_t>(to)].push_back({span.end, receive_of(s.send_of(span.action), rank)});
    for (size_t rank = 0; rank < s.ranks.size(); ++rank) {
        std::ranges::stable_sort(messages[rank], {}, &Message::sent);
        s.ranks[rank].clear();
        auto next = messages[rank].begin();
        for (const Span& span : simulation.ranks[rank]) {
            for (; next != messages[rank].end() && next->sent <= span.end; ++next)
                s.ranks[rank].push_back(next->receive);
            s.ranks[rank].push_back(span.action);
            if (s.receiver_of(span.action) >= 0) s.ranks[rank].push_back(s.send_of(span.action));
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// What is alive

namespace {

// visit(stage, +1) where a forward begins to save, visit(stage, -1) where what it saved is not needed any more.
template <typename Visit>
void for_each_life(const PipelineSchedule& s, int rank, const Visit& visit) {
    for (const Action& a : s.ranks[static_cast<size_t>(rank)]) {
        if (a.what == Do::forward) visit(a.stage, 1);
        if (is_weight_gradient(a.what) || (a.what == Do::forward && s.forward_only)) visit(a.stage, -1);
    }
}

}  // namespace

int64_t peak_alive(const PipelineSchedule& schedule, int rank, const std::function<int64_t(int stage)>& weight_of) {
    int64_t now = 0, peak = 0;
    for_each_life(schedule, rank, [&](int stage, int change) {
        now += change * weight_of(stage);
        peak = std::max(peak, now);
    });
    return peak;
}

Alive alive(const PipelineSchedule& schedule, int rank) {
    Alive result;
    for (const int stage : schedule.stages_of(rank))
        result.micro_batches.push_back(
            static_cast<int>(peak_alive(schedule, rank, [&](int other) { return other == stage ? 1 : 0; })));
    result.in_all = static_cast<int>(peak_alive(schedule, rank, [](int) { return 1; }));
    int put_off = 0;
    for (const Action& a : schedule.ranks[static_cast<size_t>(rank)]) {
        if (a.what == Do::backward_input) result.weight_gradients = std::max(result.weight_gradients, ++put_off);
        if (a.what == Do::backward_weight) --put_off;
    }
    return result;
}
