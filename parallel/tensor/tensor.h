// parallel/tensor/tensor.h: tensor parallelism: the ranks of a group divide each layer, not the batch.
//
// What a rank has of activations and weights is a geometry. All of them stand behind one interface, and the layers of
// the model do not know which it is:
//
//     --tp-mode   ranks        the residual stream        weights                     who talks
//     1d          n            whole on each rank, or     rows, then columns          all, after each sub-layer
//                              (--sp) rows
//     2d          q x q        rows x columns             rows x columns              rows and columns of the grid
//     2.5d        d x q x q    the same, rows in d q      the same, d times           the same; d at the end of a step
//     3d          p x p x p    rows in p^2 x columns      rows x columns in p^2       each of the three directions
//
// In all of them a rank has some of the heads, of the feed-forward's columns and of the vocabulary, of all tokens or of
// those of some sequences: attention, activation functions and the loss of a token stay as they are.
//
// Files, in reading order:
//     layout.cu            what a rank has in each geometry
//     cut.cu               which elements of a whole parameter those are, and back
//     one_d.cu             1D: rows of the first weight, columns of the second
//     summa.cu, cube.cu    2D and 2.5D; 3D
//     tensor_parallel.cu   what all geometries add up, and when
#pragma once

#include "core/core.h"
#include "parallel/comm/comm.h"

#include <array>
#include <map>

// ---------------------------------------------------------------------------------------------------------------------
// layout.cu: the ranks of a group as a grid of up to three axes, and what is divided along which of them.

enum class TensorMode : uint8_t { one_d, two_d, two_half_d, three_d };
TensorMode tensor_mode_from_name(const std::string& name);  // "1d", "2d", "2.5d", "3d"
const char* tensor_mode_name(TensorMode mode);

struct Part {
    int64_t index = 0, of = 1;  // part `index` of this many equal ones
    // Its elements of n. Error that says what n is where they cannot be equal.
    Range range(int64_t n, const char* what) const { return {index * div_exact(n, of, what), n / of}; }
};

// Axes in order, the one that counts slowest first: part (i_a size_b + i_b) of size_a size_b.
using Axes = std::vector<int>;

struct TensorLayout {
    TensorMode mode = TensorMode::one_d;
    int rank = 0, size = 1;
    std::array<int, 3> sizes = {1, 1, 1};  // of the axes; rank = (i_0 size_1 + i_1) size_2 + i_2
    bool sequence = false;                 // 1D: between the sub-layers each rank has some rows (--sp)
    // The residual stream: sequences and columns. Inside of a sub-layer, and of the logits: sequences; and heads,
    // columns of the feed-forward, tokens of the vocabulary.
    Axes stream_rows, stream_columns, inner_rows, heads;
    // Columns (inputs) of the weights that read the stream, and of those that write it; their rows (outputs) are
    // divided as the heads, and as the stream's columns.
    Axes enter_columns, leave_columns;

    int coordinate(int axis) const;
    Part part(const Axes& axes) const;
    AxisSet all() const;
    static AxisSet set_of(const Axes& axes);
    // Is the residual stream divided by columns? Then products that read or write it belong to a ColumnGeometry.
    bool divides_columns() const { return mode != TensorMode::one_d; }
    // The ranks that differ from this one along these axes only, with itself. same_keys: ranks with the same key head.
    std::vector<int> members(AxisSet axes, int same_keys) const;
};
// Error, with the numbers that are possible, where this many ranks are no such grid. depth: of 2.5D; 0: chosen.
TensorLayout tensor_layout(TensorMode mode, int rank, int size, bool sequence = false, int depth = 0);

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
// summa.cu, cube.cu: geometries that divide the stream's columns, too. A product with a weight (O, C), of which each
// rank has a block, needs blocks of other ranks.

// Which of a sub-layer's products: it reads the stream, it writes it, or neither (then it is one of a rank alone).
enum class Crossing : uint8_t { inside, enters, leaves };

class ColumnGeometry {
  public:
    virtual ~ColumnGeometry() = default;

