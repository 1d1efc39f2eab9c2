// cpu/nccl.cpp: NCCL for ranks that are threads of one process (nccl.h says what it does).
//
// All is made of meetings. The ranks that a call concerns (all of a communicator for a collective, two for a message)
// each bring what they were called with; the last one to come does the work of all, and all go on. A meeting has two
// sides:
//
//     on the host        join()      when the call is made: here ranks that call different things are found
//     on the stream      arrive()    when the stream gets there: the buffers may be read and written from now on,
//                                    until the meeting is over, for which the stream waits
//
// Hosts themselves meet, too, to connect, and to make, split and destroy communicators: they join, arrive and wait.
#include "nccl.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "streams.h"

using cuda_cpu::Access, cuda_cpu::Place, cuda_cpu::report;

namespace {

struct Member;

enum class Kind {
    all_reduce,
    reduce_scatter,
    reduce,
    all_gather,
    broadcast,
    send,
    recv,
    connect,
    split,
    destroy,
    init
};
constexpr const char* kNames[] = {"ncclAllReduce", "ncclReduceScatter", "ncclReduce", "ncclAllGather",
                                  "ncclBroadcast", "ncclSend",          "ncclRecv"};

// What a rank brings to a meeting.
struct Part {
    std::shared_ptr<Member> member;  // who
    const void* send = nullptr;
    void* recv = nullptr;
    std::unique_ptr<char[]> copy = nullptr;  // of what it sends, if its stream does not wait for the receiver
    int color = 0, key = 0;                  // of a split
    std::shared_ptr<Member> made = nullptr;  // by an init or a split
    bool has_come = false;
};

// What all of them must agree on, but for its place in the source.
struct Call {
    Kind kind;
    Place place{nullptr, 0};
    size_t count = 0;
    ncclDataType_t type = ncclUint8;
    ncclRedOp_t op = ncclSum;
    int root = -1;  // or the other side of a message
};

struct Meeting {
    explicit Meeting(const Call& its_call, size_t size) : call(its_call), parts(size) {}
    const Call call;  // as the first has made it
    int first = 0;    // rank
    std::vector<Part> parts;
    std::atomic<bool> over = false;
};

// What a meeting is known by: the kind of meeting, who sends to whom (messages), how many there were before.
enum class Series { collectives, messages, connections, ring, splits, end };
using Key = std::tuple<Series, int, int, int64_t>;

// A communicator: what its ranks share.
struct World {
    explicit World(int n) : size(n) {}
    const int size;
    std::mutex mutex;  // guards the meetings and their parts
    std::condition_variable changed;
    std::map<Key, std::shared_ptr<Meeting>> meetings;  // that are not over
};

// A rank of a communicator.
struct Member {
    const std::shared_ptr<World> world;
    const int rank, device;
    std::atomic<bool> aborted = false;
    std::atomic<int> under_way = 0;  // pieces of work on streams
    // Of the host's thread alone:
    int64_t n_collectives = 0, n_splits = 0;
    std::map<int, int64_t> n_sent, n_received;
    std::set<std::pair<int, int>> connected;
    Member(std::shared_ptr<World> its_world, int its_rank, int its_device)
        : world(std::move(its_world)), rank(its_rank), device(its_device) {}
};

// A handle is a number: none is given twice, so that the use of one that is gone is found.
std::mutex mutex;  // guards the rest of these
std::map<ncclComm_t, std::shared_ptr<Member>> communicators;
std::map<std::string, std::shared_ptr<World>> starting;  // by the id
uintptr_t n_communicators = 0;
uint64_t n_ids = 0;

thread_local std::string last_error;
ncclResult_t refuse(ncclResult_t result, const std::string& why) {
    last_error = why;
    return result;
}

std::string at_place(Place place) { return std::string(" at ") + place.file + ":" + std::to_string(place.line); }

std::shared_ptr<Member> member_of(ncclComm_t comm, Place place) {
    const std::lock_guard lock(mutex);
    const auto at = communicators.find(comm);
    if (at == communicators.end())
        report("NCCL: the call" + at_place(place) +
               " has a communicator that was never made, or has been destroyed or aborted");
    return at->second;
}
ncclComm_t handle_of(std::shared_ptr<Member> member) {
    const std::lock_guard lock(mutex);
    const auto handle = reinterpret_cast<ncclComm_t>(++n_communicators);
    communicators[handle] = std::move(member);
    return handle;
}

// ---------------------------------------------------------------------------------------------------------------------
// What is added, and where it goes

template <class F>
void with_type(ncclDataType_t type, F&& f) {
    switch (type) {
        case ncclInt8: return f(int8_t{});
        case ncclUint8: return f(uint8_t{});
        case ncclInt32: return f(int32_t{});
        case ncclFloat16: return f(__half{});
        case ncclFloat32: return f(float{});
        case ncclBfloat16: return f(__nv_bfloat16{});
    }
}
const char* name_of(ncclDataType_t type) {
    switch (type) {
        case ncclInt8: return "ncclInt8";
        case ncclUint8: return "ncclUint8";
        case ncclInt32: return "ncclInt32";
        case ncclFloat16: return "ncclFloat16";
        case ncclFloat32: return "ncclFloat32";
        case ncclBfloat16: return "ncclBfloat16";
    }
    return nullptr;
}
size_t bytes_of(const Call& call) {
    size_t bytes = 0;
    with_type(call.type, [&](auto zero) { bytes = call.count * sizeof zero; });
    return bytes;
}

template <class T>
T reduced(T a, T b, ncclRedOp_t op) {
    if (op == ncclMax) return a < b ? b : a;
    if constexpr (std::is_integral_v<T>) return static_cast<T>(static_cast<unsigned>(a) + static_cast<unsigned>(b));
    else return static_cast<T>(static_cast<float>(a) + static_cast<float>(b));
}

// Elements [first, first + n) of what the ranks send, added in the order of the ring that ends at rank `last`, to all
// of `to`. In place they take the places of those that have just been read.
template <class T>
void add_along_ring(const Meeting& at, size_t first, size_t n, size_t last, const std::vector<T*>& to) {
    const size_t n_ranks = at.parts.size();
    const auto from = [&](size_t k) { return static_cast<const T*>(at.parts[(last + k) % n_ranks].send) + first; };
    constexpr size_t kBlock = 1024;
    for (size_t begin = 0; begin < n; begin += kBlock) {
        const size_t length = std::min(n - begin, kBlock);
        T sums[kBlock];
        std::copy_n(from(1) + begin, length, sums);
        for (size_t k = 2; k <= n_ranks; ++k) {
            const T* const x = from(k) + begin;
            for (size_t i = 0; i < length; ++i) sums[i] = reduced(sums[i], x[i], at.call.op);
        }
        for (T* const each : to) std::copy_n(sums, length, each + begin);
    }
}

template <class T>
void reduce(const Meeting& at) {
    const size_t n_ranks = at.parts.size(), count = at.call.count;
    const auto out = [&](size_t rank, size_t first) { return static_cast<T*>(at.parts[rank].recv) + first; };
    if (at.call.kind == Kind::reduce) {
        const auto root = static_cast<size_t>(at.call.root);
        return add_along_ring<T>(at, 0, count, root, {out(root, 0)});
    }
    for (size_t r = 0; r < n_ranks; ++r) {
        if (at.call.kind == Kind::reduce_scatter) {
            add_along_ring<T>(at, r * count, count, r, {out(r, 0)});
            continue;
        }
        const size_t first = r * count / n_ranks;
        std::vector<T*> everywhere;
        for (size_t rank = 0; rank < n_ranks; ++rank) everywhere.push_back(out(rank, first));
        add_along_ring<T>(at, first, (r + 1) * count / n_ranks - first, r, everywhere);
    }
}

void copy(void* to, const void* from, size_t bytes) {
    if (to != from && bytes > 0) std::memcpy(to, from, bytes);
}

// A split: the ranks of each color get a communicator.
void split(Meeting& at) {
    std::map<int, std::vector<Part*>> groups;
    for (Part& part : at.parts)
        if (part.color != NCCL_SPLIT_NOCOLOR) groups[part.color].push_back(&part);
    for (auto& [color, group] : groups) {
        std::ranges::stable_sort(group, {}, &Part::key);
        const auto world = std::make_shared<World>(static_cast<int>(group.size()));
        for (int rank = 0; Part * part : group)
            part->made = std::make_shared<Member>(world, rank++, part->member->device);
    }
}

// All have come.
void complete(Meeting& at) {
    const size_t bytes = bytes_of(at.call);
    switch (at.call.kind) {
        case Kind::all_reduce:
        case Kind::reduce_scatter:
        case Kind::reduce: return with_type(at.call.type, [&](auto zero) { reduce<decltype(zero)>(at); });
        case Kind::all_gather:
            for (const Part& to : at.parts)
                for (size_t j = 0; j < at.parts.size(); ++j)
                    copy(static_cast<char*>(to.recv) + j * bytes, at.parts[j].send, bytes);
            return;
        case Kind::broadcast:
            for (const Part& to : at.parts) copy(to.recv, at.parts[static_cast<size_t>(at.call.root)].send, bytes);
            return;
        case Kind::send:
        case Kind::recv: return copy(at.parts[1].recv, at.parts[0].send, bytes);
        case Kind::split: return split(at);
        default: return;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Meetings

std::string name_of(const Call& call) {
    std::string text = std::string(kNames[static_cast<int>(call.kind)]) + " of " + std::to_string(call.count) + " " +
                       name_of(call.type);
    if (call.kind <= Kind::reduce) text += call.op == ncclMax ? ", ncclMax" : ", ncclSum";
    if (call.kind == Kind::reduce || call.kind == Kind::broadcast) text += ", root " + std::to_string(call.root);
    if (call.kind == Kind::send) text += " to rank " + std::to_string(call.root);
    if (call.kind == Kind::recv) text += " from rank " + std::to_string(call.root);
    return text;
}
std::string describe(const Call& call) { return name_of(call) + at_place(call.place); }

bool agree(const Call& a, const Call& b, bool is_message) {
    if (is_message) return bytes_of(a) == bytes_of(b);
    return a.kind == b.kind && a.count == b.count && a.type == b.type && a.op == b.op && a.root == b.root;
}

// The host's side of a meeting of `size` ranks, in which this one has place `place`.
std::shared_ptr<Meeting> join(const Key& key, size_t size, size_t place, const Call& call, Part part) {
    const Member& member = *part.member;
    World& world = *member.world;
    const std::lock_guard lock(world.mutex);
    std::shared_ptr<Meeting>& at = world.meetings[key];
    if (!at) at = std::make_shared<Meeting>(call, size), at->first = member.rank;
    const bool is_message = std::get<Series>(key) == Series::messages;
    if (!agree(at->call, call, is_message))
        report("NCCL: ranks of a communicator call different things as number " + std::to_string(std::get<3>(key)) +
               (is_message ? " of the messages between the two:" : " of its collectives:") + "\n  rank " +
               std::to_string(at->first) + ": " + describe(at->call) + "\n  rank " + std::to_string(member.rank) +
               ": " + describe(call));
    at->parts[place] = std::move(part);
    return at;
}

// The stream's side. A send whose stream does not wait leaves a copy, if its receiver is not there yet.
void arrive(const Key& key, Meeting& at, size_t place, World& world, bool leaves_copy) {
    const std::lock_guard lock(world.mutex);
    Part& mine = at.parts[place];
    if (!mine.member || mine.member->aborted) return;
    mine.has_come = true;
    if (std::ranges::all_of(at.parts, &Part::has_come)) {
        complete(at);
        at.over = true;
        world.meetings.erase(key);
        world.changed.notify_all();
    } else if (leaves_copy) {
        const size_t bytes = bytes_of(at.call);
        mine.copy = std::make_unique_for_overwrite<char[]>(bytes);
        copy(mine.copy.get(), mine.send, bytes);
        mine.send = mine.copy.get();
    }
}

// False: aborted.
bool wait_on_host(const Meeting& at, const Member& member) {
    const auto ready = [&] { return at.over || member.aborted; };
    if (cuda_cpu::strict) {
        cuda_cpu::wait_until(ready);
    } else {
        std::unique_lock lock(member.world->mutex);
        member.world->changed.wait(lock, ready);
    }
    return at.over;
}

ncclResult_t refuse_aborted() { return refuse(ncclInternalError, "the communicator was aborted during the call"); }

// All hosts of a communicator meet.
std::shared_ptr<Meeting> meet(const Key& key, Kind kind, Part part) {
    const std::shared_ptr<Member> member = part.member;
    const size_t place = static_cast<size_t>(member->rank);
    const auto at = join(key, static_cast<size_t>(member->world->size), place, {kind}, std::move(part));
    arrive(key, *at, place, *member->world, false);
    return wait_on_host(*at, *member) ? at : nullptr;
}

// ---------------------------------------------------------------------------------------------------------------------
// Calls, and groups of them

// A call between ncclGroupStart and ncclGroupEnd.
struct Asked {
    Call call;
    std::shared_ptr<Member> member;
    cudaStream_t stream;
    Access reads, writes;
    Key key;
    size_t n_ranks, place;
    std::shared_ptr<Meeting> meeting = nullptr;
};
thread_local int group_depth = 0;
thread_local std::vector<Asked> group;

bool overlap(const Access& a, const Access& b) {
    const auto* const first = static_cast<const char*>(a.data);
    const auto* const second = static_cast<const char*>(b.data);
    return a.bytes > 0 && b.bytes > 0 && first < second + b.bytes && second < first + a.bytes;
}

void check_memory(const Call& call, const Member& member, const Access& access) {
    if (access.bytes == 0) return;
    const auto begin = reinterpret_cast<uintptr_t>(access.data);
    const cuda_cpu::Extent memory = cuda_cpu::allocation_around(begin);
    const std::string who = "NCCL: rank " + std::to_string(member.rank) + " of a communicator, whose device is " +
                            std::to_string(member.device) + ", calls " + describe(call) + " with ";
    if (memory.end == 0) report(who + "a buffer that is not device memory");
    if (memory.end < begin + access.bytes)
        report(who + "a buffer that ends " + std::to_string(begin + access.bytes - memory.end) +
               " bytes after its allocation");
    if (!memory.on_host && memory.device != member.device)
        report(who + "memory of device " + std::to_string(memory.device));
}

// Connects the hosts of those that have not talked to each other before: all connections of a group are begun, and then
// waited for. False: aborted.
bool connect(const std::vector<Asked>& calls) {
    std::vector<std::pair<const Member*, std::shared_ptr<Meeting>>> begun;
    for (const Asked& each : calls) {
        Member& member = *each.member;
        const auto [series, from, to, number] = each.key;
        const bool is_message = series == Series::messages;
        if (!member.connected.emplace(from, to).second) continue;
        const Key key{is_message ? Series::connections : Series::ring, from, to, 0};
        const auto at = join(key, each.n_ranks, each.place, {Kind::connect}, {.member = each.member});
        arrive(key, *at, each.place, *member.world, false);
        begun.emplace_back(&member, at);
    }
    for (const auto& [member, at] : begun)
        if (!wait_on_host(*at, *member)) return false;
    return true;
}

// The calls of one communicator, on one stream.
ncclResult_t put_on_stream(const std::vector<Asked>& calls) {
    const std::shared_ptr<Member> member = calls.front().member;
    const cudaStream_t stream = calls.front().stream;
    const bool at_once = cuda_cpu::runs_at_once(stream);
    std::vector<std::shared_ptr<Meeting>> awaited;
    const Call& first = calls.front().call;
    cuda_cpu::Footprint footprint{(calls.size() == 1 ? "" : "a group that begins with ") + name_of(first), first.place};
    for (const Asked& each : calls) {
        if (!at_once || each.call.kind != Kind::send) awaited.push_back(each.meeting);
        footprint.accesses.push_back(each.reads), footprint.accesses.push_back(each.writes);
    }
    const auto begin = [=] {
        for (const Asked& each : calls)
            arrive(each.key, *each.meeting, each.place, *member->world, at_once && each.call.kind == Kind::send);
    };
    if (at_once) {
        begin();
        for (const auto& at : awaited)
            if (!wait_on_host(*at, *member)) return refuse_aborted();
        return ncclSuccess;
    }
    const auto are_over = [=] {
        return member->aborted || std::ranges::all_of(awaited, [](const auto& at) { return at->over.load(); });
    };
    ++member->under_way;
    cudaError_t error = cuda_cpu::enqueue(stream, begin, footprint);
    if (error == cudaSuccess)
        error = cuda_cpu::enqueue_when(stream, are_over, [member] { --member->under_way; }, {footprint.name});
    if (error == cudaSuccess) return ncclSuccess;
    --member->under_way;  // it is not on the stream
    return refuse(ncclUnhandledCudaError, cudaGetErrorString(error));
}

ncclResult_t launch(std::vector<Asked> calls) {
    for (const Asked& a : calls)
        for (const Asked& b : calls) {
            if (&a != &b && (overlap(a.writes, b.reads) || overlap(a.writes, b.writes)))
                report("NCCL: two calls of a group touch the same bytes: " + describe(a.call) +
                       ", which writes them, and " + describe(b.call));
            if (a.member == b.member && a.stream != b.stream)
                return refuse(ncclInvalidUsage,
                              "a group with calls of one communicator on two streams is not supported");
        }
    if (!connect(calls)) return refuse_aborted();
    std::vector<std::vector<Asked>> of_each;
    for (Asked& each : calls) {
        // Of a message its sender has place 0, and its receiver place 1.
        Part part{.member = each.member, .send = each.reads.data, .recv = const_cast<void*>(each.writes.data)};
        each.meeting = join(each.key, each.n_ranks, each.place, each.call, std::move(part));
        const auto same = [&](const auto& its) { return its.front().member == each.member; };
        const auto at = std::ranges::find_if(of_each, same);
        if (at == of_each.end()) of_each.push_back({each});
        else at->push_back(each);
    }
    for (const auto& its : of_each)
        if (const ncclResult_t result = put_on_stream(its)) return result;
    return ncclSuccess;
}

// pieces_sent, pieces_received: how many times call.count its buffers have.
ncclResult_t ask(const Call& call, const void* send, void* recv, size_t pieces_sent, size_t pieces_received,
                 ncclComm_t comm, cudaStream_t stream) {
    const std::shared_ptr<Member> member = member_of(comm, call.place);
    const int size = member->world->size, rank = member->rank;
    if (!name_of(call.type)) return refuse(ncclInvalidArgument, "a type that is not supported");
    if (call.op != ncclSum && call.op != ncclMax) return refuse(ncclInvalidArgument, "an op that is not supported");
    const bool is_message = call.kind == Kind::send || call.kind == Kind::recv;
    const bool has_root = is_message || call.kind == Kind::reduce || call.kind == Kind::broadcast;
    if (has_root && (call.root < 0 || call.root >= size))
        return refuse(ncclInvalidArgument, describe(call) + " in a communicator of " + std::to_string(size) + " ranks");

    if (is_message && call.root == rank) return refuse(ncclInvalidUsage, "messages to oneself are not supported");

    const size_t bytes = bytes_of(call);
    Asked asked{call, member, stream, {send, pieces_sent * bytes, false}, {recv, pieces_received * bytes, true},
                {},   0,      0};
    int stream_device;
    {
        const std::lock_guard lock(cuda_cpu::streams_mutex);
        stream_device = cuda_cpu::resolve(stream).device;
    }
    if (cuda_cpu::current_device() != member->device || stream_device != member->device)
        report("NCCL: rank " + std::to_string(rank) + " calls " + describe(call) +
               " of a communicator whose device is " + std::to_string(member->device) + " on a stream of device " +
               std::to_string(stream_device) + "; the current device is " + std::to_string(cuda_cpu::current_device()));
    check_memory(call, *member, asked.reads), check_memory(call, *member, asked.writes);
    const auto piece = [&](const void* whole) { return static_cast<const char*>(whole) + size_t(rank) * bytes; };
    const bool in_place = call.kind == Kind::all_gather       ? send == piece(recv)
                          : call.kind == Kind::reduce_scatter ? recv == piece(send)
                                                              : send == recv;
    if (!in_place && overlap(asked.reads, asked.writes))
        report("NCCL: rank " + std::to_string(rank) + " calls " + describe(call) +
               " with two buffers that overlap, and are not as they are in place");

    if (is_message) {
        const bool sends = call.kind == Kind::send;
        const int from = sends ? rank : call.root, to = sends ? call.root : rank;
        asked.key = {Series::messages, from, to, (sends ? member->n_sent[to] : member->n_received[from])++};
        asked.n_ranks = 2, asked.place = sends ? 0 : 1;
    } else {
        asked.key = {Series::collectives, -1, -1, member->n_collectives++};
        asked.n_ranks = size_t(size), asked.place = size_t(rank);
    }
    if (group_depth == 0) return launch({asked});
    group.push_back(asked);
    return ncclSuccess;
}

// A communicator whose ranks have met.
ncclResult_t give(ncclComm_t* comm, std::shared_ptr<Member> member) {
    *comm = member ? handle_of(std::move(member)) : nullptr;
    return ncclSuccess;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// The API

const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
        case ncclSuccess: return "no error";
        case ncclUnhandledCudaError: return "unhandled cuda error";
        case ncclSystemError: return "unhandled system error";
        case ncclInternalError: return "internal error";
        case ncclInvalidArgument: return "invalid argument";
        case ncclInvalidUsage: return "invalid usage";
        case ncclRemoteError: return "remote process exited or there was a network error";
        case ncclInProgress: return "NCCL operation in progress";
    }
    return "unknown result code";
}
const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    if (!id) return refuse(ncclInvalidArgument, "no place for the id");
    const std::lock_guard lock(mutex);
    *id = {};
    std::snprintf(id->internal, sizeof id->internal, "communicator %llu", static_cast<unsigned long long>(++n_ids));
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int n_ranks, ncclUniqueId id, int rank) {
    if (!comm || n_ranks < 1 || rank < 0 || rank >= n_ranks)
        return refuse(ncclInvalidArgument, "rank " + std::to_string(rank) + " of " + std::to_string(n_ranks));
    if (group_depth > 0) return refuse(ncclInvalidUsage, "ncclCommInitRank in a group is not supported");
    const std::string name(id.internal, sizeof id.internal);
    std::shared_ptr<World> world;
    {
        const std::lock_guard lock(mutex);
        world = starting[name];
        if (!world) world = starting[name] = std::make_shared<World>(n_ranks);
    }
    if (world->size != n_ranks)
        report("NCCL: ranks make a communicator of " + std::to_string(world->size) + " and of " +
               std::to_string(n_ranks) + " ranks");
    const auto member = std::make_shared<Member>(world, rank, cuda_cpu::current_device());
    const auto at = meet({Series::splits, 0, 0, -1}, Kind::init, {.member = member});
    {
        const std::lock_guard lock(mutex);
        starting.erase(name);
    }
    for (const Part& other : at->parts)
        if (other.member != member && other.member->device == member->device)
            return refuse(ncclInvalidUsage, "ranks " + std::to_string(rank) + " and " +
                                                std::to_string(other.member->rank) + " are both on device " +
                                                std::to_string(member->device));
    return give(comm, member);
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* part, ncclConfig_t*, Place place) {
    const std::shared_ptr<Member> member = member_of(comm, place);
    if (!part || color < NCCL_SPLIT_NOCOLOR)
        return refuse(ncclInvalidArgument, "color " + std::to_string(color) + " is negative");
    if (group_depth > 0) return refuse(ncclInvalidUsage, "ncclCommSplit in a group is not supported");
    if (member->under_way > 0)
        report("NCCL: rank " + std::to_string(member->rank) + " calls ncclCommSplit" + at_place(place) +
               " while its calls of the communicator are under way");
    const auto at =
        meet({Series::splits, 0, 0, member->n_splits++}, Kind::split, {.member = member, .color = color, .key = key});
    return at ? give(part, at->parts[size_t(member->rank)].made) : refuse_aborted();
}

ncclResult_t ncclCommDestroy(ncclComm_t comm, Place place) {
    const std::shared_ptr<Member> member = member_of(comm, place);
    const auto at = meet({Series::end, 0, 0, 0}, Kind::destroy, {.member = member});
    const std::lock_guard lock(mutex);
    communicators.erase(comm);
    return at ? ncclSuccess : refuse_aborted();
}

ncclResult_t ncclCommAbort(ncclComm_t comm, Place place) {
    const std::shared_ptr<Member> member = member_of(comm, place);
    {
        // What it has brought to meetings is taken back: its memory may be gone soon.
        World& world = *member->world;
        const std::lock_guard lock(world.mutex);
        member->aborted = true;
        for (auto& [key, at] : world.meetings)
            for (Part& part : at->parts)
                if (part.member == member) part = {};
        world.changed.notify_all();
    }
    const std::lock_guard lock(mutex);
    communicators.erase(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error, Place place) {
    member_of(comm, place);
    if (!error) return refuse(ncclInvalidArgument, "no place for the error");
    *error = ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclGroupStart() { return ++group_depth, ncclSuccess; }
ncclResult_t ncclGroupEnd() {
    if (group_depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    return --group_depth > 0 ? ncclSuccess : launch(std::exchange(group, {}));
}

ncclResult_t ncclSend(const void* sendbuff, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream, Place place) {
    return ask({Kind::send, place, count, type, ncclSum, peer}, sendbuff, nullptr, 1, 0, comm, stream);
}
ncclResult_t ncclRecv(void* recvbuff, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream,
                      Place place) {
    return ask({Kind::recv, place, count, type, ncclSum, peer}, nullptr, recvbuff, 0, 1, comm, stream);
}
ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream, Place place) {
    return ask({Kind::all_reduce, place, count, type, op}, sendbuff, recvbuff, 1, 1, comm, stream);
}
ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream, Place place) {
    const auto n = size_t(member_of(comm, place)->world->size);
    return ask({Kind::reduce_scatter, place, recvcount, type, op}, sendbuff, recvbuff, n, 1, comm, stream);
}
ncclResult_t ncclReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t type, ncclRedOp_t op,
                        int root, ncclComm_t comm, cudaStream_t stream, Place place) {
    const bool is_root = member_of(comm, place)->rank == root;
    return ask({Kind::reduce, place, count, type, op, root}, sendbuff, recvbuff, 1, is_root ? 1 : 0, comm, stream);
}
ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream, Place place) {
    const auto n = size_t(member_of(comm, place)->world->size);
    return ask({Kind::all_gather, place, sendcount, type}, sendbuff, recvbuff, 1, n, comm, stream);
}
ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream, Place place) {
    const bool is_root = member_of(comm, place)->rank == root;
    return ask({Kind::broadcast, place, count, type, ncclSum, root}, sendbuff, recvbuff, is_root ? 1 : 0, 1, comm,
               stream);
}
