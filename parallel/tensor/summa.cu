// parallel/tensor/summa.cu: tensor parallelism in 2D and 2.5D.
//                             (SUMMA: van de Geijn & Watts 1997; Optimus: Xu et al. 2021, arXiv:2104.05343;
//                              Tesseract, 2.5D: Wang et al. 2021, arXiv:2105.14500)
//
// q x q ranks, (i, j) in row i and column j of a grid. A matrix is cut into q x q blocks, and rank (i, j) has one of
// each: of activations X (N, C) rows i, columns j; of a weight W (O, C), which multiplies as X W^T, outputs j, inputs
// i.
//
//     X  rows i              W^T  inputs i                    Y = X W^T
//        columns j                outputs j
//     +----+----+----+       +----+----+----+       Y_ij = sum over k of X_ik W_jk^T       W_jk is rank (k, j)'s
//     | 00 | 01 | 02 |       | 00 | 01 | 02 |
//     +----+----+----+       +----+----+----+       in q steps: step k needs X_ik, of a rank in the same row, and W_jk,
//     | 10 | 11 | 12 |       | 10 | 11 | 12 |       of one in the same column of the grid:
//     +----+----+----+       +----+----+----+
//     | 20 | 21 | 22 |       | 20 | 21 | 22 |           (i, k) broadcasts X_ik to row i
//     +----+----+----+       +----+----+----+           (k, j) broadcasts W_jk to column j      Y_ij += X_ik W_jk^T
//
// The backward has the same form, with one broadcast and one sum:
//
//     dX_ik = sum over j of dY_ij W_jk         step k: W_jk to column j; the products are added in row i, at (i, k)
//     dW_jk = sum over i of dY_ij^T X_ik       step k: X_ik to row i; the products are added in column j, at (k, j)
//
// The blocks of step k + 1 travel while step k computes. Rows are whole sequences, and the columns of queries, keys and
// values are whole heads, so attention needs nobody else.
//
// 2.5D: d such grids. Each has all weights, and other sequences. The gradients of the weights are added over the grids
// at the end of a step (Param::sharers).
//
// The embedding (V, C) is cut as every weight: rank (i, j) has tokens j, columns i. So row i of the grid has columns i
// of all tokens. For rows m of the stream each of its ranks looks up the tokens that it has, and rank (i, m) adds what
// they found. That is the block that (m, i) needs: (i, m) and (m, i) exchange their blocks.
//
// The bill, of all ranks together, for N tokens, e bytes a number of activations and weights, g of gradients:
//
//     forward, backward by input     (q - 1) (N C + d O C) e
//     backward by weight             (q - 1) (N C e + d O C g)
//     embedding, each way            (q - 1) N C e + N C e (q - 1) / q
//     norms, forward                 q (q - 1) 2 N 4          backward     2 (q - 1) 2 N 4
//     loss                           2 (q - 1) 3 N 4
//     memory of a rank               O C / q^2 of a weight, N C / (d q^2) of an activation; two of each on their way
//
// In 1D the two products of a feed-forward of width F send 2 (d q^2 - 1) N C e in the forward; here it is less where
// that is more than (q - 1) (N (C + F) + 2 d C F) e: where there are many tokens for the weights, and many ranks.
#include "layers/layers.h"
#include "parallel/tensor/tensor.h"

#include <algorithm>

namespace {

class Summa : public ColumnGeometry {
  public:
    // row: the ranks of this row of the grid, which differ in j; column: those that differ in i.
    Summa(const TensorLayout& layout, Comm& group, Comm& row, Comm& column)
        : ColumnGeometry(row), q_(layout.sizes[1]), i_(layout.coordinate(1)),
          j_(layout.coordinate(2)), depth_part_{layout.coordinate(0), layout.sizes[0]}, group_(group), row_(row),
          column_(column), comm_stream_(make_stream()) {
        for (cudaEvent_t* event : events()) *event = make_event();
    }
    ~Summa() override {
        cudaStreamSynchronize(comm_stream_);
        for (cudaEvent_t* event : events()) cudaEventDestroy(*event);
        cudaStreamDestroy(comm_stream_);
    }

