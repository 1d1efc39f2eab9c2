// Norms of rows whose columns are divided among n ranks, each with C of the n C columns (parallel/tensor: 2D, 2.5D,
// 3D). LayerNorm, and, without mean and bias, RMSNorm: layernorm.cu and rmsnorm.cu say what is computed. Here it takes
// two steps, between which the ranks exchange two numbers a row.
//
//   forward     parts    x = inp  or  inp + branch            m_k = mean(x)   s_k = sum((x - m_k)^2)      of rank k
//                        all ranks gather (m_k, s_k)
//               finish   m = mean of all m_k                  s = sum of s_k + C sum of (m_k - m)^2
//                        r = 1 / sqrt(s / (n C) + eps)        y = (x - m) r g + b
//
//   backward    parts    dn = dy g, nx = (x - m) r            p_k = sum(dn)   q_k = sum(dn nx)      db, dg as ever
//                        p, q = sums over all ranks
//               finish   dx = r (dn - p / (n C) - nx q / (n C)) + dsum
//
// Squares of distances from each rank's own mean are added as by Chan, Golub & LeVeque (1979): nothing cancels, as it
// would in mean(x^2) - m^2. All ranks combine the same numbers in the same order, so that m and r have the same bits on
// all of them. RMSNorm has m = 0 everywhere, and no p.
//
// Bytes: the second step of either pass reads its rows again; the norms of one rank keep them in registers.
#include "layers/layers.h"
#include "layers/norm.cuh"

namespace {

template <class T, int n, int kColumns>
__global__ void __launch_bounds__(kNormThreads<kColumns>, kNormBlocks<kColumns>)
    forward_parts_kernel(float* parts, T* sum, const T* inp, const T* branch, int64_t N, int C, bool centred) {
    constexpr int K = kColumns / n;
    __shared__ float scratch[2][kWarp];
    const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    const int row_C = row < N ? C : 0;
    float x[K][n];
    load_row(x, inp + row * C, row_C);
    if (branch) add_branch(x, sum + row * C, branch + row * C, row_C);
    float sums[n] = {}, squares[n] = {};
#pragma unroll
    for (int k = 0; k < row_chunks<K, n>(row_C); ++k)
        for (int i = 0; i < n; ++i) sums[i] += x[k][i];
    const float m = centred ? row_sum(sums, scratch[0]) / static_cast<float>(C) : 0.0f;
#pragma unroll
    for (int k = 0; k < row_chunks<K, n>(row_C); ++k)
        for (int i = 0; i < n; ++i) {
            const float distance = chunk_column<K, n>(k) + i < C ? x[k][i] - m : 0.0f;
            squares[i] += distance * distance;
        }
    const float s = row_sum(squares, scratch[1]);
    if (threadIdx.x == 0 && row < N) parts[2 * row] = m, parts[2 * row + 1] = s;
}

// parts: (n_ranks, N, 2).
template <class T, int n, int kColumns>
__global__ void __launch_bounds__(kNormThreads<kColumns>, kNormBlocks<kColumns>)
    forward_finish_kernel(T* out, float* mean, float* rstd, const T* x, const float* parts, int n_ranks,
                          const T* __restrict__ weight, const T* __restrict__ bias, int64_t N, int C, float eps) {
    constexpr int K = kColumns / n;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= N) return;
    float m = 0.0f, s = 0.0f;
    for (int k = 0; k < n_ranks; ++k) m += parts[2 * (k * N + row)];
    m /= static_cast<float>(n_ranks);
    for (int k = 0; k < n_ranks; ++k) {
        const float* part = parts + 2 * (k * N + row);
        s += part[1] + static_cast<float>(C) * (part[0] - m) * (part[0] - m);
    }
    const float r = 1.0f / sqrtf(s / static_cast<float>(n_ranks * C) + eps);
    float y[K][n];
    load_row(y, x + row * C, C);
#pragma unroll
    for (int k = 0; k < row_chunks<K, n>(C); ++k) {
        float g[n], b[n] = {};
        load_columns(g, weight, chunk_column<K, n>(k), C);
        if (bias) load_columns(b, bias, chunk_column<K, n>(k), C);
        for (int i = 0; i < n; ++i) y[k][i] = (y[k][i] - m) * r * g[i] + b[i];
    }
    store_row(out + row * C, y, C);
    if (threadIdx.x > 0) return;
    if (mean) mean[row] = m;
    rstd[row] = r;
}

