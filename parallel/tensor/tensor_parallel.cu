// parallel/tensor/tensor_parallel.cu: the sums of 1D tensor parallelism.
#include "parallel/tensor/tensor.h"

#include <algorithm>

TensorParallel::TensorParallel(Comm& comm, int64_t key_heads) : comm_(comm) {
    const int64_t n = comm.size;
    if (key_heads >= n) return;
    const int same = static_cast<int>(n / key_heads), first = comm.rank / same * same;
    std::vector<int> members;
    for (int i = 0; i < same; ++i) members.push_back(first + i);
    same_keys_ = comm.split(members, "tp, same keys");
}

void TensorParallel::take_memory(const Sizes& s, Arena& arena) {
    const int64_t packed_n = std::max(s.shared_by_all, s.shared_by_same_keys);
    if (packed_n > 0) packed_ = arena.take("gradients of shared parameters", s.grad_dtype, {packed_n});
    staging_ = arena.take("staging", DType::f32, {1 << 18});
    const auto none = [](DType dtype, int64_t n) { return make_tensor(nullptr, dtype, {n}); };
    comm_.count_memory([&] {
        comm_.all_reduce(none(s.dtype, s.N * s.C), nullptr);  // samples need it with sequence parallelism, too
        if (s.sequence) {
            gather_rows(none(s.dtype, s.N * s.C), none(s.dtype, s.N * s.C / size()), nullptr);
            sum_rows(none(s.dtype, s.N * s.C / size()), none(s.dtype, s.N * s.C), nullptr);
        }
        comm_.all_reduce(none(DType::f32, 2 * s.N), nullptr);
        if (s.shared_by_all > 0) comm_.all_reduce(none(s.grad_dtype, s.shared_by_all), nullptr);
        if (s.numbers.exists()) comm_.all_reduce(s.numbers, nullptr);
        if (s.logits_n > 0) comm_.all_gather(none(s.dtype, s.logits_n * size()), none(s.dtype, s.logits_n), nullptr);
    });
    comm_.take_memory(arena);
    if (s.logits_n > 0) {
        gathered_ = arena.take("logits of samples", s.dtype, {s.logits_n * size()});
        columns_ = arena.take("logits of samples", s.dtype, {s.logits_n * size()});
    }
    if (!same_keys_) return;
    same_keys_->count_memory([&] { same_keys_->all_reduce(none(s.grad_dtype, s.shared_by_same_keys), nullptr); });
    same_keys_->take_memory(arena);
}

void TensorParallel::sum_packed(Comm& comm, const std::vector<Tensor>& parts, cudaStream_t stream) {
    if (parts.empty()) return;
    int64_t n = 0;
    for (const Tensor& part : parts) {
        copy_tensor(packed_.slice(n, part.n()), part, stream);
        n += part.n();
    }
    comm.all_reduce(packed_.slice(0, n), stream);
    n = 0;
    for (const Tensor& part : parts) {
        copy_tensor(part, packed_.slice(n, part.n()), stream);
        n += part.n();
    }
}

void TensorParallel::sum_shared(const std::vector<Tensor>& by_all, const std::vector<Tensor>& by_same_keys,
                                cudaStream_t stream) {
    sum_packed(comm_, by_all, stream);
    if (same_keys_) sum_packed(*same_keys_, by_same_keys, stream);
}

Tensor TensorParallel::gather_columns(Tensor columns, cudaStream_t stream) {
    const int64_t R = columns.shape[0], V = columns.shape[1], n = R * V;
    const Tensor pieces = gathered_.slice(0, n * size()), out = columns_.slice(0, n * size());
    comm_.all_gather(pieces, columns.view({n}), stream);
    // Rank r's piece is (R, V): its row i goes to row i of the result, from column r V on.
    const size_t row_bytes = static_cast<size_t>(V) * dtype_bytes(columns.dtype);
    for (int r = 0; r < size(); ++r)
        for (int64_t i = 0; i < R; ++i)
            cudaCheck(cudaMemcpyAsync(out.slice((i * size() + r) * V, V).data, pieces.slice(r * n + i * V, V).data,
                                      row_bytes, cudaMemcpyDeviceToDevice, stream));
    return out.view({R, V * size()});
}

std::vector<float> TensorParallel::collect(const Param& param, const std::vector<float>& part) {
    if (!param.cut.exists()) return comm_.rank == 0 ? part : std::vector<float>{};
    // What each rank has, in numbers: {columns, elements, row ranges}.
    constexpr size_t kRanges = 3;
    const Cut& mine = param.cut;
    std::vector<int64_t> numbers = {mine.first_col, mine.n_cols, std::ssize(part)};
    for (size_t i = 0; i < kRanges; ++i) {
        const auto range = i < mine.row_ranges.size() ? mine.row_ranges[i] : std::pair<int64_t, int64_t>{0, 0};
        numbers.insert(numbers.end(), {range.first, range.second});
    }
    check(mine.row_ranges.size() <= kRanges, param.name, ": cut into too many ranges of rows");
    const std::vector<std::vector<int64_t>> all = gather_numbers(comm_, numbers);
    std::vector<float> whole(comm_.rank == 0 ? static_cast<size_t>(mine.rows * mine.cols) : 0);
    const cudaStream_t stream = device().stream;
    for (int r = 0; r < size(); ++r) {
        const std::vector<int64_t>& its = all[static_cast<size_t>(r)];
        const int64_t n = its[2];
        Cut cut{mine.rows, mine.cols, {}, its[0], its[1]};
        for (size_t i = 0; i < kRanges; ++i) cut.row_ranges.push_back({its[3 + 2 * i], its[4 + 2 * i]});
        std::vector<float> values = comm_.rank == r ? part : std::vector<float>(static_cast<size_t>(n));
        for (int64_t low = 0; r != 0 && low < n; low += staging_.n()) {
            const Tensor piece = staging_.slice(0, std::min(staging_.n(), n - low));
            if (comm_.rank == r) copy_to_device(piece, values.data() + low);
            if (comm_.rank == r) comm_.send(piece, 0, stream);
            if (comm_.rank == 0) comm_.recv(piece, r, stream);
            cudaCheck(cudaStreamSynchronize(stream));
            if (comm_.rank == 0) copy_to_host(values.data() + low, piece);
        }
        if (comm_.rank == 0) put_into(whole, cut, values);
    }
    return whole;
}