    void forward(Tensor out, Tensor inp, Tensor weight, Tensor bias, Crossing, cudaStream_t stream) override {
        const auto fetch = [&](int k) {
            broadcast(row_, input_of(k, inp), k);
            broadcast(column_, weight_of(k, weight), k);
        };
        const auto use = [&](int k) {
            matmul(out, input_of(k, inp), weight_of(k, weight),
                   {.transpose_b = true, .beta = k == 0 ? 0.0f : 1.0f, .bias = k == 0 ? bias : Tensor{}}, stream);
        };
        pipeline(fetch, use, {}, stream);
    }

    void backward_input(Tensor dinp, Tensor dout, Tensor weight, Crossing, cudaStream_t stream) override {
        const auto fetch = [&](int k) { broadcast(column_, weight_of(k, weight), k); };
        const auto use = [&](int k) {
            linear_backward_input(like(partial_, k, dinp), dout, weight_of(k, weight), false, stream);
        };
        const auto reduce = [&](int k) { sum_at(row_, k, dinp, like(partial_, k, dinp)); };
        pipeline(fetch, use, reduce, stream);
    }

    void backward_weight(Tensor dweight, Tensor dout, Tensor inp, Crossing, bool accumulate,
                         cudaStream_t stream) override {
        const auto fetch = [&](int k) { broadcast(row_, input_of(k, inp), k); };
        const auto use = [&](int k) {
            matmul(like(partial_, k, dweight), dout, input_of(k, inp), {.transpose_a = true}, stream);
        };
        const Tensor sum =
            accumulate ? make_tensor(sum_.data, dweight.dtype, {dweight.rows(), dweight.cols()}) : dweight;
        const auto reduce = [&](int k) { sum_at(column_, k, sum, like(partial_, k, dweight)); };
        pipeline(fetch, use, reduce, stream);
        if (accumulate) residual_add(dweight, dweight, sum, stream);
    }

    void embed(Tensor out, Tensor tokens, Tensor wte, cudaStream_t stream) override {
        const Tensor mine = i_ == j_ ? out : like(inputs_, 0, out);  // rows j, columns i
        const auto use = [&](int m) {
            embedding_forward(as_tokens(like(partial_, m, out)), rows_of(tokens, m), {}, wte, {}, stream);
        };
        const auto reduce = [&](int m) { sum_at(row_, m, mine, like(partial_, m, out)); };
        pipeline([](int) {}, use, reduce, stream);
        exchange(out, mine, stream);
    }

    void embed_backward(Tensor dwte, Tensor tokens, Tensor dout, bool accumulate, cudaStream_t stream) override {
        const Tensor mine = i_ == j_ ? dout : like(partial_, 0, dout);
        exchange(mine, dout, stream);
        const auto fetch = [&](int m) { broadcast(row_, input_of(m, mine), m); };
        const auto use = [&](int m) {
            embedding_backward(dwte, {}, as_tokens(input_of(m, mine)), rows_of(tokens, m), {}, accumulate || m > 0,
                               false, lookup_scratch_, stream);
        };
        pipeline(fetch, use, {}, stream);
    }

    // Columns i of all rows, which the weight's block multiplies, are a block of this row of the grid: rank (i, i)'s.
    void forward_whole_rows(Tensor out, Tensor inp, Tensor weight, Tensor bias, Crossing,
                            cudaStream_t stream) override {
        const Tensor block = i_ == j_ ? inp : make_tensor(whole_rows_.data, inp.dtype, {inp.rows(), inp.cols()});
        row_.broadcast(block, i_, stream);
        linear_forward(out, block, weight, i_ == 0 ? bias : Tensor{}, stream);
        column_.all_reduce(out, stream);
    }
    void embed_whole_rows(Tensor out, Tensor tokens, Tensor wte, cudaStream_t stream) override {
        const int64_t R = out.rows(), C = out.cols();
        const Tensor all = make_tensor(whole_rows_.data, out.dtype, {q_, R, C});
        embedding_forward(out.view({1, R, C}), tokens, {}, wte, {}, stream);  // columns i
        row_.all_reduce(out, stream);
        column_.all_gather(all, out, stream);
        copy_tensor(out, all.slice(j_, 1).view({R, C}), stream);
    }

