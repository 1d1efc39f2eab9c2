// zero.cu: ZeRO: no rank keeps what another rank also keeps.          (Rajbhandari et al. 2020, arXiv:1910.02054)
//
// Data parallelism without ZeRO keeps n copies of everything. But an optimizer state is used by the update alone, a sum
// of gradients by the update alone, and a unit's weights only while that unit computes.
// Each stage shards one of them more:
//
//           each rank keeps    before its weights  before its       after its last gradient      after its update
//           as a shard         are read            first gradient
//     ----------------------------------------------------------------------------------------------------------------
//     0     nothing: ddp.cu    -                   -                all-reduce by buckets, once  -
//                                                                   a step
//     1     optimizer states,  wait for the        -                reduce-scatter in place,     all-gather weights
//           masters            all-gather                           once a step
//     2     and gradients      as stage 1          wait for a free  reduce-scatter the buffer    all-gather weights
//                                                  buffer           into the shard, in each
//                                                                   micro-batch
//     3     and weights        all-gather into a   as stage 2       as stage 2                   the buffer is out of
//                              buffer; prefetch                                                  date
//                              the next unit
//
// A buffer holds one whole unit. The blocks use two in turn, so that the next unit is gathered while this one computes,
// and this unit's gradients are reduced while the next one's are computed. Nothing frees a buffer explicitly: it is
// free when the kernels that read it are done, which the streams know by their events.
//
// Bytes that a rank sends in a step, of P gradients of G bytes and P weights of W bytes, in M micro-batches,
// times (n-1)/n:
//
//     stage 1   P (G + W)        for W = G ddp's 2 P G: an all-reduce is a reduce-scatter and an all-gather
//     stage 2   P (M G + W)
//     stage 3   P (M G + 2 M W)  at most: forward and backward each gather what is not in a buffer any more
#include "parallel/comm/transport.h"
#include "parallel/data/data.h"

#include <algorithm>

namespace {

// Optimizer states and masters are sharded. Each rank gets the sum of its shard of the gradients, updates its shard of
// the weights, and gathers the others'.
class Zero1 : public Scheme {
  public:
    using Scheme::Scheme;
    ~Zero1() override {
        for (cudaEvent_t event : gathered_) cudaEventDestroy(event);
    }

    void take_memory(const FlatParameters& p, int64_t micro_batches, Arena&) override {
        micro_batches_ = micro_batches;
        while (gathered_.size() < p.units.size()) gathered_.push_back(make_event());
        comm_.count_memory([&] {
            for (size_t u = 0; u < p.units.size(); ++u) reduce_scatter(p, u, p.grad_shard(u), nullptr);
        });
    }
    void gather(const FlatParameters&, size_t u, int64_t, cudaStream_t stream) override {
        comm_stream_.wait(stream, gathered_[u]);
    }
    // In place: this rank's shard of the flat gradients becomes the sum; the rest of them is not used any more.
    void end_grads(const FlatParameters& p, size_t u, cudaStream_t stream) override {
        if (!in_last_micro_batch()) return;
        comm_stream_.communicate(stream, [&] { reduce_scatter(p, u, p.grad_shard(u), comm_stream_); });
        grads_are_final(u, comm_stream_);
    }
    void all_gather_weights(const FlatParameters& p, size_t u, cudaStream_t stream) override {
        comm_stream_.communicate(
            stream, [&] { comm_.all_gather(p.unit_weights(u), p.weight_shard(u), p.units[u].bounds, comm_stream_); });
        cudaCheck(cudaEventRecord(gathered_[u], comm_stream_));
    }

  protected:
    // shard = this rank's shard of the sum over the ranks of the unit's gradients.
    void reduce_scatter(const FlatParameters& p, size_t u, const Tensor& shard, cudaStream_t stream) {
        comm_.reduce_scatter(shard, p.unit_grads(u), p.units[u].bounds, ReduceOp::sum, stream);
    }
    std::vector<cudaEvent_t> gathered_;  // by unit: its weights are whole
};

// Gradients, too, are sharded: a unit's whole gradients exist in a buffer, from its backward to its reduce-scatter.
// With several micro-batches each is reduced by itself and added to the shard.
class Zero2 : public Zero1 {
  public:
    using Zero1::Zero1;
    ~Zero2() override {
        for (cudaEvent_t event : reduced_) cudaEventDestroy(event);
    }

