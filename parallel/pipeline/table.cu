// table.cu: what a table of actions says, the messages that follow from its computing, and what makes it invalid.
//
// Rank r executes ranks[r] from the first action to the last. An action waits for
//
//     the action before it on its rank
//     forward of stage s          the forward of stage s - 1 of its micro-batch      (an activation, out of a message)
//     backward of stage s         the backward of stage s + 1, or its own forward at the last stage        (a gradient)
//     backward_weight             the backward_input of its stage
//
// A message is there when its send has been executed; nobody waits to send. So a table can be executed if and only if the
// waits form no circle. check_schedule() finds that out by executing the order without the computing: rank after rank as
// far as it goes, until all have come to their ends, or nobody can go on.
#include "parallel/pipeline/pipeline.h"

#include <algorithm>
#include <array>

namespace {

bool is_weight_gradient(Do what) { return what == Do::backward || what == Do::backward_weight; }
bool is_input_gradient(Do what) { return what == Do::backward || what == Do::backward_input; }

// The stage whose result an action of this kind at this stage waits for; -1 or n_stages where there is none.
int stage_before(Do what, int stage) { return what == Do::forward ? stage - 1 : stage + 1; }

// The rank that sends what this forward or input gradient waits for; -1 where it waits for no message.
int sender_to(const PipelineSchedule& s, const Action& a) {
    if (a.what != Do::forward && !is_input_gradient(a.what)) return -1;
    const int before = stage_before(a.what, a.stage), here = s.rank_of(a.stage, a.micro);
    if (before < 0 || before == s.n_stages) return -1;
    const int there = s.rank_of(before, a.micro);
    return there == here ? -1 : there;
}
// The rank that waits for the result of this forward or input gradient.
int receiver_of(const PipelineSchedule& s, const Action& a) {
    if (a.what != Do::forward && !is_input_gradient(a.what)) return -1;
    const int behind = a.what == Do::forward ? a.stage + 1 : a.stage - 1, here = s.rank_of(a.stage, a.micro);
    if (behind < 0 || behind == s.n_stages) return -1;
    const int there = s.rank_of(behind, a.micro);
    return there == here ? -1 : there;
}

Action receive_for(const PipelineSchedule& s, const Action& a) {
    return {.what = a.what == Do::forward ? Do::receive_activation : Do::receive_gradient,
            .micro = a.micro,
            .stage = a.stage,
            .peer = sender_to(s, a)};
}
Action send_of(const PipelineSchedule& s, const Action& a) {
    return {.what = a.what == Do::forward ? Do::send_activation : Do::send_gradient,
            .micro = a.micro,
            .stage = a.stage,
            .peer = receiver_of(s, a)};
}
// The other end of a send.
Action receive_of(const Action& send, int from) {
    const bool activation = send.what == Do::send_activation;
    return {.what = activation ? Do::receive_activation : Do::receive_gradient,
            .micro = send.micro,
            .stage = activation ? send.stage + 1 : send.stage - 1,
            .peer = from};
}

}  // namespace

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

// ---- messages --------------------------------------------------------------------------------------------------------

// Where a message is received follows from a simulation with equal durations: before the action that its receiver computes
// when it is sent. So the rank that sends does not wait, and the message has come when it is needed.
//
// That also keeps messages from waiting for each other in a circle, where a send ends with its receive, and a receive needs
// memory that an earlier send has to leave: what its rank has computed and sent before is over at an earlier moment of the
// simulation.
void add_messages(PipelineSchedule& s) {
    struct Message {
        double sent;
        Action receive;
    };
    std::vector<std::vector<Message>> messages(s.ranks.size());  // by receiver
    const Simulation simulation = simulate(s, {});
    for (int rank = 0; rank < s.p; ++rank)
        for (const Span& span : simulation.ranks[static_cast<size_t>(rank)])
            if (const int to = receiver_of(s, span.action); to >= 0)
                messages[static_cast<size_t>(to)].push_back({span.end, receive_of(send_of(s, span.action), rank)});
    for (size_t rank = 0; rank < s.ranks.size(); ++rank) {
        std::ranges::stable_sort(messages[rank], {}, &Message::sent);
        s.ranks[rank].clear();
        auto next = messages[rank].begin();
        for (const Span& span : simulation.ranks[rank]) {
            for (; next != messages[rank].end() && next->sent <= span.end; ++next)
                s.ranks[rank].push_back(next->receive);
            s.ranks[rank].push_back(span.action);
            if (receiver_of(s, span.action) >= 0) s.ranks[rank].push_back(send_of(s, span.action));
        }
    }
}

