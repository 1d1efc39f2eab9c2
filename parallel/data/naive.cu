// naive.cu: --dp-mode naive: rank 0 has the optimizer; the others compute gradients for it.
//
//     rank 0     forward | backward | [receive all gradients, add] | update | [send all weights]    | forward ...
//     the rest   forward | backward | [send all gradients]         |   -    | [receive all weights] | forward ...
//
// The simplest scheme that is right, and what PyTorch's first DataParallel did. Rank 0 receives (n-1) P gradients and
// sends (n-1) P weights, through one link, while the other links do nothing; it holds all optimizer states; and no
// other rank computes during the update. ddp.cu avoids the first and the last, zero.cu all three.
#include "parallel/data/data.h"

namespace {

class Naive final : public Scheme {
  public:
    using Scheme::Scheme;
    ~Naive() override { cudaEventDestroy(weights_arrived_); }

    // p.units[u].bounds give all of a unit to rank 0 (shards.cu), so a reduce-scatter is a reduce to rank 0, and an
    // all-gather a broadcast from there.
    void take_memory(const FlatParameters& p, int64_t micro_batches, Arena&) override {
        micro_batches_ = micro_batches;
        comm_.count_memory([&] {
            for (size_t u = 0; u < p.units.size(); ++u)
                comm_.reduce_scatter(p.grad_shard(u), p.unit_grads(u), p.units[u].bounds, ReduceOp::sum, nullptr);
        });
    }
    void gather(const FlatParameters&, size_t, int64_t, cudaStream_t stream) override {
        comm_stream_.wait(stream, weights_arrived_);
    }
    void end_grads(const FlatParameters& p, size_t u, cudaStream_t stream) override {
        if (!in_last_micro_batch()) return;
        comm_stream_.communicate(stream, [&] {
            comm_.reduce_scatter(p.grad_shard(u), p.unit_grads(u), p.units[u].bounds, ReduceOp::sum, comm_stream_);
        });
        grads_are_final(u, comm_stream_);
    }
    void all_gather_weights(const FlatParameters& p, size_t u, cudaStream_t stream) override {
        comm_stream_.communicate(
            stream, [&] { comm_.all_gather(p.unit_weights(u), p.weight_shard(u), p.units[u].bounds, comm_stream_); });
        cudaCheck(cudaEventRecord(weights_arrived_, comm_stream_));
    }

  private:
    cudaEvent_t weights_arrived_ = make_event();  // of all units that were sent so far
};

}  // namespace

std::unique_ptr<Scheme> make_naive(CommStream& stream) { return std::make_unique<Naive>(stream); }
