// parallel/tensor/tensor.h: tensor parallelism: the ranks of a group divide each layer, not the batch. All of them have
// the same tokens; each has some of the heads, of the feed-forward's columns and of the vocabulary.
//
// Files, in reading order:
//     cut.cu               which elements of a whole parameter a rank has, and back
//     tensor_parallel.cu   1D: columns, then rows; what is summed, and when
#pragma once

#include "core/core.h"
#include "parallel/comm/comm.h"

// ---------------------------------------------------------------------------------------------------------------------
// cut.cu: elements of a parameter that is cut, here and in the whole one

int64_t cut_rows(const Cut& cut);  // that this rank has
// This rank's elements of a whole parameter that is cut, row by row.
std::vector<float> cut_from(const Param& param, const std::vector<float>& whole);
// The other way: writes this rank's elements into the whole parameter.
void put_into(std::vector<float>& whole, const Cut& cut, const std::vector<float>& its);

// Elements of a rank, in the order in which they lie there, as pieces of the whole parameter: element i of a piece is
// element  first + (i / run) * stride + i % run  of the whole parameter.
struct CutPiece {
    int64_t local_first, n;  // counted from the first of the elements that were asked for
    int64_t first, run, stride;
};
// Of elements [first, first + n) of this rank's part.
std::vector<CutPiece> cut_pieces(const Cut& cut, int64_t first, int64_t n);

// ---------------------------------------------------------------------------------------------------------------------
// tensor_parallel.cu: 1D tensor parallelism                    (Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053)
//
// A sub-layer y = B f(A x), an attention or a feed-forward, is two products with something between them that looks at
// each head, or at each column, by itself. Rank r of n has some rows of A, and the columns of B that belong to them:
//
//         A (F, C)                 B (C, F)
//      +-----------+            +----+----+----+
//      |  rank 0   |            |    |    |    |        h_r = f(A_r x)      each rank its own columns of h
//      +-----------+            | r0 | r1 | r2 |        y   = sum over r of B_r h_r         one all-reduce
//      |  rank 1   |            |    |    |    |
//      +-----------+            +----+----+----+        backward:
//      |  rank 2   |                                    dh_r = B_r^T dy,  dA_r, dB_r        without communication
//      +-----------+                                    dx   = sum over r of A_r^T dh_r     one all-reduce
//
// The residual stream, the norms and their gradients are the same on all ranks, to the bit. The embedding and the head
// are divided by tokens; a lookup gives zeros for other ranks' tokens, and one all-reduce adds the rows. The loss needs
// of all logits 3 numbers a row (cross_entropy.cu), so that no rank ever has all logits.
//
// Sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198) divides what lies between the sub-layers, too, by
// rows: the residual stream, the norms, and what the backward needs of them. In place of an all-reduce stand a
// reduce-scatter behind a sub-layer and an all-gather of the norm's rows before the next, which send as many bytes
// together. In the backward the rows are gathered once more, because nobody keeps them: half as much again.
//
// Whatever lies inside of a sub-layer and is not divided (a norm of queries and keys, MLA's latents, key heads of which
// there are fewer than ranks) gets a part of its gradient on each rank: Param::sharers. These parts are added once a
// step, not for each micro-batch.
//
// The bill, for N tokens a micro-batch, width C, L blocks, n ranks, e bytes a number of an activation, with everything
// of a rank sent to others counted ((n - 1) / n of 2 x the bytes of an all-reduce):
//
//     forward     all-reduce of N C: the embedding, and twice a block            (2 L + 1) N C e
//     loss        maxima and sums                                                3 N 4
//     backward    all-reduce of N C: twice a block, and the head                 (2 L + 1) N C e
//
// With sequence parallelism, in all-gathers and reduce-scatters of N C, which are half an all-reduce each: forward
// 4 L + 2, backward 6 L + 3.
class TensorParallel {
  public:
    // key_heads: K of the model, before it is divided; where it is less than the ranks, some of them have the same. A
    // model that config_of_rank() has accepted.
    TensorParallel(Comm& comm, int64_t key_heads);
    int rank() const { return comm_.rank; }
    int size() const { return comm_.size; }

    // Counts what the calls below need, with activations of N x C numbers of that type; takes it.
    // shared_by_...: elements of gradients that have sharers.
    struct Sizes {
        int64_t N, C;
        DType dtype, grad_dtype;
        int64_t shared_by_all = 0, shared_by_same_keys = 0;
        Tensor numbers;         // that a step adds up
        int64_t logits_n = 0;   // numbers of the logits that gather_columns collects; 0: never
        bool sequence = false;  // rows are gathered and summed
    };
    void take_memory(const Sizes& sizes, Arena& arena);

    void sum(Tensor tensor, cudaStream_t stream) { comm_.all_reduce(tensor, stream); }
    // Sequence parallelism: rank r has rows [r N / n, (r + 1) N / n) of a tensor. gather_rows: all = the rows of all
    // ranks. sum_rows: rows = this rank's rows of the sum over the ranks.
    void gather_rows(Tensor all, Tensor rows, cudaStream_t stream) { comm_.all_gather(all, rows, stream); }
    void sum_rows(Tensor rows, Tensor all, cudaStream_t stream) {
        comm_.reduce_scatter(rows, all, ReduceOp::sum, stream);
    }
    void max(Tensor out, Tensor inp, cudaStream_t stream) { comm_.all_reduce(out, inp, ReduceOp::max, stream); }
    // Adds the parts of gradients that have sharers (FlatParameters::shared_grads); the same order on all ranks.
    void sum_shared(const std::vector<Tensor>& by_all, const std::vector<Tensor>& by_same_keys, cudaStream_t stream);
    // (R, V of a rank) of each rank -> (R, V of all): for drawing a token from a few rows of logits.
    Tensor gather_columns(Tensor columns, cudaStream_t stream);
    // Collective: of a parameter of which each rank gives its part, the whole one on rank 0; elsewhere nothing.
    std::vector<float> collect(const Param& param, const std::vector<float>& part);

  private:
    void sum_packed(Comm& comm, const std::vector<Tensor>& parts, cudaStream_t stream);
    Comm& comm_;
    std::unique_ptr<Comm> same_keys_;  // ranks with the same key head; none: each rank has its own
    Tensor packed_, staging_, gathered_, columns_;
};