// ---- what makes a table invalid --------------------------------------------------------------------------------------

namespace {

class TableCheck {
  public:
    explicit TableCheck(const PipelineSchedule& schedule) : s_(schedule) {}

    void run() {
        check_sizes();
        for (auto& of_kind : place_) of_kind.assign(static_cast<size_t>(s_.n_stages * s_.m), -1);
        for (rank_ = 0; rank_ < s_.p; ++rank_)
            for (index_ = 0; index_ < actions(rank_).size(); ++index_) check_action(actions(rank_)[index_]);
        for (int stage = 0; stage < s_.n_stages; ++stage)
            for (int micro = 0; micro < s_.m; ++micro) check_is_complete(stage, micro);
        for (rank_ = 0; rank_ < s_.p; ++rank_) {
            for (index_ = 0; index_ < actions(rank_).size(); ++index_) check_order(actions(rank_)[index_]);
            check_gradients_and_versions();
        }
        check_links();
        check_no_deadlock();
    }

  private:
    const std::vector<Action>& actions(int rank) const { return s_.ranks[static_cast<size_t>(rank)]; }
    // Where the list of its rank has the action of this kind; -1: nowhere.
    int& place(Do what, int stage, int micro) {
        return place_[static_cast<size_t>(what)][static_cast<size_t>(stage * s_.m + micro)];
    }
    int place_of(const Action& a) { return place(a.what, a.stage, a.micro); }

    // An error about the action at hand.
    template <typename... Reason>
    void require(bool condition, const Reason&... reason) const {
        if (condition) return;
        fail("schedule ", s_.name, ": rank ", rank_, ", action ", index_, " (", action_text(actions(rank_)[index_]),
             "): ", concat(reason...));
    }

    void check_sizes() const {
        check(s_.p >= 1 && s_.m >= 1, "schedule ", s_.name, ": ", s_.p, " ranks and ", s_.m,
              " micro-batches: it needs one of each at least");
        const int per_rank = s_.placement == Placement::both_ways ? 1 : s_.placement == Placement::vee ? 2 : 0;
        check(s_.n_stages >= 1 && (per_rank ? s_.n_stages == per_rank * s_.p : s_.n_stages % s_.p == 0), "schedule ",
              s_.name, ": ", s_.n_stages, " stages on ", s_.p, " ranks: that placement has ",
              per_rank ? concat(per_rank * s_.p) : concat("a multiple of ", s_.p));
        const auto p = static_cast<size_t>(s_.p);
        check(s_.ranks.size() == p && s_.versions.size() == p, "schedule ", s_.name, ": lists of actions for ",
              s_.ranks.size(), " ranks, versions for ", s_.versions.size(), ", and there are ", s_.p);
        for (const int n : s_.versions)
            check(n >= 1 && (s_.asynchronous || n == 1), "schedule ", s_.name, ": a rank that keeps ", n,
                  " versions of its weights; ", s_.asynchronous ? "1 at least" : "without updates there is 1");
        if (!s_.asynchronous) return;
        check(s_.n_stages == s_.p && s_.placement == Placement::loop && !s_.splits_backward && !s_.forward_only,
              "schedule ", s_.name, ": with updates a rank has one stage, and whole backwards");
        check(s_.per_update >= 1 && s_.m % s_.per_update == 0, "schedule ", s_.name, ": ", s_.m,
              " micro-batches are no multiple of the ", s_.per_update, " of an update");
    }

