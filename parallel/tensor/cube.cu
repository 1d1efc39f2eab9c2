// parallel/tensor/cube.cu: tensor parallelism in 3D.
//                  (Agarwal et al. 1995, "A three-dimensional approach to parallel matrix multiplication";
//                   Bian et al. 2021, arXiv:2105.14450)
//
// p x p x p ranks (x, y, z). Of Y = X W^T, X (N, C) and W (O, C), rank (x, y, z) computes one of p^3 products: of rows
// x and columns z of X and the block (outputs y, inputs z) of W. The sum over z is then complete.
//
//             W^T  inputs z, outputs y
//            +-------------+
//           /             /|        X_xz (N/p, C/p)    gathered along y: each rank keeps 1/p of its rows
//          +-------------+ |        W_yz (O/p, C/p)    gathered along x: each rank keeps 1/p of its columns
//          |             | |        Y_xy (N/p, O/p)    added along z: each rank keeps 1/p of its rows
//     X    |   rank      | +
//     rows |   (x, y, z) |/         No rank keeps what another one has: of X, W and Y each has 1/p^3.
//     x    +-------------+
//           columns z
//
// X has rows (x, y) and columns z; Y has rows (x, z) and columns y. So y and z change places with every product, and
// the next one takes Y as it is: with outputs z, inputs y. What enters a sub-layer has columns z, and inside of it a
// rank has heads y, and all tokens of the sequences (x, z).
//
// The backward: dX_xz = dY_xy W_yz, gathered along z and x, added along y;  dW_yz = dY_xy^T X_xz, added along x.
//
// The embedding (V, C) is W of the head: tokens y, columns (z, x). A rank looks the tokens of rows x up among its own;
// added along y this is the stream: rows (x, y), columns z.
//
// The bill, of all ranks together, for N tokens, e bytes a number of activations and weights, g of gradients:
//
//     forward, backward by input     (p - 1) (N C + O C + N O) e
//     backward by weight             (p - 1) ((N C + N O) e + O C g)
//     embedding, forward             (p - 1) (V C + N C) e        backward    (p - 1) (N C e + V C g)
//     norms, forward                 p (p - 1) 2 N 4              backward    2 (p - 1) 2 N 4
//     loss                           2 (p - 1) 3 N 4
//     memory of a rank               1/p^3 of everything; while a product is computed N C/p^2, N O/p^2, and O C/p^2 of
//                                    the weight and of its gradient, each twice: as pieces, and side by side
//
// Each rank sends (p - 1)/p^3 of the matrices: with P = p^3 ranks about P^(-2/3), where 2D sends about P^(-1/2), and 1D
// about all of N C for each product, 2 (P - 1)/P for two.
#include "layers/layers.h"
#include "parallel/tensor/tensor.h"

#include <algorithm>
#include <numeric>

namespace {

class Cube : public ColumnGeometry {
  public:
    Cube(const TensorLayout& layout, Comm& x, Comm& y, Comm& z)
        : ColumnGeometry(z), p_(layout.sizes[0]), rows_part_{layout.coordinate(0), p_}, x_(x), y_(y), z_(z) {}

    void forward(Tensor out, Tensor inp, Tensor weight, Tensor bias, Crossing way, cudaStream_t stream) override {
        const auto [inner, outer] = axes(way);
        const Tensor all_inp = gather_rows(inner, inputs_, inp, stream), whole = gather_weight(weight, stream);
        const Tensor part = rows_in(outputs_, out);
        linear_forward(part, all_inp, whole, outer.rank == 0 ? bias : Tensor{}, stream);
        outer.reduce_scatter(out, part, ReduceOp::sum, stream);
    }
    void backward_input(Tensor dinp, Tensor dout, Tensor weight, Crossing way, cudaStream_t stream) override {
        const auto [inner, outer] = axes(way);
        const Tensor all_dout = gather_rows(outer, outputs_, dout, stream), whole = gather_weight(weight, stream);
        const Tensor part = rows_in(inputs_, dinp);
        linear_backward_input(part, all_dout, whole, false, stream);
        inner.reduce_scatter(dinp, part, ReduceOp::sum, stream);
    }
    void backward_weight(Tensor dweight, Tensor dout, Tensor inp, Crossing way, bool accumulate,
                         cudaStream_t stream) override {
        const auto [inner, outer] = axes(way);
        const Tensor all_inp = gather_rows(inner, inputs_, inp, stream),
                     all_dout = gather_rows(outer, outputs_, dout, stream);
        const Tensor whole = whole_gradient(dweight);
        matmul(whole, all_dout, all_inp, {.transpose_a = true}, stream);
        add_gradient(dweight, whole, accumulate, stream);
    }

