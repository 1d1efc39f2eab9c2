// data_parallel.cu: when units are gathered and reduced. The maths of the schemes is in parallel.h; here is who waits for whom.
//
//     computing    forward of 0 | forward of 1 | ...      backward of 2 | backward of 1 | backward of 0 |        update
//                     ^ wait       ^ wait                             |  ^ buffer free?  |               |          ^ wait
//     comm         [gather 1]     [gather 2]                         [reduce 2]       [reduce 1]      [reduce 0]
//
// Communication has a stream of its own. It goes on where the computing stream has come to (a unit's gradients are complete, a
// buffer is no longer read), and the computing stream waits where it needs the result; nobody waits for more than that.
#include "parallel/comm/transport.h"
#include "parallel/data/data.h"

#include <algorithm>

namespace {

cudaEvent_t make_event() {
    cudaEvent_t event = nullptr;
    cudaCheck(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
}

}  // namespace

DataParallel::DataParallel(Comm& comm, const DataParallelOptions& options) : comm_(comm), options_(options) {
    check(options.zero >= 0 && options.zero <= 3, "--zero ", options.zero, ": use 0, 1, 2 or 3");
    check(!options.naive || options.zero == 0, "--dp-mode naive keeps everything with rank 0: leave --zero away");
    check(options.bucket_mib > 0, "--bucket-mib ", options.bucket_mib, ": it must be more than 0");
    check(options.compress.kind == Compression::none || (options.zero == 0 && !options.naive),
          "--compress works on the whole sums of --dp-mode ddp without --zero: leave the others away");
    compressor_ = make_compressor(comm, options.compress);
    cudaCheck(cudaStreamCreateWithFlags(&comm_stream_, cudaStreamNonBlocking));
    reached_ = make_event();
}

DataParallel::~DataParallel() {
    cudaStreamSynchronize(comm_stream_);
    for (const auto& events : {gathered_, reduced_, {reached_}})
        for (cudaEvent_t event : events) cudaEventDestroy(event);
    cudaStreamDestroy(comm_stream_);
}

Sharding DataParallel::sharding(int64_t granularity) const {
    return {.rank = comm_.rank,
            .size = comm_.size,
            .zero = options_.zero,
            .naive = options_.naive,
            .granularity = granularity};
}

void DataParallel::take_memory(const FlatParameters& p, int64_t micro_batches, Arena& arena) {
    micro_batches_ = micro_batches;
    in_buffer_.assign(4, -1);
    while (gathered_.size() < p.units.size()) gathered_.push_back(make_event());
    while (reduced_.size() < in_buffer_.size()) reduced_.push_back(make_event());
    if (p.sharding.shards_grads() && micro_batches > 1) {
        int64_t largest = 0;
        for (size_t u = 0; u < p.units.size(); ++u) largest = std::max(largest, p.shard(u).n);
        sum_rows_ = arena.take("sums of micro-batches", p.grads.dtype, {2 * largest});
    }
    if (compressor_ && p.sharding.size > 1) compressor_->take_memory(p, arena);
    if (comm_.size > 1 && p.sharding.shards_states()) staging_ = arena.take("staging", DType::f32, {1 << 18});
}

template <class Call>
void DataParallel::communicate(cudaStream_t stream, Call&& call) {
    cudaCheck(cudaEventRecord(reached_, stream));
    cudaCheck(cudaStreamWaitEvent(comm_stream_, reached_));
    busy_.start(comm_stream_);
    call();
    busy_.stop(comm_stream_);
}
void DataParallel::wait(cudaStream_t stream, cudaEvent_t event) {
    waiting_.start(stream);
    cudaCheck(cudaStreamWaitEvent(stream, event));
    waiting_.stop(stream);
}

void DataParallel::Stopwatch::start(cudaStream_t stream) {
    if (n == laps.size()) {
        laps.emplace_back();
        cudaCheck(cudaEventCreate(&laps[n].first));
        cudaCheck(cudaEventCreate(&laps[n].second));
    }
    cudaCheck(cudaEventRecord(laps[n].first, stream));
}
void DataParallel::Stopwatch::stop(cudaStream_t stream) { cudaCheck(cudaEventRecord(laps[n++].second, stream)); }
double DataParallel::Stopwatch::seconds() const {
    double sum = 0;
    for (size_t i = 0; i < n; ++i) {
        float ms = 0;
        cudaCheck(cudaEventElapsedTime(&ms, laps[i].first, laps[i].second));
        sum += 1e-3 * ms;
    }
    return sum;
}
DataParallel::Stopwatch::~Stopwatch() {
    for (const auto& [begin, end] : laps) cudaEventDestroy(begin), cudaEventDestroy(end);
}
CommTime DataParallel::read_clock() {
    cudaCheck(cudaDeviceSynchronize());
    return {busy_.seconds(), waiting_.seconds()};
}

// ---------------------------------------------------------------------------------------------------------------------
// Weights

// What the stream has been given so far is all that reads the buffer's last unit: the new one may come after it.
void DataParallel::fetch(const FlatParameters& p, size_t u, cudaStream_t stream) {
    const Unit& unit = p.units[u];
    int64_t& in_buffer = in_buffer_[static_cast<size_t>(unit.buffer)];
    if (in_buffer == static_cast<int64_t>(u)) return;
    in_buffer = static_cast<int64_t>(u);
    const Tensor whole = p.unit_weights(u);
    Tensor mine = p.weight_shard(u);
    communicate(stream, [&] {
        if (p.sharding.offload == Offload::params) {  // from the host to its place
            const Tensor place = whole.slice(p.shard(u).first, p.shard(u).n);
            cudaCheck(cudaMemcpyAsync(place.data, mine.data, mine.bytes(), cudaMemcpyHostToDevice, comm_stream_));
            mine = place;
        }
        comm_.all_gather(whole, mine, unit.bounds, comm_stream_);
    });
    cudaCheck(cudaEventRecord(gathered_[u], comm_stream_));
}

void DataParallel::gather(const FlatParameters& p, size_t u, int64_t next, cudaStream_t stream) {
    if (!p.sharding.shards_states()) return;
    if (p.sharding.shards_weights()) fetch(p, u, stream);
    wait(stream, gathered_[u]);
    if (p.sharding.shards_weights() && next >= 0 && p.units[static_cast<size_t>(next)].buffer != p.units[u].buffer)
        fetch(p, static_cast<size_t>(next), stream);
}

void DataParallel::all_gather_weights(const FlatParameters& p, size_t u, cudaStream_t stream) {
    if (!p.sharding.shards_states()) return;
    if (p.sharding.shards_weights()) {  // what the buffer holds is out of date
        int64_t& in_buffer = in_buffer_[static_cast<size_t>(p.units[u].buffer)];
        if (in_buffer == static_cast<int64_t>(u)) in_buffer = -1;
        return;
    }
    communicate(stream,
                [&] { comm_.all_gather(p.unit_weights(u), p.weight_shard(u), p.units[u].bounds, comm_stream_); });
    cudaCheck(cudaEventRecord(gathered_[u], comm_stream_));
}

// ---------------------------------------------------------------------------------------------------------------------
// Gradients

void DataParallel::begin_backward(const FlatParameters& p, int64_t micro_batch, cudaStream_t stream) {
    micro_batch_ = micro_batch;
    bucket_end_ = p.n;
    not_final_ = p.units.size();
    if (micro_batch == 0 && !p.sharding.shards_grads())
        cudaCheck(cudaMemsetAsync(p.grads.data, 0, p.grads.bytes(), stream));
}

void DataParallel::begin_grads(const FlatParameters& p, size_t u, cudaStream_t stream) {
    if (!p.sharding.shards_grads()) return;
    wait(stream, reduced_[static_cast<size_t>(p.units[u].buffer)]);  // the last unit has left the buffer
    const Tensor buffer = p.unit_grads(u);
    cudaCheck(cudaMemsetAsync(buffer.data, 0, buffer.bytes(), stream));
}

void DataParallel::end_grads(const FlatParameters& p, size_t u, cudaStream_t stream) {
    const bool last = micro_batch_ + 1 == micro_batches_;
    if (p.sharding.shards_grads() || (last && p.sharding.shards_states())) {
        reduce_unit(p, u, stream);
        if (last) announce(p, p.units[u].offset, comm_stream_);
    } else if (last && compressor_ && comm_.size > 1) {
        communicate(stream, [&] { compressor_->reduce(p, u, comm_stream_); });
        announce(p, p.units[u].offset, comm_stream_);
    } else if (last) {
        reduce_buckets(p, p.units[u].offset, u == 0, stream);
    }
}

// All gradients from element `first` on are final, at the place where the stream is now.
void DataParallel::announce(const FlatParameters& p, int64_t first, cudaStream_t stream) {
    while (not_final_ > 0 && p.units[not_final_ - 1].offset >= first) {
        --not_final_;
        if (grads_are_final) grads_are_final(not_final_, stream);
    }
}

// Buckets from the end of the array to its beginning, which is the order in which the backward fills it.
void DataParallel::reduce_buckets(const FlatParameters& p, int64_t low, bool all, cudaStream_t stream) {
    const int64_t bucket_n = std::max<int64_t>(
        1, static_cast<int64_t>(options_.bucket_mib * 0x1p20) / static_cast<int64_t>(dtype_bytes(p.grads.dtype)));
    if (comm_.size == 1) return announce(p, low, stream);
    while (bucket_end_ - low >= bucket_n || (all && bucket_end_ > low)) {
        const int64_t first = std::max(low, bucket_end_ - bucket_n);
        communicate(stream, [&] { comm_.all_reduce(p.grads.slice(first, bucket_end_ - first), comm_stream_); });
        bucket_end_ = first;
    }
    announce(p, bucket_end_, comm_stream_);
}

// Stage 1 (and naive): in place, in the flat array. Stages 2 and 3: from the buffer to this rank's part; from the second micro-batch
// on by way of two rows, {sum so far, this one}.
void DataParallel::reduce_unit(const FlatParameters& p, size_t u, cudaStream_t stream) {
    const Tensor whole = p.unit_grads(u), mine = p.grad_shard(u);
    communicate(stream, [&] {
        if (!p.sharding.shards_grads() || micro_batch_ == 0)
            return comm_.reduce_scatter(mine, whole, p.units[u].bounds, ReduceOp::sum, comm_stream_);
        const Tensor rows = sum_rows_.slice(0, 2 * mine.n());
        copy_tensor(rows.slice(0, mine.n()), mine, comm_stream_);
        comm_.reduce_scatter(rows.slice(mine.n(), mine.n()), whole, p.units[u].bounds, ReduceOp::sum, comm_stream_);
        reduce_rows(mine, rows, 2, ReduceOp::sum, comm_stream_);
    });
    cudaCheck(cudaEventRecord(reduced_[static_cast<size_t>(p.units[u].buffer)], comm_stream_));
}

void DataParallel::finish_grads(cudaStream_t stream) {
    cudaCheck(cudaEventRecord(reached_, comm_stream_));
    wait(stream, reached_);
}

void DataParallel::all_reduce(Tensor tensor, cudaStream_t stream) { comm_.all_reduce(tensor, stream); }

// ---------------------------------------------------------------------------------------------------------------------
// For checkpoints

std::vector<std::pair<std::string, Tensor>> DataParallel::compression_states() const {
    if (!compressor_ || comm_.size == 1) return {};
    return compressor_->states();
}

std::vector<float> DataParallel::read(const FlatParameters& p, const Param& param) {
    const int64_t n = param.value.n() / param.value.shape[0] * (param.value.shape[0] - param.padded_rows);
    const bool has_masters = p.masters.exists();
    if (has_masters ? !p.sharding.shards_states() : !p.sharding.shards_weights())
        return comm_.rank == 0 ? to_floats((has_masters ? p.masters : p.weights).slice(param.offset, n))
                               : std::vector<float>{};

    const size_t u = p.unit_of(param);
    const Tensor part = has_masters ? p.master_shard(u) : p.weight_shard(u);
    const std::vector<int64_t>& bounds = p.units[u].bounds;
    const int64_t begin = param.offset - p.units[u].offset, end = begin + n;
    std::vector<float> values;
    for (int r = 0; r < comm_.size; ++r) {
        const int64_t first = std::max(begin, bounds[static_cast<size_t>(r)]),
                      last = std::min(end, bounds[static_cast<size_t>(r) + 1]);
        for (int64_t low = first; low < last;) {
            const int64_t piece_n = std::min(last - low, comm_.size == 1 ? last - low : staging_.n());
            Tensor piece =
                make_tensor(staging_.data, part.dtype, {piece_n});  // messages lie on the device, the part perhaps not
            if (comm_.rank == r) {
                const Tensor mine = part.slice(low - bounds[static_cast<size_t>(r)], piece_n);
                if (r == 0) piece = mine;
                else cudaCheck(cudaMemcpyAsync(piece.data, mine.data, mine.bytes(), cudaMemcpyDefault, comm_stream_));
            }
            if (comm_.rank == r && r != 0) comm_.send(piece, 0, comm_stream_);
            if (comm_.rank == 0 && r != 0) comm_.recv(piece, r, comm_stream_);
            cudaCheck(cudaStreamSynchronize(comm_stream_));
            if (comm_.rank == 0) {
                const std::vector<float> floats = to_floats(piece);
                values.insert(values.end(), floats.begin(), floats.end());
            }
            low += piece_n;
        }
    }
    return values;
}
