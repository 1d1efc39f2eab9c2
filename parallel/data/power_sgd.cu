// power_sgd.cu: --compress powersgd: a matrix of gradients travels as two narrow ones.
//                                                               (Vogels, Karimireddy & Jaggi 2019, arXiv:1905.13727)
//
// M (R, C) of each rank is its gradient plus its error. Its best approximation of rank r is P P^T M, with the r
// strongest left singular vectors as the columns of P. One step of the power method comes close to them,
// from where the last step ended:
//
//     P = sum over ranks of M Q       (R, r)      all-reduce
//     P = orthonormal columns of P                Gram-Schmidt; on every rank the same numbers, so the same bits
//     S = M^T P                       (C, r)      this rank's share: it has sent P S^T
//     M - P S^T                                   is the error that it keeps
//     Q = sum over ranks of S         (C, r)      all-reduce; the next step starts from it
//     P Q^T                                       is the sum of gradients that all ranks use
//
// Everything is linear in M, so the sum is that of the ranks' shares, and 4 r (R + C) bytes travel instead of 4 R C.
// Vectors, and matrices too small to gain, travel as they are, in the first message.
//
// With --tp the rows that pad the vocabulary, which ranks have different numbers of, take part as rows of zeros: a
// weight that these ranks all have then lies in the same place of their messages, on which the order of a sum may
// depend.
//
// A column of P that the others already span (M has a lower rank, or is 0) would be rounding noise made long: it
// becomes 0, and its column of Q starts again from random numbers.
#include "core/kernel.cuh"
#include "parallel/data/compress.h"

#include <algorithm>

namespace {

constexpr int kMaxRank = 16;       // of a matrix; columns are kept in registers
constexpr int kProjectRows = 8;    // warps of a thread block, a row each
constexpr int kColumns = 128;      // threads of a thread block, a column or an element each
constexpr int64_t kSumRows = 256;  // rows that a thread adds up

// error = M = error + grads;  P = M Q. One warp per row.
__global__ void __launch_bounds__(kWarp* kProjectRows)
    project_kernel(float* p, float* error, const float* grads, const float* q, int64_t R, int64_t C, int r) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kProjectRows + threadIdx.y;
    if (row >= R) return;
    float sums[kMaxRank] = {};
    for (int64_t c = threadIdx.x; c < C; c += kWarp) {
        const float m = error[row * C + c] + grads[row * C + c];
        error[row * C + c] = m;
#pragma unroll
        for (int k = 0; k < kMaxRank; ++k)
            if (k < r) sums[k] += m * q[c * r + k];
    }
#pragma unroll
    for (int k = 0; k < kMaxRank; ++k) {
        if (k >= r) break;
        const float sum = warp_sum(sums[k]);
        if (threadIdx.x == 0) p[row * r + k] = sum;
    }
}

// Dot product of columns j and k of p, for all threads.
__device__ float column_dot(const float* p, int64_t R, int r, int j, int k, float* scratch) {
    float sum = 0;
    for (int64_t row = threadIdx.x; row < R; row += blockDim.x) sum += p[row * r + j] * p[row * r + k];
    sum = block_reduce<Sum>(sum, scratch);
    __syncthreads();  // all have read the scratch
    return sum;
}

// Divides column k of p by the power of two of its largest number. That rounds nothing, and then the squares neither
// overflow nor vanish: P is as large as the square of the gradients, because Q is as large as they were. Infinity
// becomes NaN.
__device__ void scale_column(float* p, int64_t R, int r, int k, float* scratch) {
    float largest = 0;
    for (int64_t row = threadIdx.x; row < R; row += blockDim.x) largest = fmaxf(largest, fabsf(p[row * r + k]));
    largest = block_reduce<Max>(largest, scratch);
    __syncthreads();  // all have read the scratch
    if (largest == 0) return;
    const float scale = scalbnf(1.0f, -max(ilogbf(largest), -126));
    for (int64_t row = threadIdx.x; row < R; row += blockDim.x) p[row * r + k] *= scale;
}

// Modified Gram-Schmidt by one thread block. A thread reads and writes its own rows only. alive[k]: column k is not 0.
// What is left of a column after the others are taken off it has an error of some 2^-24 of what was there: with at
// least 1e-3 left, the columns are orthogonal to about 1e-4.
__global__ void __launch_bounds__(256) orthonormalise_kernel(float* p, float* alive, int64_t R, int r) {
    __shared__ float scratch[kWarp];
    for (int k = 0; k < r; ++k) {
        scale_column(p, R, r, k, scratch);
        const float before = column_dot(p, R, r, k, k, scratch);
        for (int j = 0; j < k; ++j) {
            const float dot = column_dot(p, R, r, j, k, scratch);
            for (int64_t row = threadIdx.x; row < R; row += blockDim.x) p[row * r + k] -= dot * p[row * r + j];
        }
        const float after = column_dot(p, R, r, k, k, scratch);
        const bool dead = after <= 1e-6f * before;  // not for NaN, which has to be seen
        const float scale = dead ? 0.0f : 1.0f / sqrtf(after);
        for (int64_t row = threadIdx.x; row < R; row += blockDim.x) p[row * r + k] *= scale;
        if (threadIdx.x == 0) alive[k] = dead ? 0.0f : 1.0f;
    }
}