    void embed(Tensor out, Tensor tokens, Tensor wte, cudaStream_t stream) override {
        const Tensor part = rows_in(inputs_, out);
        embedding_forward(as_tokens(part), tokens_here(tokens), {}, gather_weight(wte, stream), {}, stream);
        y_.reduce_scatter(out, part, ReduceOp::sum, stream);
    }
    void embed_backward(Tensor dwte, Tensor tokens, Tensor dout, bool accumulate, cudaStream_t stream) override {
        const Tensor whole = whole_gradient(dwte);
        embedding_backward(whole, {}, as_tokens(gather_rows(y_, inputs_, dout, stream)), tokens_here(tokens), {}, false,
                           false, lookup_scratch_, stream);
        add_gradient(dwte, whole, accumulate, stream);
    }

    void forward_whole_rows(Tensor out, Tensor inp, Tensor weight, Tensor bias, Crossing way,
                            cudaStream_t stream) override {
        Comm& outer = axes(way).outer;
        linear_forward(out, inp, gather_weight(weight, stream), outer.rank == 0 ? bias : Tensor{}, stream);
        outer.all_reduce(out, stream);
    }
    void embed_whole_rows(Tensor out, Tensor tokens, Tensor wte, cudaStream_t stream) override {
        embedding_forward(as_tokens(out), tokens.view({1, tokens.n()}), {}, gather_weight(wte, stream), {}, stream);
        y_.all_reduce(out, stream);
    }

    void take_memory(const Sizes& s, Arena& arena) override {
        const auto bytes = [](int64_t n, DType dtype) { return n * static_cast<int64_t>(dtype_bytes(dtype)); };
        int64_t inputs = s.columns, outputs = s.columns, weight = s.embedding.O * s.embedding.C;
        for (const Product& product : s.products) {
            inputs = std::max(inputs, product.C * p_), outputs = std::max(outputs, product.O);
            weight = std::max(weight, product.O * product.C);
        }
        const auto take = [&](int64_t n_bytes) {
            return arena.take("blocks of other ranks", DType::i32, {ceil_div(n_bytes, 4)});
        };
        inputs_ = take(bytes(s.rows * p_ * inputs, s.dtype)), outputs_ = take(bytes(s.rows * p_ * outputs, s.dtype));
        weight_pieces_ = take(bytes(weight * p_, s.dtype)), weight_ = take(bytes(weight * p_, s.dtype));
        gradient_pieces_ = take(bytes(weight * p_, s.grad_dtype)), gradient_ = take(bytes(weight * p_, s.grad_dtype));
        lookup_scratch_ = arena.take("blocks of other ranks", DType::i32,
                                     {embedding_backward_scratch_n(s.dtype, s.rows * p_, s.columns)});
        const auto none = [](DType dtype, int64_t n) { return make_tensor(nullptr, dtype, {n}); };
        const int64_t rows_n = s.rows * std::max(inputs, outputs);
        for (Comm* comm : {&y_, &z_})
            comm->count_memory([&] {
                comm->reduce_scatter(none(s.dtype, rows_n), none(s.dtype, rows_n * p_), ReduceOp::sum, nullptr);
                comm->all_reduce(none(DType::f32, 2 * std::max(s.rows, s.whole_rows)), nullptr);
                if (s.whole_rows > 0)
                    comm->all_reduce(none(s.dtype, s.whole_rows * std::max(inputs, outputs)), nullptr);
            });
        x_.count_memory([&] {
            x_.reduce_scatter(none(s.grad_dtype, weight), none(s.grad_dtype, weight * p_), ReduceOp::sum, nullptr);
        });
    }

