// test/comm_check.h: every collective against a serial sum; used by test_comm.cu (ranks as threads) and by
// comm_check.cu (as processes, and for the faults). A difference is an Error, because Catch2's macros may not be used
// on several threads or in other processes.
#pragma once

#include "parallel/comm/transport.h"
#include "parallel/data/data.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <utility>

namespace comm_check {

// Device memory in an allocation of its own, so that strict mode's guard page finds an access beyond its end.
struct Buffer {
    Tensor tensor;
    Buffer(DType dtype, int64_t n) : tensor(make_tensor(nullptr, dtype, {n})) {
        if (n > 0) cudaCheck(cudaMalloc(&tensor.data, tensor.bytes()));
    }
    ~Buffer() { cudaFree(tensor.data); }
    Buffer(const Buffer&) = delete;
    operator Tensor() const { return tensor; }
};

// Memory for all collectives of up to n numbers of 4 bytes (reduce_scatter: n / size per rank) by this communicator.
struct CommMemory {
    Arena arena{"communication"};
    CommMemory(Comm& comm, int64_t n) {
        const Tensor x = make_tensor(nullptr, DType::f32, {n}),
                     even = make_tensor(nullptr, DType::f32, {round_up(n, comm.size)}),
                     piece = make_tensor(nullptr, DType::f32, {even.n() / comm.size});
        for (const AllReduce algorithm : all_reduce_algorithms()) count_all_reduce(comm, n, algorithm);
        comm.count_memory([&] {
            comm.reduce_scatter(piece, even, ReduceOp::sum, nullptr);
            comm.all_to_all(even, even, nullptr);
            comm.reduce(x, x, ReduceOp::sum, comm.size - 1, nullptr);
            comm.reduce(x, x, ReduceOp::sum, 0, nullptr);
        });
        take(comm);
    }
    // For all_reduce by one algorithm alone.
    CommMemory(Comm& comm, int64_t n, AllReduce algorithm) {
        count_all_reduce(comm, n, algorithm);
        take(comm);
    }

