// training/pipeline_validation.cu: an update that does not wait for the norm of all gradients, for schedules without a
// bubble (ZB-H2, ZB-V).                                           (Qi et al. 2023, arXiv:2401.10241, section 4)
//
// In these schedules a rank that has ended its part of a step begins the next one while others still compute. But the
// norm of all gradients, by which they are clipped, and which shows an overflow, is known when the last rank has its
// gradients. So a rank updates with what is known, and looks at the rest later:
//
//     rank 0  | F F F B F B ... W W W | update | F F F  check  B F ...
//     rank 1    | F F B F B ... W W W | update | F F  check  B F B ...
//                                     ->                <-
//                       squares of ranks 0 to r       norm of all
//
//     update   with the factor that follows from the squares of the ranks before and its own: 1 / loss scale as long as
//              nothing is to be clipped
//     check    in the forwards of the next step, before its first backward. If something is to be clipped, or there is
//              an overflow, that factor was wrong: the weights and states are put back as they were, the update is
//              made again with the right factor, and the forwards, which had the wrong weights, are done again.
//
// So the bits are those of every other schedule. It costs a copy of what an update changes, and in steps that are
// clipped the forwards that are done twice; the paper found that such steps are rare, and that waiting costs 8 %.
#include "training/training.h"

#include <algorithm>
#include <cmath>

namespace {

constexpr int64_t kAhead = 8;  // steps whose sequences are read at once

int64_t next_multiple(int64_t step, int64_t every) { return every > 0 ? ceil_div(step, every) * every : step + kAhead; }

}  // namespace

bool validates_later(const TrainOptions& o) { return o.pp > 1 && (o.pipeline == "zb-h2" || o.pipeline == "zb-v"); }
int64_t steps_read_at_once(const TrainOptions& o) {
    return validates_later(o) ? std::min(kAhead, o.steps) : steps_at_once(o);
}

int64_t last_step_at_once(const TrainOptions& o, int64_t step) {
    if (o.pp > 1 && o.asynchronous) return std::min(next_multiple(step, o.flush_every), o.steps);
    if (!validates_later(o)) return step;
    // Until something needs the weights of all ranks.
    const int64_t until = std::min(
        {step + kAhead - 1, o.last_step(), next_multiple(step, o.val_every), next_multiple(step, o.save_every)});
    return std::max(step, until);
}

void Pipeline::take_validation_memory() {
    const Model& model = t_.model;
    passed_ = t_.memory.activations.take("shared by layers", DType::f32, {t_.totals.shape[0], 2});
    final_ = t_.memory.activations.take("shared by layers", DType::f32, {t_.totals.shape[0], 2});
    totals_ = t_.totals;
    updated_ = {model.weights};
    if (model.masters.exists()) updated_.push_back(model.masters);
    for (const OptimizerState& state : t_.optimizer->states()) updated_.push_back(state.tensor);
    // In which the next step's forwards note the largest values that they see: with wrong weights, wrong ones.
    if (model.fp8_states.exists()) updated_.push_back(model.fp8_states);
    before_.clear();
    if (!t_.options.updates_after_norm()) return;  // nothing that is known later changes an update
    for (const Tensor& tensor : updated_)
        before_.push_back(t_.memory.optimizer.take("before an update", tensor.dtype, {tensor.n()}));
}

// `later` goes on when `earlier` has come here.
void Pipeline::after(cudaStream_t later, cudaStream_t earlier) {
    cudaCheck(cudaEventRecord(reached_, earlier));
    cudaCheck(cudaStreamWaitEvent(later, reached_));
}

// With the squares of the ranks up to this one. The last rank has those of all, and sends them back.
void Pipeline::update_early(int64_t step, bool stop, cudaStream_t stream) {
    const int rank = ranks_.rank, last = ranks_.size - 1;
    add_squares(t_);
    set_stop(t_, stop);
    t_.sum_over_equal_stages(stream);
    if (rank > 0) {
        numbers_->recv(passed_, rank - 1, numbers_stream_);
        after(stream, numbers_stream_);
        residual_add(t_.totals, t_.totals, passed_, stream);
    }
    clip_scale(t_.totals.slice(0, t_.n_units()), t_.clip_scale(t_.options.clip), stream);
    // What travels stays as it is while the next step counts.
    copy_tensor(final_, t_.totals, stream);
    after(numbers_stream_, stream);
    numbers_->send(final_, rank < last ? rank + 1 : rank - 1, numbers_stream_);

    for (size_t i = 0; i < before_.size(); ++i) copy_tensor(before_[i], updated_[i].view({updated_[i].n()}), stream);
    update_weights(t_, step);
}

