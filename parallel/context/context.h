// parallel/context/context.h: context parallelism: the ranks of a group divide the tokens of every sequence, for
// sequences that are longer than what one rank has memory for. All of them have the same weights.
//
// Everything in a model but attention looks at each token by itself: there the ranks of the group are data-parallel
// ranks with other tokens. Positions (of rope, of learned positions), windows, documents and the mean of the loss mean
// the whole sequence. Attention is the one place where the group talks; the mode says how:
//
//     --cp-mode ring      keys and values travel from rank to rank, and queries stay     any number of heads
//     --cp-mode ulysses   tokens are exchanged for heads, and back                       n divides the heads
//
// Files, in reading order:
//     zigzag.cu            which tokens a rank has, and why two chunks
//     ring_attention.cu    the ring
//     ulysses.cu           the exchange
#pragma once

#include "core/core.h"
#include "layers/layers.h"
#include "parallel/comm/comm.h"

// ---------------------------------------------------------------------------------------------------------------------
// zigzag.cu: which tokens a rank has

// Rank r of n has chunks r and 2 n - 1 - r of the 2 n chunks of a sequence, as its rows, in this order.
struct ZigZag {
    int64_t T = 0;  // tokens of a sequence
    int n = 1;
    int64_t chunk() const { return T / (2 * n); }
    int64_t rows() const { return T / n; }  // of a sequence on a rank
    TokenChunks of_rank(int rank) const;
    std::vector<int64_t> tokens(int rank) const;  // of each row
    // Pairs of a query of one rank and a key of another that a causal mask leaves.
    int64_t causal_pairs(int queries_of, int keys_of) const;
    // Whose keys and values a rank has in step 0 ... n - 1 of the ring: its own first.
    int keys_in_step(int rank, int step) const { return (rank + n - step) % n; }
};
// Error, with the flags and the nearest lengths that can be divided.
ZigZag make_zigzag(int64_t T, int n);

// ---------------------------------------------------------------------------------------------------------------------
// Attention of queries, keys and values of which each rank has the rows of its tokens. Arguments as in
// flash_attention_forward and flash_attention_backward, of this rank's rows; options.documents are those of whole
// sequences, (B, whole T, 2). lse (B, H, rows()) f32 is what forward leaves for backward: with ulysses these are the
// numbers of this rank's heads, (B, H / n, T). Collective.

enum class ContextMode { ring, ulysses };
ContextMode context_mode_from_name(const std::string& name);  // "ring", "ulysses"
const char* context_mode_name(ContextMode mode);

class ContextParallel {
  public:
    // What the calls below work on: B sequences, H query heads of D columns over K key heads, values of Dv columns.
    struct Sizes {
        int64_t B, H, K, D, Dv;
        DType dtype;
    };
    ContextParallel(Comm& comm, const ZigZag& zigzag) : zigzag(zigzag), comm_(comm) {}
    virtual ~ContextParallel() = default;
    ContextParallel(const ContextParallel&) = delete;
    ContextParallel& operator=(const ContextParallel&) = delete;

    int rank() const { return comm_.rank; }
    int size() const { return comm_.size; }
    // Takes what the calls need, one set for all layers. Error for heads that this mode cannot divide.
    virtual void take_memory(const Sizes& sizes, Arena& arena) = 0;
    virtual void forward(const HeadColumns& out, Tensor lse, const HeadColumns& q, const HeadColumns& k,
                         const HeadColumns& v, const FlashAttentionOptions& options, cudaStream_t stream) = 0;
    virtual void backward(const HeadColumns& dq, const HeadColumns& dk, const HeadColumns& dv, const HeadColumns& dout,
                          const HeadColumns& out, Tensor lse, const HeadColumns& q, const HeadColumns& k,
                          const HeadColumns& v, const FlashAttentionOptions& options, Tensor scratch,
                          cudaStream_t stream) = 0;
    // Bytes that this rank sends in one call.
    virtual int64_t forward_bytes(const Sizes& sizes) const = 0;
    virtual int64_t backward_bytes(const Sizes& sizes) const = 0;
    // Floats of scratch of backward().
    virtual int64_t backward_scratch_n(const Sizes& sizes, FlashTier tier) const = 0;

    const ZigZag zigzag;

  protected:
    Comm& comm_;
};
std::unique_ptr<ContextParallel> make_ring_attention(Comm& comm, const ZigZag& zigzag);
std::unique_ptr<ContextParallel> make_ulysses(Comm& comm, const ZigZag& zigzag);
std::unique_ptr<ContextParallel> make_context_parallel(ContextMode mode, Comm& comm, const ZigZag& zigzag);
