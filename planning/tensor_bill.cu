// planning/tensor_bill.cu: what tensor parallelism sends, in every geometry: the formulas that stand at the top of
// parallel/tensor/tensor.h, summa.cu and cube.cu, added up over the work of a step. The account of a run holds what was
// sent against them, to the byte; --plan prints them side by side.
#include "model/sublayer.h"
#include "planning/planning.h"

namespace {

// All numbers are of all ranks of a group together, for one micro-batch of N tokens.
struct Bill {
    const Model& model;
    const TensorLayout& layout;
    int64_t N, e, g;  // e, g: bytes of an activation or weight, of a gradient

    int64_t side(int axis) const { return layout.sizes[static_cast<size_t>(axis)]; }
    bool is_cube() const { return layout.mode == TensorMode::three_d; }

    // A whole weight, as the blocks of all ranks that differ.
    struct Whole {
        int64_t O, C;
    };
    Whole whole(const Linear& linear) const {
        const bool leaves = linear.crossing == Crossing::leaves;
        return {linear.weight.rows() * layout.part(leaves ? layout.stream_columns : layout.heads).of,
                linear.weight.cols() * layout.part(leaves ? layout.leave_columns : layout.enter_columns).of};
    }
    // 1D: an all-reduce of the stream is two of these.
    int64_t half() const { return (layout.size - 1) * N * model.config.C * e; }

    int64_t forward(const Linear& linear) const {
        if (linear.crossing == Crossing::inside) return 0;
        if (!layout.divides_columns())
            return linear.crossing == Crossing::leaves || layout.sequence ? 2 * half() / (1 + layout.sequence) : 0;
        const auto [O, C] = whole(linear);
        if (is_cube()) return (side(0) - 1) * (N * C + O * C + N * O) * e;
        return (side(1) - 1) * (N * C + side(0) * O * C) * e;
    }
    // By input and by weight.
    int64_t backward(const Linear& linear) const {
        if (linear.crossing == Crossing::inside) return 0;
        const bool enters = linear.crossing == Crossing::enters;
        if (!layout.divides_columns()) {
            // --sp: what left is gathered once, for both products; what entered is gathered again, and summed.
            if (layout.sequence) return (enters ? 2 : 1) * half();
            return enters ? 2 * half() : 0;
        }
        const auto [O, C] = whole(linear);
        if (is_cube()) return (side(0) - 1) * ((N * O + O * C + N * C) * e + (N * C + N * O) * e + O * C * g);
        return (side(1) - 1) * (2 * (N * C + side(0) * O * C) * e + side(0) * O * C * (g - e));
    }
    int64_t norm_forward() const {
        const int64_t n = layout.part(layout.stream_columns).of;
        return n * (n - 1) * N * 8;
    }
    int64_t norm_backward() const { return 2 * (layout.part(layout.stream_columns).of - 1) * N * 8; }
    int64_t embedding(bool is_backward) const {
        const int64_t C = model.config.C, V = vocabulary_rows(model.config, layout) * layout.part(layout.heads).of;
        if (!layout.divides_columns()) return layout.sequence ? half() : is_backward ? 0 : 2 * half();
        if (is_cube()) return (side(0) - 1) * (N * C * e + V * C * (is_backward ? g : e));
        return (side(1) - 1) * N * C * e + N * C / side(1) * (side(1) - 1) * e;
    }
    int64_t loss() const { return 2 * (layout.part(layout.heads).of - 1) * N * 3 * 4; }

    int64_t block_forward(bool last_product) const {
        Block block = model.blocks[0];
        int64_t bytes = 2 * norm_forward();
        for (const Linear* linear : linears(block)) bytes += forward(*linear);
        return last_product ? bytes : bytes - forward(block.feed_forward.linears[1]);
    }
    int64_t block_backward(bool selective) const {
        Block block = model.blocks[0];
        int64_t bytes = 2 * norm_backward() + (selective ? 2 * norm_forward() : 0);
        for (const Linear* linear : linears(block)) bytes += backward(*linear);
        return bytes;
    }
    int64_t visit(const Visit& visit, bool selective) const {
        switch (visit.work) {
            case Work::embed: return embedding(false);
            case Work::forward_block: return block_forward(true);
            case Work::forward_head: return norm_forward() + forward(model.head);
            case Work::backward_head: return norm_backward() + backward(model.head);
            case Work::recompute_block: return block_forward(!visit.last);
            case Work::backward_block: return block_backward(selective);
            case Work::backward_embedding: return embedding(true);
        }
        return 0;
    }
    int64_t micro_batch(const Recompute& recompute) const {
        int64_t bytes = loss();
        for (const Visit& each : forward_visits(model.config)) bytes += visit(each, false);
        for (const Visit& each : backward_visits(model.config, recompute)) bytes += visit(each, recompute.selective);
        return bytes;
    }
    // Once a step: gradients that ranks have parts of.
    int64_t shared_gradients() const {
        int64_t bytes = 0;
        const int64_t heads = layout.part(layout.heads).of;
        for (const Param& param : model.params) {
            if (param.sharers == 0) continue;
            const int64_t same = static_cast<int64_t>(
                layout.members(param.sharers, static_cast<int>(std::max<int64_t>(1, heads / model.config.K))).size());
            bytes += layout.size / same * 2 * (same - 1) * param.value.n() * g;
        }
        return bytes;
    }
};

}  // namespace

TensorTraffic tensor_traffic(const Model& model, int64_t N, const Recompute& recompute) {
    const Bill bill{model, model.layout, N, static_cast<int64_t>(dtype_bytes(model.precision.dtype)),
                    static_cast<int64_t>(dtype_bytes(model.precision.grad_dtype))};
    return {bill.micro_batch(recompute), bill.shared_gradients()};
}
