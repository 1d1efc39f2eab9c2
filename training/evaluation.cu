// training/evaluation.cu: the loss on text that is never trained on.
//
//   mean over n sequences of the mean over their tokens of  -log p(next token)
//
// The sequences are the same at every evaluation and in every run on this text. The ranks take micro-batches in turn.
#include "training/training.h"

#include <algorithm>
#include <cmath>

double evaluate(Trainer& t, const BatchReader& data, int64_t n_sequences) {
    // The same memory, without documents: what a token sees must not depend on --mask-documents.
    Activations acts = t.acts;
    acts.documents = acts.stream_positions = {};
    if (!t.context_parallel) acts.positions = {};
    else set_positions(t, t.micro_batch);  // a step reads its documents' positions anew
    const cudaStream_t stream = device().stream;
    const int64_t n_batches = std::max<int64_t>(1, std::min(n_sequences, data.sequences_per_epoch()) / t.micro_batch);
    cudaCheck(cudaMemsetAsync(t.totals.data, 0, t.totals.bytes(), stream));
    const int64_t n_ranks = t.options.data_ranks();
    for (int64_t first = 0; first < n_batches; first += n_ranks) {
        const int64_t batch = first + t.dp_rank;
        const bool mine = batch < n_batches;
        // With ZeRO 3 all ranks must take part in every forward, to hand over their shards of the weights: a rank
        // without a micro-batch of its own repeats its last one, and does not count it.
        if (!mine && !t.model.sharding.shards_weights()) break;
        if (mine) {
            for (int64_t b = 0; b < t.micro_batch; ++b) read_sequence(t, data, batch * t.micro_batch + b, b);
            upload_micro_batch(t, acts, 0, stream);
        }
        forward(t.model, acts, t.workspace, stream, false);
        loss_forward(t.model, acts, stream);
        if (mine) t.add_losses_once(acts, stream);
        cudaCheck(cudaStreamSynchronize(stream));  // the next batch is read into the same host memory
    }
    t.sum_over_ranks(stream);
    return read_numbers(t).loss_sum() / static_cast<double>(n_batches * t.micro_batch * t.options.seq);
}

bool note_best(Trainer& t, int64_t step, double val_loss) {
    if (!std::isfinite(val_loss) || (t.best && t.best->val_loss <= val_loss)) return false;
    t.best = {step, val_loss};
    return true;
}