  private:
    static void count_all_reduce(Comm& comm, int64_t n, AllReduce algorithm) {
        const AllReduce chosen = std::exchange(comm.algorithm, algorithm);
        comm.count_memory([&] {
            for (const DType dtype : {DType::f32, DType::bf16})
                comm.all_reduce(make_tensor(nullptr, dtype, {n}), nullptr);
        });
        comm.algorithm = chosen;
    }
    void take(Comm& comm) {
        comm.take_memory(arena);
        arena.reserve();
        comm.take_memory(arena);
    }
};

// Element i of rank r's input. Sums of the integers are exact in every dtype: up to 8 ranks of |x| <= 15 stay below
// 2^7, and bf16 has 8 bits. The fractions are not exact, and show the order of the additions.
enum class Values { integers, fractions };
inline float value_of(Values values, int rank, int64_t i) {
    if (values == Values::integers) return static_cast<float>((7 * i + 13 * rank + i / 31) % 31 - 15);
    return static_cast<float>(uniform(2, static_cast<uint64_t>(rank), static_cast<uint64_t>(i)) * 2 - 1);
}

// Reads and writes as floats (int32 too).
inline void fill(const Tensor& tensor, const std::vector<float>& values, cudaStream_t stream) {
    if (values.empty()) return;
    std::vector<char> bytes(tensor.bytes());
    for (size_t i = 0; i < values.size(); ++i) {
        if (tensor.dtype == DType::i32) {
            reinterpret_cast<int32_t*>(bytes.data())[i] = static_cast<int32_t>(values[i]);
        } else {
            dispatch(tensor.dtype, [&](auto zero) {
                reinterpret_cast<decltype(zero)*>(bytes.data())[i] = static_cast<decltype(zero)>(values[i]);
            });
        }
    }
    cudaCheck(cudaMemcpyAsync(tensor.data, bytes.data(), bytes.size(), cudaMemcpyHostToDevice, stream));
}
inline std::vector<float> read(const Tensor& tensor, cudaStream_t stream) {
    std::vector<char> bytes(tensor.bytes());
    std::vector<float> values(static_cast<size_t>(tensor.n()));
    if (values.empty()) return values;
    cudaCheck(cudaMemcpyAsync(bytes.data(), tensor.data, bytes.size(), cudaMemcpyDeviceToHost, stream));
    cudaCheck(cudaStreamSynchronize(stream));
    for (size_t i = 0; i < values.size(); ++i) {
        if (tensor.dtype == DType::i32) {
            values[i] = static_cast<float>(reinterpret_cast<int32_t*>(bytes.data())[i]);
        } else {
            dispatch(tensor.dtype, [&](auto zero) {
                values[i] = static_cast<float>(reinterpret_cast<decltype(zero)*>(bytes.data())[i]);
            });
        }
    }
    return values;
}
inline float rounded(float x, DType dtype) {
    float result = x;
    if (dtype != DType::i32)
        dispatch(dtype, [&](auto zero) { result = static_cast<float>(static_cast<decltype(zero)>(x)); });
    return result;
}

inline std::vector<float> inputs(Values values, int rank, int64_t n, DType dtype) {
    std::vector<float> all(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) all[static_cast<size_t>(i)] = rounded(value_of(values, rank, i), dtype);
    return all;
}

// The serial sum or maximum over ranks 0 .. size-1, in float32, rounded once.
inline std::vector<float> serial(Values values, int size, int64_t n, DType dtype, ReduceOp op) {
    std::vector<float> all = inputs(values, 0, n, dtype);
    for (int r = 1; r < size; ++r) {
        const std::vector<float> next = inputs(values, r, n, dtype);
        for (size_t i = 0; i < all.size(); ++i)
            all[i] = op == ReduceOp::max ? std::max(all[i], next[i]) : all[i] + next[i];
    }
    for (float& x : all) x = rounded(x, dtype);
    return all;
}

// tolerance: of each element, absolute; 0: bit for bit.
inline void compare(const std::string& what, const std::vector<float>& got, const std::vector<float>& want,
                    double tolerance = 0) {
    check(got.size() == want.size(), what, ": ", got.size(), " elements instead of ", want.size());
    for (size_t i = 0; i < got.size(); ++i)
        check(std::abs(static_cast<double>(got[i]) - want[i]) <= tolerance, what, ": element ", i, " of ", got.size(),
              " is ", got[i], ", expected ", want[i]);
}

// What two sums of the fractions may differ by that are added in different orders: both sides make size - 1 additions
// of |x| < 1, each of which rounds by at most 2^-24 of a sum below `size`; and in 16 bits the two results, each rounded
// to 2^-8 (bf16) or 2^-11 (f16) of itself, may become neighbouring numbers. Integers are exact in any order.
inline double other_order(int size, DType dtype) {
    const double unit = dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0x1p-24;
    return 2.0 * size * (size * 0x1p-24 + (dtype == DType::f32 ? 0 : unit));
}

// all_reduce by one algorithm, for one size and dtype, in place and out of place.
inline void check_all_reduce(Comm& comm, AllReduce algorithm, int64_t n, DType dtype, ReduceOp op, Values values,
                             cudaStream_t stream) {
    comm.algorithm = algorithm;
    const std::string what = concat("all_reduce ", all_reduce_name(algorithm), " of ", n, " ", dtype_name(dtype),
                                    " over ", comm.size, " ranks, rank ", comm.rank);
    const std::vector<float> mine = inputs(values, comm.rank, n, dtype), want = serial(values, comm.size, n, dtype, op);
    const bool any_order = values == Values::fractions && op == ReduceOp::sum && !comm.adds_in_rank_order();
    const double tolerance = any_order ? other_order(comm.size, dtype) : 0;
    for (const bool in_place : {false, true}) {
        Buffer inp(dtype, n), other(dtype, n);
        const Tensor out = in_place ? inp.tensor : other.tensor;
        fill(inp, mine, stream);
        comm.all_reduce(out, inp, op, stream);
        compare(what + (in_place ? ", in place" : ""), read(out, stream), want, tolerance);
        if (!in_place) compare(what + ": its input afterwards", read(inp, stream), mine);
    }
    comm.algorithm = AllReduce::library;
}

// Everything else, for one size of a piece and dtype.
inline void check_others(Comm& comm, int64_t n, DType dtype, cudaStream_t stream) {
    const int size = comm.size, rank = comm.rank;
    const Values values = dtype == DType::i32 ? Values::integers : Values::fractions;
    const std::string where = concat(" of ", n, " ", dtype_name(dtype), " over ", size, " ranks, rank ", rank);
    const double of_sums = values == Values::fractions && !comm.adds_in_rank_order() ? other_order(size, dtype) : 0;
    const auto part = [&](const std::vector<float>& all, int j) {
        return std::vector<float>(all.begin() + j * n, all.begin() + (j + 1) * n);
    };
    const auto part_of = [&](const Tensor& all, int j) {
        return make_tensor(static_cast<char*>(all.data) + static_cast<size_t>(j * n) * dtype_bytes(dtype), dtype, {n});
    };
    for (const bool in_place : {false, true}) {
        const std::string suffix = where + (in_place ? ", in place" : "");
        Buffer whole(dtype, n * size), piece(dtype, n), other(dtype, n * size);
        for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max}) {
            fill(whole, inputs(values, rank, n * size, dtype), stream);
            const Tensor out = in_place ? part_of(whole, rank) : piece.tensor;
            comm.reduce_scatter(out, whole, op, stream);
            compare("reduce_scatter" + suffix, read(out, stream), part(serial(values, size, n * size, dtype, op), rank),
                    op == ReduceOp::sum ? of_sums : 0);
        }