    // As linear.cu's, on the blocks of this rank: weight (its O, its C), and rows and columns of activations as the
    // layout says of the stream and of the inside. dweight is added to, or written; dbias is for the caller: a column
    // sum of dout.
    virtual void forward(Tensor out, Tensor inp, Tensor weight, Tensor bias, Crossing way, cudaStream_t stream) = 0;
    virtual void backward_input(Tensor dinp, Tensor dout, Tensor weight, Crossing way, cudaStream_t stream) = 0;
    virtual void backward_weight(Tensor dweight, Tensor dout, Tensor inp, Crossing way, bool accumulate,
                                 cudaStream_t stream) = 0;
    // The embedding: wte (its tokens, its columns), out and dout rows and columns of the stream. tokens: (B, T) i32 of
    // all ranks, as rows of this rank's wte, or -1.
    virtual void embed(Tensor out, Tensor tokens, Tensor wte, cudaStream_t stream) = 0;
    virtual void embed_backward(Tensor dwte, Tensor tokens, Tensor dout, bool accumulate, cudaStream_t stream) = 0;
    // Inference: every rank has all rows of a step, and its columns of them.
    virtual void forward_whole_rows(Tensor out, Tensor inp, Tensor weight, Tensor bias, Crossing way,
                                    cudaStream_t stream) = 0;
    virtual void embed_whole_rows(Tensor out, Tensor tokens, Tensor wte, cudaStream_t stream) = 0;

    // The statistics of norms: numbers of each row. all = those of all ranks that have the other columns of these rows,
    // in order; or tensor = their sum.
    void gather_statistics(Tensor all, Tensor mine, cudaStream_t stream) { statistics_.all_gather(all, mine, stream); }
    void sum_statistics(Tensor tensor, cudaStream_t stream) { statistics_.all_reduce(tensor, stream); }
    int columns() const { return statistics_.size; }

    struct Product {
        int64_t O = 0, C = 0;  // of the block of the weight that a rank has
    };
    struct Sizes {
        DType dtype = DType::f32, grad_dtype = DType::f32;
        int64_t rows = 0, columns = 0;  // of the stream on this rank
        std::vector<Product> products = {};
        Product embedding = {};  // 0 x 0 where the rank has none: of a pipeline not all ranks do
        int64_t whole_rows = 0;  // of the largest step of inference; 0: none
    };
    virtual void take_memory(const Sizes& sizes, Arena& arena) = 0;

  protected:
    explicit ColumnGeometry(Comm& statistics) : statistics_(statistics) {}

  private:
    Comm& statistics_;
};
// along: the communicator of the ranks that differ from this one along these axes.
std::unique_ptr<ColumnGeometry> make_summa(const TensorLayout& layout, const std::function<Comm*(AxisSet)>& along);
std::unique_ptr<ColumnGeometry> make_cube(const TensorLayout& layout, const std::function<Comm*(AxisSet)>& along);

// ---------------------------------------------------------------------------------------------------------------------
// one_d.cu: 1D: the products are those of a rank alone, and what stands around them is a sum over the ranks. The stream
// is whole on each rank; or `divided`, with sequence parallelism, in a training step: rank r has rows [r N/n, (r + 1)
// N/n).

class OneD {
  public:
    explicit OneD(Comm& comm);
    ~OneD();
    OneD(const OneD&) = delete;
    OneD& operator=(const OneD&) = delete;

    // Computes out from inp on this rank, for any rows of them.
    using Product = std::function<void(Tensor out, Tensor inp)>;
    // A layer that reads the stream, and one that writes it.
    void enter(Tensor out, Tensor stream_rows, bool divided, const Product& product, cudaStream_t stream);
    void leave(Tensor stream_rows, Tensor inp, bool divided, const Product& product, cudaStream_t stream);
    // Their backward, the one that writes first. By input (product: dinp from dout); then, by weight, `use` is given
    // all rows of the stream, or of its gradient. What a reading layer gives to the stream is there after its second
    // call.
    void leave_backward_input(Tensor dinp, Tensor dstream, bool divided, const Product& product, cudaStream_t stream);
    void leave_backward_weight(Tensor dstream, bool divided, const std::function<void(Tensor)>& use);
    void enter_backward_input(Tensor dstream, Tensor dout, bool divided, const Product& product, cudaStream_t stream);
    void enter_backward_weight(Tensor stream_rows, bool divided, const std::function<void(Tensor)>& use,
                               cudaStream_t stream);
    // In place of enter_backward_weight, which comes later: what was given to the stream is there.
    void finish_backward_input(bool divided, cudaStream_t stream);
    // Before a sub-layer's backward: what its reading layer's enter_backward_weight will be given travels meanwhile.
    void prefetch(Tensor stream_rows, bool divided, cudaStream_t stream);
    // The embedding: lookup writes all rows of what this rank has; use is given all rows of the gradient.
    void embed(Tensor stream_rows, bool divided, const std::function<void(Tensor)>& lookup, cudaStream_t stream);
    void embed_backward(Tensor dstream, bool divided, const std::function<void(Tensor)>& use, cudaStream_t stream);