// What all ranks have now: was the update of this step right? Otherwise it is undone and made again. Returns whether
// the forwards since then had the right weights.
bool Pipeline::check_update(int64_t step, const BatchReader& data, cudaStream_t stream) {
    const TrainOptions& o = t_.options;
    const int rank = ranks_.rank, last = ranks_.size - 1;
    if (rank < last) numbers_->recv(final_, rank + 1, numbers_stream_);
    if (rank < last && rank > 0) numbers_->send(final_, rank - 1, numbers_stream_);
    t_.totals = final_;
    const StepNumbers numbers = read_numbers(t_, numbers_stream_);
    const bool overflow = !std::isfinite(numbers.grad_norm),
               right = !overflow && numbers.grad_scale == 1 / static_cast<float>(t_.scaler.scale);
    if (!right && !before_.empty()) {
        // The new weights may still be on their way from other ranks (ZeRO 1).
        for (size_t u = 0; u < t_.model.units.size(); ++u) t_.data_parallel.gather(t_.model, u, -1, stream);
        for (size_t i = 0; i < before_.size(); ++i)
            copy_tensor(updated_[i].view({updated_[i].n()}), before_[i], stream);
        update_weights(t_, step);
        ++n_put_back_;
    }
    t_.totals = totals_;
    const double loss = numbers.loss_sum() / static_cast<double>(o.batch * o.seq), norm = numbers.grad_norm;
    if ((overflow || !std::isfinite(loss)) && o.precision.dtype != DType::f16)
        fail(explain_not_finite(t_, data, step, loss, norm));
    t_.scaler.update(overflow);
    if (!overflow) ++t_.updates;
    results_.push_back({loss, norm, overflow, numbers.stop_count > 0});
    results_.back().loss_scale = t_.scaler.scale;
    return right || before_.empty();
}

// Steps first to first + n - 1.
void Pipeline::run_validated_steps(const BatchReader& data, int64_t first, int64_t n) {
    const TrainOptions& o = t_.options;
    const cudaStream_t stream = device().stream;
    const std::vector<size_t> places = places_before_backward(schedule_);
    const size_t check_at = places[static_cast<size_t>(ranks_.rank)];
    const int64_t per_step = t_.micro_batches();
    const bool stop = take_stop_request(o, first + n - 1);
    training_ = true;
    for (int64_t i = 0; i < n; ++i) read_batch_to(i * t_.local_batch, t_, data, first + i);
    for (int64_t i = 0; i < n; ++i) {
        t_.world.set_step(first + i);
        for (int64_t micro = 0; micro < per_step; ++micro)
            upload_micro_batch(t_, micro_batches_[static_cast<size_t>(micro)],
                               i * t_.local_batch + micro * t_.micro_batch, stream);
        int64_t before = runner_.messages_sent();
        runner_.begin(schedule_);
        runner_.advance(check_at, *this, stream);
        if (i > 0 && !check_update(first + i - 1, data, stream)) {
            forget_forwards();
            runner_.begin_again(places, stream);
            before = runner_.messages_sent();
            runner_.advance(check_at, *this, stream);
        }
        cudaCheck(cudaMemsetAsync(t_.totals.data, 0, t_.totals.bytes(), stream));
        runner_.advance(schedule_.ranks[static_cast<size_t>(ranks_.rank)].size(), *this, stream);
        messages_ = runner_.messages_sent() - before;
        reduce_gradients(stream);
        inject_overflow(t_, first + i, stream);
        update_early(first + i, stop && i + 1 == n, stream);
    }
    check_update(first + n - 1, data, stream);
}

// The forwards before the check are done again: what they keep is given back.
void Pipeline::forget_forwards() {
    for (const auto& [micro, stage] : forwards_) {
        const auto [first, last] = chunks_.at(stage);
        in_flight_.give_back_chunk(micro_batches_[static_cast<size_t>(micro)], first, last);
    }
    forwards_.clear();
    last_out_.clear();
}
