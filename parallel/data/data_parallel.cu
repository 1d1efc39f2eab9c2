// data_parallel.cu: what all schemes of data parallelism share: the stream of the collectives, its clock,
// and checkpoints.
//
//     computing    forward of 0 | forward of 1 | ...   backward of 2 | backward of 1 | backward of 0 |      update
//                     ^ wait       ^ wait                          |  ^ buffer free?  |               |        ^ wait
//     collectives  [gather 1]     [gather 2]                      [reduce 2]       [reduce 1]      [reduce 0]
//
// What is gathered and reduced at each of these points is the scheme's: naive.cu, ddp.cu, zero.cu.
#include "parallel/data/data.h"

#include "parallel/comm/transport.h"

#include <algorithm>

// ---------------------------------------------------------------------------------------------------------------------
// The stream of the collectives

CommStream::CommStream(Comm& its_comm) : comm(its_comm), stream_(make_stream()), reached_(make_event()) {}
CommStream::~CommStream() {
    cudaStreamSynchronize(stream_);
    cudaEventDestroy(reached_);
    cudaStreamDestroy(stream_);
}

void CommStream::communicate(cudaStream_t computing, const std::function<void()>& call) {
    cudaCheck(cudaEventRecord(reached_, computing));
    cudaCheck(cudaStreamWaitEvent(stream_, reached_));
    is_used_ = true;
    busy_.start(stream_);
    call();
    busy_.stop(stream_);
}
void CommStream::wait(cudaStream_t computing, cudaEvent_t event) {
    waiting_.start(computing);
    cudaCheck(cudaStreamWaitEvent(computing, event));
    waiting_.stop(computing);
}
void CommStream::wait_for_all(cudaStream_t computing) {
    if (!is_used_) return;
    cudaCheck(cudaEventRecord(reached_, stream_));
    wait(computing, reached_);
}

void CommStream::Stopwatch::start(cudaStream_t stream) {
    if (n == laps.size()) {
        laps.emplace_back();
        cudaCheck(cudaEventCreate(&laps[n].first));
        cudaCheck(cudaEventCreate(&laps[n].second));
    }
    cudaCheck(cudaEventRecord(laps[n].first, stream));
}
void CommStream::Stopwatch::stop(cudaStream_t stream) { cudaCheck(cudaEventRecord(laps[n++].second, stream)); }
double CommStream::Stopwatch::seconds() const {
    double sum = 0;
    for (size_t i = 0; i < n; ++i) {
        float ms = 0;
        cudaCheck(cudaEventElapsedTime(&ms, laps[i].first, laps[i].second));
        sum += 1e-3 * ms;
    }
    return sum;
}
CommStream::Stopwatch::~Stopwatch() {
    for (const auto& [begin, end] : laps) cudaEventDestroy(begin), cudaEventDestroy(end);
}
CommTime CommStream::read_clock() {
    cudaCheck(cudaDeviceSynchronize());
    return {busy_.seconds(), waiting_.seconds()};
}

// ---------------------------------------------------------------------------------------------------------------------
// A step

namespace {

std::unique_ptr<Scheme> make_scheme(CommStream& stream, const DataParallelOptions& options) {
    check(options.zero >= 0 && options.zero <= 3, "--zero ", options.zero, ": use 0, 1, 2 or 3");
    check(!options.naive || options.zero == 0, "--dp-mode naive keeps all states with rank 0: leave --zero out");
    check(options.bucket_mib > 0, "--bucket-mib ", options.bucket_mib, ": it must be more than 0");
    const bool compresses = options.compress.kind != Compression::none;
    check(!compresses || (options.zero == 0 && !options.naive),
          "--compress works on the whole sums of --dp-mode ddp without --zero: leave the others out");
    if (options.naive) return make_naive(stream);
    if (options.zero > 0) return make_zero(stream, options.zero);
    if (compresses) {
        auto compressed = make_compressed_ddp(stream, options.compress);  // also for one rank: it checks its options
        if (stream.comm.size > 1) return compressed;
    }
    return make_ddp(stream, options.bucket_mib);
}

}  // namespace

DataParallel::DataParallel(Comm& comm, const DataParallelOptions& options)
    : options_(options), stream_(comm), scheme_(make_scheme(stream_, options)) {
    scheme_->grads_are_final = [this](size_t unit, cudaStream_t stream) {
        if (grads_are_final) grads_are_final(unit, stream);
    };
}

