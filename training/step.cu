// training/step.cu: the parts of a training step. train_gpt.cu calls them in this order:
//
//   read_batch             host: the sequences of this step, which follow from its number and the seed alone
//   accumulate_gradients   for each micro-batch: forward, loss, backward; the first one writes the gradients of the
//                          parameters, and the others add to them
//   clip_gradients         norm = sqrt(sum of squares of all gradients) / loss scale
//                          factor = min(1, clip / (norm + 1e-6)) / loss scale, or NaN where the norm is not finite
//   update_weights         weights -= lr * the optimizer's step for factor * gradients; nothing if the factor is NaN
//   request_numbers        loss and norm travel to the host
//   read_back              host: loss and norm; a norm that is not finite lowers the loss scale (fp16) or ends the run
//
// The host runs ahead of the device, and waits only in read_back: an overflow must therefore be handled on the
// device, and it is, by the factor.
#include "training/training.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace {

void copy_to_device_async(const Tensor& to, const void* from, cudaStream_t stream) {
    cudaCheck(cudaMemcpyAsync(to.data, from, to.bytes(), cudaMemcpyHostToDevice, stream));
    launched("memcpy", {.writes = bytes_of(to)});
}

// Of a whole sequence the tokens of this rank.
void take_own(const Trainer& t, int32_t* to, const std::vector<int32_t>& whole) {
    const ContextParallel& ranks = *t.context_parallel;
    const TokenChunks chunks = ranks.zigzag.of_rank(ranks.rank());
    for (const int64_t first : chunks.first) to = std::copy_n(whole.begin() + first, chunks.length, to);
}

// The intervals of all documents, the positions of this rank's tokens.
void read_documents(const Trainer& t, const BatchReader& data, int64_t sequence, int64_t row) {
    const int64_t T = t.options.seq;
    int32_t *documents = t.host_documents + 2 * row * T, *positions = t.host_positions + row * t.options.rank_seq();
    if (!t.context_parallel) return data.documents(sequence, documents, positions);
    std::vector<int32_t> whole(static_cast<size_t>(T));
    data.documents(sequence, documents, whole.data());
    take_own(t, positions, whole);
}

// The ids of all data have been compared with the vocabulary before the run began. But a token shard is mapped, not
// copied: what another program writes into the file is read as well, and a kernel can only stop the whole process.
void read_checked(const Trainer& t, const BatchReader& data, int64_t sequence, int32_t* tokens, int32_t* targets) {
    data.sequence(sequence, tokens, targets);
    const int32_t largest = std::max(tokens[0], *std::max_element(targets, targets + t.options.seq));
    if (largest >= t.config.V)  // no check(): to describe a sequence is to look for the start of its document
        fail(data.describe(sequence), ": holds token id ", largest, ", beyond the model's vocabulary of ", t.config.V,
             ": another program has written into the file since the run began");
}

}  // namespace

void read_sequence(const Trainer& t, const BatchReader& data, int64_t sequence, int64_t row) {
    if (!t.context_parallel) return read_checked(t, data, sequence, t.tokens_of(row), t.targets_of(row));
    std::vector<int32_t> tokens(static_cast<size_t>(t.options.seq)), targets(tokens.size());
    read_checked(t, data, sequence, tokens.data(), targets.data());
    take_own(t, t.tokens_of(row), tokens);
    take_own(t, t.targets_of(row), targets);
}

void set_positions(const Trainer& t, int64_t n) {
    std::vector<int32_t> positions(static_cast<size_t>(t.options.seq));
    std::iota(positions.begin(), positions.end(), 0);
    for (int64_t row = 0; row < n; ++row) {
        int32_t* to = t.host_positions + row * t.options.rank_seq();
        if (t.context_parallel) take_own(t, to, positions);
        else std::copy(positions.begin(), positions.end(), to);
    }
}

void read_batch(Trainer& t, const BatchReader& data, int64_t step) {
    if (std::exchange(t.batch_read, step) != step) read_batch_to(t.first_row(step), t, data, step);
}

void read_batch_to(int64_t row, const Trainer& t, const BatchReader& data, int64_t step) {
    const int64_t first = (step - 1) * t.options.batch + t.dp_rank * t.local_batch;
    for (int64_t b = 0; b < t.local_batch; ++b) {
        read_sequence(t, data, first + b, row + b);
        // The last token of a document keeps its target, which is the first token of the next document: where that is
        // an end-of-text token, this is how a model learns to end.
        if (t.options.mask_documents) read_documents(t, data, first + b, row + b);
    }
}