// Row y of sums (C, r each): M^T P over rows [256 y, 256 y + 256) of M. One thread per column of M.
__global__ void __launch_bounds__(kColumns)
    transposed_kernel(float* sums, const float* m, const float* p, int64_t R, int64_t C, int r) {
    const int64_t c = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
    if (c >= C) return;
    float sum[kMaxRank] = {};
    for (int64_t row = blockIdx.y * kSumRows; row < min(R, (blockIdx.y + 1) * kSumRows); ++row) {
        const float x = m[row * C + c];
#pragma unroll
        for (int k = 0; k < kMaxRank; ++k)
            if (k < r) sum[k] += x * p[row * r + k];
    }
#pragma unroll
    for (int k = 0; k < kMaxRank; ++k)
        if (k < r) sums[(blockIdx.y * C + c) * r + k] = sum[k];
}

// out = P Q^T, or out -= P Q^T. One thread per element.
template <bool subtract>
__global__ void __launch_bounds__(kColumns)
    expand_kernel(float* out, const float* p, const float* q, int64_t R, int64_t C, int r) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
    if (i >= R * C) return;
    const int64_t row = i / C, c = i % C;
    float sum = 0;
    for (int k = 0; k < r; ++k) sum += p[row * r + k] * q[c * r + k];
    out[i] = subtract ? out[i] - sum : sum;
}

// Where the next step starts. sums: Q of this step. A column that was 0: numbers in [-1, 1), the same on every rank.
__global__ void __launch_bounds__(kColumns)
    warm_start_kernel(float* q, const float* sums, const float* alive, int64_t n, int r) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
    if (i >= n) return;
    const Philox bits = philox(1905'13727, 0, static_cast<uint64_t>(i));
    q[i] = alive[i % r] != 0.0f ? sums[i] : static_cast<float>(static_cast<int32_t>(bits.v[0])) * 0x1p-31f;
}

dim3 blocks_for(int64_t n) { return static_cast<unsigned>(narrow(ceil_div(n, kColumns), "powersgd: blocks")); }

// ---------------------------------------------------------------------------------------------------------------------

class PowerSgd : public Compressor {
  public:
    PowerSgd(Comm& comm, int64_t rank) : comm_(comm), r_(static_cast<int>(rank)) {
        check(rank >= 1 && rank <= kMaxRank, "--compress-rank ", rank, ": use 1 to ", kMaxRank);
    }

    void take_memory(const FlatParameters& p, Arena& arena) override {
        units_.assign(p.units.size(), {});
        int64_t first_n = 0, second_n = 0, sums_n = 0, q_n = 0, n_matrices = 0;
        for (size_t u = 0; u < units_.size(); ++u) {
            UnitPlan& plan = units_[u];
            for (const Param& param : params_of(p, u)) {
                const int64_t n = param.value.n(), C = param.value.cols(), R = n / C;
                if (param.value.ndim != 2 || r_ * (R + C) >= n) {
                    plan.whole.push_back({param.offset, n, plan.first_n});
                    plan.first_n += n;
                    continue;
                }
                plan.matrices.push_back({param.offset, R, C, plan.first_n, plan.second_n, q_n, n_matrices++});
                plan.first_n += R * r_;
                plan.second_n += C * r_;
                q_n += C * r_;
                sums_n = std::max(sums_n, ceil_div(R, kSumRows) * C * r_);
            }
            first_n = std::max(first_n, plan.first_n);
            second_n = std::max(second_n, plan.second_n);
        }
        first_ = arena.take("compressed gradients", DType::f32, {first_n});
        second_ = arena.take("compressed gradients", DType::f32, {second_n});
        sums_ = arena.take("compressed gradients", DType::f32, {sums_n});
        error_ = arena.take("compression's errors", DType::f32, {p.n});
        q_ = arena.take("powersgd's Q", DType::f32, {q_n});
        alive_ = arena.take("powersgd's Q", DType::f32, {n_matrices * r_});
        comm_.count_memory([&] {
            comm_.all_reduce(first_, nullptr);
            comm_.all_reduce(second_, nullptr);
        });
        if (arena.counting()) return;
        zero(error_);
        zero(alive_);
        for (const UnitPlan& plan : units_)
            for (const Matrix& m : plan.matrices) warm_start(m, second_, device().stream);
        cudaCheck(cudaDeviceSynchronize());
    }