Sharding DataParallel::sharding(int64_t granularity) const {
    return {.rank = stream_.comm.rank,
            .size = stream_.comm.size,
            .zero = options_.zero,
            .naive = options_.naive,
            .granularity = granularity};
}

void DataParallel::take_memory(const FlatParameters& p, int64_t micro_batches, const std::vector<Tensor>& summed,
                               Arena& arena) {
    scheme_->take_memory(p, micro_batches, arena);
    if (comm().size > 1 && p.sharding.shards_states()) staging_ = arena.take("staging", DType::f32, {1 << 18});
    comm().count_memory([&] {
        for (const Tensor& tensor : summed)
            if (tensor.exists()) comm().all_reduce(tensor, nullptr);
    });
    comm().take_memory(arena);
}

void DataParallel::gather(const FlatParameters& p, size_t u, int64_t next, cudaStream_t stream) {
    scheme_->gather(p, u, next, stream);
}
bool DataParallel::begin_backward(const FlatParameters& p, int64_t micro_batch) {
    scheme_->begin_backward(p, micro_batch);
    return micro_batch > 0 && !p.sharding.shards_grads();
}
void DataParallel::begin_grads(const FlatParameters& p, size_t u, cudaStream_t stream) {
    scheme_->begin_grads(p, u, stream);
}
void DataParallel::end_grads(const FlatParameters& p, size_t u, cudaStream_t stream) {
    scheme_->end_grads(p, u, stream);
}

// The trace of computing: forward and backward are named by who runs them (model/visits.cu), what follows is named
// here. While the stream may wait for a collective it computes nothing.
void DataParallel::finish_grads(cudaStream_t stream) {
    stream_.wait_for_all(stream);
    comm().trace_computing("norm", stream);
}
void DataParallel::all_reduce(Tensor tensor, cudaStream_t stream) {
    comm().trace_computing("", stream);
    comm().all_reduce(tensor, stream);
}
void DataParallel::begin_updates(const FlatParameters& p, cudaStream_t stream) {
    comm().trace_computing(updates_by_unit() ? "update of " + p.units[0].name : "update", stream);
}
void DataParallel::all_gather_weights(const FlatParameters& p, size_t u, cudaStream_t stream) {
    const bool last = u + 1 == p.units.size();
    if (updates_by_unit() || last) comm().trace_computing("", stream);
    scheme_->all_gather_weights(p, u, stream);
    if (updates_by_unit() && !last) comm().trace_computing("update of " + p.units[u + 1].name, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// For checkpoints

std::vector<float> DataParallel::read(const FlatParameters& p, const Param& param) {
    Comm& ranks = comm();
    const int64_t n = param.used_n();
    const bool has_masters = p.masters.exists();
    if (has_masters ? !p.sharding.shards_states() : !p.sharding.shards_weights())
        return ranks.rank == 0 ? to_floats((has_masters ? p.masters : p.weights).slice(param.offset, n))
                               : std::vector<float>{};

    const size_t u = p.unit_of(param);
    const Tensor shard = has_masters ? p.master_shard(u) : p.weight_shard(u);
    const std::vector<int64_t>& bounds = p.units[u].bounds;
    const int64_t begin = param.offset - p.units[u].offset, end = begin + n;
    std::vector<float> values;
    // Rank 0 takes its own shard, then receives those of the others, a piece at a time.
    for (int r = 0; r < ranks.size; ++r) {
        const int64_t its_first = bounds[static_cast<size_t>(r)], its_end = bounds[static_cast<size_t>(r) + 1];
        const int64_t first = std::max(begin, its_first), last = std::min(end, its_end);
        for (int64_t low = first; low < last;) {
            const int64_t piece_n = std::min(last - low, ranks.size == 1 ? last - low : staging_.n());
            Tensor piece = make_tensor(staging_.data, shard.dtype, {piece_n});
            if (ranks.rank == r) {
                const Tensor mine = shard.slice(low - its_first, piece_n);
                // A message must lie on the device, and the shard may lie on the host.
                if (r == 0) piece = mine;
                else cudaCheck(cudaMemcpyAsync(piece.data, mine.data, mine.bytes(), cudaMemcpyDefault, stream_));
            }
            if (ranks.rank == r && r != 0) ranks.send(piece, 0, stream_);
            if (ranks.rank == 0 && r != 0) ranks.recv(piece, r, stream_);
            cudaCheck(cudaStreamSynchronize(stream_));
            if (ranks.rank == 0) {
                const std::vector<float> floats = to_floats(piece);
                values.insert(values.end(), floats.begin(), floats.end());
            }
            low += piece_n;
        }
    }
    return values;
}
