// training/evaluation.cu: the loss on text that is never trained on.
//
//   mean over n sequences of the mean over their tokens of  -log p(next token)
//
// The sequences are the same at every evaluation and in every run on this text. The ranks take micro-batches in turn.
#include "training/training.h"

#include <algorithm>
#include <cmath>

// What a token sees must not depend on --mask-documents.
Activations without_documents(const Trainer& t, const Activations& acts) {
    Activations plain = acts;
    plain.documents = plain.stream_positions = {};
    if (!t.context_parallel) plain.positions = {};
    return plain;
}

namespace {

// The losses of a micro-batch, whose sequences are in the host's memory.
void add_losses_of_one(Trainer& t, cudaStream_t stream) {
    Activations acts = without_documents(t, t.acts);
    upload_micro_batch(t, acts, t.evaluation_row(), stream);
    forward(t.model, acts, t.workspace, stream, false);
    loss_forward(t.model, acts, stream);
    t.add_losses_once(acts, true, stream);
}

}  // namespace

double evaluate(Trainer& t, const BatchReader& data, int64_t n_sequences) {
    const cudaStream_t stream = device().stream;
    n_sequences = std::max<int64_t>(1, std::min(n_sequences, data.sequences_per_epoch()));
    const int64_t n_batches = ceil_div(n_sequences, t.micro_batch);
    cudaCheck(cudaMemsetAsync(t.totals.data, 0, t.totals.bytes(), stream));
    const int64_t n_ranks = t.options.data_ranks(), at_once = t.pipeline ? t.micro_batches() : 1;
    // With ZeRO 3 all ranks must take part in every forward, to hand over their shards of the weights.
    const bool together = t.model.sharding.shards_weights();
    for (int64_t first = t.dp_rank; first - t.dp_rank < n_batches; first += at_once * n_ranks) {
        int64_t n = 0;  // micro-batches of this rank: first, first + n_ranks, ...
        for (; n < at_once && (together || first + n * n_ranks < n_batches); ++n)
            for (int64_t b = 0; b < t.micro_batch; ++b) {
                const int64_t sequence = (first + n * n_ranks) * t.micro_batch + b,
                              row = t.evaluation_row() + n * t.micro_batch + b;
                read_sequence(t, data, std::min(sequence, n_sequences - 1), row);
                // Beyond the last sequence a row only fills up a micro-batch, and has no targets: in the last one, and
                // on ranks that take part with a micro-batch of such rows alone.
                if (sequence >= n_sequences) std::fill_n(t.targets_of(row), t.options.rank_seq(), -1);
            }
        if (t.pipeline) t.pipeline->add_losses_of(n, stream);
        else if (n == 1) add_losses_of_one(t, stream);
        cudaCheck(cudaStreamSynchronize(stream));  // the next batch is read into the same host memory
    }
    t.sum_over_ranks(stream);
    const double loss = read_numbers(t, stream).loss_sum() / static_cast<double>(n_sequences * t.options.seq);
    return std::isnan(loss) ? NAN : loss;  // without its sign: the line and log.csv say "nan", never "-nan"
}

bool note_best(Trainer& t, int64_t step, double val_loss) {
    if (!std::isfinite(val_loss) || (t.best && t.best->val_loss <= val_loss)) return false;
    t.best_before = std::exchange(t.best, BestStep{step, val_loss});
    return true;
}