    void take_memory(const Sizes& s, Arena& arena) override {
        const auto bytes = [](int64_t n, DType dtype) { return n * static_cast<int64_t>(dtype_bytes(dtype)); };
        int64_t input = bytes(s.rows * s.columns, s.dtype), weight = 0, gradient = 0, widest = s.columns, outputs = 0;
        for (const Product& p : s.products) {
            input = std::max(input, bytes(s.rows * p.C, s.dtype)), weight = std::max(weight, bytes(p.O * p.C, s.dtype));
            gradient = std::max(gradient, bytes(p.O * p.C, s.grad_dtype));
            widest = std::max(widest, p.C), outputs = std::max(outputs, p.O);
        }
        const auto take = [&](int64_t n_bytes) {
            return arena.take("blocks of other ranks", DType::i32, {ceil_div(n_bytes, 4)});
        };
        for (int b = 0; b < 2; ++b) {
            inputs_[b] = take(input), weights_[b] = take(weight), partial_[b] = take(std::max(input, gradient));
        }
        sum_ = take(gradient);
        lookup_scratch_ =
            arena.take("blocks of other ranks", DType::i32, {embedding_backward_scratch_n(s.dtype, s.rows, s.columns)});
        if (s.whole_rows > 0) whole_rows_ = take(bytes(s.whole_rows * std::max(widest, q_ * s.columns), s.dtype));
        const auto none = [](DType dtype, int64_t n) { return make_tensor(nullptr, dtype, {n}); };
        const int64_t sample_n = s.whole_rows * std::max(widest, outputs);
        row_.count_memory([&] {
            for (int k = 0; k < q_; ++k) {
                const Tensor partial = none(s.dtype, input / static_cast<int64_t>(dtype_bytes(s.dtype)));
                row_.reduce_scatter(k == j_ ? partial : none(s.dtype, 0), partial, bounds(row_, k, partial.n()),
                                    ReduceOp::sum, nullptr);
            }
            row_.all_reduce(none(DType::f32, 2 * std::max(s.rows, s.whole_rows)), nullptr);
            if (sample_n > 0) row_.all_reduce(none(s.dtype, sample_n), nullptr);
        });
        column_.count_memory([&] {
            for (int k = 0; k < q_; ++k) {
                const Tensor partial = none(s.grad_dtype, gradient / static_cast<int64_t>(dtype_bytes(s.grad_dtype)));
                column_.reduce_scatter(k == i_ ? partial : none(s.grad_dtype, 0), partial,
                                       bounds(column_, k, partial.n()), ReduceOp::sum, nullptr);
            }
            if (sample_n > 0) column_.all_reduce(none(s.dtype, sample_n), nullptr);
        });
    }

