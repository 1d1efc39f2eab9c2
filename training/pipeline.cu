// training/pipeline.cu: the part of a step that differs where the layers are divided among ranks (--pp): the forward
// and backward of all micro-batches, in the order of a schedule (parallel/pipeline); and what ranks with the same
// weights add.
//
// A rank has the blocks of its stages, side by side in one Model, with the embedding and the head if they are its. What
// a micro-batch saves comes from pools as large as the schedule says (model/in_flight.cu).
//
// The head and the loss are computed in the backward of the last stage, right before their own backward: so there are
// logits of one micro-batch at a time. Where backwards by weight come later, they keep theirs (the logits' gradients)
// until then.
//
// Sums. A weight's gradients are added in the order of the micro-batches, whatever the schedule, and the gradients of a
// tied embedding are those of the embedding plus those of the head: so all schedules give the same bits. In DualPipe
// two ranks have each stage, and half of the micro-batches each; their sums are added as those of two data-parallel
// ranks.
#include "training/training.h"

#include <algorithm>
#include <numeric>

namespace {

// What backwards by input leave for backwards by weight, at most at once: of this many blocks, of this many heads.
struct Waiting {
    int64_t blocks = 0, heads = 0;
};
Waiting waiting_for_weights(const PipelineSchedule& schedule, int rank, const std::vector<int64_t>& n_blocks) {
    Waiting now, most;
    for (const Action& action : schedule.ranks[static_cast<size_t>(rank)]) {
        const int64_t n = n_blocks[static_cast<size_t>(action.stage)], head = action.stage + 1 == schedule.n_stages;
        if (action.what == Do::backward_input) now.blocks += n, now.heads += head;
        most = {std::max(most.blocks, now.blocks), std::max(most.heads, now.heads)};
        if (action.what == Do::backward_weight) now.blocks -= n, now.heads -= head;
    }
    return most;
}

// The same table with each backward by weight at once.
PipelineSchedule with_backward_at_once(PipelineSchedule schedule) {
    for (std::vector<Action>& actions : schedule.ranks) {
        std::erase_if(actions, [](const Action& action) { return action.what == Do::backward_weight; });
        for (Action& action : actions)
            if (action.what == Do::backward_input) action.what = Do::backward;
    }
    return schedule;
}

}  // namespace

// A step's table, or that of this many steps that run at once.
PipelineSchedule schedule_of_steps(const TrainOptions& o, int64_t micro_batches, int64_t steps) {
    ScheduleOptions options = schedule_options(o, steps * micro_batches);
    options.per_update = static_cast<int>(micro_batches);
    return make_schedule(options);
}

Pipeline::Pipeline(Trainer& trainer, Comm& ranks)
    : t_(trainer), ranks_(ranks),
      schedule_(schedule_of_steps(t_.options, t_.micro_batches(), steps_at_once(t_.options))),
      n_blocks_(cut_stages(t_.config, schedule_.n_stages, t_.options.seq, t_.options.stages)),
      stages_(stages_of(ranks.rank)), runner_(ranks, schedule_) {
    const std::vector<int> stages = schedule_.stages_of(ranks.rank);
    for (size_t i = 0; i < stages.size(); ++i) {
        const auto [first, n] = stages_.chunks[i];
        chunks_[stages[i]] = {first, first + n};
        largest_chunk_ = std::max(largest_chunk_, n);
    }
    // Ranks that have something in common: the two ends of a tied embedding, the two ranks with the same stages.
    const int last = ranks.size - 1, other = last - ranks.rank;
    const bool at_end = ranks.rank == 0 || ranks.rank == last;
    std::vector<int> members = {ranks.rank};
    if ((has_twins() || (ties_two_ranks() && at_end)) && other != ranks.rank)
        members = {std::min(ranks.rank, other), std::max(ranks.rank, other)};
    twin_ = ranks.split(members, "pp twins");
    if (!validates_later(t_.options)) return;
    std::vector<int> all(static_cast<size_t>(ranks.size));
    std::iota(all.begin(), all.end(), 0);
    numbers_ = ranks.split(all, "pp numbers");
    numbers_stream_ = make_stream();
    reached_ = make_event();
    if (ranks.is_plan()) return;
    // Its hosts meet at once, as those of the runner's links do: the last rank's first message goes to one that may
    // need forwards of the last rank before it comes to the receive.
    const Tensor words = numbers_->host_words().slice(0, 2 * ranks.size);
    cudaCheck(cudaMemsetAsync(words.data, 0, words.bytes(), numbers_stream_));
    numbers_->all_to_all(words.slice(0, ranks.size), words.slice(ranks.size, ranks.size), numbers_stream_);
    cudaCheck(cudaStreamSynchronize(numbers_stream_));
}

