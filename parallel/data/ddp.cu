// ddp.cu: distributed data parallelism: every rank holds everything; gradients are summed while the backward goes on.
//                                                              (Li et al. 2020, "PyTorch Distributed",
//                                                              arXiv:2006.15704)
//     gradients    | embedding | block 0 | block 1 | block 2 | head |       the flat array, filled from its end
//     buckets      |     bucket 3    |  bucket 2   |  bucket 1   | bucket 0 |
//
//     computing    backward of head | backward of block 2 | backward of block 1 | ...          | update
//     collectives                                         [all-reduce bucket 0]  [all-reduce bucket 1] ...
//
// The backward fills the flat array from its end to its beginning. As soon as --bucket-mib of it are final, that piece
// is summed. A bucket does not know where a unit begins or ends: small buckets would pay for many messages, a single
// one could only start when the backward is over. Every rank then updates all parameters, with the same numbers in the
// same order: their weights stay equal bit for bit, and are never sent.
#include "parallel/data/data.h"

#include <algorithm>

namespace {

class Ddp final : public Scheme {
  public:
    Ddp(CommStream& stream, double bucket_mib) : Scheme(stream), bucket_mib_(bucket_mib) {}

    void take_memory(const FlatParameters& p, int64_t micro_batches, Arena&) override {
        micro_batches_ = micro_batches;
        const double n = bucket_mib_ * 0x1p20 / static_cast<double>(dtype_bytes(p.grads.dtype));
        bucket_n_ = static_cast<int64_t>(std::clamp(n, 1.0, static_cast<double>(p.n)));
        comm_.count_memory([&] { comm_.all_reduce(p.grads.slice(0, bucket_n_), nullptr); });
    }
    void begin_backward(const FlatParameters& p, int64_t micro_batch) override {
        Scheme::begin_backward(p, micro_batch);
        reduced_from_ = p.n;
        not_final_ = p.units.size();
    }
    // All gradients from this unit's on are complete. The buckets that are full of them leave; after unit 0 the rest.
    void end_grads(const FlatParameters& p, size_t u, cudaStream_t stream) override {
        if (!in_last_micro_batch()) return;
        const int64_t complete_from = p.units[u].offset;
        if (comm_.size == 1) return announce(p, complete_from, stream);
        while (reduced_from_ - complete_from >= bucket_n_ || (u == 0 && reduced_from_ > 0)) {
            const int64_t first = std::max(complete_from, reduced_from_ - bucket_n_);
            comm_stream_.communicate(
                stream, [&] { comm_.all_reduce(p.grads.slice(first, reduced_from_ - first), comm_stream_); });
            reduced_from_ = first;
        }
        announce(p, reduced_from_, comm_stream_);
    }

  private:
    // All gradients from element `first` on are final, when the stream has done what is on it so far.
    void announce(const FlatParameters& p, int64_t first, cudaStream_t stream) {
        while (not_final_ > 0 && p.units[not_final_ - 1].offset >= first) grads_are_final(--not_final_, stream);
    }

    const double bucket_mib_;
    int64_t bucket_n_ = 1;
    int64_t reduced_from_ = 0;  // gradients from here on are in buckets that have left
    size_t not_final_ = 0;      // units 0 to here - 1 have gradients that are not final
};

}  // namespace

std::unique_ptr<Scheme> make_ddp(CommStream& stream, double bucket_mib) {
    return std::make_unique<Ddp>(stream, bucket_mib);
}