    void check_action(const Action& a) {
        require(a.what <= Do::update, "no such kind of action: ", static_cast<int>(a.what));
        require(a.stage >= 0 && a.stage < s_.n_stages, "there are stages 0 to ", s_.n_stages - 1);
        require(a.micro >= 0 && a.micro < s_.m, "there are micro-batches 0 to ", s_.m - 1);
        require(s_.rank_of(a.stage, a.micro) == rank_, "this stage of this micro-batch is on rank ",
                s_.rank_of(a.stage, a.micro));
        if (sends(a.what) || receives(a.what)) {
            // The computing that the message is for, or of.
            const Action computing{
                .what = a.what == Do::send_activation || a.what == Do::receive_activation ? Do::forward : Do::backward,
                .micro = a.micro,
                .stage = a.stage};
            const int peer = sends(a.what) ? receiver_of(s_, computing) : sender_to(s_, computing);
            require(peer >= 0, "the other end of this message is not on another rank");
            require(a.peer == peer, "the other end of this message is rank ", peer);
        } else {
            require(a.peer == -1, "it is no message, and names rank ", a.peer);
        }
        require(s_.splits_backward || (a.what != Do::backward_input && a.what != Do::backward_weight),
                "this schedule does not split the backward");
        require(!s_.forward_only || a.what == Do::forward || a.what == Do::send_activation ||
                    a.what == Do::receive_activation,
                "this schedule has forwards alone");
        require(s_.asynchronous || a.what != Do::update, "this schedule has no updates");
        require(place_of(a) < 0, "it is there twice; first as action ", place_of(a));
        place(a.what, a.stage, a.micro) = static_cast<int>(index_);
    }

    void check_is_complete(int stage, int micro) {
        const auto must_have = [&](Do what) {
            if (place(what, stage, micro) >= 0) return;
            Action a{.what = what, .micro = micro, .stage = stage};
            if (sends(what)) a.peer = receiver_of(s_, {Do::forward, micro, stage});
            fail("schedule ", s_.name, ": rank ", s_.rank_of(stage, micro), " does not have the action ",
                 action_text(a));
        };
        const auto must_have_messages = [&](const Action& a) {
            if (sender_to(s_, a) >= 0) must_have(receive_for(s_, a).what);
            if (receiver_of(s_, a) >= 0) must_have(send_of(s_, a).what);
        };
        must_have(Do::forward);
        must_have_messages({Do::forward, micro, stage});
        if (s_.forward_only) return;
        must_have_messages({Do::backward, micro, stage});
        if (place(Do::backward, stage, micro) < 0) {
            must_have(s_.splits_backward ? Do::backward_input : Do::backward);
            must_have(Do::backward_weight);
        } else {
            rank_ = s_.rank_of(stage, micro);
            for (const Do half : {Do::backward_input, Do::backward_weight}) {
                if (place(half, stage, micro) < 0) continue;
                index_ = static_cast<size_t>(place(half, stage, micro));
                require(false, "the whole backward is there as well, as action ", place(Do::backward, stage, micro));
            }
        }
    }

    // The place of a stage's gradient by input.
    int place_of_gradient(int stage, int micro) {
        return std::max(place(Do::backward, stage, micro), place(Do::backward_input, stage, micro));
    }

    // On one rank, what an action needs comes before it.
    void check_order(const Action& a) {
        const auto needs = [&](int place, const auto&... name) {
            if (place >= static_cast<int>(index_))
                require(false, "it needs ", name..., ", which comes later, as action ", place);
        };
        const int before = stage_before(a.what, a.stage);
        if (a.what == Do::forward && sender_to(s_, a) >= 0)
            needs(place(Do::receive_activation, a.stage, a.micro), "its message");
        else if (a.what == Do::forward && before >= 0)
            needs(place(Do::forward, before, a.micro), "the forward of stage ", before);
        if (is_input_gradient(a.what)) {
            needs(place(Do::forward, a.stage, a.micro), "its forward");
            if (sender_to(s_, a) >= 0) needs(place(Do::receive_gradient, a.stage, a.micro), "its message");
            else if (before < s_.n_stages) needs(place_of_gradient(before, a.micro), "the backward of stage ", before);
        }
        if (a.what == Do::backward_weight) needs(place(Do::backward_input, a.stage, a.micro), "its gradient by input");
        if (a.what == Do::send_activation) needs(place(Do::forward, a.stage, a.micro), "the forward that it sends");
        if (a.what == Do::send_gradient) needs(place_of_gradient(a.stage, a.micro), "the gradient that it sends");
    }

