// model/in_flight.cu: the activations of the micro-batches that are under way on a rank of a pipeline.
//
//     forward of (micro-batch 2, chunk 0)   takes   set set set | input input   3 blocks; the chunk's own input is
//                                                                               the tensor from the stage before
//     backward, or backward by weight       gives them back
//
// With --recompute N a chunk keeps only inputs, and the sets of N blocks are those of all chunks: their contents
// are needed within one forward or one backward, which runs the forward again, N blocks at a time.
#include "model/sublayer.h"

#include <algorithm>

Pieces chunk_pieces(const Precision& precision, const Recompute& recompute, int64_t n_blocks) {
    Pieces pieces;
    pieces.sets = recompute.every > 0 ? 0 : n_blocks;
    pieces.inputs = (recompute.every > 0 ? ceil_div(n_blocks, recompute.every) : n_blocks) - 1;
    pieces.scales = precision.fp8 == Fp8Recipe::none ? 0 : n_blocks;
    return pieces;
}

namespace {

// A piece of each kind from an arena.
struct PieceTaker {
    const Model& model;
    const int64_t B, T;  // of this rank
    Arena& arena;
    const int64_t rows, head_rows;
    SavedTaker take;

    PieceTaker(const Model& its_model, int64_t all_B, int64_t its_T, const Recompute& recompute, Arena& its_arena)
        : model(its_model), B(sequences_of_rank(model, all_B)), T(its_T), arena(its_arena),
          rows(rows_of_rank(model, B * T)), head_rows(recompute.head_rows(B * T)),
          take(arena, model.precision.dtype, B, T, rows, recompute.selective) {}

    BlockSaved set() { return take_block(model, take, {}); }
    Tensor input() { return take.keep_rows("residual stream", model.local.C); }
    Tensor scales() {
        const int64_t n = static_cast<int64_t>(block_linear_shapes(model.config).size());
        return arena.take("fp8 scales", DType::f32, {n, 2});
    }
    Activations head() {
        Activations acts;
        acts.B = B, acts.T = T;
        take_losses(model, acts, arena);
        take_head(model, acts, rows, head_rows, {}, arena);
        return acts;
    }
    // Of the blocks between two kept inputs.
    std::vector<BlockSaved> shared(const Recompute& recompute, int64_t largest_chunk) {
        std::vector<BlockSaved> sets;
        for (int64_t i = 0; i < std::min(recompute.every, largest_chunk); ++i) {
            sets.push_back(set());
            if (i > 0) sets.back().norm1.sum = input();
        }
        return sets;
    }
};

}  // namespace

PieceBytes piece_bytes(const Model& model, int64_t B, int64_t T, const Recompute& recompute, int64_t largest_chunk) {
    const auto bytes = [&](const auto& take) {
        Arena arena("a piece");
        PieceTaker pieces(model, B, T, recompute, arena);
        take(pieces);
        return static_cast<int64_t>(arena.bytes());
    };
    const int64_t one = bytes([](PieceTaker&p) { p.set(); }), two = bytes([](PieceTaker&p) { p.set(), p.set(); });
    PieceBytes of;
    of.set = two - one;  // without what selective recomputation shares
    of.input = bytes([](PieceTaker& p) { p.input(); });
    of.scales = bytes([](PieceTaker& p) { p.scales(); });
    of.head = model.part.head ? bytes([](PieceTaker& p) { p.head(); }) : 0;
    of.shared = one - of.set + bytes([&](PieceTaker& p) { p.shared(recompute, largest_chunk); });
    return of;
}

template <class Piece>
Piece InFlight::Pool<Piece>::take(const char* what) {
    check(!free.empty(), "activations in flight: all ", size, " ", what,
          " are taken: the schedule has more alive at once than the memory was taken for");
    const Piece piece = free.back();
    free.pop_back();
    return piece;
}

void InFlight::take_memory(const Model& model, int64_t B, int64_t T, const Recompute& recompute, int64_t largest_chunk,
                           const Pieces& most, Arena& arena) {
    PieceTaker pieces(model, B, T, recompute, arena);
    recompute_ = recompute;
    most_taken_ = {};
    const auto fill = [](auto& pool, int64_t n, const auto& take) {
        pool.free.clear();
        pool.size = n;
        for (int64_t i = 0; i < n; ++i) pool.free.push_back(take());
        std::ranges::reverse(pool.free);  // the first one is taken first
    };
    fill(sets_, most.sets, [&] { return pieces.set(); });
    fill(inputs_, most.inputs, [&] { return pieces.input(); });
    fill(scales_, most.scales, [&] { return pieces.scales(); });
    fill(heads_, most.heads, [&] { return pieces.head(); });
    shared_ = pieces.shared(recompute, largest_chunk);
}

void InFlight::take_chunk(Activations& acts, int64_t first, int64_t last, Tensor input) {
    const int64_t every = recompute_.every;
    for (int64_t l = first; l < last; ++l) {
        const int64_t in_segment = every > 0 ? (l - first) % every : 0;
        BlockSaved saved = every > 0 ? shared_[static_cast<size_t>(in_segment)] : sets_.take("blocks");
        if (l == first) saved.norm1.sum = input;
        else if (in_segment == 0) saved.norm1.sum = inputs_.take("inputs of blocks");
        if (scales_.size > 0) saved.fp8 = scales_.take("scales of blocks");
        acts.blocks[static_cast<size_t>(l)] = saved;
    }
    const Pieces now = taken();
    for (int64_t Pieces::*kind : {&Pieces::sets, &Pieces::inputs, &Pieces::scales})
        most_taken_.*kind = std::max(most_taken_.*kind, now.*kind);
}

void InFlight::give_back_chunk(Activations& acts, int64_t first, int64_t last) {
    const int64_t every = recompute_.every;
    for (int64_t l = first; l < last; ++l) {
        BlockSaved& saved = acts.blocks[static_cast<size_t>(l)];
        if (l > first && (every == 0 || (l - first) % every == 0)) inputs_.give_back(saved.norm1.sum);
        if (saved.fp8) scales_.give_back(saved.fp8);
        saved.norm1.sum = saved.fp8 = {};
        if (every == 0) sets_.give_back(saved);
        saved = {};
    }
}

void InFlight::take_head(Activations& acts, Tensor input) {
    const Activations head = heads_.take("heads");
    acts.final_norm = head.final_norm, acts.logits = head.logits, acts.losses = head.losses;
    acts.max = head.max, acts.all_max = head.all_max, acts.sums = head.sums;
    acts.final_norm.sum = input;
    most_taken_.heads = std::max(most_taken_.heads, taken().heads);
}

void InFlight::give_back_head(Activations& acts) {
    Activations head;
    head.final_norm = acts.final_norm, head.logits = acts.logits, head.losses = acts.losses;
    head.max = acts.max, head.all_max = acts.all_max, head.sums = acts.sums;
    heads_.give_back(head);
    acts.final_norm = {};
    acts.logits = acts.losses = acts.max = acts.all_max = acts.sums = {};
}

Pieces InFlight::taken() const {
    const auto of = [](const auto& pool) { return pool.size - std::ssize(pool.free); };
    return {of(sets_), of(inputs_), of(scales_), of(heads_)};
}

Activations take_micro_batch(const Model& model, int64_t B, int64_t T, const Recompute& recompute, Arena& arena) {
    Activations acts;
    acts.B = sequences_of_rank(model, B), acts.T = T;
    acts.divided_rows = rows_of_rank(model, acts.B * T) < acts.B * T;
    acts.recompute = recompute;
    acts.blocks.resize(model.blocks.size());
    take_tokens(model, acts, B * T, arena);
    return acts;
}
