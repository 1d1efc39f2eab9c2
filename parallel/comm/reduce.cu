// reduce.cu: the additions of the collectives, as kernels over flat arrays.
//
// One element per thread, no barrier, memory speed. Sums of 16-bit numbers are float32 until they are rounded, once.
#include "core/kernel.cuh"
#include "parallel/comm/transport.h"

namespace {

constexpr int kThreads = 256;

// int32 adds wrap around (as unsigned ones do in C++).
template <ReduceOp op>
__device__ __forceinline__ int32_t combine(int32_t a, int32_t b) {
    if constexpr (op == ReduceOp::max) return a > b ? a : b;
    else return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}
template <ReduceOp op>
__device__ __forceinline__ float combine(float a, float b) {
    if constexpr (op == ReduceOp::max) return a > b ? a : b;
    else return a + b;
}

// float for float types, int for int.
__device__ __forceinline__ int32_t widen(int32_t x) { return x; }
template <class T>
__device__ __forceinline__ float widen(T x) {
    return to_float(x);
}

// In whole blocks no thread is asked for its index, so that on the CPU their loop needs no masks.
__device__ __forceinline__ bool is_outside(int64_t i, int64_t n) {
    return n - static_cast<int64_t>(blockIdx.x) * kThreads < kThreads && i >= n;
}

template <class T, ReduceOp op>
__global__ void __launch_bounds__(kThreads)
    reduce_into_kernel(T* __restrict__ acc, const T* __restrict__ part, int64_t n) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (is_outside(i, n)) return;
    acc[i] = combine<op>(acc[i], part[i]);
}

// kRows = 0: any number. The others are for the CPU, whose compiler makes SIMD of a thread loop only if no loop of
// unknown length is inside.
template <class Out, class T, ReduceOp op, int kRows>
__global__ void __launch_bounds__(kThreads)
    reduce_rows_kernel(Out* __restrict__ out, const T* __restrict__ parts, int n_rows, int64_t n) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (is_outside(i, n)) return;
    auto sum = widen(parts[i]);
    if constexpr (kRows > 0) {
        for (int j = 1; j < kRows; ++j) sum = combine<op>(sum, widen(parts[j * n + i]));
    } else {
        for (int j = 1; j < n_rows; ++j) sum = combine<op>(sum, widen(parts[j * n + i]));
    }
    out[i] = static_cast<Out>(sum);  // 16 bits: to the nearest
}

template <class Out, class T>
__global__ void __launch_bounds__(kThreads)
    convert_kernel(Out* __restrict__ out, const T* __restrict__ inp, int64_t n) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (is_outside(i, n)) return;
    out[i] = from_float<Out>(to_float(inp[i]));
}

unsigned blocks_for(int64_t n) { return static_cast<unsigned>(narrow(ceil_div(n, kThreads), "collective: blocks")); }

template <ReduceOp op, int kRows, class Out, class T>
void launch_fixed_rows(Out* out, const T* parts, int n_rows, int64_t n, cudaStream_t stream) {
    reduce_rows_kernel<Out, T, op, kRows><<<blocks_for(n), kThreads, 0, stream>>>(out, parts, n_rows, n);
    cudaCheckLaunch();
}
// Sums of floats, the gradients, are what takes time. The others are a few numbers.
template <ReduceOp op, class Out, class T>
void launch_rows(Out* out, const T* parts, int n_rows, int64_t n, cudaStream_t stream) {
    if constexpr (op == ReduceOp::sum && !std::is_same_v<T, int32_t>) {
        switch (n_rows) {
            case 2: return launch_fixed_rows<op, 2>(out, parts, n_rows, n, stream);
            case 3: return launch_fixed_rows<op, 3>(out, parts, n_rows, n, stream);
            case 4: return launch_fixed_rows<op, 4>(out, parts, n_rows, n, stream);
            case 8: return launch_fixed_rows<op, 8>(out, parts, n_rows, n, stream);
        }
    }
    launch_fixed_rows<op, 0>(out, parts, n_rows, n, stream);
}

template <class F>
void dispatch_op(ReduceOp op, F&& f) {
    if (op == ReduceOp::max) f(std::integral_constant<ReduceOp, ReduceOp::max>{});
    else f(std::integral_constant<ReduceOp, ReduceOp::sum>{});
}

}  // namespace

void reduce_into(Tensor acc, Tensor part, ReduceOp op, cudaStream_t stream) {
    const int64_t n = acc.n();
    if (n == 0) return;
    check(part.n() == n && part.dtype == acc.dtype, "reduce_into: acc is ", acc, ", part is ", part);
    dispatch_op(op, [&](auto constant) {
        constexpr ReduceOp kOp = decltype(constant)::value;
        if (acc.dtype == DType::i32) {
            reduce_into_kernel<int32_t, kOp>
                <<<blocks_for(n), kThreads, 0, stream>>>(acc.ptr<int32_t>(), part.ptr<int32_t>(), n);
        } else {
            reduce_into_kernel<float, kOp>
                <<<blocks_for(n), kThreads, 0, stream>>>(acc.ptr<float>(), part.ptr<float>(), n);
        }
        cudaCheckLaunch();
    });
}

void reduce_rows(Tensor out, Tensor parts, int n_parts, ReduceOp op, cudaStream_t stream) {
    const int64_t n = out.n();
    if (n == 0) return;
    check(parts.n() == n * n_parts && (out.dtype == parts.dtype || out.dtype == DType::f32), "reduce_rows: out is ",
          out, ", parts are ", n_parts, " rows in ", parts);
    dispatch_op(op, [&](auto constant) {
        constexpr ReduceOp kOp = decltype(constant)::value;
        if (parts.dtype == DType::i32)
            return launch_rows<kOp>(out.ptr<int32_t>(), parts.ptr<int32_t>(), n_parts, n, stream);
        dispatch(parts.dtype, [&](auto zero) {
            using T = decltype(zero);
            if (out.dtype == DType::f32) launch_rows<kOp>(out.ptr<float>(), parts.ptr<T>(), n_parts, n, stream);
            else launch_rows<kOp>(out.ptr<T>(), parts.ptr<T>(), n_parts, n, stream);
        });
    });
}

void convert(Tensor out, Tensor inp, cudaStream_t stream) {
    const int64_t n = out.n();
    if (n == 0) return;
    check(inp.n() == n, "convert: out is ", out, ", inp is ", inp);
    dispatch(out.dtype, [&](auto out_zero) {
        dispatch(inp.dtype, [&](auto inp_zero) {
            using Out = decltype(out_zero);
            using T = decltype(inp_zero);
            convert_kernel<Out, T><<<blocks_for(n), kThreads, 0, stream>>>(out.ptr<Out>(), inp.ptr<T>(), n);
            cudaCheckLaunch();
        });
    });
}

Tensor widened(Comm& comm, Tensor out, Tensor inp, cudaStream_t stream) {
    const bool is_wide = dtype_bytes(inp.dtype) == 4;
    const Tensor sum = is_wide ? out : comm.scratch(1, DType::f32, inp.n());
    if (comm.counting()) return sum;
    if (is_wide) copy_tensor(sum, inp, stream);
    else convert(sum, inp, stream);
    return sum;
}

void narrowed(Tensor out, Tensor sum, Range part, cudaStream_t stream) {
    if (out.data != sum.data) convert(part_of(out, part.first, part.n), part_of(sum, part.first, part.n), stream);
}
