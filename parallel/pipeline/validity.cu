// validity.cu: what makes a table invalid.
//
// Rank r executes ranks[r] from the first action to the last. An action waits for
//
//     the action before it on its rank
//     forward of stage s          the forward of stage s - 1 of its micro-batch      (an activation, out of a message)
//     backward of stage s         the backward of stage s + 1, or its own forward at the last stage        (a gradient)
//     backward_weight             the backward_input of its stage
//
// A message is there when its send has been executed; nobody waits to send. So a table can be executed if and only if
// the waits form no cycle. That is found out by executing the order without the computing: rank after rank as far as
// it goes, until all have come to their ends, or nobody can go on.
#include "parallel/pipeline/pipeline.h"

#include <algorithm>
#include <array>

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
              " micro-batches are not a multiple of the ", s_.per_update, " of an update");
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
            const int peer = sends(a.what) ? s_.receiver_of(computing) : s_.sender_to(computing);
            require(peer >= 0, "the other end of this message is not on another rank");
            require(a.peer == peer, "the other end of this message is rank ", peer);
        } else {
            require(a.peer == -1, "it is not a message, and names rank ", a.peer);
        }
        require(s_.splits_backward || (a.what != Do::backward_input && a.what != Do::backward_weight),
                "this schedule does not split the backward");
        require(!s_.forward_only || a.what == Do::forward || a.what == Do::send_activation ||
                    a.what == Do::receive_activation,
                "this schedule has only forwards");
        require(s_.asynchronous || a.what != Do::update, "this schedule has no updates");
        require(place_of(a) < 0, "it is there twice; first as action ", place_of(a));
        place(a.what, a.stage, a.micro) = static_cast<int>(index_);
    }

    void check_is_complete(int stage, int micro) {
        const auto must_have = [&](const Action& a) {
            if (place_of(a) < 0)
                fail("schedule ", s_.name, ": rank ", s_.rank_of(stage, micro),
                     " does not have the action: ", action_text(a));
        };
        const auto must_have_messages = [&](const Action& a) {
            if (s_.sender_to(a) >= 0) must_have(s_.receive_for(a));
            if (s_.receiver_of(a) >= 0) must_have(s_.send_of(a));
        };
        must_have({Do::forward, micro, stage});
        must_have_messages({Do::forward, micro, stage});
        if (s_.forward_only) return;
        must_have_messages({Do::backward, micro, stage});
        if (place(Do::backward, stage, micro) < 0) {
            must_have({s_.splits_backward ? Do::backward_input : Do::backward, micro, stage});
            must_have({Do::backward_weight, micro, stage});
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
        const int before = a.what == Do::forward ? a.stage - 1 : a.stage + 1;
        if (a.what == Do::forward && s_.sender_to(a) >= 0)
            needs(place(Do::receive_activation, a.stage, a.micro), "its message");
        else if (a.what == Do::forward && before >= 0)
            needs(place(Do::forward, before, a.micro), "the forward of stage ", before);
        if (is_input_gradient(a.what)) {
            needs(place(Do::forward, a.stage, a.micro), "its forward");
            if (s_.sender_to(a) >= 0) needs(place(Do::receive_gradient, a.stage, a.micro), "its message");
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
        if (s_.sender_to(a) < 0) return -1;
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
                        static_cast<int>(done[static_cast<size_t>(std::max(0, s_.sender_to(actions(rank)[i])))]))
                        break;
                }
                moves = moves || i > start;
            }
        }
        for (rank_ = 0; rank_ < s_.p; ++rank_) {
            index_ = done[static_cast<size_t>(rank_)];
            if (index_ == actions(rank_).size()) continue;
            const Action& a = actions(rank_)[index_];
            const auto from = static_cast<size_t>(s_.sender_to(a));
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
