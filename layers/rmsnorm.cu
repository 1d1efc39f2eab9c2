// RMSNorm: one learned scale per channel, no mean, no bias.        (Zhang & Sennrich 2019, arXiv:1910.07467)
//
//   forward     x = inp  or  inp + branch  (the residual add before the norm, fused: it saves a pass over memory)
//               y = x r g              r = 1 / sqrt(mean_c(x^2) + eps)
//
//   backward    with n = x r, the normalised row:   dg = sum over rows of dy n
//
//               dn = dy g.  Through n_c = x_c r(x) with  dr/dx_c = -r^3 x_c / C = -r^2 n_c / C:
//               dx = r (dn - n mean_c(dn n))        dn without its component along n: scaling x does not change y
//               + dsum, the gradient that reaches x past the norm, along the residual stream
//
// As plain loops, for each row:
//
//   r = 1 / sqrt(sum(x^2) / C + eps)                        for c < C:  dn[c] = dy[c] * g[c];  n[c] = x[c] * r
//   for c < C:  y[c] = x[c] * (r * g[c])                    a = sum(dn * n) / C
//                                                           for c < C:  dx[c] = r * (dn[c] - n[c] * a) + dsum[c]
//                                                           for c < C:  dg[c] += dy[c] * n[c]
//
// Bytes: forward 2 rows read, 2 written (with branch); backward 3 read, 1 written. Memory is the limit, so each row is
// read once and kept in registers; norm.cuh says how. r is saved: N floats.
//
// Rows of more than 8192 channels do not fit.
//
// What is normalised may also be heads inside of wider rows (Qwen3's queries and keys; the latents of MLA and MFA):
// then row i of the kernels is head i % heads of token i / heads. A plain row is treated as a single head.
#include "layers/early_launch.cuh"
#include "layers/layers.h"
#include "layers/norm.cuh"

#include <numeric>

namespace {

// Where rows are.
template <class T>
struct NormRows {
    T* data;
    int64_t token_stride, head_stride;
    int heads;

    __device__ __forceinline__ T* operator[](int64_t row) const {
        if (heads == 1) return data + row * token_stride;
        return data + row / heads * token_stride + row % heads * head_stride;
    }
};
template <class T>
NormRows<T> norm_rows(const HeadColumns& heads) {
    return {heads.rows.ptr<std::remove_const_t<T>>() + heads.column, heads.rows.cols(), heads.head_stride(),
            narrow(heads.count, "heads")};
}

template <class T, int n, int kColumns>
__global__ void __launch_bounds__(kNormThreads<kColumns>, kNormBlocks<kColumns>)
    rmsnorm_forward_kernel(NormRows<T> out, T* sum, float* rstd, NormRows<const T> inp, const T* branch,
                           const T* __restrict__ weight, int64_t N, int C, float eps) {
    constexpr int K = kColumns / n;
    let_next_start();
    prefetch_columns<K, n>(weight, C, N);
    wait_for_previous();
    __shared__ float scratch[kWarp];
    const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    const int row_C = row < N ? C : 0;  // beyond the last row there is nothing to load or store
    float x[K][n];
    load_row(x, inp[row], row_C);
    if (branch) add_branch(x, sum + row * C, branch + row * C, row_C);
    float squares[n] = {};
#pragma unroll
    for (int k = 0; k < row_chunks<K, n>(row_C); ++k)
        for (int i = 0; i < n; ++i) squares[i] += x[k][i] * x[k][i];
    const float r = 1.0f / sqrtf(row_sum(squares, scratch) / static_cast<float>(C) + eps);
#pragma unroll
    for (int k = 0; k < row_chunks<K, n>(row_C); ++k) {
        float g[n];
        load_columns(g, weight, chunk_column<K, n>(k), row_C);
        for (int i = 0; i < n; ++i) x[k][i] *= r * g[i];
    }
    store_row(out[row], x, row_C);
    if (threadIdx.x == 0 && row < N) rstd[row] = r;
}

// The partial row of `params`: the sum of dy n over this block's rows.
template <class T, int n, int kColumns>
__global__ void __launch_bounds__(kBackwardThreads<kColumns>, 1)
    rmsnorm_backward_kernel(NormRows<T> dinp, ColumnSums params, NormRows<const T> dout, const T* dsum,
                            NormRows<const T> inp, const T* __restrict__ weight, const float* rstd, int64_t N, int C) {
    constexpr int K = kColumns / n;
    // Rows wider than a warp: there is one barrier per row, after which its sum is read, perhaps while a faster thread
    // already writes the next row's. So the rows use the two arrays in turn; the third row's sum is written after the
    // second row's barrier, when all threads have read the first's.
    __shared__ float scratch[2][kWarp];
    float dweight[K][n];
    zero_row(dweight, C);
    int turn = 0;
    const unsigned stride = gridDim.x * blockDim.y;
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < N; first += stride, turn ^= 1) {
        // Every thread of the block goes through the same number of rounds: sums and barriers need all of them.
        const int64_t row = first + threadIdx.y;
        const int row_C = row < N ? C : 0;
        float dy[K][n], x[K][n];
        load_row(dy, dout[row], row_C);
        load_row(x, inp[row], row_C);
        const float r = row < N ? rstd[row] : 0.0f;
        float dot[n] = {};
#pragma unroll
        for (int k = 0; k < row_chunks<K, n>(row_C); ++k) {
            float g[n];
            load_columns(g, weight, chunk_column<K, n>(k), row_C);
            for (int i = 0; i < n; ++i) {
                x[k][i] *= r;  // from here on the normalised row
                dweight[k][i] += dy[k][i] * x[k][i];
                dy[k][i] *= g[i];  // from here on the gradient of it
                dot[i] += dy[k][i] * x[k][i];
            }
        }
        const float mean = row_sum(dot, scratch[turn]) / static_cast<float>(C);
#pragma unroll
        for (int k = 0; k < row_chunks<K, n>(row_C); ++k) {
            float past[n] = {};
            if (dsum) load_columns(past, dsum + row * C, chunk_column<K, n>(k), row_C);
            for (int i = 0; i < n; ++i) dy[k][i] = r * (dy[k][i] - x[k][i] * mean) + past[i];
        }
        store_row(dinp[row], dy, row_C);
    }
    store_partial(params.partial + blockIdx.x * C, dweight, dynamic_shared<float>(), C);
    finish_column_sums<n>(params, blockIdx.x, gridDim.x, C, 0, C, params.arrivals);
}

