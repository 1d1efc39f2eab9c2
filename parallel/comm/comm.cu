// comm.cu: communicators: checks, the order of calls, and the collectives that are not worth a file of their own.
#include "core/names.h"
#include "core/run_on_host.h"
#include "parallel/comm/transport.h"

#include <algorithm>
#include <set>

// ---------------------------------------------------------------------------------------------------------------------
// Parts of flat tensors

Tensor part_of(const Tensor& tensor, int64_t first, int64_t n) {
    if (!tensor.data) return make_tensor(nullptr, tensor.dtype, {n});  // memory is being counted
    return make_tensor(static_cast<char*>(tensor.data) + static_cast<size_t>(first) * dtype_bytes(tensor.dtype),
                       tensor.dtype, {n});
}

Range piece_of(int64_t n, int n_pieces, int j) {
    const int64_t length = round_up(ceil_div(n, n_pieces), 32), first = std::min(n, j * length);
    return {first, std::min(n - first, length)};
}

// Empty pieces are not messages: both sides know the sizes.
void send_tensor(Comm& comm, const Tensor& tensor, int to, cudaStream_t stream) {
    if (tensor.n() == 0) return;
    comm.state().bytes_sent += static_cast<int64_t>(tensor.bytes());
    comm.transport().send(tensor.data, tensor.bytes(), to, stream);
}
void recv_tensor(Comm& comm, const Tensor& tensor, int from, cudaStream_t stream) {
    if (tensor.n() == 0) return;
    comm.state().bytes_received += static_cast<int64_t>(tensor.bytes());
    comm.transport().recv(tensor.data, tensor.bytes(), from, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// Algorithms

namespace {
struct Algorithm {
    const char* name;
    AllReduce value;
    void (*all_reduce)(Comm& comm, Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream);
};
constexpr Algorithm kAlgorithms[] = {{"library", AllReduce::library, nullptr},
                                     {"ring", AllReduce::ring, ring_all_reduce},
                                     {"tree", AllReduce::tree, tree_all_reduce},
                                     {"halving", AllReduce::halving, halving_all_reduce},
                                     {"two-level", AllReduce::two_level, two_level_all_reduce}};
}  // namespace

std::vector<std::string> all_reduce_names() { return names_of(kAlgorithms); }
AllReduce all_reduce_from_name(const std::string& name) { return find_named(kAlgorithms, "--all-reduce", name).value; }
const char* all_reduce_name(AllReduce algorithm) { return name_of(kAlgorithms, algorithm); }

const std::vector<AllReduce>& all_reduce_algorithms() {
    static const std::vector<AllReduce> values = [] {
        std::vector<AllReduce> all;
        for (const Algorithm& its : kAlgorithms) all.push_back(its.value);
        return all;
    }();
    return values;
}

// ---------------------------------------------------------------------------------------------------------------------
// Life of a communicator

WordPool::~WordPool() { cudaFree(base_); }
void* WordPool::take() {
    if (!base_) cudaCheck(cudaMalloc(&base_, kCommsOfRank * kPlaceBytes));
    size_t place = 0;
    while (taken_.count(place) > 0) ++place;
    check(place < kCommsOfRank, "a rank has more than ", kCommsOfRank, " communicators");
    taken_.insert(place);
    return base_ + place * kPlaceBytes;
}
void WordPool::give_back(void* place) {
    taken_.erase(static_cast<size_t>(static_cast<char*>(place) - base_) / kPlaceBytes);
}

Comm::Comm(std::string its_name, std::shared_ptr<RankState> state, std::shared_ptr<Transport> transport)
    : name(std::move(its_name)), state_(std::move(state)), transport_(std::move(transport)) {
    rank = transport_->rank();
    size = transport_->size();
    algorithm = all_reduce_from_name(state_->options.all_reduce);
    transport_->name = name;
    for (const int member : transport_->members()) nodes_.push_back(state_->node[static_cast<size_t>(member)]);
    last_call_ = make_event();
    words_ = state_->words.take();
}

Comm::~Comm() {
    cudaEventSynchronize(last_call_);  // work in streams still uses the transport
    state_->words.give_back(words_);
    cudaEventDestroy(last_call_);
}

std::unique_ptr<Comm> Comm::split(const std::vector<int>& members, const std::string& its_name,
                                  const std::vector<int>& placed_like) {
    const std::set<int> different(members.begin(), members.end());
    check(different.size() == members.size() && different.count(rank) && *different.begin() >= 0 &&
              *different.rbegin() < size,
          name, ": split into '", its_name, "': members must be different ranks below ", size, ", rank ", rank,
          " among them");
    cudaCheck(cudaEventSynchronize(last_call_));  // NCCL may wait for ever to split while a call is under way
    auto part = std::make_unique<Comm>(its_name, state_, transport_->split(members));
    part->algorithm = algorithm;
    const std::vector<int>& placed = placed_like.empty() ? members : placed_like;
    for (size_t i = 0; i < placed.size(); ++i) part->nodes_[i] = node_of(placed[i]);
    return part;
}

void Comm::set_step(int64_t step) {
    state_->step = step;
    state_->tracing = state_->traced_steps.count(step) > 0;
}
void Comm::end_step() { state_->tracing = false; }

// The time is that at which the stream gets here; the host is ahead of it.
void Comm::trace_computing(const std::string& what, cudaStream_t stream) {
    if (!state_->tracing) return;
    const auto note = [state = state_, what, step = state_->step.load()] {
        TraceEvent& last = state->computing;
        const double now = seconds_now() - state->started;
        last.end = now;
        if (!last.what.empty()) state->trace->add(last);
        last = {.kind = TraceEvent::computing, .rank = state->rank, .step = step, .start = now, .what = what};
    };
    run_on_host(stream, note, {}, {});
}
int Comm::node_of(int member) const { return nodes_[static_cast<size_t>(member)]; }

int Comm::sharers_of_device() const { return state_->sharers; }

// ---------------------------------------------------------------------------------------------------------------------
// Memory for pieces on their way: what the largest of the counted calls needs

void Comm::count_memory(const std::function<void()>& calls) {
    counting_ = true;
    calls();
    counting_ = false;
}

void Comm::take_memory(Arena& arena) {
    for (Scratch& slot : scratch_)
        if (slot.n_needed > 0) slot.words = arena.take("pieces on their way", DType::i32, {slot.n_needed});
}

Tensor Comm::scratch(int slot, DType dtype, int64_t n) {
    Scratch& its = scratch_[slot];
    const int64_t n_words = ceil_div(n * static_cast<int64_t>(dtype_bytes(dtype)), int64_t{sizeof(int32_t)});
    if (counting_) its.n_needed = std::max(its.n_needed, n_words);
    else if (n_words > (its.words.exists() ? its.words.n() : 0))
        fail(transport_->describe(transport_->tag), " needs ", n, " elements of ", dtype_name(dtype),
             " on their way, more than were counted: name this call in count_memory");
    return make_tensor(counting_ ? nullptr : its.words.data, dtype, {n});
}

Traffic Comm::traffic() const { return {state_->bytes_sent, state_->bytes_received}; }

// ---------------------------------------------------------------------------------------------------------------------
// Calls

// What all calls have in common. A call on a different stream from the last waits for it. Collectives are numbered: all
// members count alike. Messages are not (number -1): each rank sends and receives its own.
template <class Body>
void Comm::call(const CallTag& tag, size_t bytes, cudaStream_t stream, Body&& body) {
    if (counting_) return body();
    if (state_->job->failed()) throw Stopped(state_->job->reason());
    if (stream != last_stream_) cudaCheck(cudaStreamWaitEvent(stream, last_call_));
    last_stream_ = stream;
    transport_->tag = tag;
    transport_->begin(stream);
    body();
    transport_->end(stream, bytes);
    cudaCheck(cudaEventRecord(last_call_, stream));
}
template <class Body>
void Comm::collective(const char* what, size_t bytes, cudaStream_t stream, Body&& body) {
    call({what, counting_ ? 0 : n_calls_++, state_->step, state_->tracing}, bytes, stream, body);
}

namespace {

void check_pair(const char* what, const Tensor& out, const Tensor& inp, int64_t out_pieces, int64_t inp_pieces) {
    check(
        inp.dtype == out.dtype && (dtype_bytes(inp.dtype) == 4 || inp.dtype == DType::bf16 || inp.dtype == DType::f16),
        what, ": out is ", out, ", inp is ", inp, "; expected two of one dtype: f32, bf16, f16 or i32");
    check(out.n() * inp_pieces == inp.n() * out_pieces, what, ": out is ", out, ", inp is ", inp,
          "; expected out : inp = ", out_pieces, " : ", inp_pieces, " elements");
}

Group all_ranks(const Comm& comm) {
    Group group{{}, comm.rank, comm.size};
    for (int i = 0; i < comm.size; ++i) group.members.push_back(i);
    return group;
}

// Of this many bytes this rank's part, for the count of traffic: the parts of all ranks add up to all bytes.
size_t share_of(const Comm& comm, size_t bytes) {
    const size_t n = static_cast<size_t>(comm.size), r = static_cast<size_t>(comm.rank);
    return bytes * (r + 1) / n - bytes * r / n;
}

}  // namespace

void Comm::all_reduce(Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream) {
    check_pair("all_reduce", out, inp, 1, 1);
    if (size == 1) return copy_own(out, inp, stream);
    collective("all_reduce", out.bytes(), stream, [&] {
        if (out.n() == 0) return;
        if (const auto ours = find_value(kAlgorithms, algorithm).all_reduce) return ours(*this, out, inp, op, stream);
        if (!transport_->has_native()) return rank_order_all_reduce(*this, out, inp, op, stream);
        note_native_traffic(2 * share_of(*this, out.bytes()));
        native_reduce(out, inp, op, stream, [&](const Tensor& to, const Tensor& from) {
            transport_->native()->all_reduce(to, from, op, stream);
        });
    });
}

bool Comm::adds_in_rank_order() const { return algorithm == AllReduce::library && !transport_->has_native(); }

void rank_order_all_reduce(Comm& comm, Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream) {
    const Range mine = piece_of(inp.n(), comm.size, comm.rank);
    const Group group = all_ranks(comm);
    reduce_to_owners(comm, group, part_of(out, mine.first, mine.n), inp, op, 0, stream);
    gather_from_owners(comm, group, out, stream);
}

// Equal pieces: the library's own collective, where there is one.
void Comm::reduce_scatter(Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream) {
    check_pair("reduce_scatter", out, inp, 1, size);
    if (!transport_->has_native() || size == 1) return reduce_scatter(out, inp, equal_bounds(out.n()), op, stream);
    collective("reduce_scatter", inp.bytes(), stream, [&] {
        note_native_traffic(out.bytes());
        native_reduce(out, inp, op, stream, [&](const Tensor& to, const Tensor& from) {
            transport_->native()->reduce_scatter(to, from, op, stream);
        });
    });
}
void Comm::all_gather(Tensor out, Tensor inp, cudaStream_t stream) {
    check_pair("all_gather", out, inp, size, 1);
    if (!transport_->has_native() || size == 1) return all_gather(out, inp, equal_bounds(inp.n()), stream);
    collective("all_gather", out.bytes(), stream, [&] {
        if (counting_) return;
        note_native_traffic(inp.bytes());
        if (inp.n() > 0) transport_->native()->all_gather(out, inp, stream);
    });
}

std::vector<int64_t> Comm::equal_bounds(int64_t n) const {
    std::vector<int64_t> bounds;
    for (int j = 0; j <= size; ++j) bounds.push_back(j * n);
    return bounds;
}

// NCCL rounds a sum of 16-bit numbers at each hop; ours are float32 and rounded once. So 16-bit numbers are widened
// first, in place: `to` lies where the library's in-place rule wants it. In a reduce only root has an out.
template <class Call>
void Comm::native_reduce(Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream, Call&& call) {
    const bool widens = op == ReduceOp::sum && dtype_bytes(inp.dtype) == 2;
    Tensor wide;
    if (widens) wide = scratch(1, DType::f32, inp.n());
    if (counting_ || inp.n() == 0) return;
    if (!widens) return call(out, inp);
    convert(wide, inp, stream);
    const Tensor to = out ? part_of(wide, out.n() == inp.n() ? 0 : rank * out.n(), out.n()) : wide;
    call(to, wide);
    if (out) convert(out, to, stream);
}

// With one rank every collective's result is what it was given.
void Comm::copy_own(Tensor out, Tensor inp, cudaStream_t stream) const {
    if (!counting_) copy_tensor(out, inp, stream);
}

// What a ring sends for a reduce_scatter or all_gather of pieces of this size; a broadcast or reduce is one of them, on
// average over the ranks. Sums of 16-bit numbers are counted as 16 bits, half of what NCCL then sends.
void Comm::note_native_traffic(size_t piece_bytes) {
    if (counting_) return;
    const int64_t bytes = static_cast<int64_t>(piece_bytes) * (size - 1);
    state_->bytes_sent += bytes;
    state_->bytes_received += bytes;
}

namespace {
void check_bounds(const char* what, const Tensor& piece, const Tensor& whole, const std::vector<int64_t>& bounds,
                  int rank, int size) {
    check(bounds.size() == static_cast<size_t>(size) + 1 && bounds[0] == 0 &&
              std::is_sorted(bounds.begin(), bounds.end()) && bounds.back() == whole.n(),
          what, ": ", bounds.size(), " boundaries up to ", bounds.empty() ? 0 : bounds.back(), " of ", whole, " for ",
          size, " ranks: expected one more than ranks, from 0 to all elements, in order");
    const size_t r = static_cast<size_t>(rank);
    check(piece.dtype == whole.dtype && piece.n() == bounds[r + 1] - bounds[r], what, ": rank ", rank, "'s piece is ",
          piece, "; expected ", bounds[r + 1] - bounds[r], " elements of ", dtype_name(whole.dtype));
}
}  // namespace

// Each rank sends every other rank the piece that the other one owns, and each adds what it got in rank order: an
// element's sum is that of rank_order_all_reduce, whatever the boundaries.
void Comm::reduce_scatter(Tensor out, Tensor inp, const std::vector<int64_t>& bounds, ReduceOp op,
                          cudaStream_t stream) {
    check_bounds("reduce_scatter", out, inp, bounds, rank, size);
    if (size == 1) return copy_own(out, inp, stream);
    collective("reduce_scatter", inp.bytes(), stream, [&] {
        const auto piece = [&](int j) {
            const size_t k = static_cast<size_t>(j);
            return part_of(inp, bounds[k], bounds[k + 1] - bounds[k]);
        };
        const int64_t n = out.n();
        Tensor parts;
        if (n > 0) parts = scratch(0, inp.dtype, n * size);
        if (counting_) return;
        transport_->group_start();
        for (int j = 0; j < size; ++j)
            if (j != rank) send_tensor(*this, piece(j), j, stream);
        for (int j = 0; j < size && n > 0; ++j)
            if (j != rank) recv_tensor(*this, part_of(parts, j * n, n), j, stream);
        transport_->group_end();
        if (n == 0) return;
        copy_tensor(part_of(parts, rank * n, n), piece(rank), stream);
        reduce_rows(out, parts, size, op, stream);
    });
}

void Comm::all_gather(Tensor out, Tensor inp, const std::vector<int64_t>& bounds, cudaStream_t stream) {
    check_bounds("all_gather", inp, out, bounds, rank, size);
    if (size == 1) return copy_own(out, inp, stream);
    collective("all_gather", out.bytes(), stream, [&] {
        const auto piece = [&](int j) {
            const size_t k = static_cast<size_t>(j);
            return part_of(out, bounds[k], bounds[k + 1] - bounds[k]);
        };
        if (counting_) return;
        copy_tensor(piece(rank), inp, stream);
        transport_->group_start();
        for (int j = 0; j < size; ++j)
            if (j != rank) send_tensor(*this, inp, j, stream);
        for (int j = 0; j < size; ++j)
            if (j != rank) recv_tensor(*this, piece(j), j, stream);
        transport_->group_end();
    });
}

void Comm::all_to_all(Tensor out, Tensor inp, cudaStream_t stream) {
    check_pair("all_to_all", out, inp, 1, 1);
    const int64_t n = div_exact(inp.n(), size, "all_to_all: elements per rank");
    if (size == 1) return copy_own(out, inp, stream);
    collective("all_to_all", inp.bytes(), stream, [&] {
        if (n == 0) return;
        Tensor copy;  // in place, what arrives must not overwrite what has not left
        if (out.data == inp.data) copy = scratch(0, inp.dtype, inp.n());
        if (counting_) return;
        if (copy) {
            copy_tensor(copy, inp, stream);
            inp = copy;
        }
        copy_tensor(part_of(out, rank * n, n), part_of(inp, rank * n, n), stream);
        transport_->group_start();
        for (int j = 0; j < size; ++j)
            if (j != rank) send_tensor(*this, part_of(inp, j * n, n), j, stream);
        for (int j = 0; j < size; ++j)
            if (j != rank) recv_tensor(*this, part_of(out, j * n, n), j, stream);
        transport_->group_end();
    });
}

void Comm::shift(Tensor out, Tensor inp, cudaStream_t stream) {
    check_pair("shift", out, inp, 1, 1);
    check(counting_ || inp.n() == 0 || out.data != inp.data, "shift: out is inp, which is being sent");
    if (size == 1) return copy_own(out, inp, stream);
    collective("shift", inp.bytes(), stream, [&] {
        if (counting_) return;
        transport_->group_start();
        send_tensor(*this, inp, (rank + 1) % size, stream);
        recv_tensor(*this, out, (rank + size - 1) % size, stream);
        transport_->group_end();
    });
}

void Comm::broadcast(Tensor tensor, int root, cudaStream_t stream) {
    check(root >= 0 && root < size, "broadcast: root ", root, " of ", size, " ranks");
    if (size == 1) return;
    collective("broadcast", tensor.bytes(), stream, [&] {
        if (tensor.n() == 0 || counting_) return;
        NativeCollectives* const native = transport_->native();
        if (!native) return tree_broadcast(*this, tensor, root, stream);
        note_native_traffic(share_of(*this, tensor.bytes()));
        native->broadcast(tensor, root, stream);
    });
}

// Each rank reduces its piece, in rank order, and root collects the pieces. Root receives 2 (n-1)/n N bytes, where N
// would be enough, but no rank adds more than its share.
void Comm::reduce(Tensor out, Tensor inp, ReduceOp op, int root, cudaStream_t stream) {
    check(root >= 0 && root < size, "reduce: root ", root, " of ", size, " ranks");
    check_pair("reduce", rank == root ? out : inp, inp, 1, 1);
    if (size == 1) return copy_own(out, inp, stream);
    collective("reduce", inp.bytes(), stream, [&] {
        const int64_t n = inp.n();
        if (n == 0) return;
        if (transport_->has_native()) {
            note_native_traffic(share_of(*this, inp.bytes()));
            return native_reduce(rank == root ? out : Tensor{}, inp, op, stream,
                                 [&](const Tensor& to, const Tensor& from) {
                                     transport_->native()->reduce(to, from, op, root, stream);
                                 });
        }
        const Range mine = piece_of(n, size, rank);
        const Tensor piece = rank == root ? part_of(out, mine.first, mine.n)
                                          : part_of(scratch(1, inp.dtype, piece_of(n, size, 0).n), 0, mine.n);
        reduce_to_owners(*this, all_ranks(*this), piece, inp, op, 0, stream);
        if (counting_) return;
        if (rank != root) return send_tensor(*this, piece, root, stream);
        for (int j = 0; j < size; ++j) {
            const Range range = piece_of(n, size, j);
            if (j != root) recv_tensor(*this, part_of(out, range.first, range.n), j, stream);
        }
    });
}

void Comm::send(Tensor tensor, int to, cudaStream_t stream) {
    check(to >= 0 && to < size && to != rank, "send: rank ", rank, " to rank ", to, " of ", size);
    call({"send", -1, state_->step, state_->tracing}, tensor.bytes(), stream, [&] {
        if (!counting_) send_tensor(*this, tensor, to, stream);
    });
}
void Comm::recv(Tensor tensor, int from, cudaStream_t stream) {
    check(from >= 0 && from < size && from != rank, "recv: rank ", rank, " from rank ", from, " of ", size);
    call({"recv", -1, state_->step, state_->tracing}, tensor.bytes(), stream, [&] {
        if (!counting_) recv_tensor(*this, tensor, from, stream);
    });
}
bool Comm::is_plan() const { return state_->options.planning; }
bool Comm::recv_waits_on_host(cudaStream_t stream) const { return transport_->recv_waits_on_host(stream); }
void Comm::group_start() { transport_->group_start(); }
// The group's messages are put on the stream here, after the marks of its calls.
void Comm::group_end() {
    transport_->group_end();
    if (last_stream_) cudaCheck(cudaEventRecord(last_call_, last_stream_));
}

void Comm::meet_hosts() {
    if (state_->meet_hosts) state_->meet_hosts();  // a plan's ranks do not exist
}

void Comm::patiently(const std::function<void()>& work) {
    state_->patience = 30;
    work();
    meet_hosts();
    state_->patience = 1;
}

// Dissemination (Hensgen, Finkel & Manber 1988): in round k each rank tells the one 2^k further on that it has come,
// and all whom it has heard of. After log2 n rounds every rank has heard of all ranks.
void Comm::barrier(cudaStream_t stream) {
    if (size == 1) return;
    collective("barrier", 0, stream, [&] {
        if (counting_) return;
        const Tensor tokens = make_tensor(static_cast<int32_t*>(words_) + kHostWords, DType::i32, {2});
        cudaCheck(cudaMemsetAsync(tokens.data, 0, tokens.bytes(), stream));
        for (int distance = 1; distance < size; distance *= 2) {
            transport_->group_start();
            send_tensor(*this, part_of(tokens, 0, 1), (rank + distance) % size, stream);
            recv_tensor(*this, part_of(tokens, 1, 1), (rank + size - distance) % size, stream);
            transport_->group_end();
        }
    });
}
