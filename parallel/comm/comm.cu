// comm.cu: communicators: checks, the order of calls, and the collectives that are not worth a file of their own.
#include "parallel/comm/transport.h"

#include <algorithm>
#include <set>

// ---------------------------------------------------------------------------------------------------------------------
// Parts of flat tensors

Tensor part_of(const Tensor& tensor, int64_t first, int64_t n) {
    return make_tensor(static_cast<char*>(tensor.data) + static_cast<size_t>(first) * dtype_bytes(tensor.dtype),
                       tensor.dtype, {n});
}

Range piece_of(int64_t n, int n_pieces, int j) {
    const int64_t length = round_up(ceil_div(n, n_pieces), 32), first = std::min(n, j * length);
    return {first, std::min(n - first, length)};
}

void copy_tensor(const Tensor& out, const Tensor& inp, cudaStream_t stream) {
    if (out.data != inp.data && inp.n() > 0)
        cudaCheck(cudaMemcpyAsync(out.data, inp.data, inp.bytes(), cudaMemcpyDeviceToDevice, stream));
}

// Empty pieces are no messages: both sides know the sizes.
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
// Names

namespace {
constexpr std::pair<AllReduce, const char*> kAlgorithms[] = {{AllReduce::library, "library"},
                                                             {AllReduce::ring, "ring"},
                                                             {AllReduce::tree, "tree"},
                                                             {AllReduce::halving, "halving"},
                                                             {AllReduce::two_level, "two-level"}};
}
AllReduce all_reduce_from_name(const std::string& name) {
    for (const auto& [algorithm, its_name] : kAlgorithms)
        if (name == its_name) return algorithm;
    fail("--all-reduce ", name, ": use library, ring, tree, halving or two-level");
}
const char* all_reduce_name(AllReduce algorithm) { return kAlgorithms[static_cast<int>(algorithm)].second; }

// ---------------------------------------------------------------------------------------------------------------------
// Life of a communicator

Comm::Comm(std::string its_name, std::shared_ptr<RankState> state, std::shared_ptr<Transport> transport)
    : name(std::move(its_name)), state_(std::move(state)), transport_(std::move(transport)) {
    rank = transport_->rank();
    size = transport_->size();
    algorithm = all_reduce_from_name(state_->options.all_reduce);
    transport_->name = name;
    cudaCheck(cudaEventCreateWithFlags(&last_call_, cudaEventDisableTiming));
}

Comm::~Comm() {
    cudaEventSynchronize(last_call_);  // work in streams still uses the transport and the buffers
    for (Buffer& buffer : scratch_) cudaFree(buffer.data);
    cudaEventDestroy(last_call_);
}

std::unique_ptr<Comm> Comm::split(const std::vector<int>& members, const std::string& its_name) {
    const std::set<int> different(members.begin(), members.end());
    check(different.size() == members.size() && different.count(rank) && *different.begin() >= 0 &&
              *different.rbegin() < size,
          name, ": split into '", its_name, "': members must be different ranks below ", size, ", rank ", rank,
          " among them");
    auto part = std::make_unique<Comm>(its_name, state_, transport_->split(members));
    part->algorithm = algorithm;
    return part;
}

void Comm::set_step(int64_t step) { state_->step = step; }
int Comm::node_of(int member) const {
    return state_->node[static_cast<size_t>(transport_->members()[static_cast<size_t>(member)])];
}

Tensor Comm::scratch(int slot, DType dtype, int64_t n) {
    Buffer& buffer = scratch_[slot];
    const size_t bytes = static_cast<size_t>(n) * dtype_bytes(dtype);
    if (buffer.bytes < bytes) {
        cudaCheck(cudaFree(buffer.data));  // waits for what still uses it
        buffer = {};
        cudaCheck(cudaMalloc(&buffer.data, bytes));
        buffer.bytes = bytes;
    }
    return make_tensor(buffer.data, dtype, {n});
}
Traffic Comm::traffic() const { return {state_->bytes_sent, state_->bytes_received}; }
size_t Comm::workspace_bytes() const { return scratch_[0].bytes + scratch_[1].bytes + scratch_[2].bytes; }

// ---------------------------------------------------------------------------------------------------------------------
// Calls

// What all calls have in common. A call on another stream than the last one waits for it. Collectives are numbered: all members
// count alike. Messages are not (number -1): each rank sends and receives its own.
template <class Body>
void Comm::call(const CallTag& tag, size_t bytes, cudaStream_t stream, Body&& body) {
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
    call({what, n_calls_++, state_->step}, bytes, stream, body);
}

