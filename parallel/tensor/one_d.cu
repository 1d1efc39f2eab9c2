// parallel/tensor/one_d.cu: tensor parallelism in 1D.          (Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053)
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
// reduce-scatter after a sub-layer and an all-gather of the norm's rows before the next, which send as many bytes
// together. In the backward the rows are gathered once more, because nobody keeps them: half as much again.
//
// Whatever lies inside of a sub-layer and is not divided (a norm of queries and keys, MLA's latents, key heads of which
// there are fewer than ranks) gets a part of its gradient on each rank: Param::sharers. These parts are added once a
// step, not for each micro-batch.
//
// The bill, for N tokens a micro-batch, width C, L blocks, n ranks, e bytes a number of an activation: the bytes of
// what is added up. A rank sends 2 (n - 1) / n times as many:
//
//     forward     all-reduce of N C: the embedding, and twice a block            (2 L + 1) N C e
//     loss        maxima and sums                                                3 N 4
//     backward    all-reduce of N C: twice a block, and the head                 (2 L + 1) N C e
//
// With sequence parallelism, in all-gathers and reduce-scatters of N C, which are half an all-reduce each: forward
// 4 L + 2, backward 6 L + 3.
//
// What is not needed at once travels beside products: the gradient of a reading layer's input while its weight's is
// computed, and the rows for that weight's gradient from the beginning of the sub-layer's backward on. With
// --tp-overlap gathers and sums go around a ring, a piece of the rows at a time, each beside the product of the piece
// before (Wang et al. 2023, "Overlap communication with dependent computation via decomposition in large deep learning
// models"):
//
//     gather, then multiply      piece r is here: multiply it, while r - 1 comes from rank r - 1; and so on
//     multiply, then sum         piece r - 1 is multiplied first, and goes to r + 1, which adds its own product of it,
//                                until rank j has piece j: its sum begins at rank j + 1; 16 bits round at each step
#include "parallel/tensor/tensor.h"

#include "layers/layers.h"

OneD::OneD(Comm& comm) : comm_(comm), comm_stream_(make_stream()) {
    for (cudaEvent_t* event : {&reached_, &gathered_, &summed_, &arrived_}) *event = make_event();
}
OneD::~OneD() {
    cudaStreamSynchronize(comm_stream_);
    for (const cudaEvent_t event : {reached_, gathered_, summed_, arrived_}) cudaEventDestroy(event);
    cudaStreamDestroy(comm_stream_);
}

void OneD::take_memory(int64_t N, int64_t C, DType dtype, bool sequence, bool overlap, Arena& arena) {
    overlap_ = overlap && sequence;
    const int64_t R = N / comm_.size;
    check(!overlap_ || R % 8 == 0, "--tp-overlap: of the ", N, " tokens of a micro-batch (--micro-batch times --seq) ",
          "a piece has ", R, ", and products need multiples of 8: use a multiple of ", 8 * comm_.size);
    const auto none = [&](int64_t n) { return make_tensor(nullptr, dtype, {n}); };
    comm_.count_memory([&] {
        comm_.all_reduce(none(N * C), nullptr);  // samples need it with sequence parallelism, too
        if (!sequence) return;
        comm_.all_gather(none(N * C), none(N * C / comm_.size), nullptr);
        comm_.reduce_scatter(none(N * C / comm_.size), none(N * C), ReduceOp::sum, nullptr);
    });
    if (!sequence) return;
    for (Tensor* all : {&all_in_, &all_out_, &all_dout_}) *all = arena.take("all ranks' rows", dtype, {N, C});
    if (overlap_)
        for (Tensor& piece : travelling_) piece = arena.take("rows on their way", dtype, {N / comm_.size, C});
}

Tensor OneD::all(const Tensor& buffer, const Tensor& rows) const { return buffer.slice(0, rows.rows() * comm_.size); }

// Collectives on their own stream, when `stream` has come here; `done` when they are.
void OneD::beside(cudaStream_t stream, cudaEvent_t done, const std::function<void()>& call) {
    cudaCheck(cudaEventRecord(reached_, stream));
    cudaCheck(cudaStreamWaitEvent(comm_stream_, reached_, 0));
    call();
    cudaCheck(cudaEventRecord(done, comm_stream_));
}

// all = the rows of all ranks; use(rows, first): each piece as soon as it is here.
void OneD::ring_gather(Tensor all, Tensor rows, const std::function<void(Tensor rows, int64_t first)>& use,
                       cudaStream_t stream) {
    const int n = comm_.size, right = (comm_.rank + 1) % n, left = (comm_.rank + n - 1) % n;
    const int64_t R = rows.rows();
    const auto piece = [&](int step) {
        const int64_t first = (comm_.rank + n - step) % n * R;
        return std::pair(all.slice(first, R), first);
    };
    copy_tensor(piece(0).first, rows, stream);
    for (int step = 0; step < n; ++step) {
        if (step + 1 < n)
            beside(stream, arrived_, [&] {
                comm_.group_start();
                comm_.send(piece(step).first, right, comm_stream_);
                comm_.recv(piece(step + 1).first, left, comm_stream_);
                comm_.group_end();
            });
        use(piece(step).first, piece(step).second);
        if (step + 1 < n) cudaCheck(cudaStreamWaitEvent(stream, arrived_, 0));
    }
}