  private:
    // Of a product: along `inner` lie the other rows of its input, along `outer` those of its output.
    struct Sides {
        Comm &inner, &outer;
    };
    Sides axes(Crossing way) { return way == Crossing::enters ? Sides{y_, z_} : Sides{z_, y_}; }

    static Tensor as_tokens(const Tensor& rows) { return rows.view({1, rows.rows(), rows.cols()}); }
    // p times the rows of a tensor, in a buffer.
    Tensor rows_in(const Tensor& buffer, const Tensor& like) const {
        return make_tensor(buffer.data, like.dtype, {p_ * like.rows(), like.cols()});
    }
    Tensor gather_rows(Comm& comm, const Tensor& buffer, Tensor rows, cudaStream_t stream) {
        const Tensor all = rows_in(buffer, rows);
        comm.all_gather(all, rows, stream);
        return all;
    }
    // Columns [first, first + n) of a matrix, in groups of some that one block of copy_heads copies.
    static HeadColumns columns(const Tensor& matrix, int64_t first, int64_t n) {
        const int64_t width = std::gcd(n, int64_t{256});
        return {matrix.view({1, matrix.rows(), matrix.cols()}), n / width, width, first};
    }
    // The pieces arrive one after the other; a product wants their columns side by side.
    Tensor gather_weight(Tensor weight, cudaStream_t stream) {
        const int64_t O = weight.rows(), C = weight.cols();
        const Tensor pieces = make_tensor(weight_pieces_.data, weight.dtype, {p_, O, C}),
                     whole = make_tensor(weight_.data, weight.dtype, {O, p_ * C});
        x_.all_gather(pieces, weight, stream);
        for (int64_t s = 0; s < p_; ++s)
            copy_heads(columns(whole, s * C, C), columns(pieces.slice(s, 1).view({O, C}), 0, C), stream);
        return whole;
    }
    Tensor whole_gradient(const Tensor& dweight) const {
        return make_tensor(gradient_.data, dweight.dtype, {dweight.rows(), p_ * dweight.cols()});
    }
    // dweight (+)= this rank's columns of the sum over x.
    void add_gradient(Tensor dweight, Tensor whole, bool accumulate, cudaStream_t stream) {
        const int64_t O = dweight.rows(), C = dweight.cols();
        const Tensor pieces = make_tensor(gradient_pieces_.data, dweight.dtype, {p_, O, C}),
                     sum = accumulate ? make_tensor(gradient_.data, dweight.dtype, {O, C}) : dweight;
        for (int64_t s = 0; s < p_; ++s)
            copy_heads(columns(pieces.slice(s, 1).view({O, C}), 0, C), columns(whole, s * C, C), stream);
        x_.reduce_scatter(sum, pieces, ReduceOp::sum, stream);
        if (accumulate) residual_add(dweight, dweight, sum, stream);
    }
    // Of the tokens of the group, those of rows x.
    Tensor tokens_here(const Tensor& tokens) const {
        const int64_t n = tokens.n() / p_;
        return tokens.view({tokens.n()}).slice(rows_part_.index * n, n).view({1, n});
    }

    const int p_;
    const Part rows_part_;
    Comm &x_, &y_, &z_;
    Tensor inputs_, outputs_, weight_pieces_, weight_, gradient_pieces_, gradient_, lookup_scratch_;
};

}  // namespace

std::unique_ptr<ColumnGeometry> make_cube(const TensorLayout& layout, const std::function<Comm*(AxisSet)>& along) {
    return std::make_unique<Cube>(layout, *along(TensorLayout::set_of({0})), *along(TensorLayout::set_of({1})),
                                  *along(TensorLayout::set_of({2})));
}
