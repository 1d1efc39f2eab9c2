// parallel/context/ulysses.cu: tokens are exchanged for heads, and back.       (Jacobs et al. 2023, arXiv:2309.14509)
//
//                    heads                                    heads
//                 h0  h1  h2                              h0  h1  h2
//     rank 0's  +---+---+---+                           +---+---+---+
//     tokens    | 0 | 0 | 0 |                           |   |   |   |
//               +---+---+---+       all-to-all          |   |   |   |        rank r has all tokens of the heads that
//     rank 1's  | 1 | 1 | 1 |   ----------------->      | 0 | 1 | 2 |        are its share: attention is what it is on
//     tokens    +---+---+---+                           |   |   |   |        one rank, with fewer heads
//     rank 2's  | 2 | 2 | 2 |   <-----------------      |   |   |   |
//     tokens    +---+---+---+                           +---+---+---+
//
//     forward     q, k, v go there, out comes back
//     backward    q, k, v, out and dout go there, dq, dk and dv come back
//
// The backward sends q, k, v and out once more, because nobody keeps them by heads: what a rank keeps between forward
// and backward is what it keeps of its tokens, and lse by heads, which are as many numbers.
//
// A message holds for each token the heads of its receiver, [query heads | key heads | value heads | ...]. Tokens
// arrive in the order of the ranks, and are put in the order of the sequence (zigzag.cu). Where there are more ranks
// than key heads, several ranks get the same one, and the gradients that come back are added, in float32, in the order
// of ranks.
//
// The bill of a rank of n, for B sequences of T tokens, H query heads of D columns, K key heads (or n, where that is
// more), values of Dv columns, e bytes a number:
//
//     sends      forward    (n - 1)/n (B T / n) (H (D + Dv) + K (D + Dv)) e
//                backward   (n - 1)/n (B T / n) (2 H (D + Dv) + 2 K (D + Dv)) e
//     memory     of each of its B T / n tokens, one set for all layers: queries, keys, values, outputs and gradients of
//                outputs three times (to send, as it arrives, in order), gradients of queries, keys and values once;
//                with more ranks than key heads also the sums of gradients of keys and values, in float32
#include "parallel/context/context.h"

#include <algorithm>

namespace {

class Ulysses final : public ContextParallel {
  public:
    using ContextParallel::ContextParallel;

    void take_memory(const Sizes& s, Arena& arena) override {
        check(s.H % size() == 0, "--cp-mode ulysses divides heads: the ", s.H, " query heads of a rank cannot be ",
              "divided among the ", size(), " ranks of --cp: use a --cp that divides them, or --cp-mode ring");
        check(s.K % size() == 0 || size() % s.K == 0, "--cp-mode ulysses divides heads: the ", s.K,
              " key/value heads of a rank cannot be given to the ", size(),
              " ranks of --cp evenly: use another --cp, or --cp-mode ring");
        const int64_t rows = s.B * zigzag.T, keys = keys_here(s.K);
        const int64_t there = s.H / size() * s.D + keys * (s.D + s.Dv), all = there + 2 * s.H / size() * s.Dv;
        const auto take = [&](int64_t columns) { return arena.take("heads on their way", s.dtype, {rows * columns}); };
        sent_ = take(all), arrived_ = take(all), whole_ = take(all);
        dwhole_ = take(std::max(there, s.H / size() * s.Dv));  // or outputs
        if (keys > s.K / size())                               // several ranks have the same key head
            dkv_sum_ = arena.take("heads on their way", DType::f32, {s.B * zigzag.rows() * s.K * (s.D + s.Dv)});
    }
    int64_t backward_scratch_n(const Sizes& s, FlashTier tier) const override {
        return flash_attention_backward_scratch_n(s.B, zigzag.T, s.H / size(), keys_here(s.K), s.D, s.Dv, s.dtype,
                                                  tier);
    }
    int64_t forward_bytes(const Sizes& s) const override { return bytes_sent(s, 1); }
    int64_t backward_bytes(const Sizes& s) const override { return bytes_sent(s, 2); }

    void forward(const HeadColumns& out, Tensor lse, const HeadColumns& q, const HeadColumns& k, const HeadColumns& v,
                 const FlashAttentionOptions& options, cudaStream_t stream) override {
        const std::vector<HeadColumns> whole = to_heads(whole_, {q, k, v}, stream);
        const HeadColumns whole_out = share_of({out}, dwhole_, out.rows.shape[0], zigzag.T)[0];
        flash_attention_forward(whole_out, by_heads(lse), whole[0], whole[1], whole[2], options, stream);
        to_tokens({out}, {whole_out}, stream);
    }

    void backward(const HeadColumns& dq, const HeadColumns& dk, const HeadColumns& dv, const HeadColumns& dout,
                  const HeadColumns& out, Tensor lse, const HeadColumns& q, const HeadColumns& k, const HeadColumns& v,
                  const FlashAttentionOptions& options, Tensor scratch, cudaStream_t stream) override {
        const std::vector<HeadColumns> whole = to_heads(whole_, {q, k, v, out, dout}, stream);
        const std::vector<HeadColumns> dwhole = share_of({dq, dk, dv}, dwhole_, q.rows.shape[0], zigzag.T);
        flash_attention_backward(dwhole[0], dwhole[1], dwhole[2], whole[4], whole[3], by_heads(lse), whole[0], whole[1],
                                 whole[2], options, scratch, stream);
        to_tokens({dq, dk, dv}, dwhole, stream);
    }

