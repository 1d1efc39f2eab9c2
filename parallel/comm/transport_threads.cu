// transport_threads.cu: messages between threads of one process.
//
// Each rank has a mailbox. A sender copies its bytes into a new message, puts it there and wakes the owner; the owner
// finds it by (communicator, sender, number) and copies the bytes out. Sending never waits.
#include "parallel/comm/transport.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <tuple>

struct Message {
    std::unique_ptr<char[]> data;
    size_t bytes = 0;
};
using Key = std::tuple<uint64_t, int, int64_t>;  // communicator, sender's world rank, number

struct Mailbox {
    std::mutex mutex;
    std::condition_variable filled;
    std::map<Key, Message> messages;
    uint64_t n_posted = 0;
};

class ThreadWorld {
  public:
    explicit ThreadWorld(int n)
        : boxes(new Mailbox[static_cast<size_t>(n)]), slots(new Slot[static_cast<size_t>(n)]{}), size(n) {}
    std::unique_ptr<Mailbox[]> boxes;
    std::unique_ptr<Slot[]> slots;
    int size;
};

std::shared_ptr<ThreadWorld> make_thread_world(int n) { return std::make_shared<ThreadWorld>(n); }
Slot* thread_slot(ThreadWorld& world, int rank) { return &world.slots[static_cast<size_t>(rank)]; }

namespace {

class ThreadTransport final : public HostTransport {
  public:
    ThreadTransport(std::shared_ptr<ThreadWorld> world, std::shared_ptr<RankState> state, std::vector<int> members,
                    uint64_t id)
        : HostTransport(std::move(state), std::move(members), id), world_(std::move(world)), box_(box_of(rank())) {}

    std::shared_ptr<Transport> split(const std::vector<int>& members) override {
        return std::make_shared<ThreadTransport>(world_, state_, to_world(members), next_id(members));
    }

  protected:
    void post(int to, int64_t number, const void* data, size_t bytes) override {
        // The copy is made before the lock is taken.
        Message message{std::make_unique_for_overwrite<char[]>(bytes), bytes};
        if (bytes > 0) std::memcpy(message.data.get(), data, bytes);
        Mailbox& box = box_of(to);
        {
            const std::lock_guard lock(box.mutex);
            box.messages[{id(), state_->rank, number}] = std::move(message);
            ++box.n_posted;
        }
        box.filled.notify_one();
    }
    bool arrived(int from, int64_t number) override {
        const std::lock_guard lock(box_.mutex);
        n_seen_ = box_.n_posted;
        return box_.messages.count(key(from, number)) != 0;
    }
    size_t arrived_bytes(int from, int64_t number) override {
        const std::lock_guard lock(box_.mutex);
        return box_.messages.at(key(from, number)).bytes;
    }
    void take(void* data, int from, int64_t number) override {
        Message message;
        {
            const std::lock_guard lock(box_.mutex);
            const auto at = box_.messages.find(key(from, number));
            message = std::move(at->second);
            box_.messages.erase(at);
        }
        if (message.bytes > 0) std::memcpy(data, message.data.get(), message.bytes);
    }
    // Until something new is in the box; not for long, because the job may have failed meanwhile.
    void pause() override {
        std::unique_lock lock(box_.mutex);
        box_.filled.wait_for(lock, std::chrono::milliseconds(20), [&] { return box_.n_posted != n_seen_; });
    }

  private:
    Mailbox& box_of(int member) { return world_->boxes[static_cast<size_t>(members()[static_cast<size_t>(member)])]; }
    Key key(int from, int64_t number) const { return {id(), members()[static_cast<size_t>(from)], number}; }

    const std::shared_ptr<ThreadWorld> world_;
    Mailbox& box_;
    uint64_t n_seen_ = 0;
};

}  // namespace

std::shared_ptr<HostTransport> make_thread_transport(std::shared_ptr<ThreadWorld> world,
                                                     std::shared_ptr<RankState> state) {
    std::vector<int> members;
    for (int i = 0; i < world->size; ++i) members.push_back(i);
    return std::make_shared<ThreadTransport>(std::move(world), std::move(state), std::move(members), 0);
}
