// parallel/tensor/tensor_parallel.cu: what the ranks add up in all geometries.
#include "parallel/tensor/tensor.h"

#include <algorithm>

TensorParallel::TensorParallel(Comm& comm, const TensorLayout& layout, int64_t key_heads)
    : comm_(comm), layout_(layout),
      same_keys_(static_cast<int>(std::max<int64_t>(1, layout.part(layout.heads).of / key_heads))), one_d_(comm) {
    vocabulary_ = along(TensorLayout::set_of(layout.heads));
    const auto comm_of = [this](AxisSet axes) { return along(axes); };
    if (layout.mode == TensorMode::three_d) geometry_ = make_cube(layout, comm_of);
    else if (layout.divides_columns()) geometry_ = make_summa(layout, comm_of);
}
TensorParallel::~TensorParallel() = default;

Comm* TensorParallel::along(AxisSet axes) {
    if (axes == layout_.all()) return &comm_;
    std::unique_ptr<Comm>& comm = comms_[axes];
    if (!comm) comm = comm_.split(layout_.members(axes, same_keys_), concat("tp, axes ", static_cast<int>(axes)));
    return comm.get();
}

void TensorParallel::take_memory(const Sizes& s, Arena& arena) {
    int64_t packed_n = 0;
    for (const auto& [axes, n] : s.shared) packed_n = std::max(packed_n, n);
    if (packed_n > 0) packed_ = arena.take("gradients of shared parameters", s.grad_dtype, {packed_n});
    staging_ = arena.take("staging", DType::f32, {1 << 18});
    const auto none = [](DType dtype, int64_t n) { return make_tensor(nullptr, dtype, {n}); };
    comm_.count_memory([&] {
        for (const Tensor& sum : s.sums) comm_.all_reduce(sum, nullptr);
        if (s.numbers.exists()) comm_.all_reduce(s.numbers, nullptr);
    });
    vocabulary_->count_memory([&] {
        vocabulary_->all_reduce(none(DType::f32, 2 * s.N), nullptr);
        if (s.logits_n > 0)
            vocabulary_->all_gather(none(s.dtype, s.logits_n * vocabulary_->size), none(s.dtype, s.logits_n), nullptr);
    });
    for (const auto& [axes, n] : s.shared)
        along(axes)->count_memory(
            [&, shared_n = n] { along(axes)->all_reduce(none(s.grad_dtype, shared_n), nullptr); });
    if (s.logits_n > 0) {
        gathered_ = arena.take("logits of samples", s.dtype, {s.logits_n * vocabulary_->size});
        columns_ = arena.take("logits of samples", s.dtype, {s.logits_n * vocabulary_->size});
    }
    if (geometry_) geometry_->take_memory(s.geometry, arena);
    else one_d_.take_memory(s.N, s.C, s.dtype, layout_.sequence, s.overlap, arena);
    comm_.take_memory(arena);
    for (const auto& [axes, comm] : comms_) comm->take_memory(arena);
}

void TensorParallel::sum_shared(AxisSet sharers, const std::vector<Tensor>& parts, cudaStream_t stream) {
    int64_t n = 0;
    for (const Tensor& part : parts) {
        copy_tensor(packed_.slice(n, part.n()), part, stream);
        n += part.n();
    }
    along(sharers)->all_reduce(packed_.slice(0, n), stream);
    n = 0;
    for (const Tensor& part : parts) {
        copy_tensor(part, packed_.slice(n, part.n()), stream);
        n += part.n();
    }
}

Tensor TensorParallel::gather_columns(Tensor columns, cudaStream_t stream) {
    const int n_parts = vocabulary_->size;
    const int64_t R = columns.shape[0], V = columns.shape[1], n = R * V;
    const Tensor pieces = gathered_.slice(0, n * n_parts), out = columns_.slice(0, n * n_parts);
    vocabulary_->all_gather(pieces, columns.view({n}), stream);
    // Rank r's piece is (R, V): its row i goes to row i of the result, from column r V on.
    const size_t row_bytes = static_cast<size_t>(V) * dtype_bytes(columns.dtype);
    for (int r = 0; r < n_parts; ++r)
        for (int64_t i = 0; i < R; ++i)
            cudaCheck(cudaMemcpyAsync(out.slice((i * n_parts + r) * V, V).data, pieces.slice(r * n + i * V, V).data,
                                      row_bytes, cudaMemcpyDeviceToDevice, stream));
    return out.view({R, V * n_parts});
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