    void take_memory(const FlatParameters& p, int64_t micro_batches, Arena& arena) override {
        Zero1::take_memory(p, micro_batches, arena);
        while (reduced_.size() < p.grad_buffers.size()) reduced_.push_back(make_event());
        if (micro_batches == 1) return;
        int64_t largest = 0;
        for (size_t u = 0; u < p.units.size(); ++u) largest = std::max(largest, p.shard(u).n);
        sum_rows_ = arena.take("sums of micro-batches", p.grads.dtype, {2 * largest});
    }
    // Every gradient of the unit will be written. What is between them counts in the norm, so it must be 0 as well.
    void begin_grads(const FlatParameters& p, size_t u, cudaStream_t stream) override {
        comm_stream_.wait(stream, reduced_[buffer_of(p, u)]);  // the buffer's previous unit has been reduced
        for (const Range& gap : p.gaps(u)) set_to_zero(p.unit_grads(u).slice(gap.first, gap.n), stream);
    }
    void end_grads(const FlatParameters& p, size_t u, cudaStream_t stream) override {
        const Tensor shard = p.grad_shard(u);
        comm_stream_.communicate(stream, [&] {
            if (micro_batch_ == 0) return reduce_scatter(p, u, shard, comm_stream_);
            // shard = row 0 + row 1 = {the sum of the micro-batches so far, this one's}
            const Tensor rows = sum_rows_.slice(0, 2 * shard.n());
            copy_tensor(rows.slice(0, shard.n()), shard, comm_stream_);
            reduce_scatter(p, u, rows.slice(shard.n(), shard.n()), comm_stream_);
            reduce_rows(shard, rows, 2, ReduceOp::sum, comm_stream_);
        });
        cudaCheck(cudaEventRecord(reduced_[buffer_of(p, u)], comm_stream_));
        if (in_last_micro_batch()) grads_are_final(u, comm_stream_);
    }

  protected:
    static size_t buffer_of(const FlatParameters& p, size_t u) { return static_cast<size_t>(p.units[u].buffer); }

  private:
    std::vector<cudaEvent_t> reduced_;  // by buffer: its gradients have been read
    Tensor sum_rows_;                   // with several micro-batches: (2, largest shard)
};

// Weights, too, are sharded: a unit's whole weights exist in a buffer, from shortly before it computes until the next
// unit that uses the buffer is fetched.
class Zero3 final : public Zero2 {
  public:
    using Zero2::Zero2;

    void take_memory(const FlatParameters& p, int64_t micro_batches, Arena& arena) override {
        Zero2::take_memory(p, micro_batches, arena);
        in_buffer_.assign(p.weight_buffers.size(), -1);
    }
    void gather(const FlatParameters& p, size_t u, int64_t next, cudaStream_t stream) override {
        fetch(p, u, stream);
        comm_stream_.wait(stream, gathered_[u]);
        if (next >= 0 && buffer_of(p, static_cast<size_t>(next)) != buffer_of(p, u))
            fetch(p, static_cast<size_t>(next), stream);
    }
    // The shard is new, so a whole unit that is still in its buffer is out of date. Its next gather fetches it again.
    void all_gather_weights(const FlatParameters& p, size_t u, cudaStream_t) override {
        int64_t& in_buffer = in_buffer_[buffer_of(p, u)];
        if (in_buffer == static_cast<int64_t>(u)) in_buffer = -1;
    }

  private:
    // All reads of the buffer's previous unit are already queued on the stream, and the gather comes after them.
    void fetch(const FlatParameters& p, size_t u, cudaStream_t stream) {
        int64_t& in_buffer = in_buffer_[buffer_of(p, u)];
        if (in_buffer == static_cast<int64_t>(u)) return;
        in_buffer = static_cast<int64_t>(u);
        const Tensor whole = p.unit_weights(u);
        Tensor mine = p.weight_shard(u);
        comm_stream_.communicate(stream, [&] {
            if (p.sharding.offload == Offload::params) {  // the shard is on the host: first to its place in the buffer
                const Tensor place = whole.slice(p.shard(u).first, p.shard(u).n);
                cudaCheck(cudaMemcpyAsync(place.data, mine.data, mine.bytes(), cudaMemcpyHostToDevice, comm_stream_));
                mine = place;
            }
            comm_.all_gather(whole, mine, p.units[u].bounds, comm_stream_);
        });
        cudaCheck(cudaEventRecord(gathered_[u], comm_stream_));
    }

    std::vector<int64_t> in_buffer_;  // buffer -> unit whose weights it holds, or -1
};

}  // namespace

std::unique_ptr<Scheme> make_zero(CommStream& stream, int stage) {
    if (stage == 1) return std::make_unique<Zero1>(stream);
    if (stage == 2) return std::make_unique<Zero2>(stream);
    return std::make_unique<Zero3>(stream);
}