    // N x C: the whole stream. overlap: divided products and messages take turns in n pieces (--tp-overlap).
    void take_memory(int64_t N, int64_t C, DType dtype, bool sequence, bool overlap, Arena& arena);

  private:
    Tensor all(const Tensor& buffer, const Tensor& rows) const;
    void ring_gather(Tensor all, Tensor rows, const std::function<void(Tensor rows, int64_t first)>& use,
                     cudaStream_t stream);
    void ring_sum(Tensor rows, Tensor all, const std::function<void(Tensor part, int64_t first)>& compute,
                  cudaStream_t stream);
    void beside(cudaStream_t stream, cudaEvent_t done, const std::function<void()>& call);
    Comm& comm_;
    cudaStream_t comm_stream_;
    cudaEvent_t reached_, gathered_, summed_, arrived_;
    Tensor all_in_, all_out_, all_dout_;
    std::array<Tensor, 2> travelling_;
    const void* prefetched_ = nullptr;  // the rows that are on their way to all_in_
    bool overlap_ = false;
};

// ---------------------------------------------------------------------------------------------------------------------
// tensor_parallel.cu: what all geometries add up, and when
class TensorParallel {
  public:
    // key_heads: K of the model, before it is divided; where it is less than the ranks, some of them have the same. A
    // model that config_of_rank() has accepted.
    TensorParallel(Comm& comm, const TensorLayout& layout, int64_t key_heads);
    ~TensorParallel();
    const TensorLayout& layout() const { return layout_; }
    int size() const { return comm_.size; }
    // The products that read or write the stream: in 2D, 2.5D and 3D geometry(), which 1D has not.
    ColumnGeometry* geometry() const { return geometry_.get(); }
    OneD& one_d() { return one_d_; }

    // Counts what the calls below need, with activations of N x C numbers of that type on this rank; takes it.
    struct Sizes {
        int64_t N, C;
        DType dtype, grad_dtype;
        std::map<AxisSet, int64_t> shared = {};  // elements of gradients that have sharers, by Param::sharers
        Tensor numbers = {};                     // that a step adds up
        int64_t logits_n = 0;                    // numbers of the logits that gather_columns collects; 0: never
        ColumnGeometry::Sizes geometry = {};
        bool overlap = false;           // --tp-overlap
        std::vector<Tensor> sums = {};  // what is summed beside those: an optimizer's, fp8's histories
    };
    void take_memory(const Sizes& sizes, Arena& arena);

    // tensor = the sum, or the maximum, over all ranks.
    void sum(Tensor tensor, cudaStream_t stream) { comm_.all_reduce(tensor, stream); }
    void max(Tensor tensor, cudaStream_t stream) { comm_.all_reduce(tensor, tensor, ReduceOp::max, stream); }

    // Over the ranks that have the other tokens of the vocabulary, for the same rows: what a loss needs of all logits.
    void max_over_vocabulary(Tensor out, Tensor inp, cudaStream_t stream) {
        vocabulary_->all_reduce(out, inp, ReduceOp::max, stream);
    }
    void sum_over_vocabulary(Tensor tensor, cudaStream_t stream) { vocabulary_->all_reduce(tensor, stream); }
    // Adds the parts of gradients that have sharers: FlatParameters::shared_grads of these axes; the same order on all
    // ranks.
    void sum_shared(AxisSet sharers, const std::vector<Tensor>& parts, cudaStream_t stream);
    // (R, V of a rank) of each rank -> (R, V of all): for drawing a token from a few rows of logits.
    Tensor gather_columns(Tensor columns, cudaStream_t stream);
    // Collective: of a parameter of which each rank gives its part, the whole one on rank 0; elsewhere nothing.
    std::vector<float> collect(const Param& param, const std::vector<float>& part);

  private:
    Comm* along(AxisSet axes);  // the communicator of those ranks; made at the first call, on all ranks at once
    Comm& comm_;
    const TensorLayout layout_;
    const int same_keys_;  // ranks with the same key head
    std::map<AxisSet, std::unique_ptr<Comm>> comms_;
    Comm* vocabulary_ = nullptr;
    std::unique_ptr<ColumnGeometry> geometry_;
    OneD one_d_;
    Tensor packed_, staging_, gathered_, columns_;
};