  private:
    // A buffer of the two that step k uses, with the shape and the type of a tensor.
    static Tensor like(const std::array<Tensor, 2>& buffers, int k, const Tensor& tensor) {
        return make_tensor(buffers[static_cast<size_t>(k % 2)].data, tensor.dtype, {tensor.rows(), tensor.cols()});
    }
    // The blocks of step k: this rank's own, or where its row, or its column, of the grid receives that of another one.
    Tensor input_of(int k, const Tensor& own) const { return k == j_ ? own : like(inputs_, k, own); }
    Tensor weight_of(int k, const Tensor& own) const { return k == i_ ? own : like(weights_, k, own); }
    static Tensor as_tokens(const Tensor& rows) { return rows.view({1, rows.rows(), rows.cols()}); }
    // Of the tokens of the group, those of row m of this grid.
    Tensor rows_of(const Tensor& tokens, int m) const {
        const int64_t n = tokens.n() / (depth_part_.of * q_);
        return tokens.view({tokens.n()}).slice((depth_part_.index * q_ + m) * n, n).view({1, n});
    }
    void broadcast(Comm& comm, Tensor block, int root) { comm.broadcast(block, root, comm_stream_); }
    static std::vector<int64_t> bounds(const Comm& comm, int root, int64_t n) {
        std::vector<int64_t> bounds(static_cast<size_t>(comm.size) + 1);
        for (int r = root; r < comm.size; ++r) bounds[static_cast<size_t>(r) + 1] = n;
        return bounds;
    }
    // At `root`: out = the sum of the ranks' parts, in rank order.
    void sum_at(Comm& comm, int root, Tensor out, Tensor part) {
        const Tensor none = make_tensor(out.data, out.dtype, {0});
        comm.reduce_scatter(comm.rank == root ? out : none, part, bounds(comm, root, part.n()), ReduceOp::sum,
                            comm_stream_);
    }
    // (i, j) and (j, i) give each other a block.
    void exchange(Tensor to, Tensor from, cudaStream_t stream) {
        if (i_ == j_) return;
        const int other = (static_cast<int>(depth_part_.index) * q_ + j_) * q_ + i_;
        group_.group_start();
        group_.send(from, other, stream);
        group_.recv(to, other, stream);
        group_.group_end();
    }

    // fetch(k) and reduce(k), which put collectives on comm_stream_, beside use(k), which computes: the blocks of step
    // k + 1 travel, and the products of step k - 1 are added, while step k computes.
    template <class Fetch, class Use>
    void pipeline(const Fetch& fetch, const Use& use, const std::function<void(int)>& reduce, cudaStream_t stream) {
        cudaCheck(cudaEventRecord(start_, stream));
        cudaCheck(cudaStreamWaitEvent(comm_stream_, start_, 0));
        const auto fetch_when_free = [&](int k) {
            if (k >= 2) cudaCheck(cudaStreamWaitEvent(comm_stream_, used_[k % 2], 0));
            fetch(k);
            cudaCheck(cudaEventRecord(fetched_[k % 2], comm_stream_));
        };
        fetch_when_free(0);
        for (int k = 0; k < q_; ++k) {
            if (k + 1 < q_) fetch_when_free(k + 1);
            // Then the products of step k - 2, too, have been added, whose buffers this step writes.
            cudaCheck(cudaStreamWaitEvent(stream, fetched_[k % 2], 0));
            use(k);
            cudaCheck(cudaEventRecord(used_[k % 2], stream));
            if (!reduce) continue;
            cudaCheck(cudaStreamWaitEvent(comm_stream_, used_[k % 2], 0));
            reduce(k);
        }
        cudaCheck(cudaEventRecord(start_, comm_stream_));
        cudaCheck(cudaStreamWaitEvent(stream, start_, 0));
    }
    std::array<cudaEvent_t*, 5> events() { return {&start_, &fetched_[0], &fetched_[1], &used_[0], &used_[1]}; }

    const int q_, i_, j_;
    const Part depth_part_;
    Comm &group_, &row_, &column_;
    cudaStream_t comm_stream_;
    cudaEvent_t start_ = nullptr, fetched_[2] = {}, used_[2] = {};
    std::array<Tensor, 2> inputs_, weights_, partial_;
    Tensor sum_, lookup_scratch_, whole_rows_;
};

}  // namespace

std::unique_ptr<ColumnGeometry> make_summa(const TensorLayout& layout, const std::function<Comm*(AxisSet)>& along) {
    return std::make_unique<Summa>(layout, *along(layout.all()), *along(TensorLayout::set_of({2})),
                                   *along(TensorLayout::set_of({1})));
}
