// optim/weights.cuh: how the kernels of the optimizers write new weights, in one of the formats that optim.h allows.
//
//   values   copy          gradients      a step writes
//   f32      none          f32            the new weight
//   f32      bf16 or f16   f32, or as     the new weight, and rounded to nearest into the copy, in the same pass
//                          the copy
//   bf16     none          f32 or bf16    the new weight, rounded to nearest or stochastically
//
// Stochastic rounding adds a random number of 16 bits to the lower half of the f32 and cuts that half off:
//
//   sign exponent mantissa | lower half        up with the probability lower half / 2^16, which is how far it is on its
//                    + 1 <-| + random bits     way to the next bf16: the expected result is the exact weight
//
// The random bits of an element depend on the seed, its parameter's name, its index in the parameter, and the step; not
// on where it lies in memory, or which thread or rank updates it.
#pragma once

#include "layers/chunk.cuh"
#include "optim/optim.h"

namespace {

// A draw of Philox has 128 bits, the random bits of 8 elements. Element e takes part e / kDrawStride % 8 of draw
// e / kTileN * kDrawStride + e % kDrawStride:
//
//   elements of a tile   | 0 1 2 ... 127 | 128 129 ... 255 | ... | 896 ... 1023 |
//   draw                 | 0 1 2 ... 127 |   0   1 ... 127 | ... |   0 ...  127 |
//
// So a thread that updates 8 elements of a tile at this distance draws once, while threads that are neighbours still
// read neighbours. A draw is about 100 integer instructions. One for each element would cost a GPU about as much time
// as the 22 bytes that AdamW moves for it; an eighth of that hides behind the memory.
constexpr int kDrawParts = 8, kDrawStride = kTileN / kDrawParts;

__device__ __forceinline__ Philox draw_of(uint64_t seed, uint64_t key, int64_t t, int64_t draw) {
    return philox(seed, key, static_cast<uint64_t>(t) << 32 | static_cast<uint64_t>(draw));
}
__device__ __forceinline__ uint32_t part_of(const Philox& draw, int part) {
    // Not v[part / 2]: with an index that nvcc does not know the draw would be in memory, not in registers.
    const uint32_t low = part & 2 ? draw.v[1] : draw.v[0], high = part & 2 ? draw.v[3] : draw.v[2];
    return (part & 4 ? high : low) >> (part % 2 * 16) & 0xffff;
}

// Beyond the largest bf16 the next "number" is infinity, as in rounding to nearest. Infinity and NaN stay.
__device__ __forceinline__ __nv_bfloat16 round_stochastically(float w, uint32_t random_bits) {
    const uint32_t bits = __float_as_uint(w);
    const uint32_t up_or_down = bits + random_bits, nan = bits | 0x400000;  // so that a NaN keeps a bit of its mantissa
    const bool is_finite = (bits & 0x7f800000) != 0x7f800000, is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return __ushort_as_bfloat16(static_cast<unsigned short>((is_finite ? up_or_down : is_nan ? nan : bits) >> 16));
}

// Neighbours that a thread updates at once in kernels whose arrays may begin anywhere.
constexpr int kUpdated = kOnCpu ? kChunk<float> : 1;

struct NoCopy {};

// One of the formats. Kernels take the two pointers as arguments of their own, where __restrict__ works.
template <class V, class C, bool is_stochastic>
struct WeightFormat {
    using Value = V;
    using Copy = C;
    static constexpr bool stochastic = is_stochastic;
    uint64_t seed = 0;
    int64_t t = 0;