Pipeline::~Pipeline() {
    if (!numbers_stream_) return;
    cudaStreamSynchronize(numbers_stream_);
    cudaEventDestroy(reached_);
    cudaStreamDestroy(numbers_stream_);
}

bool Pipeline::ties_two_ranks() const { return t_.config.tied && schedule_.placement == Placement::loop; }
RankStages Pipeline::stages_of(int rank) const { return rank_stages(t_.config, n_blocks_, schedule_.stages_of(rank)); }
bool Pipeline::is_last(const Action& action) const { return action.stage + 1 == schedule_.n_stages; }

Activations Pipeline::take_memory() {
    Arena& arena = t_.memory.activations;
    const TrainOptions& o = t_.options;
    const Model& model = t_.model;
    const int64_t B = t_.micro_batch, T = o.rank_seq();
    micro_batches_.clear();
    for (int micro = 0; micro < schedule_.m; ++micro) {
        Activations acts = take_micro_batch(model, B, T, o.recompute, arena);
        if (o.mask_documents) take_documents(model, acts, o.seq, arena);
        if (o.has_positions()) take_positions(acts, arena);
        // A plan may have 100,000 of them, with a list of all blocks each: while memory is counted the first is enough.
        if (micro == 0 || !arena.counting()) micro_batches_.push_back(std::move(acts));
    }
    const Kept kept = planned_pieces(schedule_, ranks_.rank);
    in_flight_.take_memory(model, B, T, o.recompute, largest_chunk_, kept.pieces, arena);
    later_.take_memory(model, B, T, kept.later, arena);
    const Tensor stream = t_.workspace.branch;  // of the shape of the residual stream here
    const int n_borders = std::max(kept.borders, border_tensors(forward_schedule(schedule_, schedule_.m), ranks_.rank));
    runner_.take_memory(n_borders, stream.rows(), stream.cols(), stream.dtype, arena);

    if (schedule_.asynchronous) take_versions();
    if (validates_later(o)) take_validation_memory();
    ranks_.count_memory([&] { ranks_.all_reduce(t_.step_sums(), nullptr); });
    ranks_.take_memory(t_.memory.communication);
    twin_->count_memory([&] {
        max_over_twins(model.fp8_states, nullptr);
        if (has_twins()) for_all_gradients([&](const Tensor& grads) { twin_->all_reduce(grads, nullptr); });
        else if (twin_->size > 1) twin_->all_reduce(stages_.part.embedding ? model.dwte : model.head.dweight, nullptr);
    });
    twin_->take_memory(t_.memory.communication);
    return micro_batches_[0];
}

// What the table says is alive at once on a rank.
Pipeline::Kept Pipeline::planned_pieces(const PipelineSchedule& schedule, int rank) const {
    const auto largest = [&](int64_t Pieces::*kind) {
        return peak_alive(schedule, rank, [&](int stage) {
            return chunk_pieces(t_.model.precision, t_.options.recompute, n_blocks_[static_cast<size_t>(stage)]).*kind;
        });
    };
    const Waiting waiting = waiting_for_weights(schedule, rank, n_blocks_);
    Kept kept;
    kept.pieces = {largest(&Pieces::sets), largest(&Pieces::inputs), largest(&Pieces::scales),
                   stages_of(rank).part.head ? std::max<int64_t>(1, waiting.heads) : 0};
    kept.borders = border_tensors(schedule, rank);
    kept.later = waiting.blocks;
    return kept;
}

