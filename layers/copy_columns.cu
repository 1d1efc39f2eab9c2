// layers/copy_columns.cu: a block of columns of one matrix to its place in another.
//
//   for r < R, c < n:  out[r][out_column + c] = inp[r][inp_column + c]
//
// Ranks send blocks of matrices as they lie in memory, one after the other; products want them side by side:
//
//     block 0 (R, n) | block 1 (R, n) | ...   ->   row 0 of block 0, row 0 of block 1, ... | row 1 of block 0, ...
//
// Neighbouring threads copy neighbouring numbers. Bytes: n R numbers read and written.
#include "layers/layers.h"

#include "core/kernel.cuh"

namespace {

template <class T>
__global__ void copy_columns_kernel(T* out, int64_t out_stride, const T* inp, int64_t inp_stride, int64_t R,
                                    int64_t n) {
    const int64_t i = global_thread();
    if (i >= R * n) return;
    out[i / n * out_stride + i % n] = inp[i / n * inp_stride + i % n];
}

}  // namespace

void copy_columns(Tensor out, int64_t out_column, Tensor inp, int64_t inp_column, int64_t n, cudaStream_t stream) {
    const char* const name = "copy_columns";
    const int64_t R = inp.rows();
    check(out.dtype == inp.dtype && out.rows() == R, name, ": out is ", out, ", inp is ", inp,
          "; expected one dtype and as many rows");
    check(n >= 0 && out_column >= 0 && inp_column >= 0 && out_column + n <= out.cols() && inp_column + n <= inp.cols(),
          name, ": columns ", inp_column, " to ", inp_column + n, " of ", inp, " do not fit at ", out_column, " of ",
          out);
    if (R * n == 0) return;
    dispatch(inp.dtype, [&](auto zero) {
        using T = decltype(zero);
        const unsigned blocks = static_cast<unsigned>(narrow(ceil_div(R * n, int64_t{256}), name));
        copy_columns_kernel<T><<<blocks, 256, 0, stream>>>(out.ptr<T>() + out_column, out.cols(),
                                                           inp.ptr<T>() + inp_column, inp.cols(), R, n);
        cudaCheckLaunch();
    });
}