    // The sums of a rank's gradients, and the versions of its weights.
    void check_gradients_and_versions() {
        std::vector<int> last(static_cast<size_t>(s_.n_stages), -1);  // micro-batch whose gradient was added
        std::vector<int> used(static_cast<size_t>(s_.m), 0);          // the version of a micro-batch's forward
        int version = 0, n = 0;                                       // the newest version; gradients that were added
        const int kept = s_.versions[static_cast<size_t>(rank_)];
        for (index_ = 0; index_ < actions(rank_).size(); ++index_) {
            const Action& a = actions(rank_)[index_];
            if (is_weight_gradient(a.what)) {
                int& micro = last[static_cast<size_t>(a.stage)];
                require(a.micro > micro,
                        "the gradients of a stage are added in the order of the micro-batches, and that of ", micro,
                        " came before");
                micro = a.micro;
                ++n;
            }
            if (a.what == Do::update) {
                require(a.version == version + 1, "the next version of the weights is ", version + 1);
                ++version;
                require(a.micro == version * s_.per_update - 1, "the last micro-batch of this update is ",
                        version * s_.per_update - 1);
                require(n == version * s_.per_update, "it needs the gradients of ", version * s_.per_update,
                        " micro-batches, and ", n, " are there");
            } else if (computes(a.what) && s_.asynchronous) {
                require(a.version <= version, "version ", a.version, " of the weights is not there yet: the newest is ",
                        version);
                require(a.version >= 0 && a.version > version - kept, "version ", a.version,
                        " of the weights is gone: ", kept, " are kept, and the newest is ", version);
                if (a.what == Do::forward) used[static_cast<size_t>(a.micro)] = a.version;
                require(a.version == used[static_cast<size_t>(a.micro)], "its forward used version ",
                        used[static_cast<size_t>(a.micro)], " of the weights");
            } else {
                require(a.version == 0, "only updates, and computing in a schedule with updates, name a version");
            }
        }
        check(!s_.asynchronous || n == version * s_.per_update, "schedule ", s_.name, ": rank ", rank_,
              " has no update for the gradients of its last ", n - version * s_.per_update, " micro-batches");
    }

    // What is received on a link, in the order of the sends. (That each has its other end is known by now.)
    void check_links() {
        std::vector<size_t> next(static_cast<size_t>(s_.p * s_.p),
                                 0);  // on each link: the place after its last receive
        for (int from = 0; from < s_.p; ++from)
            for (size_t i = 0; i < actions(from).size(); ++i) {
                const Action& send = actions(from)[i];
                if (!sends(send.what)) continue;
                size_t& place = next[static_cast<size_t>(from * s_.p + send.peer)];
                rank_ = send.peer;
                const std::vector<Action>& there = actions(rank_);
                while (!(receives(there[place].what) && there[place].peer == from)) ++place;
                index_ = place;
                if (there[place] != receive_of(send, from))
                    require(false, "rank ", from, " sends another message first on this link: its action ", i, " (",
                            action_text(send), ")");
                ++place;
            }
    }

    // What the action at hand waits for on another rank: the place of its send; -1: nothing.
    int place_of_send_to(const Action& a) {
        if (sender_to(s_, a) < 0) return -1;
        const Action send = a.what == Do::forward ? Action{Do::send_activation, a.micro, a.stage - 1}
                                                  : Action{Do::send_gradient, a.micro, a.stage + 1};
        return place_of(send);
    }

    void check_no_deadlock() {
        std::vector<size_t> done(static_cast<size_t>(s_.p), 0);
        for (bool moves = true; moves;) {
            moves = false;
            for (int rank = 0; rank < s_.p; ++rank) {
                size_t& i = done[static_cast<size_t>(rank)];
                const size_t start = i;
                for (; i < actions(rank).size(); ++i) {
                    const int send = place_of_send_to(actions(rank)[i]);
                    if (send >=
                        static_cast<int>(done[static_cast<size_t>(std::max(0, sender_to(s_, actions(rank)[i])))]))
                        break;
                }
                moves = moves || i > start;
            }
        }
        for (rank_ = 0; rank_ < s_.p; ++rank_) {
            index_ = done[static_cast<size_t>(rank_)];
            if (index_ == actions(rank_).size()) continue;
            const Action& a = actions(rank_)[index_];
            const auto from = static_cast<size_t>(sender_to(s_, a));
            require(false, "a deadlock: it waits for action ", place_of_send_to(a), " of rank ", from,
                    ", which itself waits at action ", done[from], " (", action_text(s_.ranks[from][done[from]]), ")");
        }
    }

    const PipelineSchedule& s_;
    int rank_ = 0;      // of the action at hand
    size_t index_ = 0;  // its place
    std::array<std::vector<int>, static_cast<size_t>(Do::update) + 1> place_;
};

}  // namespace

void check_schedule(const PipelineSchedule& schedule) { TableCheck(schedule).run(); }

// ---- what is alive ---------------------------------------------------------------------------------------------------

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