    // The random bits of element e of a parameter, for kernels whose threads share no draws.
    __device__ __forceinline__ uint32_t random_bits(uint64_t key, int64_t e) const {
        if constexpr (!stochastic) return 0;
        return part_of(draw_of(seed, key, t, e / kTileN * kDrawStride + e % kDrawStride),
                       static_cast<int>(e % kTileN / kDrawStride));
    }
    // Of n neighbours, from element e of this rank's part of its parameter on. (On the CPU device the loop is SIMD
    // where nothing is cut, because it has no division. With both loops nvcc unrolled adam8bit's loop over the elements
    // of a thread no longer, and kept their states in memory.)
    template <int n>
    __device__ __forceinline__ void random_bits(uint32_t (&bits)[n], uint64_t key, int64_t e,
                                                const PlaceInWhole& place) const {
        if (kOnCpu && !place.is_cut()) {
            for (int k = 0; k < n; ++k) bits[k] = random_bits(key, place.first + e + k);
        } else {
            for (int k = 0; k < n; ++k) bits[k] = random_bits(key, place.of(e + k));
        }
    }
    __device__ __forceinline__ V rounded(float w, uint32_t random_bits) const {
        if constexpr (stochastic) return round_stochastically(w, random_bits);
        else return from_float<V>(w);
    }
    static constexpr bool has_copy = !std::is_same_v<C, NoCopy>;
    // A chunk (layers/chunk.cuh), whose first element is at i, in the copy at copy_i, and is element e of this rank's
    // part of its parameter.
    template <int n>
    __device__ __forceinline__ void store_chunk(V* values, int64_t i, C* copy, int64_t copy_i, const float (&w)[n],
                                                int64_t n_left, uint64_t key, int64_t e,
                                                const PlaceInWhole& place) const {
        if constexpr (stochastic) {
            uint32_t bits[n];
            V rounded[n];
            random_bits(bits, key, e, place);
            for (int k = 0; k < n; ++k) rounded[k] = round_stochastically(w[k], bits[k]);
            for (int k = 0; k < n; ++k)
                if (k < n_left) values[i + k] = rounded[k];
        } else {
            ::store_chunk(values + i, w, n_left);
        }
        if constexpr (has_copy) ::store_chunk(copy + copy_i, w, n_left);
    }
};

// dispatch() for kernels that write weights: calls f(a WeightFormat, a value of the gradients' type).
//     dispatch_weights(kName, weights, grads.dtype, t, [&](auto format, auto grad_zero) {
//         using F = decltype(format); ... weights.values.ptr<typename F::Value>(), copy_of<F>(weights), ... });
template <class F>
void dispatch_weights(const char* name, const Weights& weights, DType grads, int64_t t, F&& f) {
    using bf16 = __nv_bfloat16;
    const DType v = weights.values.dtype, c = weights.copy.dtype;
    const bool has_copy = weights.copy.exists();
    const auto with_gradients = [&](auto format, auto small) {  // f32, or of the 16-bit type of the weights
        format.seed = weights.seed;
        format.t = t;
        if (grads == DType::f32) return f(format, float{});
        if constexpr (!std::is_same_v<decltype(small), float>)
            if (grads == DTypeOf<decltype(small)>::value) return f(format, small);
        fail(name, ": ", dtype_name(v), " values", has_copy ? concat(" with a copy in ", dtype_name(c)) : "",
             " do not go with gradients in ", dtype_name(grads), ": use f32",
             std::is_same_v<decltype(small), float> ? "" : concat(" or ", dtype_name(DTypeOf<decltype(small)>::value)));
    };
    check(!weights.stochastic || v == DType::bf16, name, ": stochastic rounding is for bf16 values, these are ",
          dtype_name(v));
    if (v == DType::f32 && !has_copy) return with_gradients(WeightFormat<float, NoCopy, false>{}, float{});
    if (v == DType::f32 && c == DType::bf16) return with_gradients(WeightFormat<float, bf16, false>{}, bf16{});
    if (v == DType::f32 && c == DType::f16) return with_gradients(WeightFormat<float, __half, false>{}, __half{});
    check(v == DType::bf16 && !has_copy, name, ": ", dtype_name(v), " values",
          has_copy ? concat(" with a copy in ", dtype_name(c)) : "",
          ": values are f32, with or without a copy in bf16 or f16, or bf16 without a copy");
    if (weights.stochastic) return with_gradients(WeightFormat<bf16, NoCopy, true>{}, bf16{});
    return with_gradients(WeightFormat<bf16, NoCopy, false>{}, bf16{});
}
template <class F>
typename F::Copy* copy_of(const Weights& weights) {
    if constexpr (std::is_same_v<typename F::Copy, NoCopy>) return nullptr;
    else return weights.copy.ptr<typename F::Copy>();
}

}  // namespace
