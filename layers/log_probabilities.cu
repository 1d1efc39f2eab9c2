// Log-probabilities of the token that was drawn, and of the n most probable tokens, by the logits themselves.
//
//   log p[v] = x[v] - max - log(sum of exp(x - max))
//
// As plain loops, for each row:
//
//   max, sum = statistics of softmax (layers/softmax.cuh)
//   for i < n:  top[i] = the v with the largest (x[v], -v) below those of top[i - 1]
//
// A pass over the row for each of the n would read it n times. The tokens are in kPieces pieces instead, and the first
// pass finds the largest of each. Then n times: the largest of the pieces is the next token, and its piece alone is
// searched for its next largest.
#include "layers/sampling.cuh"
#include "layers/softmax.cuh"

namespace {

constexpr int kPieces = 256;  // chunk c of the row is in piece c % kPieces

// The largest key up to `limit` in the chunks first, first + step, ... of the row; 0: there is none.
template <int n, class T>
__device__ __forceinline__ uint64_t largest_key(const T* row, int V, int Vp, int first, int step, uint64_t limit) {
    uint64_t largest[n] = {};
    for (int v = first * n; v < V; v += step * n) {
        float x[n];
        load_chunk(x, row + v, Vp - v);
        for (int l = 0; l < n; ++l) {
            const uint64_t key = token_key(x[l], v + l);
            const bool is_larger = key <= limit && key > largest[l] && v + l < V;
            largest[l] = is_larger ? key : largest[l];
        }
    }
    uint64_t key = largest[0];
    for (int l = 1; l < n; ++l) key = key > largest[l] ? key : largest[l];
    return key;
}

template <class T, int n>
__global__ void __launch_bounds__(kThreads)
    log_probabilities_kernel(int* results, const T* logits, const SamplingRule* rules, int V, int Vp,
                             int result_columns) {
    __shared__ float scratch[2 * kWarp];
    __shared__ uint64_t pieces[kPieces], key_scratch[2][kWarp];
    const int64_t row = blockIdx.x;
    const T* x_row = logits + row * Vp;
    int* result = results + row * result_columns;
    const int most = (result_columns - 2) / 2, n_top = min(rules[row].n_top, min(V, most));
    if (rules[row].n_top < 0) return;  // the whole block

    const SoftmaxStatistics softmax = softmax_statistics<n>(x_row, V, Vp, scratch);
    const float log_sum = logf(softmax.sum);
    if (threadIdx.x == 0) {
        const float x = result[0] < 0 ? NAN : to_float(x_row[result[0]]);
        result[1] = __float_as_int(x - softmax.max - log_sum);
    }
    if (n_top == 0) return;

    for (int p = static_cast<int>(threadIdx.x); p < kPieces; p += kThreads)
        pieces[p] = largest_key<n>(x_row, V, Vp, p, kPieces, ~uint64_t{0});
    for (int i = 0; i < n_top; ++i) {
        team_barrier();  // the pieces are up to date
        uint64_t key = 0;
        for (int p = static_cast<int>(threadIdx.x); p < kPieces; p += kThreads) key = key > pieces[p] ? key : pieces[p];
        key = team_largest(key, key_scratch[0]);
        const int token = token_of(key), piece = token / n % kPieces;
        if (threadIdx.x == 0) {
            result[2 + i] = token;
            result[2 + most + i] = __float_as_int(to_float(x_row[token]) - softmax.max - log_sum);
        }
        const int first = piece + static_cast<int>(threadIdx.x) * kPieces;
        const uint64_t next =
            team_largest(largest_key<n>(x_row, V, Vp, first, kPieces * kThreads, key - 1), key_scratch[1]);
        if (threadIdx.x == 0) pieces[piece] = next;
    }
}

}  // namespace

void log_probabilities(Tensor results, Tensor logits, Tensor rules, int64_t V, cudaStream_t stream) {
    const char* operation = "log_probabilities";
    expect(operation, "logits", logits, logits.dtype, {-1, -1});
    const int64_t rows = logits.shape[0], Vp = logits.shape[1];
    check(V > 0 && V <= Vp, operation, ": V = ", V, " tokens do not fit in logits ", logits);
    expect(operation, "results", results, DType::i32, {rows, -1});
    check(results.shape[1] >= 2, operation, ": results is ", results, ", expected 2 + 2 n columns for n tokens");
    expect(operation, "rules", rules, DType::i32, {rows, kStructN<SamplingRule>});
    if (rows == 0) return;
    dispatch_chunks(logits.dtype, row_n_of_chunks(logits), [&](auto chunk) {
        using T = typename decltype(chunk)::Element;
        log_probabilities_kernel<T, decltype(chunk)::n><<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
            results.ptr<int>(), logits.ptr<T>(), structs<SamplingRule>(rules), narrow(V, "vocabulary"),
            narrow(Vp, "columns of logits"), narrow(results.shape[1], "columns of results"));
        // The n most probable tokens are looked for in pieces that a cache still has.
        const int64_t token_bytes = bytes_of_tokens<T, decltype(chunk)::n>(logits, V);
        launched("log_probabilities_kernel", {.reads = token_bytes + bytes_of(rules) + rows * int64_t{sizeof(int)},
                                              .writes = bytes_of(results),
                                              .flops = 4.0 * static_cast<double>(rows * V)});
    });
}