// The partial rows of `params`: the sums of dy nx, and with a mean of dy, over this block's rows.
template <class T, int n, int kColumns>
__global__ void __launch_bounds__(kBackwardThreads<kColumns>, 1)
    backward_parts_kernel(float* parts, ColumnSums params, const T* dout, const T* inp, const T* __restrict__ weight,
                          const float* mean, const float* rstd, int64_t N, int C) {
    constexpr int K = kColumns / n;
    __shared__ float scratch[2][kWarp];  // as in layernorm.cu
    float dweight[K][n], dbias[K][n];
    zero_row(dweight, C);
    zero_row(dbias, C);
    const unsigned stride = gridDim.x * blockDim.y;
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < N; first += stride) {
        const int64_t row = first + threadIdx.y;
        const int row_C = row < N ? C : 0;
        float dy[K][n], x[K][n];
        load_row(dy, dout + row * C, row_C);
        load_row(x, inp + row * C, row_C);
        const float m = mean && row < N ? mean[row] : 0.0f, r = row < N ? rstd[row] : 0.0f;
        float sums[n] = {}, dot[n] = {};
#pragma unroll
        for (int k = 0; k < row_chunks<K, n>(row_C); ++k) {
            float g[n];
            load_columns(g, weight, chunk_column<K, n>(k), row_C);
            for (int i = 0; i < n; ++i) {
                const float nx = (x[k][i] - m) * r;
                dbias[k][i] += dy[k][i];
                dweight[k][i] += dy[k][i] * nx;
                sums[i] += dy[k][i] * g[i];
                dot[i] += dy[k][i] * g[i] * nx;
            }
        }
        const float p = row_sum(sums, scratch[0]), q = row_sum(dot, scratch[1]);
        if (threadIdx.x == 0 && row < N) parts[2 * row] = p, parts[2 * row + 1] = q;
    }
    float* shared = dynamic_shared<float>();
    store_partial(params.partial + blockIdx.x * C, dweight, shared, C);
    if (mean) {
        if (blockDim.y > 1) __syncthreads();  // the first sums have been read out of shared memory
        store_partial(params.partial + (static_cast<int64_t>(gridDim.x) + blockIdx.x) * C, dbias, shared, C);
    }
    finish_column_sums<n>(params, blockIdx.x, gridDim.x, C, 0, C, params.arrivals);
}

template <class T, int n, int kColumns>
__global__ void __launch_bounds__(kNormThreads<kColumns>, kNormBlocks<kColumns>)
    backward_finish_kernel(T* dinp, const T* dout, const T* dsum, const T* inp, const T* __restrict__ weight,
                           const float* mean, const float* rstd, const float* parts, int64_t N, int C, int64_t all_C) {
    constexpr int K = kColumns / n;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= N) return;
    float dy[K][n], x[K][n];
    load_row(dy, dout + row * C, C);
    load_row(x, inp + row * C, C);
    const float m = mean ? mean[row] : 0.0f, r = rstd[row];
    const float p = mean ? parts[2 * row] / static_cast<float>(all_C) : 0.0f,
                q = parts[2 * row + 1] / static_cast<float>(all_C);
#pragma unroll
    for (int k = 0; k < row_chunks<K, n>(C); ++k) {
        float g[n], past[n] = {};
        load_columns(g, weight, chunk_column<K, n>(k), C);
        if (dsum) load_columns(past, dsum + row * C, chunk_column<K, n>(k), C);
        for (int i = 0; i < n; ++i) dy[k][i] = r * (dy[k][i] * g[i] - p - (x[k][i] - m) * r * q) + past[i];
    }
    store_row(dinp + row * C, dy, C);
}

