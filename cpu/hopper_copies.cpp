// cpu/hopper_copies.cpp: bulk and tensor copies between device memory and shared memory (TMA), and the tensor maps that
// describe boxes of a tensor. What strict mode checks is at the top of hopper.cpp.
#include "cuda.h"
#include "hopper_state.h"

namespace cuda_cpu {

using namespace hopper;

namespace {

bool overlap(const char* a, size_t a_bytes, const char* b, size_t b_bytes) {
    return a < b + b_bytes && b < a + a_bytes;
}

}  // namespace

namespace hopper {

void check_fenced(Unit& u, unsigned thread, const char* at, size_t bytes, const char* what, Place here) {
    const char* seen = view_of(u, at);
    if (!seen || at + bytes > u.shared + u.shared_bytes || std::memcmp(seen, at, bytes) == 0) return;
    while (*seen == *at) ++seen, ++at;
    report_in(thread, "missing proxy fence",
              std::string(what) + " at " + place(here) + " reads " + offset_of(u, at) +
                  ", which ordinary stores have written with no fence_proxy_async after them");
}
void check_not_in_flight(Unit& u, unsigned thread, const char* at, size_t bytes, const char* what, Place here) {
    for (const Load& load : u.loads)
        if (overlap(at, bytes, load.to, load.bytes))
            report_in(thread, "shared memory in flight",
                      std::string(what) + " at " + place(here) + " touches " +
                          offset_of(u, std::max<const char*>(at, load.to)) + ", which the copy at " + place(load.here) +
                          " fills: no thread has waited for phase " + std::to_string(load.phase) + " (parity " +
                          std::to_string(load.phase % 2) + ") of its mbarrier");
}

}  // namespace hopper

namespace {

void finish_load(unsigned thread, void* barrier, size_t bytes, unsigned phase, Place here) {
    Barrier& b = find_barrier(thread, barrier, here);
    if (b.phase != phase)
        report_in(thread, "bytes that were not expected",
                  "the mbarrier's phase " + std::to_string(phase) + " was complete before the copy at " + place(here) +
                      " had landed: its " + std::to_string(bytes) +
                      " bytes were not announced (mbarrier_arrive_expect_tx)");
    b.bytes -= static_cast<int64_t>(bytes);
    complete_phase_if_due(b);
}

}  // namespace

namespace hopper {

void land(Unit& u, Load& load) {
    load.copy();
    load.landed = true;
    --u.n_flying;
    if (char* view = view_of(u, load.to)) std::memcpy(view, load.to, load.bytes);
    finish_load(load.thread, load.barrier, load.bytes, load.phase, load.here);
}
void finish_writing(Store& store) {
    if (!store.written) store.write(store.bytes.data());
    store.written = true;
}

}  // namespace hopper

namespace {

void check_not_read(Unit& u, unsigned thread, const char* at, size_t bytes, const char* what, Place here) {
    for (const Store& store : u.stores)
        if (!store.read && overlap(at, bytes, store.from, store.bytes.size()))
            report_in(thread, "shared memory in use",
                      std::string(what) + " at " + place(here) + " overwrites " + offset_of(u, at) +
                          ", which the store at " + place(store.here) + " reads: its thread has not waited for it");
    for (const Product& p : u.products)
        for (const Chunk& chunk : p.operands)
            if (overlap(at, bytes, chunk.at, 16))
                report_in(thread, "shared memory in use",
                          std::string(what) + " at " + place(here) + " overwrites " + offset_of(u, chunk.at) +
                              ", which the wgmma at " + place(p.here) + " reads: no thread has waited for it");
}

// A thread may overwrite a tile only if it comes, through barriers, after the wait for the last product that read the
// tile. It is not enough that the product happens to be complete.
void check_known_done(Unit& u, unsigned thread, const char* at, size_t bytes, const char* what, Place here) {
    if (!view_of(u, at)) return;
    const size_t first = static_cast<size_t>(at - u.shared) / 16, n = std::min(bytes, u.shared_bytes - first * 16) / 16;
    for (size_t g = 0; g < u.warp_groups.size(); ++g) {
        const WarpGroup& group = u.warp_groups[g];
        if (group.readers.empty()) continue;
        for (size_t chunk = first; chunk < first + n; ++chunk)
            if (const uint32_t reader = group.readers[chunk]; reader > u.threads[thread].knowledge.n_done[g])
                report_in(thread, "shared memory in use",
                          std::string(what) + " at " + place(here) + " overwrites " +
                              offset_of(u, u.shared + chunk * 16) + ", which the wgmma at " +
                              place(group.products[reader - 1]) +
                              " reads: this thread has waited for no arrival that came after its wgmma_wait");
    }
}

// Starts a load. `copy` writes to shared memory.
void start_load(unsigned thread, char* to, size_t bytes, void* barrier, Place here, std::function<void()> copy) {
    Unit& u = this_unit();
    Barrier& b = find_barrier(thread, barrier, here);
    const unsigned phase = b.phase;
    if (!strict) {
        copy();
        return finish_load(thread, barrier, bytes, phase, here);
    }
    check_fenced(u, thread, static_cast<char*>(barrier), 8, "the copy's mbarrier", here);
    check_not_in_flight(u, thread, to, bytes, "a copy", here);
    check_not_read(u, thread, to, bytes, "a copy", here);
    check_known_done(u, thread, to, bytes, "a copy", here);
    std::memset(to, 0xff, bytes);
    if (char* view = view_of(u, to)) std::memset(view, 0xff, bytes);
    u.loads.push_back({to, bytes, barrier, phase, thread, here, false, std::move(copy)});
    ++u.n_flying;
}
void start_store(unsigned thread, const char* from, size_t bytes, Place here, std::function<void(const char*)> write) {
    Unit& u = this_unit();
    if (!strict) return write(from);
    check_fenced(u, thread, from, bytes, "a store", here);
    check_not_in_flight(u, thread, from, bytes, "a store", here);
    u.stores.push_back({from, std::vector<char>(from, from + bytes), u.threads[thread].n_stores, thread, here, false,
                        false, std::move(write)});
}
void finish_reading(Store& store) {
    if (store.read) return;
    store.read = true;
    if (std::memcmp(store.from, store.bytes.data(), store.bytes.size()) != 0)
        report_in(
            store.thread, "shared memory in use",
            "what the store at " + place(store.here) + " reads was overwritten before its thread had waited for it");
}

void check_bulk(unsigned thread, const void* to, const void* from, size_t bytes, Place here) {
    check_aligned(thread, to, 16, "the destination of the bulk copy", here);
    check_aligned(thread, from, 16, "the source of the bulk copy", here);
    check_aligned(thread, reinterpret_cast<const void*>(bytes), 16, "the size of the bulk copy", here);
}

// ---------------------------------------------------------------------------------------------------------------------
// Tensor maps

struct TensorMap {
    uint64_t tag;
    char* data;
    uint64_t dims[5], strides[5];
    uint16_t box[5];
    uint8_t rank, element_bytes, swizzle_bytes;
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));
constexpr uint64_t kMapTag = 0x54656e736f724d70u;

TensorMap decode(unsigned thread, const CUtensorMap& map, const int* coordinates, unsigned rank, const void* shared,
                 Place here) {
    TensorMap decoded;
    std::memcpy(&decoded, &map, sizeof decoded);
    if (decoded.tag != kMapTag || decoded.rank != rank)
        report_in(thread, "no tensor map",
                  "the map at " + place(here) + " is not one of a tensor of rank " + std::to_string(rank));
    check_aligned(thread, shared, 128, "a tile in shared memory", here);
    if (coordinates[0] * int64_t{decoded.element_bytes} % 16 != 0)
        report_in(thread, "illegal instruction",
                  "the box at " + place(here) + " begins at element " + std::to_string(coordinates[0]) +
                      " of its rows: the copy engine needs a multiple of 16 bytes");
    return decoded;
}
// What the copy engine does not check, and then writes elsewhere, or answers with an illegal instruction.
void check_store(unsigned thread, const TensorMap& map, const int* coordinates, Place here) {
    for (unsigned d = 0; d < map.rank; ++d)
        if (coordinates[d] < 0)
            report_in(thread, "illegal instruction",
                      "the store at " + place(here) + " begins at " + std::to_string(coordinates[d]) +
                          " in dimension " + std::to_string(d) + ": boxes that are stored begin inside of the tensor");
    if (const uint64_t bytes = map.dims[0] * map.element_bytes; bytes % 16 != 0)
        report_in(thread, "store past a row's end",
                  "the rows of the tensor at " + place(here) + " have " + std::to_string(bytes) +
                      " bytes: the copy engine writes 16 at a time, and would overwrite the " +
                      std::to_string(16 - bytes % 16) + " after a row");
}
size_t box_bytes(const TensorMap& map) {
    size_t bytes = map.element_bytes;
    for (unsigned d = 0; d < map.rank; ++d) bytes *= map.box[d];
    return bytes;
}
// A row of a box is divided into chunks of 16 bytes. Within a line of 128 bytes the chunks are permuted: the number of
// a chunk (address bits 4 to 6) is xored with the number of its line (bits 7 to 9), as many bits as the swizzle has.
uintptr_t swizzled(const TensorMap& map, uintptr_t address) {
    const uintptr_t chunks = map.swizzle_bytes > 0 ? map.swizzle_bytes / 16u - 1 : 0;
    return address ^ (address >> 7 & chunks) << 4;
}
// f(chunk of the box, where it lies in device memory, first and end of its bytes that are inside of the tensor)
template <class F>
void for_each_chunk(const TensorMap& map, const int* coordinates, F&& f) {
    const size_t row_bytes = map.box[0] * size_t{map.element_bytes}, n_rows = box_bytes(map) / row_bytes;
    for (size_t row = 0; row < n_rows; ++row) {
        int64_t offset = 0;
        bool inside = true;
        for (size_t d = 1, rest = row; d < map.rank; rest /= map.box[d], ++d) {
            const int64_t i = coordinates[d] + static_cast<int64_t>(rest % map.box[d]);
            inside = inside && i >= 0 && i < static_cast<int64_t>(map.dims[d]);
            offset += i * static_cast<int64_t>(map.strides[d]);
        }
        for (size_t chunk = 0; chunk < row_bytes / 16; ++chunk) {
            const int64_t start = int64_t{coordinates[0]} * map.element_bytes + static_cast<int64_t>(chunk) * 16;
            const int64_t end = static_cast<int64_t>(map.dims[0]) * map.element_bytes - start;
            const size_t from = static_cast<size_t>(std::clamp<int64_t>(-start, 0, 16));
            const size_t to = inside ? static_cast<size_t>(std::clamp<int64_t>(end, 0, 16)) : 0;
            f(row * (row_bytes / 16) + chunk, map.data + offset + start, from, std::max(from, to));
        }
    }
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Instructions

void bulk_load_by(unsigned thread, void* to, const void* from, size_t bytes, void* barrier, Place here) {
    check_bulk(thread, to, from, bytes, here);
    start_load(thread, static_cast<char*>(to), bytes, barrier, here, [=] { std::memcpy(to, from, bytes); });
}
void bulk_store_by(unsigned thread, void* to, const void* from, size_t bytes, Place here) {
    check_bulk(thread, to, from, bytes, here);
    start_store(thread, static_cast<const char*>(from), bytes, here,
                [=](const char* source) { std::memcpy(to, source, bytes); });
}
void bulk_add_by(unsigned thread, float* to, const void* from, size_t bytes, Place here) {
    check_bulk(thread, to, from, bytes, here);
    start_store(thread, static_cast<const char*>(from), bytes, here, [=](const char* source) {
        for (size_t i = 0; i < bytes / sizeof(float); ++i) {
            float x;
            std::memcpy(&x, source + i * sizeof x, sizeof x);
            to[i] += x;
        }
    });
}
void tensor_load_by(unsigned thread, void* to, const CUtensorMap& encoded, const int* coordinates, unsigned rank,
                    void* barrier, Place here) {
    const TensorMap map = decode(thread, encoded, coordinates, rank, to, here);
    int at[5] = {};
    std::copy(coordinates, coordinates + rank, at);
    const auto copy = [=] {
        for_each_chunk(map, at, [&](size_t chunk, const char* from, size_t first, size_t end) {
            char* place_in_tile = reinterpret_cast<char*>(swizzled(map, reinterpret_cast<uintptr_t>(to) + chunk * 16));
            std::memset(place_in_tile, 0, 16);
            if (first < end) std::memcpy(place_in_tile + first, from + first, end - first);
        });
    };
    start_load(thread, static_cast<char*>(to), box_bytes(map), barrier, here, copy);
}
void tensor_store_by(unsigned thread, const CUtensorMap& encoded, const int* coordinates, unsigned rank,
                     const void* from, Place here) {
    const TensorMap map = decode(thread, encoded, coordinates, rank, from, here);
    check_store(thread, map, coordinates, here);
    int at[5] = {};
    std::copy(coordinates, coordinates + rank, at);
    const uintptr_t tile = reinterpret_cast<uintptr_t>(from);
    const auto write = [=](const char* source) {
        for_each_chunk(map, at, [&](size_t chunk, char* to, size_t first, size_t end) {
            if (first < end)
                std::memcpy(to + first, source + (swizzled(map, tile + chunk * 16) - tile) + first, end - first);
        });
    };
    start_store(thread, static_cast<const char*>(from), box_bytes(map), here, write);
}
void bulk_commit_by(unsigned thread) { ++this_unit().threads[thread].n_stores; }
void bulk_wait_by(unsigned thread, unsigned n_groups, bool read_only) {
    Unit& u = this_unit();
    for (Store& store : u.stores) {
        if (store.thread != thread || store.group + n_groups >= u.threads[thread].n_stores) continue;
        finish_reading(store);
        if (!read_only) finish_writing(store);
    }
    std::erase_if(u.stores, [](const Store& store) { return store.read && store.written; });
}
void fence_proxy_async_by(unsigned) {
    Unit& u = this_unit();
    if (strict && u.shared) std::memcpy(u.view.data(), u.shared, u.shared_bytes);
}

}  // namespace cuda_cpu

// ---------------------------------------------------------------------------------------------------------------------
// The driver

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                                const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
    using namespace cuda_cpu;
    if (!map || !data || rank < 1 || rank > 5 || reinterpret_cast<uintptr_t>(data) % 16 != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
        return CUDA_ERROR_NOT_SUPPORTED;
    TensorMap m{};
    m.tag = kMapTag;
    m.data = static_cast<char*>(data);
    m.rank = static_cast<uint8_t>(rank);
    switch (type) {
        case CU_TENSOR_MAP_DATA_TYPE_UINT8: m.element_bytes = 1; break;
        case CU_TENSOR_MAP_DATA_TYPE_UINT16:
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
        case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: m.element_bytes = 2; break;
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: m.element_bytes = 4; break;
    }
    m.swizzle_bytes = static_cast<uint8_t>(swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? 0 : 16 << swizzle);
    for (cuuint32_t d = 0; d < rank; ++d) {
        if (dims[d] < 1 || dims[d] > uint64_t{1} << 32 || box[d] < 1 || box[d] > 256) return CUDA_ERROR_INVALID_VALUE;
        if (element_strides[d] != 1) return CUDA_ERROR_NOT_SUPPORTED;
        m.dims[d] = dims[d];
        m.box[d] = static_cast<uint16_t>(box[d]);
        if (d == 0) continue;
        if (strides[d - 1] % 16 != 0 || strides[d - 1] >= uint64_t{1} << 40) return CUDA_ERROR_INVALID_VALUE;
        m.strides[d] = strides[d - 1];
    }
    // The copy engine moves whole chunks of 16 bytes; a swizzle permutes them within rows of swizzle_bytes.
    const unsigned row_bytes = m.box[0] * m.element_bytes;
    if (row_bytes % 16 != 0 || (m.swizzle_bytes > 0 && row_bytes > m.swizzle_bytes)) return CUDA_ERROR_INVALID_VALUE;
    if (m.swizzle_bytes > 0 && row_bytes != m.swizzle_bytes) return CUDA_ERROR_NOT_SUPPORTED;
    std::memset(map, 0, sizeof *map);
    std::memcpy(map, &m, sizeof m);
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
    const bool found = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
    *function = found ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
    if (result) *result = found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return found ? cudaSuccess : cudaErrorInvalidValue;
}