// The arguments that launchers share. sum, branch and dsum, where present, are plain rows: (N, C).
void launch_forward(const char* name, const HeadColumns& out, Tensor sum, Tensor rstd, const HeadColumns& inp,
                    Tensor branch, Tensor weight, float eps, int64_t chunk_columns, cudaStream_t stream) {
    const int64_t N = rstd.n(), C = inp.D;
    expect_aligned(name, {{"out", out.rows}, {"sum", sum}, {"inp", inp.rows}, {"branch", branch}, {"weight", weight}});
    if (N == 0) return;
    const NormGeometry geometry = norm_geometry(name, N, C, chunk_columns);
    const dim3 grid(static_cast<unsigned>(geometry.n_blocks_forward));
    dispatch_rows(inp.rows.dtype, C, chunk_columns, [&](auto zero) {
        using Row = decltype(zero);
        using T = typename Row::Element;
        EarlyLaunch(grid, geometry.block, 0, stream)(
            "rmsnorm_forward_kernel", rmsnorm_forward_kernel<T, Row::n, Row::kColumns>, norm_rows<T>(out),
            branch ? sum.ptr<T>() : nullptr, rstd.ptr<float>(), norm_rows<const T>(inp), branch.ptr_or_null<T>(),
            weight.ptr<T>(), N, C, eps);
    });
    launched("rmsnorm_forward_kernel", {.reads = bytes_of(inp, branch, weight),
                                        .writes = bytes_of(out, rstd) + (branch ? bytes_of(sum) : 0),
                                        .flops = 4.0 * static_cast<double>(N * C)});
}

void launch_backward(const char* name, const HeadColumns& dinp, Tensor dweight, const HeadColumns& dout, Tensor dsum,
                     const HeadColumns& inp, Tensor weight, Tensor rstd, bool accumulate, Tensor scratch,
                     int64_t chunk_columns, cudaStream_t stream) {
    const int64_t N = rstd.n(), C = inp.D;
    expect(name, "dweight", dweight, dweight.dtype == DType::f32 ? DType::f32 : inp.rows.dtype, {C});
    expect_aligned(name, {{"dinp", dinp.rows},
                          {"dweight", dweight},
                          {"dout", dout.rows},
                          {"dsum", dsum},
                          {"inp", inp.rows},
                          {"weight", weight}});
    if (N == 0) return zero_unless(accumulate, dweight, stream);
    const NormGeometry geometry = norm_geometry(name, N, C, chunk_columns);
    const dim3 grid(static_cast<unsigned>(geometry.n_blocks_backward));
    const Tensor partial = scratch_as(name, scratch, {geometry.n_blocks_backward, C});
    const ColumnSums params = column_sums(name, partial, dweight, {}, accumulate);
    dispatch_rows(inp.rows.dtype, C, chunk_columns, [&](auto zero) {
        using Row = decltype(zero);
        using T = typename Row::Element;
        allow_shared(rmsnorm_backward_kernel<T, Row::n, Row::kColumns>, geometry.backward_shared_bytes);
        rmsnorm_backward_kernel<T, Row::n, Row::kColumns>
            <<<grid, geometry.backward_block, geometry.backward_shared_bytes, stream>>>(
                norm_rows<T>(dinp), params, norm_rows<const T>(dout), dsum.ptr_or_null<T>(), norm_rows<const T>(inp),
                weight.ptr<T>(), rstd.ptr<float>(), N, narrow(C, name));
    });
    LaunchCost cost = {.reads = bytes_of(dout, dsum, inp, weight, rstd),
                       .writes = bytes_of(dinp),
                       .flops = 10.0 * static_cast<double>(N * C)};
    add_cost_of_sums(cost, partial, dweight, {}, accumulate);
    launched("rmsnorm_backward_kernel", cost);
}