int64_t Pipeline::bytes_of(int rank, const Kept& kept) const {
    Model model = t_.model;  // of which the sizes and the part are asked for
    const RankStages stages = stages_of(rank);
    model.part = stages.part;
    int64_t largest_chunk = 0;
    for (const Range& chunk : stages.chunks) largest_chunk = std::max(largest_chunk, chunk.n);
    const int64_t B = t_.micro_batch, T = t_.options.rank_seq();
    Arena later("later");
    WeightGradients().take_memory(model, B, T, 1, later);
    return piece_bytes(model, B, T, t_.options.recompute, largest_chunk).of(kept.pieces) +
           kept.borders * static_cast<int64_t>(t_.workspace.branch.bytes()) +
           kept.later * static_cast<int64_t>(later.bytes());
}

PipelineTraffic Pipeline::planned(int rank) const {
    const int64_t messages = messages_sent(schedule_, rank) / steps_at_once(t_.options);
    const Kept kept = planned_pieces(schedule_, rank), at_once = planned_pieces(with_backward_at_once(schedule_), rank);
    const int64_t bytes = bytes_of(rank, kept);
    return {.activations = bytes,
            .longer = bytes - bytes_of(rank, at_once),
            .messages = messages,
            .bytes = messages * static_cast<int64_t>(t_.workspace.branch.bytes())};
}

PipelineTraffic Pipeline::measured() const {
    const Kept kept{in_flight_.most_taken(), runner_.most_borders(), later_.most_blocks()};
    return {.activations = bytes_of(ranks_.rank, kept),
            .messages = messages_,
            .bytes = messages_ * static_cast<int64_t>(t_.workspace.branch.bytes())};
}

void Pipeline::run_table(const PipelineSchedule& schedule, cudaStream_t stream) {
    const int64_t before = runner_.messages_sent();
    runner_.run(schedule, *this, stream);
    messages_ = runner_.messages_sent() - before;
}

void Pipeline::for_all_gradients(const std::function<void(const Tensor&)>& call) const {
    for (size_t u = 0; u < t_.model.units.size(); ++u)
        if (const Tensor grads = t_.model.updated_grads(u); grads.n() > 0) call(grads);
}

// ---------------------------------------------------------------------------------------------------------------------
// A step

void Pipeline::accumulate(int64_t first_row, cudaStream_t stream) {
    training_ = true;
    for (size_t micro = 0; micro < micro_batches_.size(); ++micro)
        upload_micro_batch(t_, micro_batches_[micro], first_row + static_cast<int64_t>(micro) * t_.micro_batch, stream);
    run_table(schedule_, stream);
    reduce_gradients(stream);
}

// Of the gradients of all micro-batches of a step the sums over the ranks with the same weights. A tied gradient lies
// in two places. A sum in the order of the ranks is the same in both; one in another order may depend on the place, and
// then the places are added last: otherwise the two would become different weights, of which a checkpoint has one.
void Pipeline::reduce_gradients(cudaStream_t stream) {
    const bool in_rank_order = t_.options.data_parallel.zero > 0 || t_.world.adds_in_rank_order();
    if (in_rank_order) add_tied(stream);
    // For data parallelism the step's gradients are those of the last of two micro-batches: complete, last units first.
    t_.data_parallel.begin_backward(t_.model, 1);
    for (size_t u = t_.model.units.size(); u-- > 0;) t_.data_parallel.end_grads(t_.model, u, stream);
    t_.data_parallel.finish_grads(stream);
    if (!in_rank_order) add_tied(stream);
    if (has_twins()) for_all_gradients([&](const Tensor& grads) { twin_->all_reduce(grads, stream); });
    add_shared_gradients(t_, stream);
}

void Pipeline::max_over_twins(const Tensor& values, cudaStream_t stream) {
    if (has_twins() && values.exists()) twin_->all_reduce(values, values, ReduceOp::max, stream);
}

// d tied = d embedding + d head, in both places.
void Pipeline::add_tied(cudaStream_t stream) {
    const Model& model = t_.model;
    if (!t_.config.tied || !(stages_.part.embedding || stages_.part.head)) return;
    if (stages_.part.embedding && stages_.part.head) {
        residual_add(model.dwte, model.dwte, model.head.dweight, stream);
        copy_tensor(model.head.dweight, model.dwte, stream);
    } else twin_->all_reduce(stages_.part.embedding ? model.dwte : model.head.dweight, stream);
}

