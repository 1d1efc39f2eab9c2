// planning/tensor_bill.cu: what tensor parallelism sends, in every geometry: the formulas that stand at the top of
// parallel/tensor/one_d.cu, summa.cu and cube.cu, added up over the work of a step. The account of a run holds what was
// sent against them, to the byte; --plan prints them side by side, with the time that they take on links:
//
//     seconds = bytes that a rank sends / bandwidth + messages one after the other * latency
//
// which is what a step waits for if nothing of it is hidden behind computing.
#include "model/sublayer.h"
#include "planning/planning.h"

#include <bit>
#include <cstdio>

namespace {

// Bytes are of all ranks of a group together, for one micro-batch of N tokens.
struct Bill {
    const Model& model;
    const TensorLayout& layout;
    int64_t N, e, g;  // e, g: bytes of an activation or weight, of a gradient

    int64_t side(int axis) const { return layout.sizes[static_cast<size_t>(axis)]; }
    bool is_cube() const { return layout.mode == TensorMode::three_d; }

    // Rows and columns of a whole weight, of which each rank has a block.
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
    int64_t all(const std::vector<Visit>& visits, bool selective) const {
        int64_t bytes = 0;
        for (const Visit& each : visits)
            bytes += visit(each, selective) + (each.work == Work::forward_head ? loss() : 0);
        return bytes;
    }
    // Messages one after the other in a forward and a backward, all products of all blocks: an all-gather or
    // reduce-scatter on a ring of n has n - 1, a broadcast log2 n, a sum at one rank, to which the others send at the
    // same time, 1.
    int64_t messages() const {
        Block block = model.blocks[0];
        int64_t products = 0, leaving = 0;
        for (const Linear* linear : linears(block)) {
            products += linear->crossing != Crossing::inside;
            leaving += linear->crossing == Crossing::leaves;
        }
        const int64_t L = model.n_blocks();
        if (!layout.divides_columns()) return (layout.size - 1) * L * leaving * (layout.sequence ? 5 : 4);
        if (is_cube()) return (side(0) - 1) * (3 + 3 + 3) * L * products;
        const int64_t q = side(1), broadcast = std::bit_width(static_cast<uint64_t>(q - 1));
        return q * (4 * broadcast + 2) * L * products;
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

Bill bill_of(const Model& model, int64_t N) {
    return {model, model.layout, N, static_cast<int64_t>(dtype_bytes(model.precision.dtype)),
            static_cast<int64_t>(dtype_bytes(model.precision.grad_dtype))};
}

}  // namespace

TensorTraffic tensor_traffic(const Model& model, int64_t N, const std::vector<Visit>& visits, bool selective) {
    const Bill bill = bill_of(model, N);
    return {bill.all(visits, selective), bill.shared_gradients()};
}

namespace {

struct Link {
    const char* name;
    double bytes_per_s, latency_s;
};
// What a GPU sends in one direction, as NVIDIA states it for H100 (NVLink 4: 900 GB/s both ways) and for a 400 Gb/s
// adapter a GPU (NDR). Latencies are orders of magnitude, of a message of a collective.
constexpr Link kLinks[] = {{"NVLink", 450e9, 3e-6}, {"InfiniBand", 50e9, 6e-6}};

void print_row(const Trainer& t, const TensorLayout& layout, const char* name, int64_t depth) {
    const TrainOptions& o = t.options;
    Arena weights("weights"), grads("gradients"), masters("master weights"), activations("activations");
    const Model model = build_model(t.config, o.precision, o.seq, weights, grads, masters, {}, layout);
    take_activations(model, t.micro_batch, o.rank_seq(), o.recompute, activations);
    const TensorTraffic traffic = tensor_traffic(model, t.micro_batch * o.rank_seq(),
                                                 visits_of_micro_batch(model, o.recompute), o.recompute.selective);
    const int64_t M = t.micro_batches();
    const double bytes = static_cast<double>(M * traffic.visits + traffic.shared_gradients) / layout.size;
    std::string grid;
    if (depth > 0 || layout.mode == TensorMode::three_d)
        grid = concat(layout.sizes[0], " x ", layout.sizes[1], " x ", layout.sizes[2]);
    else if (layout.mode == TensorMode::two_d) grid = concat(layout.sizes[1], " x ", layout.sizes[2]);
    std::printf("  %-8s %-12s %10s %12s %12s", name, grid.c_str(), human_count(static_cast<double>(model.n)).c_str(),
                human_bytes(static_cast<double>(activations.bytes())).c_str(), human_bytes(bytes).c_str());
    for (const Link& link : kLinks)
        std::printf(" %11s", human_seconds(bytes / link.bytes_per_s +
                                           static_cast<double>(M * bill_of(model, 0).messages()) * link.latency_s)
                                 .c_str());
    std::printf("\n");
}

}  // namespace

void print_tensor_bills(const Trainer& t) {
    const int n = static_cast<int>(t.options.tp);
    // A rank of a pipeline has some of the blocks, of several micro-batches: its own row of the plan says how much.
    std::printf(
        "geometry of %d ranks that divide each layer%s: what one of them has and sends; times if nothing is hidden\n",
        n, t.pipeline ? ", of the whole model, without --pp" : "");
    std::printf("  %-21s %10s %12s %12s", "", "parameters", "activations", "sent a step");
    for (const Link& link : kLinks) std::printf(" %11s", link.name);
    std::printf("\n");
    struct Kind {
        TensorMode mode;
        bool sequence;
        const char* name;
    };
    for (const Kind& kind : {Kind{TensorMode::one_d, false, "1d"},
                             {TensorMode::one_d, true, "1d --sp"},
                             {TensorMode::two_d, false, "2d"},
                             {TensorMode::two_half_d, false, "2.5d"},
                             {TensorMode::three_d, false, "3d"}}) {
        try {
            const bool deep = kind.mode == TensorMode::two_half_d;
            print_row(t, tensor_layout(kind.mode, 0, n, kind.sequence, deep ? static_cast<int>(t.options.tp_depth) : 0),
                      kind.name, deep);
        } catch (const Error& error) {
            std::printf("  %-8s not possible: %s\n", kind.name, error.what());
        }
    }
}