        std::vector<float> all;
        for (int j = 0; j < size; ++j)
            for (float x : inputs(values, j, n, dtype)) all.push_back(x);
        const Tensor mine = in_place ? part_of(whole, rank) : piece.tensor;
        fill(mine, inputs(values, rank, n, dtype), stream);
        comm.all_gather(whole, mine, stream);
        compare("all_gather" + suffix, read(whole, stream), all);

        std::vector<float> transposed;
        for (int j = 0; j < size; ++j)
            for (float x : part(inputs(values, j, n * size, dtype), rank)) transposed.push_back(x);
        fill(whole, inputs(values, rank, n * size, dtype), stream);
        comm.all_to_all(in_place ? whole.tensor : other.tensor, whole, stream);
        compare("all_to_all" + suffix, read(in_place ? whole : other, stream), transposed);

        for (const int root : {0, size - 1}) {
            fill(whole, inputs(values, rank, n * size, dtype), stream);
            comm.broadcast(whole, root, stream);
            compare("broadcast" + suffix, read(whole, stream), inputs(values, root, n * size, dtype));
            fill(whole, inputs(values, rank, n * size, dtype), stream);
            Tensor out = in_place ? whole.tensor : other.tensor;
            if (rank != root && !in_place) out = Tensor{};
            comm.reduce(out, whole, ReduceOp::sum, root, stream);
            if (rank == root)
                compare("reduce" + suffix, read(out, stream), serial(values, size, n * size, dtype, ReduceOp::sum),
                        of_sums);
        }
    }

    Buffer shifted(dtype, n), own(dtype, n);
    fill(own, inputs(values, rank, n, dtype), stream);
    comm.shift(shifted, own, stream);
    compare("shift" + where, read(shifted, stream), inputs(values, (rank + size - 1) % size, n, dtype));

    // Messages once around the ring; of the two messages, the second one has a number of its own.
    if (size > 1 && n > 0) {
        Buffer first(dtype, n), second(dtype, n), from_left(dtype, n), from_left_too(dtype, n);
        const int right = (rank + 1) % size, left = (rank + size - 1) % size;
        fill(first, inputs(values, rank, n, dtype), stream);
        fill(second, inputs(values, rank + size, n, dtype), stream);
        comm.group_start();
        comm.send(first, right, stream);
        comm.send(second, right, stream);
        comm.recv(from_left, left, stream);
        comm.recv(from_left_too, left, stream);
        comm.group_end();
        compare("send and recv" + where, read(from_left, stream), inputs(values, left, n, dtype));
        compare("second send and recv" + where, read(from_left_too, stream), inputs(values, left + size, n, dtype));
    }
    comm.barrier(stream);
}

// n: from 0 to 10^6 + 3; the long ones only in some cases, because they take time.
inline void check_all(Comm& comm, const std::vector<int64_t>& sizes, cudaStream_t stream) {
    int64_t longest = 0;
    for (const int64_t n : sizes) longest = std::max(longest, n > 10000 ? n : n * comm.size);
    const CommMemory memory(comm, longest);
    std::vector<int> everyone(static_cast<size_t>(comm.size));
    std::iota(everyone.begin(), everyone.end(), 0);
    for (const AllReduce algorithm : all_reduce_algorithms()) {
        // With the memory that this algorithm asks for, and its name where a rank waits for another.
        const std::unique_ptr<Comm> own = comm.split(everyone, all_reduce_name(algorithm));
        const CommMemory its_memory(*own, std::ranges::max(sizes), algorithm);
        for (const int64_t n : sizes)
            for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::i32}) {
                if (n > 10000 && dtype != DType::f32 && (dtype != DType::bf16 || algorithm != AllReduce::ring))
                    continue;
                check_all_reduce(*own, algorithm, n, dtype, ReduceOp::sum, Values::integers, stream);
                if (n > 10000) continue;
                check_all_reduce(*own, algorithm, n, dtype, ReduceOp::max, Values::integers, stream);
                if (dtype != DType::i32)
                    check_all_reduce(*own, algorithm, n, dtype, ReduceOp::sum, Values::fractions, stream);
            }
    }
    for (const int64_t n : sizes)
        for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::i32})
            if (n <= 10000) check_others(comm, n, dtype, stream);
}

}  // namespace comm_check