void upload_micro_batch(const Trainer& t, const Activations& acts, int64_t row, cudaStream_t stream) {
    // Ranks that divide the layers may divide the sequences of a micro-batch, too.
    const TensorLayout& layout = t.model.layout;
    const int64_t first = row * t.options.rank_seq(), n = acts.targets.n(),
                  inside = layout.part(layout.inner_rows).index, in_stream = layout.part(layout.stream_rows).index;
    if (acts.targets.data == acts.tokens.ptr<int32_t>() + n) {
        copy_to_device_async(make_tensor(acts.tokens.data, DType::i32, {2 * n}), t.tokens_of(row), stream);
    } else {
        copy_to_device_async(acts.tokens, t.tokens_of(row), stream);
        copy_to_device_async(acts.targets, t.targets_of(row) + inside * n, stream);
    }
    if (acts.documents)
        copy_to_device_async(acts.documents, t.host_documents + 2 * (row + inside * acts.B) * t.options.seq, stream);
    if (acts.positions) copy_to_device_async(acts.positions, t.host_positions + first + inside * n, stream);
    if (acts.stream_positions)
        copy_to_device_async(acts.stream_positions, t.host_positions + first + in_stream * n, stream);
}

// What a gradient too large for its type leaves behind: on one rank, of a pipeline the last one.
void inject_overflow(const Trainer& t, int64_t step, cudaStream_t stream) {
    const bool at_the_end = t.pipeline && t.options.pipeline != "dualpipe";  // where the last rank's norm counts
    if (step != t.options.inject_overflow || t.world.rank != (at_the_end ? t.world.size - 1 : 0)) return;
    static const float f32 = INFINITY;
    static const __half f16 = __float2half(INFINITY);
    const Range shard = t.model.shard(1);
    int64_t at = shard.n / 2;
    for (const Range& gap : t.model.gaps(1))  // between parameters nobody would overwrite it
        if (const int64_t first = gap.first - shard.first; first <= at && at < first + gap.n) at = first - 1;
    const Tensor one = t.model.grad_shard(1).slice(at, 1);
    copy_to_device_async(one, one.dtype == DType::f32 ? static_cast<const void*>(&f32) : &f16, stream);
}

void add_shared_gradients(Trainer& t, cudaStream_t stream) {
    if (!t.tensor_parallel) return;
    for (const auto& [axes, parts] : t.model.shared_grads()) t.tensor_parallel->sum_shared(axes, parts, stream);
}

void accumulate_gradients(Trainer& t, int64_t step) {
    const TrainOptions& o = t.options;
    const cudaStream_t stream = device().stream;
    // With --clip 0 the host updates a unit as soon as the backward has its gradients, and needs to know how.
    if (t.offload)
        t.offload->begin_step(learning_rate(o.schedule, step), t.updates + 1, 1.0f / static_cast<float>(t.scaler.scale),
                              static_cast<uint64_t>(o.seed));
    // A rank writes the rows of its own units only, and the sum over several ranks needs zeros in the others.
    const bool several = t.world.size > 1;
    if (several) set_to_zero(t.step_sums(), stream);
    if (t.pipeline) t.pipeline->accumulate(t.first_row(step), stream);
    else {
        for (int64_t micro = 0; micro < t.micro_batches(); ++micro) {
            upload_micro_batch(t, t.acts, t.first_row(step) + micro * t.micro_batch, stream);
            forward(t.model, t.acts, t.workspace, stream);
            loss_backward(t.model, t.acts, t.dloss(), stream);
            t.workspace.accumulate = t.data_parallel.begin_backward(t.model, micro);
            backward(t.model, t.acts, t.workspace, stream);
            // With --head-chunks it is the backward that has computed them.
            t.add_losses_once(t.acts, several || micro > 0, stream);
        }
        t.data_parallel.finish_grads(stream);
        add_shared_gradients(t, stream);
    }
    for (size_t u = t.model.units.size(); t.tensor_parallel && t.offload && u-- > 0;)
        t.offload->grads_are_final(u, stream);
    inject_overflow(t, step, stream);
}

void Trainer::add_losses_once(const Activations& its, bool accumulate, cudaStream_t stream) {
    if (model.layout.part(model.layout.heads).index == 0) add_losses(loss_sum(), its.losses, accumulate, stream);
}
ClipScale Trainer::clip_scale(double clip) const {
    return {norm_result(), static_cast<float>(clip), 1.0f / static_cast<float>(scaler.scale), options.run_ahead};
}
float Trainer::dloss() const {
    const auto n_tokens = static_cast<double>(options.batch * options.seq);  // of all micro-batches and all ranks
    return static_cast<float>(static_cast<float>(scaler.scale) / n_tokens);
}
void Trainer::sum_over_equal_stages(cudaStream_t stream) {
    data_parallel.all_reduce(step_sums(), stream);
    if (tensor_parallel) tensor_parallel->sum(step_sums(), stream);
}
void Trainer::sum_over_ranks(cudaStream_t stream) {
    sum_over_equal_stages(stream);
    if (pipeline) pipeline->add_up(step_sums(), stream);
}

