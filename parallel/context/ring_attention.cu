// parallel/context/ring_attention.cu: keys and values travel around the ring of ranks, and queries stay.
//                                                                              (Liu et al. 2023, arXiv:2310.01889)
//
//     step      rank 0            rank 1            rank 2                  K_j, V_j: keys and values of rank j
//      0     Q_0 with K_0 --.  Q_1 with K_1 --.  Q_2 with K_2 --> rank 0
//      1     Q_0 with K_2 <-'->Q_1 with K_0 <-'->Q_2 with K_1 --> rank 0    while a rank computes with what it has,
//      2     Q_0 with K_1      Q_1 with K_2      Q_2 with K_0               the next keys and values arrive
//
// FORWARD. Each step is flash attention over some of the keys, and gives out and lse of these keys alone. Two such
// parts are merged by their lse (layers/flash_attention/merge.cu), in the order of the steps:
//
//     (out, lse) = attention(Q_r, K_r, V_r)
//     (o, l)     = attention(Q_r, K_r-1, V_r-1)
//     (o, l)     = merge((o, l), attention(Q_r, K_r-s, V_r-s))    for s = 2 ... n - 1
//     (out, lse) = merge((out, lse), (o, l))                                                     o and l in float32
//
// BACKWARD. With lse of all keys, the probabilities of any part are exp(S - lse), and delta is a sum over columns: so
// the parts need nothing of each other. dQ_r is a sum over the steps on rank r. dK_j and dV_j are sums over the ranks,
// which travel with K_j and V_j: rank j + 1 begins them, each following rank adds its part, and at the end rank
// j + n - 1 sends them home, where rank j adds its own. Parts are in the model's dtype, sums in float32.
//
//     stream of the ring   [ K_r-1 arrives ][ K_r-2 arrives ][ K_r-3, and dK_r-2 arrive ]
//     computing stream     [ pairs with K_r ][ pairs with K_r-1 ][ pairs with K_r-2 ] + dK_r-2 ...
//
// Zigzag placement (zigzag.cu) gives all ranks the same work in every step, so that none waits for another.
//
// The bill of a rank of n, for B sequences of T tokens, K key heads of D and values of Dv columns, e bytes a number:
//
//     sends      forward    (n - 1) (B T / n) K (D + Dv) e
//                backward   (n - 1) (B T / n) K (D + Dv) (e + 4)
//     memory     of each of its B T / n tokens, one set for all layers:  two of keys and values, two of their gradients
//                in float32, and a part of these; of queries a part, and the sum of parts in float32.
//     MLA        its keys and values travel expanded, of all heads.
//
// With a window, keys that no query of a rank sees still pass through it, and need no computing.
#include "parallel/context/context.h"

#include <algorithm>

namespace {

class RingAttention final : public ContextParallel {
  public:
    RingAttention(Comm& comm, const ZigZag& zigzag)
        : ContextParallel(comm, zigzag), ring_(make_stream()), reached_(make_event()), arrived_(make_event()) {}
    ~RingAttention() override {
        cudaStreamSynchronize(ring_);
        cudaEventDestroy(reached_);
        cudaEventDestroy(arrived_);
        cudaStreamDestroy(ring_);
    }

    void take_memory(const Sizes& s, Arena& arena) override {
        const int64_t T = zigzag.rows(), keys = s.K * (s.D + s.Dv), queries = s.H * std::max(s.D, s.Dv);
        const auto take = [&](DType dtype, int64_t columns) {
            return arena.take("keys and values on their way", dtype, {s.B, T, columns});
        };
        for (Tensor& kv : kv_) kv = take(s.dtype, keys);
        for (Tensor& dkv : dkv_) dkv = take(DType::f32, keys);
        dkv_part_ = take(s.dtype, keys);
        part_ = take(s.dtype, queries), sum_ = take(DType::f32, queries);
        part_lse_ = arena.take("keys and values on their way", DType::f32, {s.B, s.H, T});
        sum_lse_ = arena.take("keys and values on their way", DType::f32, {s.B, s.H, T});
    }
    int64_t backward_scratch_n(const Sizes& s, FlashTier tier) const override {
        return flash_attention_backward_scratch_n(s.B, zigzag.rows(), s.H, s.K, s.D, s.Dv, s.dtype, tier);
    }
    int64_t forward_bytes(const Sizes& s) const override { return numbers_sent(s) * bytes_of(s.dtype); }
    int64_t backward_bytes(const Sizes& s) const override {
        return numbers_sent(s) * (bytes_of(s.dtype) + bytes_of(DType::f32));
    }

    void forward(const HeadColumns& out, Tensor lse, const HeadColumns& q, const HeadColumns& k, const HeadColumns& v,
                 const FlashAttentionOptions& options, cudaStream_t stream) override {
        pack_own(k, v, stream);
        const HeadColumns part = in(part_, out), sum = in(sum_, out);
        for (int step = 0; step < size(); ++step) {
            start_step(step, nullptr, stream);
            const FlashAttentionOptions masked = mask_of(options, step);
            if (step == 0) {
                flash_attention_forward(out, lse, q, k, v, masked, stream);
            } else {
                const auto [keys, values] = travelling(kv_[step % 2], k, v);
                flash_attention_forward(part, part_lse_, q, keys, values, masked, stream);
                if (step == 1) copy_heads(sum, part, stream), copy_tensor(sum_lse_, part_lse_, stream);
                else merge_attention(sum, sum_lse_, part, part_lse_, stream);
            }
            cudaCheck(cudaStreamWaitEvent(stream, arrived_));
        }
        merge_attention(out, lse, sum, sum_lse_, stream);
    }