// What all four are given: rows of one type; and what all but the first are given: a vector of weights, and for each
// row its rstd and, with LayerNorm, its mean.
struct Rows {
    int64_t N, C;
    NormGeometry geometry;
    Rows(const char* name, const char* argument, Tensor x)
        : N(x.rows()), C(x.cols()), geometry(norm_geometry(name, x.rows(), x.cols(), x.cols())) {
        expect(name, argument, x, x.dtype, {N, C});
    }
    Rows(const char* name, Tensor x, Tensor weight, Tensor mean, Tensor rstd) : Rows(name, "x", x) {
        expect(name, "weight", weight, x.dtype, {C});
        if (mean.exists()) expect(name, "mean", mean, DType::f32, {N});
        expect(name, "rstd", rstd, DType::f32, {N});
    }
    template <class F>
    void launch(const char* kernel, const LaunchCost& cost, DType dtype, F&& f) const {
        if (N == 0) return;
        dispatch_rows(dtype, C, C, f);
        launched(kernel, cost);
    }
    dim3 forward_grid() const { return dim3(static_cast<unsigned>(geometry.n_blocks_forward)); }
};

}  // namespace

void divided_norm_parts(Tensor parts, Tensor sum, Tensor inp, Tensor branch, bool centred, cudaStream_t stream) {
    const char* name = "divided_norm_parts";
    const Rows rows(name, "inp", inp);
    expect(name, "parts", parts, DType::f32, {rows.N, 2});
    if (branch) {
        expect(name, "branch", branch, inp.dtype, {rows.N, rows.C});
        expect(name, "sum", sum, inp.dtype, {rows.N, rows.C});
    }
    expect_aligned(name, {{"sum", sum}, {"inp", inp}, {"branch", branch}});
    const LaunchCost cost = {.reads = bytes_of(inp, branch),
                             .writes = bytes_of(parts) + (branch ? bytes_of(sum) : 0),
                             .flops = 4.0 * static_cast<double>(rows.N * rows.C)};
    rows.launch("forward_parts_kernel", cost, inp.dtype, [&](auto zero) {
        using Row = decltype(zero);
        using T = typename Row::Element;
        forward_parts_kernel<T, Row::n, Row::kColumns><<<rows.forward_grid(), rows.geometry.block, 0, stream>>>(
            parts.ptr<float>(), (branch ? sum : Tensor{}).ptr_or_null<T>(), inp.ptr<T>(), branch.ptr_or_null<T>(),
            rows.N, rows.C, centred);
    });
}

void divided_norm_finish(Tensor out, Tensor mean, Tensor rstd, Tensor x, Tensor parts, Tensor weight, Tensor bias,
                         float eps, cudaStream_t stream) {
    const char* name = "divided_norm_finish";
    const Rows rows(name, x, weight, mean, rstd);
    const int64_t n_ranks = parts.shape[0];
    expect(name, "out", out, x.dtype, {rows.N, rows.C});
    expect(name, "parts", parts, DType::f32, {n_ranks, rows.N, 2});
    if (bias) expect(name, "bias", bias, x.dtype, {rows.C});
    check(mean.exists() == bias.exists(), name, ": mean and bias are LayerNorm's: give both or none");
    expect_aligned(name, {{"out", out}, {"x", x}, {"weight", weight}, {"bias", bias}});
    const LaunchCost cost = {.reads = bytes_of(x, parts, weight, bias),
                             .writes = bytes_of(out, mean, rstd),
                             .flops = 4.0 * static_cast<double>(rows.N * rows.C)};
    rows.launch("forward_finish_kernel", cost, x.dtype, [&](auto zero) {
        using Row = decltype(zero);
        using T = typename Row::Element;
        forward_finish_kernel<T, Row::n, Row::kColumns><<<rows.forward_grid(), rows.geometry.block, 0, stream>>>(
            out.ptr<T>(), mean.ptr_or_null<float>(), rstd.ptr<float>(), x.ptr<T>(), parts.ptr<float>(),
            static_cast<int>(n_ranks), weight.ptr<T>(), bias.ptr_or_null<T>(), rows.N, rows.C, eps);
    });
}

