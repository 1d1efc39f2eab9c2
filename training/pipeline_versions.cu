// training/pipeline_versions.cu: pipelines that update without waiting until they are empty: PipeDream and
// PipeDream-2BW.
//
// Between two moments at which the pipeline is empty (--flush-every steps) its ranks do not wait for each other: while
// one updates with the gradients of step t, another one computes the forward of step t + 3. So there are several
// versions of a rank's weights at once, and the table says with which one each forward and backward computes:
//
//     version 0 (at the beginning), 1, 2, ...   version v has the gradients of the first v of these steps
//     memory                                    as many flat arrays as the rank keeps versions:
//                                               version v in array v mod n
//     an update                                 copies version v - 1 to the array of version v, whose old one nobody
//                                               needs any more, and makes the optimizer's step there
//
// There is one set of optimizer states, and of float32 master weights: that of the newest version. There is no norm of
// all gradients of a step before its updates are made: so nothing is clipped, and a loss that is not finite ends the
// run when the pipeline is empty.      (Harlap et al. 2018, arXiv:1806.03377; Narayanan et al. 2020, arXiv:2006.09503)
#include "parallel/comm/transport.h"
#include "training/training.h"

#include <algorithm>
#include <cmath>

int64_t steps_at_once(const TrainOptions& o) {
    return o.pp > 1 && o.asynchronous ? std::min(o.flush_every, o.steps) : 1;
}

void Pipeline::take_versions() {
    versions_.clear();
    const Model& model = t_.model;
    const int64_t n = schedule_.versions[static_cast<size_t>(ranks_.rank)];
    for (int64_t v = 0; v < n; ++v)
        versions_.push_back(v == 0 ? model
                                   : with_weights(model, t_.memory.weights.take("versions of the weights",
                                                                                model.weights.dtype, {model.n})));
    step_totals_ = t_.memory.activations.take("shared by layers", DType::f32,
                                              {steps_at_once(t_.options), t_.totals.shape[0], t_.totals.shape[1]});
}

const Model& Pipeline::model_of(const Action& action) const {
    return versions_.empty() ? t_.model : versions_[static_cast<size_t>(action.version) % versions_.size()];
}

// From here on the trainer's totals are those of one of the steps that run at once.
void Pipeline::count_for(int64_t step) {
    if (step_totals_) t_.totals = step_totals_.slice(step, 1).view({step_totals_.shape[1], step_totals_.shape[2]});
}

void Pipeline::update(const Action& action, cudaStream_t stream) {
    const TrainOptions& o = t_.options;
    const int64_t step = action.version - 1;  // of those that run at once
    count_for(step);
    reduce_gradients(stream);
    add_squares(t_);
    clip_scale(t_.totals.slice(0, t_.n_units()), t_.clip_scale(0), stream);

    const size_t n = versions_.size(), v = static_cast<size_t>(action.version);
    const Model &next = versions_[v % n], &now = versions_[(v - 1) % n];
    if (n > 1) copy_tensor(next.weights, now.weights, stream);
    update_units(t_, next, learning_rate(o.schedule, first_step_ + step), t_.updates + 1 + step);
    // The shards of other ranks (ZeRO 1, naive) must be there before this version is read or copied.
    for (size_t u = 0; u < next.units.size(); ++u) t_.data_parallel.gather(next, u, -1, stream);
}

// Steps first to first + n - 1.
void Pipeline::run_steps(const BatchReader& data, int64_t first, int64_t n) {
    const TrainOptions& o = t_.options;
    const cudaStream_t stream = device().stream;
    const int64_t per_step = t_.micro_batches();
    first_step_ = first;
    training_ = true;
    for (int64_t i = 0; i < n; ++i) read_batch_to(i * t_.local_batch, t_, data, first + i);
    for (int64_t micro = 0; micro < n * per_step; ++micro)
        upload_micro_batch(t_, micro_batches_[static_cast<size_t>(micro)], micro * t_.micro_batch, stream);
    cudaCheck(cudaMemsetAsync(step_totals_.data, 0, step_totals_.bytes(), stream));
    run_table(n == steps_at_once(o) ? schedule_ : schedule_of_steps(o, per_step, n), stream);
    messages_ /= n;
    // The next steps begin with the newest version as their version 0.
    const Model& newest = versions_[static_cast<size_t>(n) % versions_.size()];
    if (newest.weights.data != t_.model.weights.data) copy_tensor(t_.model.weights, newest.weights, stream);
    t_.updates += n;
}

StepResult Pipeline::read_result(int64_t step, bool stop) {
    const TrainOptions& o = t_.options;
    count_for(step - first_step_);
    add_stop_and_norm(t_, stop, 0);
    const StepNumbers numbers = read_numbers(t_, device().stream);
    const double loss = numbers.loss_sum() / static_cast<double>(o.batch * o.seq);
    check(std::isfinite(loss) && std::isfinite(numbers.grad_norm), "step ", step, ": the loss is ", std::abs(loss),
          " and the gradient norm ", std::abs(numbers.grad_norm),  // never "-nan"
          ". With --pipeline ", o.pipeline, " the weights have been updated with them. ",
          // --resume would go on with the same --lr.
          o.checkpoint.empty() ? "Nothing was saved yet: start again "
                               : concat("Start a new run from the weights of the last checkpoint, --init ",
                                        o.checkpoint, " --out OTHER, "),
          "with a smaller --lr or a longer --warmup");
    return {loss, numbers.grad_norm, false, numbers.stop_count > 0};
}

// A trace has all of these steps under the number of the one that was asked for.
void Pipeline::trace_one_of(int64_t first, int64_t n) {
    for (const int64_t traced : traced_steps(t_.options.ranks.trace))
        if (first <= traced && traced < first + n) return t_.world.set_step(traced);
}

// The results of the next steps, until something needs the weights of all ranks. Where one of them fails, those of the
// steps before it come first.
void Pipeline::run_next_steps(const BatchReader& data, int64_t step) {
    const double start = seconds_now();
    const Traffic before = ranks_.traffic();
    const int64_t n = last_step_at_once(t_.options, step) - step + 1;
    try {
        if (schedule_.asynchronous) {
            trace_one_of(step, n);
            run_steps(data, step, n);
            // The ranks agree on stopping here: after the last of these steps.
            const bool stop = take_stop_request(t_.options, step + n - 1);
            for (int64_t i = 0; i < n; ++i) results_.push_back(read_result(step + i, stop && i + 1 == n));
        } else run_validated_steps(data, step, n);
    } catch (const Error&) {
        if (results_.empty()) throw;
        failure_ = std::current_exception();
    }
    const Traffic after = ranks_.traffic();
    const CommTime collectives = failure_ ? CommTime{} : t_.data_parallel.read_clock();
    const int64_t n_made = std::ssize(results_);
    const double n_steps = static_cast<double>(n_made);
    for (StepResult& result : results_)
        result.share = {(seconds_now() - start) / n_steps,
                        {(after.sent - before.sent) / n_made, (after.received - before.received) / n_made},
                        {collectives.total / n_steps, collectives.exposed / n_steps}};
}

StepResult Pipeline::step(const BatchReader& data, int64_t step) {
    if (results_.empty() && failure_) std::rethrow_exception(failure_);
    if (results_.empty()) run_next_steps(data, step);
    const StepResult result = results_.front();
    results_.pop_front();
    return result;
}