// Heads of D columns in as many tokens as `like` has. Returns the number that divides every address, for packed loads.
int64_t check_norm_heads(const char* name, const char* argument, const HeadColumns& heads, const HeadColumns& like) {
    const Tensor& rows = heads.rows;
    check(rows.data && rows.dtype == like.rows.dtype && rows.rows() == like.rows.rows(), name, ": ", argument, " is ",
          rows, ", expected ", dtype_name(like.rows.dtype), " with ", like.rows.rows(), " rows");
    check(heads.count == like.count && heads.D == like.D && heads.count >= 1 && heads.D >= 1, name, ": ", argument,
          " has ", heads.count, " heads of ", heads.D, " columns, expected ", like.count, " of ", like.D);
    check(heads.column >= 0 && heads.head_stride() >= heads.D &&
              heads.column + (heads.count - 1) * heads.head_stride() + heads.D <= rows.cols(),
          name, ": ", argument, "'s ", heads.count, " heads of ", heads.D, " columns are not inside of ", rows.cols(),
          " columns");
    return std::gcd(std::gcd(heads.D, heads.column), std::gcd(heads.head_stride(), rows.cols()));
}

HeadColumns one_head(Tensor rows) { return {rows, 1, rows.cols()}; }

}  // namespace

void rmsnorm_forward(Tensor out, Tensor sum, Tensor rstd, Tensor inp, Tensor branch, Tensor weight, float eps,
                     cudaStream_t stream) {
    const char* name = "rmsnorm_forward";
    expect(name, "inp", inp, out.dtype, {-1, -1});
    const int64_t N = inp.shape[0], C = inp.shape[1];
    expect(name, "out", out, inp.dtype, {N, C});
    expect(name, "rstd", rstd, DType::f32, {N});
    expect(name, "weight", weight, inp.dtype, {C});
    if (branch) {
        expect(name, "branch", branch, inp.dtype, {N, C});
        expect(name, "sum", sum, inp.dtype, {N, C});
    }
    launch_forward(name, one_head(out), sum, rstd, one_head(inp), branch, weight, eps, C, stream);
}

void rmsnorm_backward(Tensor dinp, Tensor dweight, Tensor dout, Tensor dsum, Tensor inp, Tensor weight, Tensor rstd,
                      bool accumulate, Tensor scratch, cudaStream_t stream) {
    const char* name = "rmsnorm_backward";
    expect(name, "inp", inp, dinp.dtype, {-1, -1});
    const int64_t N = inp.shape[0], C = inp.shape[1];
    expect(name, "dinp", dinp, inp.dtype, {N, C});
    expect(name, "dout", dout, inp.dtype, {N, C});
    if (dsum) expect(name, "dsum", dsum, inp.dtype, {N, C});
    expect(name, "weight", weight, inp.dtype, {C});
    expect(name, "rstd", rstd, DType::f32, {N});
    launch_backward(name, one_head(dinp), dweight, one_head(dout), dsum, one_head(inp), weight, rstd, accumulate,
                    scratch, C, stream);
}

void rmsnorm_heads_forward(const HeadColumns& out, Tensor rstd, const HeadColumns& inp, Tensor weight, float eps,
                           cudaStream_t stream) {
    const char* name = "rmsnorm_heads_forward";
    const int64_t of_inp = check_norm_heads(name, "inp", inp, inp), of_out = check_norm_heads(name, "out", out, inp);
    expect(name, "rstd", rstd, DType::f32, {inp.rows.rows(), inp.count});
    expect(name, "weight", weight, inp.rows.dtype, {inp.D});
    launch_forward(name, out, {}, rstd, inp, {}, weight, eps, std::gcd(of_inp, of_out), stream);
}

void rmsnorm_heads_backward(const HeadColumns& dinp, Tensor dweight, const HeadColumns& dout, const HeadColumns& inp,
                            Tensor weight, Tensor rstd, bool accumulate, Tensor scratch, cudaStream_t stream) {
    const char* name = "rmsnorm_heads_backward";
    const int64_t of_inp = check_norm_heads(name, "inp", inp, inp), of_dinp = check_norm_heads(name, "dinp", dinp, inp),
                  of_dout = check_norm_heads(name, "dout", dout, inp);
    expect(name, "rstd", rstd, DType::f32, {inp.rows.rows(), inp.count});
    expect(name, "weight", weight, inp.rows.dtype, {inp.D});
    launch_backward(name, dinp, dweight, dout, {}, inp, weight, rstd, accumulate, scratch,
                    std::gcd(of_inp, std::gcd(of_dinp, of_dout)), stream);
}

int64_t rmsnorm_backward_scratch_n(int64_t N, int64_t C) {
    return norm_geometry("rmsnorm_backward", N, C, C).n_blocks_backward * C;
}