void add_squares(Trainer& t) {
    const cudaStream_t stream = device().stream;
    if (t.pipeline && !t.pipeline->counts()) return;
    t.square_sums->add_up(t.totals, t.model.grads, stream);
}

// The ranks agree on stopping in a sum that they make anyway: all of them stop after the same step.
void set_stop(Trainer& t, bool stop) {
    *t.host_stop = stop ? 1.0f : 0.0f;
    copy_to_device_async(t.stop_count().slice(0, 1), t.host_stop, device().stream);
}

void add_stop_and_norm(Trainer& t, bool stop, double clip) {
    const cudaStream_t stream = device().stream;
    set_stop(t, stop);
    t.sum_over_ranks(stream);
    clip_scale(t.totals.slice(0, t.n_units()), t.clip_scale(clip), stream);
}

void clip_gradients(Trainer& t, int64_t step) {
    if (t.world.size == 1)
        return t.square_sums->add_up(t.totals.slice(0, t.n_units()), t.model.grads, device().stream,
                                     t.clip_scale(t.options.clip));
    add_squares(t);
    add_stop_and_norm(t, take_stop_request(t.options, step), t.options.clip);
}

void update_units(Trainer& t, const Model& model, double lr, int64_t n_updates) {
    const cudaStream_t stream = device().stream;
    const size_t n_units = model.units.size();
    const auto update = [&](size_t first, size_t count) {
        t.optimizer->step_units(first, count, model.updated_weights(static_cast<uint64_t>(t.options.seed)), model.grads,
                                t.norm_result(), lr, n_updates, stream);
    };
    t.data_parallel.begin_updates(model, stream);
    // One launch, unless a unit's weights go to other ranks, or to the device, while the next unit is updated.
    const bool one_by_one = t.offload || t.data_parallel.updates_by_unit();
    if (!one_by_one) update(0, n_units);
    for (size_t u = 0; u < n_units; ++u) {
        if (t.offload) t.offload->update(u, t.norm_result(), stream);
        else if (one_by_one) update(u, 1);
        t.data_parallel.all_gather_weights(model, u, stream);
    }
}

void update_weights(Trainer& t, int64_t step) {
    const cudaStream_t stream = device().stream;
    update_units(t, t.model, learning_rate(t.options.schedule, step), t.updates + 1);
    quantise_weights(t.model, stream);
    // Ranks with the same blocks have seen half of the micro-batches each.
    if (t.pipeline) t.pipeline->max_over_twins(t.model.fp8_states, stream);
    advance_fp8(t.model, stream);
}

namespace {

void copy_numbers(const StepEnd& end, const Trainer& t, cudaStream_t stream) {
    cudaCheck(cudaMemcpyAsync(end.numbers, t.stop_count().data, sizeof(StepNumbers), cudaMemcpyDeviceToHost, stream));
    cudaCheck(cudaEventRecord(end.arrived, stream));
}

}  // namespace

StepNumbers read_numbers(Trainer& t, cudaStream_t stream) {
    copy_numbers(t.step_ends[0], t, stream);
    cudaCheck(cudaEventSynchronize(t.step_ends[0].arrived));
    return *t.step_ends[0].numbers;
}

void note_start(Trainer& t) { cudaCheck(cudaEventRecord(t.began = t.start, device().stream)); }

// The step counts as an update from here on; where it was none, read_back takes that back.
void request_numbers(Trainer& t, int64_t step) {
    t.end_of(step).asked_to_stop = t.world.size == 1 && take_stop_request(t.options, step);
    copy_numbers(t.end_of(step), t, device().stream);
    ++t.updates;
}

StepResult read_back(Trainer& t, const BatchReader& data, int64_t step) {
    const TrainOptions& o = t.options;
    const StepEnd& end = t.end_of(step);
    cudaCheck(cudaEventSynchronize(end.arrived));
    const StepNumbers numbers = *end.numbers;
    const double loss = numbers.loss_sum() / static_cast<double>(o.batch * o.seq), norm = numbers.grad_norm;
    const bool overflow = !std::isfinite(norm);
    // In float16 an overflow is expected from time to time: the step is skipped, and the loss scale becomes smaller.
    if ((overflow || !std::isfinite(loss)) && o.precision.dtype != DType::f16)
        fail(explain_not_finite(t, data, step, loss, norm));
    t.scaler.update(overflow);
    if (overflow) --t.updates;
    StepResult result{loss, norm, overflow, t.world.size == 1 ? end.asked_to_stop : numbers.stop_count > 0};
    if (o.run_ahead) {
        float ms = 0;
        cudaCheck(cudaEventElapsedTime(&ms, t.began, end.arrived));
        result.share = {1e-3 * ms, {}};
        t.began = end.arrived;
    }
    return result;
}