namespace {

void check_pair(const char* what, const Tensor& out, const Tensor& inp, int64_t out_pieces, int64_t inp_pieces) {
    check(
        inp.dtype == out.dtype && (dtype_bytes(inp.dtype) == 4 || inp.dtype == DType::bf16 || inp.dtype == DType::f16),
        what, ": out is ", out, ", inp is ", inp, "; expected two of one dtype: f32, bf16, f16 or i32");
    check(out.n() * inp_pieces == inp.n() * out_pieces, what, ": out is ", out, ", inp is ", inp,
          "; expected out : inp = ", out_pieces, " : ", inp_pieces, " elements");
}

}  // namespace

void Comm::all_reduce(Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream) {
    check_pair("all_reduce", out, inp, 1, 1);
    if (size == 1) return copy_tensor(out, inp, stream);
    collective("all_reduce", out.bytes(), stream, [&] {
        if (out.n() == 0) return;
        switch (algorithm) {
            case AllReduce::ring: return ring_all_reduce(*this, out, inp, op, stream);
            case AllReduce::tree: return tree_all_reduce(*this, out, inp, op, stream);
            case AllReduce::halving: return halving_all_reduce(*this, out, inp, op, stream);
            case AllReduce::two_level: return two_level_all_reduce(*this, out, inp, op, stream);
            case AllReduce::library: break;
        }
        NativeCollectives* native = transport_->native();
        if (native) count_native(2 * out.bytes() / static_cast<size_t>(size));
        if (native) native->all_reduce(out, inp, op, stream);
        else rank_order_all_reduce(*this, out, inp, op, stream);
    });
}

namespace {
Group everybody(const Comm& comm) {
    Group group{{}, comm.rank, comm.size};
    for (int i = 0; i < comm.size; ++i) group.members.push_back(i);
    return group;
}
}  // namespace

void rank_order_all_reduce(Comm& comm, Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream) {
    const Range mine = piece_of(inp.n(), comm.size, comm.rank);
    const Group group = everybody(comm);
    reduce_to_owners(comm, group, part_of(out, mine.first, mine.n), inp, op, 0, stream);
    gather_from_owners(comm, group, out, stream);
}

// Equal pieces: the library's own collective, where there is one.
void Comm::reduce_scatter(Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream) {
    check_pair("reduce_scatter", out, inp, 1, size);
    NativeCollectives* native = transport_->native();
    if (!native || size == 1) return reduce_scatter(out, inp, equal_cuts(out.n()), op, stream);
    collective("reduce_scatter", inp.bytes(), stream, [&] {
        count_native(out.bytes());
        if (out.n() > 0) native->reduce_scatter(out, inp, op, stream);
    });
}
void Comm::all_gather(Tensor out, Tensor inp, cudaStream_t stream) {
    check_pair("all_gather", out, inp, size, 1);
    NativeCollectives* native = transport_->native();
    if (!native || size == 1) return all_gather(out, inp, equal_cuts(inp.n()), stream);
    collective("all_gather", out.bytes(), stream, [&] {
        count_native(inp.bytes());
        if (inp.n() > 0) native->all_gather(out, inp, stream);
    });
}

std::vector<int64_t> Comm::equal_cuts(int64_t n) const {
    std::vector<int64_t> cuts;
    for (int j = 0; j <= size; ++j) cuts.push_back(j * n);
    return cuts;
}
// What a ring sends for a reduce_scatter or all_gather of pieces of this size.
void Comm::count_native(size_t piece_bytes) {
    const int64_t bytes = static_cast<int64_t>(piece_bytes) * (size - 1);
    state_->bytes_sent += bytes;
    state_->bytes_received += bytes;
}

namespace {
void check_cuts(const char* what, const Tensor& piece, const Tensor& whole, const std::vector<int64_t>& cuts, int rank,
                int size) {
    check(cuts.size() == static_cast<size_t>(size) + 1 && cuts[0] == 0 && std::is_sorted(cuts.begin(), cuts.end()) &&
              cuts.back() == whole.n(),
          what, ": ", cuts.size(), " cuts up to ", cuts.empty() ? 0 : cuts.back(), " of ", whole, " for ", size,
          " ranks: expected one more than ranks, from 0 to all elements, in order");
    const size_t r = static_cast<size_t>(rank);
    check(piece.dtype == whole.dtype && piece.n() == cuts[r + 1] - cuts[r], what, ": rank ", rank, "'s piece is ",
          piece, "; expected ", cuts[r + 1] - cuts[r], " elements of ", dtype_name(whole.dtype));
}
}  // namespace