  private:
    int64_t keys_here(int64_t K) const { return std::max<int64_t>(1, K / size()); }
    // times: that queries, outputs, keys and values go one way or the other.
    int64_t bytes_sent(const Sizes& s, int64_t times) const {
        const int64_t columns = (s.H / size() + keys_here(s.K)) * (s.D + s.Dv);
        return times * (size() - 1) * s.B * zigzag.rows() * columns * static_cast<int64_t>(dtype_bytes(s.dtype));
    }
    // (B, H, T / n) is kept as (B, H / n, T).
    Tensor by_heads(const Tensor& lse) const {
        return lse.view({lse.shape[0], lse.shape[1] / size(), lse.shape[2] * size()});
    }

    // Which of these heads rank r gets.
    HeadColumns heads_of(const HeadColumns& all, int r) const {
        const int64_t here = keys_here(all.count), first = r * all.count / size();
        return {all.rows, here, all.D, all.column + first * all.head_stride(), all.head_stride()};
    }
    // A rank's share of several groups of heads, side by side in rows (B, T, ...) from the beginning of `memory`.
    std::vector<HeadColumns> share_of(const std::vector<HeadColumns>& groups, const Tensor& memory, int64_t B,
                                      int64_t T) const {
        int64_t columns = 0;
        for (const HeadColumns& group : groups) columns += keys_here(group.count) * group.D;
        const Tensor rows = make_tensor(memory.data, memory.dtype, {B, T, columns});
        std::vector<HeadColumns> shares;
        int64_t column = 0;
        for (const HeadColumns& group : groups) {
            shares.push_back({rows, keys_here(group.count), group.D, column});
            column += shares.back().count * group.D;
        }
        return shares;
    }
    // Rank r's piece of a buffer of messages.
    std::vector<HeadColumns> message(const std::vector<HeadColumns>& groups, const Tensor& buffer, int r) const {
        const int64_t B = groups[0].rows.shape[0];
        const int64_t n = share_of(groups, buffer, B, zigzag.rows())[0].rows.n();
        return share_of(groups, buffer.slice(r * n, n), B, zigzag.rows());
    }
    void exchange(const std::vector<HeadColumns>& groups, cudaStream_t stream) {
        const int64_t n = size() * message(groups, sent_, 0)[0].rows.n();
        comm_.all_to_all(arrived_.slice(0, n), sent_.slice(0, n), stream);
    }

    // All heads of this rank's tokens -> this rank's heads of all tokens, in `memory`.
    std::vector<HeadColumns> to_heads(const Tensor& memory, const std::vector<HeadColumns>& groups,
                                      cudaStream_t stream) {
        for (int r = 0; r < size(); ++r) {
            const std::vector<HeadColumns> to = message(groups, sent_, r);
            for (size_t i = 0; i < groups.size(); ++i) copy_heads(to[i], heads_of(groups[i], r), stream);
        }
        exchange(groups, stream);
        const std::vector<HeadColumns> whole = share_of(groups, memory, groups[0].rows.shape[0], zigzag.T);
        for (int r = 0; r < size(); ++r) {
            const std::vector<HeadColumns> from = message(groups, arrived_, r);
            for (size_t i = 0; i < groups.size(); ++i) spread_heads(whole[i], from[i], zigzag.of_rank(r), stream);
        }
        return whole;
    }
    // The other way. Of a key head that several ranks have, what comes back is added.
    void to_tokens(const std::vector<HeadColumns>& groups, const std::vector<HeadColumns>& whole, cudaStream_t stream) {
        for (int r = 0; r < size(); ++r) {
            const std::vector<HeadColumns> to = message(groups, sent_, r);
            for (size_t i = 0; i < groups.size(); ++i) collect_heads(to[i], whole[i], zigzag.of_rank(r), stream);
        }
        exchange(groups, stream);
        int64_t sum_column = 0;
        for (size_t i = 0; i < groups.size(); ++i) {
            const HeadColumns& group = groups[i];
            const int sharers = static_cast<int>(std::max<int64_t>(1, size() / group.count));
            HeadColumns target = group;
            if (sharers > 1) {
                const int64_t B = group.rows.shape[0], T = group.rows.shape[1], columns = group.count * group.D;
                target = {dkv_sum_.slice(sum_column, B * T * columns).view({B, T, columns}), group.count, group.D};
                sum_column += B * T * columns;
            }
            for (int r = 0; r < size(); ++r)
                (r % sharers == 0 ? copy_heads : add_heads)(heads_of(target, r), message(groups, arrived_, r)[i],
                                                            stream);
            if (sharers > 1) copy_heads(group, target, stream);
        }
    }

    Tensor sent_, arrived_;  // n messages, one after the other
    Tensor whole_, dwhole_;  // this rank's heads of all tokens
    Tensor dkv_sum_;         // gradients of keys and values that come back from several ranks
};

}  // namespace

std::unique_ptr<ContextParallel> make_ulysses(Comm& comm, const ZigZag& zigzag) {
    return std::make_unique<Ulysses>(comm, zigzag);
}