    void reduce(const FlatParameters& p, size_t u, cudaStream_t stream) override {
        const UnitPlan& plan = units_[u];
        const Tensor first = first_.slice(0, plan.first_n), second = second_.slice(0, plan.second_n);
        for (const Whole& w : plan.whole) copy_tensor(first.slice(w.at, w.n), p.grads.slice(w.offset, w.n), stream);
        for (const Matrix& m : plan.matrices) {
            project_kernel<<<static_cast<unsigned>(ceil_div(m.R, kProjectRows)), dim3(kWarp, kProjectRows), 0,
                             stream>>>(p_of(m), error_of(m), grads_of(p, m), q_.ptr<float>() + m.q_at, m.R, m.C, r_);
            cudaCheckLaunch();
        }
        comm_.all_reduce(first, stream);
        for (const Whole& w : plan.whole) copy_tensor(p.grads.slice(w.offset, w.n), first.slice(w.at, w.n), stream);
        for (const Matrix& m : plan.matrices) share(m, stream);
        comm_.all_reduce(second, stream);
        for (const Matrix& m : plan.matrices) {
            expand_kernel<false>
                <<<blocks_for(m.R * m.C), kColumns, 0, stream>>>(grads_of(p, m), p_of(m), s_of(m), m.R, m.C, r_);
            cudaCheckLaunch();
            warm_start(m, second.slice(m.second_at, m.C * r_), stream);
        }
    }

    std::vector<std::pair<std::string, Tensor>> states() const override { return {{"error", error_}, {"q", q_}}; }

  private:
    // Places: in the flat gradients; of P in the first message, of S and Q in the second; in q_; among all matrices.
    struct Matrix {
        int64_t offset, R, C, first_at, second_at, q_at, index;
    };
    struct Whole {
        int64_t offset, n, at;
    };
    struct UnitPlan {
        std::vector<Matrix> matrices;
        std::vector<Whole> whole;
        int64_t first_n = 0, second_n = 0;
    };
    // A tensor of this matrix alone: gradients behind it may be on their way to the host (--offload), and strict mode
    // counts a pointer up to the end of its tensor.
    static float* grads_of(const FlatParameters& p, const Matrix& m) {
        return p.grads.slice(m.offset, m.R * m.C).ptr<float>();
    }
    float* p_of(const Matrix& m) const { return first_.ptr<float>() + m.first_at; }
    float* s_of(const Matrix& m) const { return second_.ptr<float>() + m.second_at; }
    float* error_of(const Matrix& m) const { return error_.ptr<float>() + m.offset; }
    float* alive_of(const Matrix& m) const { return alive_.ptr<float>() + m.index * r_; }

    // From the sum of P to this rank's share and its error.
    void share(const Matrix& m, cudaStream_t stream) const {
        const int64_t n_sums = ceil_div(m.R, kSumRows), n = m.C * r_;
        orthonormalise_kernel<<<1, 256, 0, stream>>>(p_of(m), alive_of(m), m.R, r_);
        cudaCheckLaunch();
        const dim3 grid(static_cast<unsigned>(ceil_div(m.C, kColumns)), static_cast<unsigned>(n_sums));
        transposed_kernel<<<grid, kColumns, 0, stream>>>(sums_.ptr<float>(), error_of(m), p_of(m), m.R, m.C, r_);
        cudaCheckLaunch();
        reduce_rows(second_.slice(m.second_at, n), sums_.slice(0, n_sums * n), static_cast<int>(n_sums), ReduceOp::sum,
                    stream);
        expand_kernel<true>
            <<<blocks_for(m.R * m.C), kColumns, 0, stream>>>(error_of(m), p_of(m), s_of(m), m.R, m.C, r_);
        cudaCheckLaunch();
    }
    void warm_start(const Matrix& m, const Tensor& sums, cudaStream_t stream) const {
        warm_start_kernel<<<blocks_for(m.C * r_), kColumns, 0, stream>>>(q_.ptr<float>() + m.q_at, sums.ptr<float>(),
                                                                         alive_of(m), m.C * r_, r_);
        cudaCheckLaunch();
    }

    Comm& comm_;
    const int r_;
    std::vector<UnitPlan> units_;
    Tensor first_, second_, sums_, error_, q_, alive_;
};

}  // namespace

std::unique_ptr<Compressor> make_power_sgd(Comm& comm, int64_t rank) { return std::make_unique<PowerSgd>(comm, rank); }