    void backward(const HeadColumns& dq, const HeadColumns& dk, const HeadColumns& dv, const HeadColumns& dout,
                  const HeadColumns& out, Tensor lse, const HeadColumns& q, const HeadColumns& k, const HeadColumns& v,
                  const FlashAttentionOptions& options, Tensor scratch, cudaStream_t stream) override {
        pack_own(k, v, stream);
        const HeadColumns dq_part = in(part_, dq), dq_sum = in(sum_, dq);
        const auto [dk_part, dv_part] = travelling(dkv_part_, k, v);
        for (int step = 0; step < size(); ++step) {
            // The sums of the step before, to which this one adds: there are some from step 1 on.
            start_step(step, step >= 2 ? &dkv_[step % 2] : nullptr, stream);
            FlashAttentionOptions masked = mask_of(options, step);
            if (step == 0) {
                flash_attention_backward(dq, dk, dv, dout, out, lse, q, k, v, masked, scratch, stream);
            } else {
                masked.scratch = FlashAttentionOptions::of_other_keys;
                const auto [keys, values] = travelling(kv_[step % 2], k, v);
                flash_attention_backward(dq_part, dk_part, dv_part, dout, out, lse, q, keys, values, masked, scratch,
                                         stream);
                (step == 1 ? copy_heads : add_heads)(dq_sum, dq_part, stream);
            }
            cudaCheck(cudaStreamWaitEvent(stream, arrived_));
            if (step == 0) continue;
            const auto [dkeys, dvalues] = travelling(dkv_[step % 2], k, v);
            (step == 1 ? copy_heads : add_heads)(dkeys, dk_part, stream);
            (step == 1 ? copy_heads : add_heads)(dvalues, dv_part, stream);
        }
        add_heads(dq, dq_sum, stream);
        const Tensor& home = dkv_[size() % 2];
        on_ring(stream, [&] { comm_.shift(home, dkv_[(size() - 1) % 2], ring_); });
        cudaCheck(cudaStreamWaitEvent(stream, arrived_));
        const auto [dkeys, dvalues] = travelling(home, k, v);
        add_heads(dk, dkeys, stream);
        add_heads(dv, dvalues, stream);
    }

  private:
    static int64_t bytes_of(DType dtype) { return static_cast<int64_t>(dtype_bytes(dtype)); }
    // Of keys and values, in one call.
    int64_t numbers_sent(const Sizes& s) const { return (size() - 1) * s.B * zigzag.rows() * s.K * (s.D + s.Dv); }

    // Heads like these in rows of their own.
    static HeadColumns in(const Tensor& rows, const HeadColumns& like) {
        const int64_t columns = like.count * like.D;
        return {make_tensor(rows.data, rows.dtype, {rows.shape[0], rows.shape[1], columns}), like.count, like.D};
    }
    // Key and value heads in rows that travel: [K keys | K values].
    static std::pair<HeadColumns, HeadColumns> travelling(const Tensor& rows, const HeadColumns& k,
                                                          const HeadColumns& v) {
        return {{rows, k.count, k.D}, {rows, v.count, v.D, k.count * k.D}};
    }
    void pack_own(const HeadColumns& k, const HeadColumns& v, cudaStream_t stream) {
        const auto [keys, values] = travelling(kv_[0], k, v);
        copy_heads(keys, k, stream);
        copy_heads(values, v, stream);
    }
    FlashAttentionOptions mask_of(const FlashAttentionOptions& options, int step) const {
        FlashAttentionOptions masked = options;
        masked.whole_T = zigzag.T;
        masked.queries = zigzag.of_rank(rank());
        masked.keys = zigzag.of_rank(zigzag.keys_in_step(rank(), step));
        return masked;
    }

    // Runs `messages` on the ring's stream when the computing stream has come here: then what they send is complete,
    // and nobody reads any more what they overwrite. arrived_: they have arrived.
    template <class Messages>
    void on_ring(cudaStream_t computing, Messages&& messages) {
        cudaCheck(cudaEventRecord(reached_, computing));
        cudaCheck(cudaStreamWaitEvent(ring_, reached_));
        messages();
        cudaCheck(cudaEventRecord(arrived_, ring_));
    }
    // What travels while this step computes: its keys and values, to be the next step's, and the gradients (or none)
    // that the step before has added to, to those that this step adds to.
    void start_step(int step, const Tensor* dkv, cudaStream_t computing) {
        on_ring(computing, [&] {
            if (step + 1 < size()) comm_.shift(kv_[(step + 1) % 2], kv_[step % 2], ring_);
            if (dkv) comm_.shift(*dkv, dkv_[(step + 1) % 2], ring_);
        });
    }

    cudaStream_t ring_;
    cudaEvent_t reached_, arrived_;
    Tensor kv_[2];       // (B, T / n, K (D + Dv)): in step s, kv_[s % 2] is computed with, the other one arrives
    Tensor dkv_[2];      // the same in float32
    Tensor dkv_part_;    // of one step
    Tensor part_, sum_;  // of out, or of dq: of one step, and of all steps but the first
    Tensor part_lse_, sum_lse_;
};

}  // namespace

std::unique_ptr<ContextParallel> make_ring_attention(Comm& comm, const ZigZag& zigzag) {
    return std::make_unique<RingAttention>(comm, zigzag);
}