// rows = this rank's rows of the sum over the ranks of `all`; compute(part, first): this rank's part of a piece of it.
void OneD::ring_sum(Tensor rows, Tensor all, const std::function<void(Tensor part, int64_t first)>& compute,
                    cudaStream_t stream) {
    const int n = comm_.size, right = (comm_.rank + 1) % n, left = (comm_.rank + n - 1) % n;
    const int64_t R = rows.rows();
    for (int step = 0; step < n; ++step) {
        const int64_t first = (comm_.rank + 2 * n - 1 - step) % n * R;
        const Tensor part = all.slice(first, R), sum = step + 1 < n ? part : rows;
        compute(part, first);
        if (step > 0) {
            cudaCheck(cudaStreamWaitEvent(stream, arrived_, 0));
            residual_add(sum, part, travelling_[static_cast<size_t>(step % 2)], stream);
        }
        if (step + 1 < n)
            beside(stream, arrived_, [&] {
                comm_.group_start();
                comm_.send(sum, right, comm_stream_);
                comm_.recv(travelling_[static_cast<size_t>((step + 1) % 2)], left, comm_stream_);
                comm_.group_end();
            });
    }
}

// ---------------------------------------------------------------------------------------------------------------------

void OneD::enter(Tensor out, Tensor stream_rows, bool divided, const Product& product, cudaStream_t stream) {
    if (!divided) return product(out, stream_rows);
    const Tensor inp = all(all_in_, stream_rows);
    if (overlap_)
        return ring_gather(
            inp, stream_rows, [&](Tensor rows, int64_t first) { product(out.slice(first, rows.rows()), rows); },
            stream);
    comm_.all_gather(inp, stream_rows, stream);
    product(out, inp);
}

void OneD::leave(Tensor stream_rows, Tensor inp, bool divided, const Product& product, cudaStream_t stream) {
    if (!divided) {
        product(stream_rows, inp);
        return comm_.all_reduce(stream_rows, stream);
    }
    const Tensor out = all(all_out_, stream_rows);
    if (overlap_)
        return ring_sum(
            stream_rows, out, [&](Tensor part, int64_t first) { product(part, inp.slice(first, part.rows())); },
            stream);
    product(out, inp);
    comm_.reduce_scatter(stream_rows, out, ReduceOp::sum, stream);
}

void OneD::leave_backward_input(Tensor dinp, Tensor dstream, bool divided, const Product& product,
                                cudaStream_t stream) {
    if (!divided) return product(dinp, dstream);
    const Tensor dout = all(all_dout_, dstream);
    if (overlap_)
        return ring_gather(
            dout, dstream, [&](Tensor rows, int64_t first) { product(dinp.slice(first, rows.rows()), rows); }, stream);
    comm_.all_gather(dout, dstream, stream);
    product(dinp, dout);
}

void OneD::leave_backward_weight(Tensor dstream, bool divided, const std::function<void(Tensor)>& use) {
    use(divided ? all(all_dout_, dstream) : dstream);  // gathered by leave_backward_input
}

void OneD::enter_backward_input(Tensor dstream, Tensor dout, bool divided, const Product& product,
                                cudaStream_t stream) {
    if (!divided) {
        product(dstream, dout);
        return beside(stream, summed_, [&] { comm_.all_reduce(dstream, comm_stream_); });
    }
    const Tensor part = all(all_out_, dstream);
    if (overlap_) {
        ring_sum(
            dstream, part, [&](Tensor rows, int64_t first) { product(rows, dout.slice(first, rows.rows())); }, stream);
        return;  // the sum has been made on the stream itself
    }
    product(part, dout);
    beside(stream, summed_, [&] { comm_.reduce_scatter(dstream, part, ReduceOp::sum, comm_stream_); });
}

void OneD::prefetch(Tensor stream_rows, bool divided, cudaStream_t stream) {
    if (!divided) return;
    beside(stream, gathered_, [&] { comm_.all_gather(all(all_in_, stream_rows), stream_rows, comm_stream_); });
    prefetched_ = stream_rows.data;
}

void OneD::enter_backward_weight(Tensor stream_rows, bool divided, const std::function<void(Tensor)>& use,
                                 cudaStream_t stream) {
    if (divided) {
        if (prefetched_ != stream_rows.data) prefetch(stream_rows, divided, stream);
        prefetched_ = nullptr;
        cudaCheck(cudaStreamWaitEvent(stream, gathered_, 0));
    }
    use(divided ? all(all_in_, stream_rows) : stream_rows);
    finish_backward_input(divided, stream);
}

void OneD::finish_backward_input(bool divided, cudaStream_t stream) {
    if (!divided || !overlap_) cudaCheck(cudaStreamWaitEvent(stream, summed_, 0));
}

void OneD::embed(Tensor stream_rows, bool divided, const std::function<void(Tensor)>& lookup, cudaStream_t stream) {
    const Tensor out = divided ? all(all_out_, stream_rows) : stream_rows;
    lookup(out);
    if (divided) comm_.reduce_scatter(stream_rows, out, ReduceOp::sum, stream);
    else comm_.all_reduce(stream_rows, stream);
}

void OneD::embed_backward(Tensor dstream, bool divided, const std::function<void(Tensor)>& use, cudaStream_t stream) {
    if (divided) comm_.all_gather(all(all_dout_, dstream), dstream, stream);
    use(divided ? all(all_dout_, dstream) : dstream);
}