void divided_norm_backward_parts(Tensor parts, Tensor dweight, Tensor dbias, Tensor dout, Tensor x, Tensor weight,
                                 Tensor mean, Tensor rstd, bool accumulate, Tensor scratch, cudaStream_t stream) {
    const char* name = "divided_norm_backward_parts";
    const Rows rows(name, x, weight, mean, rstd);
    const int64_t N = rows.N, C = rows.C, blocks = rows.geometry.n_blocks_backward;
    expect(name, "dout", dout, x.dtype, {N, C});
    expect(name, "parts", parts, DType::f32, {N, 2});
    expect(name, "dweight", dweight, dweight.dtype == DType::f32 ? DType::f32 : x.dtype, {C});
    if (dbias) expect(name, "dbias", dbias, dweight.dtype, {C});
    check(mean.exists() == dbias.exists(), name, ": mean and dbias are LayerNorm's: give both or none");
    expect_aligned(name, {{"dweight", dweight}, {"dbias", dbias}, {"dout", dout}, {"x", x}, {"weight", weight}});
    if (N == 0) return zero_unless(accumulate, dweight, stream), zero_unless(accumulate, dbias, stream);
    const Tensor partial = scratch_as(name, scratch, {mean ? 2 : 1, blocks, C});
    const ColumnSums params = column_sums(name, partial, dweight, dbias, accumulate);
    LaunchCost cost = {.reads = bytes_of(dout, x, weight, mean, rstd),
                       .writes = bytes_of(parts),
                       .flops = 9.0 * static_cast<double>(rows.N * rows.C)};
    add_cost_of_sums(cost, partial, dweight, dbias, accumulate);
    rows.launch("backward_parts_kernel", cost, x.dtype, [&](auto zero) {
        using Row = decltype(zero);
        using T = typename Row::Element;
        allow_shared(backward_parts_kernel<T, Row::n, Row::kColumns>, rows.geometry.backward_shared_bytes);
        backward_parts_kernel<T, Row::n, Row::kColumns>
            <<<dim3(static_cast<unsigned>(blocks)), rows.geometry.backward_block, rows.geometry.backward_shared_bytes,
               stream>>>(parts.ptr<float>(), params, dout.ptr<T>(), x.ptr<T>(), weight.ptr<T>(),
                         mean.ptr_or_null<const float>(), rstd.ptr<float>(), N, C);
    });
}

void divided_norm_backward_finish(Tensor dinp, Tensor dout, Tensor dsum, Tensor x, Tensor weight, Tensor mean,
                                  Tensor rstd, Tensor parts, int64_t columns, cudaStream_t stream) {
    const char* name = "divided_norm_backward_finish";
    const Rows rows(name, x, weight, mean, rstd);
    expect(name, "dinp", dinp, x.dtype, {rows.N, rows.C});
    expect(name, "dout", dout, x.dtype, {rows.N, rows.C});
    if (dsum) expect(name, "dsum", dsum, x.dtype, {rows.N, rows.C});
    expect(name, "parts", parts, DType::f32, {rows.N, 2});
    expect_aligned(name, {{"dinp", dinp}, {"dout", dout}, {"dsum", dsum}, {"x", x}, {"weight", weight}});
    const LaunchCost cost = {.reads = bytes_of(dout, dsum, x, weight, mean, rstd) + bytes_of(parts) / (mean ? 1 : 2),
                             .writes = bytes_of(dinp),
                             .flops = 7.0 * static_cast<double>(rows.N * rows.C)};
    rows.launch("backward_finish_kernel", cost, x.dtype, [&](auto zero) {
        using Row = decltype(zero);
        using T = typename Row::Element;
        backward_finish_kernel<T, Row::n, Row::kColumns><<<rows.forward_grid(), rows.geometry.block, 0, stream>>>(
            dinp.ptr<T>(), dout.ptr<T>(), dsum.ptr_or_null<T>(), x.ptr<T>(), weight.ptr<T>(),
            mean.ptr_or_null<const float>(), rstd.ptr<float>(), parts.ptr<float>(), rows.N, rows.C, columns);
    });
}