void Pipeline::forward(const Action& action, Tensor in, Tensor out, cudaStream_t stream) {
    Activations& acts = micro_batches_[static_cast<size_t>(action.micro)];
    const auto [first, last] = chunks_.at(action.stage);
    const Model& model = model_of(action);
    in_flight_.take_chunk(acts, first, last, in);
    if (action.stage == 0) embed_forward(model, acts, t_.workspace, in, stream);
    forward_blocks(model, acts, t_.workspace, first, last, in, out, stream, training_);
    if (is_last(action)) last_out_[action.micro] = out;
    if (training_) return forwards_.insert({action.micro, action.stage}), void();
    in_flight_.give_back_chunk(acts, first, last);
    if (!is_last(action)) return;
    in_flight_.take_head(acts, out);
    head_forward(model, acts, t_.workspace, out, stream);
    loss_forward(model, acts, stream);
    t_.add_losses_once(acts, true, stream);
    in_flight_.give_back_head(acts);
}

// Has an earlier micro-batch of the step written the gradients of this stage here? They come in order.
bool Pipeline::accumulates(const Action& action) const {
    const int per_step = static_cast<int>(t_.micro_batches());
    for (int micro = action.micro - action.micro % per_step; micro < action.micro; ++micro)
        if (schedule_.rank_of(action.stage, micro) == ranks_.rank) return true;
    return false;
}

void Pipeline::backward(const Action& action, Tensor dx, cudaStream_t stream) {
    Activations& acts = micro_batches_[static_cast<size_t>(action.micro)];
    const auto [first, last] = chunks_.at(action.stage);
    const Model& model = model_of(action);
    count_for(action.micro / t_.micro_batches());
    Workspace workspace = t_.workspace;
    workspace.accumulate = accumulates(action);
    if (action.what == Do::backward_input) {
        workspace.later = &later_;
        later_.begin(action.micro, action.stage);
    }
    if (is_last(action)) {
        const Tensor out = last_out_.extract(action.micro).mapped();
        in_flight_.take_head(acts, out);
        head_forward(model, acts, workspace, out, stream);
        loss_backward(model, acts, t_.dloss(), stream);
        head_backward(model, acts, workspace, dx, stream);
        t_.add_losses_once(acts, true, stream);
    }
    backward_blocks(model, acts, workspace, first, last, dx, dx, stream);
    if (action.stage == 0) embed_backward(model, acts, workspace, dx, stream);
    if (action.what == Do::backward) end_backward(action);
}

void Pipeline::backward_weight(const Action& action, cudaStream_t stream) {
    Workspace workspace = t_.workspace;
    workspace.accumulate = accumulates(action);
    later_.run(action.micro, action.stage, workspace, stream);
    end_backward(action);
}

void Pipeline::end_backward(const Action& action) {
    Activations& acts = micro_batches_[static_cast<size_t>(action.micro)];
    const auto [first, last] = chunks_.at(action.stage);
    in_flight_.give_back_chunk(acts, first, last);
    if (is_last(action)) in_flight_.give_back_head(acts);
    forwards_.erase({action.micro, action.stage});
}

void Pipeline::add_up(Tensor sums, cudaStream_t stream) { ranks_.all_reduce(sums, stream); }

// ---------------------------------------------------------------------------------------------------------------------
// An evaluation

void Pipeline::add_losses_of(int64_t micro_batches, cudaStream_t stream) {
    training_ = false;
    const std::vector<Activations> of_steps = micro_batches_;
    for (int64_t micro = 0; micro < micro_batches; ++micro) {
        Activations& acts = micro_batches_[static_cast<size_t>(micro)];
        acts = without_documents(t_, acts);
        upload_micro_batch(t_, acts, t_.evaluation_row() + micro * t_.micro_batch, stream);
    }
    if (micro_batches > 0) runner_.run(forward_schedule(schedule_, static_cast<int>(micro_batches)), *this, stream);
    micro_batches_ = of_steps;
}