// Everybody sends everybody the piece that is theirs, and each adds what it got in rank order: an element's sum is that of
// rank_order_all_reduce, whatever the cuts.
void Comm::reduce_scatter(Tensor out, Tensor inp, const std::vector<int64_t>& cuts, ReduceOp op, cudaStream_t stream) {
    check_cuts("reduce_scatter", out, inp, cuts, rank, size);
    if (size == 1) return copy_tensor(out, inp, stream);
    collective("reduce_scatter", inp.bytes(), stream, [&] {
        const auto piece = [&](int j) {
            const size_t k = static_cast<size_t>(j);
            return part_of(inp, cuts[k], cuts[k + 1] - cuts[k]);
        };
        const int64_t n = out.n();
        Tensor parts;
        if (n > 0) parts = scratch(0, inp.dtype, n * size);
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

void Comm::all_gather(Tensor out, Tensor inp, const std::vector<int64_t>& cuts, cudaStream_t stream) {
    check_cuts("all_gather", inp, out, cuts, rank, size);
    if (size == 1) return copy_tensor(out, inp, stream);
    collective("all_gather", out.bytes(), stream, [&] {
        const auto piece = [&](int j) {
            const size_t k = static_cast<size_t>(j);
            return part_of(out, cuts[k], cuts[k + 1] - cuts[k]);
        };
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
    if (size == 1) return copy_tensor(out, inp, stream);
    collective("all_to_all", inp.bytes(), stream, [&] {
        if (n == 0) return;
        if (out.data == inp.data) {  // what arrives must not overwrite what has not left
            const Tensor copy = scratch(0, inp.dtype, inp.n());
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

void Comm::broadcast(Tensor tensor, int root, cudaStream_t stream) {
    check(root >= 0 && root < size, "broadcast: root ", root, " of ", size, " ranks");
    if (size == 1) return;
    collective("broadcast", tensor.bytes(), stream, [&] {
        if (tensor.n() == 0) return;
        if (NativeCollectives* native = transport_->native()) native->broadcast(tensor, root, stream);
        else tree_broadcast(*this, tensor, root, stream);
    });
}

// Each rank reduces its piece, in rank order, and root collects the pieces: twice the bytes that root must receive, but no rank
// adds more than its share.
void Comm::reduce(Tensor out, Tensor inp, ReduceOp op, int root, cudaStream_t stream) {
    check(root >= 0 && root < size, "reduce: root ", root, " of ", size, " ranks");
    check_pair("reduce", rank == root ? out : inp, inp, 1, 1);
    if (size == 1) return copy_tensor(out, inp, stream);
    collective("reduce", inp.bytes(), stream, [&] {
        const int64_t n = inp.n();
        if (n == 0) return;
        if (NativeCollectives* native = transport_->native()) return native->reduce(out, inp, op, root, stream);
        const Range mine = piece_of(n, size, rank);
        const Tensor piece = rank == root ? part_of(out, mine.first, mine.n) : scratch(1, inp.dtype, mine.n);
        reduce_to_owners(*this, everybody(*this), piece, inp, op, 0, stream);
        if (rank != root) return send_tensor(*this, piece, root, stream);
        for (int j = 0; j < size; ++j) {
            const Range range = piece_of(n, size, j);
            if (j != root) recv_tensor(*this, part_of(out, range.first, range.n), j, stream);
        }
    });
}

void Comm::send(Tensor tensor, int to, cudaStream_t stream) {
    check(to >= 0 && to < size && to != rank, "send: rank ", rank, " to rank ", to, " of ", size);
    call({"send", -1, state_->step}, tensor.bytes(), stream, [&] { send_tensor(*this, tensor, to, stream); });
}
void Comm::recv(Tensor tensor, int from, cudaStream_t stream) {
    check(from >= 0 && from < size && from != rank, "recv: rank ", rank, " from rank ", from, " of ", size);
    call({"recv", -1, state_->step}, tensor.bytes(), stream, [&] { recv_tensor(*this, tensor, from, stream); });
}
void Comm::group_start() { transport_->group_start(); }
void Comm::group_end() { transport_->group_end(); }

// Dissemination (Hensgen, Finkel & Manber 1988): in round k each rank tells the one 2^k further on that it has come, and all
// whom it has heard of. After log2 n rounds everybody has heard of everybody.
void Comm::barrier(cudaStream_t stream) {
    if (size == 1) return;
    collective("barrier", 0, stream, [&] {
        const Tensor tokens = scratch(0, DType::i32, 2);
        cudaCheck(cudaMemsetAsync(tokens.data, 0, tokens.bytes(), stream));
        for (int distance = 1; distance < size; distance *= 2) {
            transport_->group_start();
            send_tensor(*this, part_of(tokens, 0, 1), (rank + distance) % size, stream);
            recv_tensor(*this, part_of(tokens, 1, 1), (rank + size - distance) % size, stream);
            transport_->group_end();
        }
    });
}
