// core/core.h: what every file may use. Errors, dtypes, Tensor, Arena, Param, what launches cost, Device, Philox random
// numbers, the time.
//
// Reading order: errors first, then the one data type that everything passes around (Tensor: a view that owns nothing),
// then where its memory comes from (Arena), then the device: a GPU, or a CPU that emulates one (cpu/README.md).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// ---------------------------------------------------------------------------------------------------------------------
// error.cu: errors. A mistake of the caller or of the input throws Error with one line that says what is wrong and
// what to do. The programs catch it in main, print that line on stderr and exit with status 2.

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A part of a message: the value or the address of what is to be printed, not yet text.
struct Tensor;
struct Printable {
    enum class Kind : uint8_t { text, character, integer, natural, real, address, tensor } kind;
    union {
        std::string_view text;
        char character;
        int64_t integer;
        uint64_t natural;
        double real;
        const void* address;
        const Tensor* tensor;
    };
    Printable(const char* part) : kind(Kind::text), text(part) {}
    Printable(const std::string& part) : kind(Kind::text), text(part) {}
    Printable(std::string_view part) : kind(Kind::text), text(part) {}
    Printable(char part) : kind(Kind::character), character(part) {}
    Printable(int part) : kind(Kind::integer), integer(part) {}
    Printable(long part) : kind(Kind::integer), integer(part) {}
    Printable(long long part) : kind(Kind::integer), integer(part) {}
    Printable(unsigned part) : kind(Kind::natural), natural(part) {}
    Printable(unsigned long part) : kind(Kind::natural), natural(part) {}
    Printable(unsigned long long part) : kind(Kind::natural), natural(part) {}
    Printable(double part) : kind(Kind::real), real(part) {}
    Printable(const void* part) : kind(Kind::address), address(part) {}
    Printable(const Tensor& part) : kind(Kind::tensor), tensor(&part) {}
};
std::string joined(std::initializer_list<Printable> parts);
[[noreturn]] void fail_with(std::initializer_list<Printable> parts);

// Joins its arguments as `<<` would print them: concat("row ", 3) == "row 3". (Without <sstream>, which nvcc would read
// several times for each file.)
template <class... Parts>
std::string concat(const Parts&... parts) {
    return joined({Printable(parts)...});
}
// As std::printf prints: format("%.2f", 0.5) == "0.50".
[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);
std::string comma_list(const std::vector<std::string>& names);  // "a, b, c"
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    fail_with({Printable(parts)...});
}

// check(condition, "what is wrong, with values, and what to do"): throws when the condition does not hold. Arguments
// are passed by reference and become text only then, so a check that passes costs a comparison. Launchers make dozens
// of checks: pass a Tensor itself (it is printed as "f32 (4, 64, 768)"), and no text that is made for the call.
template <class... Parts>
void check(bool condition, const Parts&... parts) {
    if (!condition) fail(parts...);
}

// cudaCheck(call): throws with the failing expression, its place and CUDA's own words.
// cudaCheckLaunch(): the same for the kernel launched just before. With LAUNCH_BLOCKING=1 in the environment it waits
// for the kernel, so that a fault is reported on the line that launched it.
#define cudaCheck(call) cuda_check((call), #call, __FILE__, __LINE__)
#define cublasCheck(call) cublas_check(static_cast<int>(call), #call, __FILE__, __LINE__)
#define cudaCheckLaunch() cuda_check_launch(__FILE__, __LINE__)
void cuda_check(cudaError_t status, const char* expression, const char* file, int line);
void cublas_check(int status, const char* expression, const char* file, int line);
void cuda_check_launch(const char* file, int line);

// ---------------------------------------------------------------------------------------------------------------------
// Integers. Products of dimensions are 64-bit. n_* counts elements, *_bytes counts bytes.

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// a / b where b must divide a: `what` names the quotient in the error ("channels per head").
int64_t div_exact(int64_t a, int64_t b, const char* what);

// A 64-bit count as int, or an error: for the APIs (grids, BLAS) that count in int.
int narrow(int64_t value, const char* what);

// ---------------------------------------------------------------------------------------------------------------------
// DType: the element type of a Tensor, chosen at run time.

enum class DType : uint8_t { f32, bf16, f16, e4m3, e5m2, i8, i32 };  // e4m3, e5m2: 8-bit floats

size_t dtype_bytes(DType dtype);
const char* dtype_name(DType dtype);             // "f32", "bf16", "f16", "e4m3", "e5m2", "i8", "i32"
DType dtype_from_name(const std::string& name);  // accepts also fp32, float32, bfloat16, fp16, float16, int8, int32

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
    static constexpr DType value = DType::f32;
};
template <>
struct DTypeOf<__nv_bfloat16> {
    static constexpr DType value = DType::bf16;
};
template <>
struct DTypeOf<__half> {
    static constexpr DType value = DType::f16;
};
template <>
struct DTypeOf<__nv_fp8_e4m3> {
    static constexpr DType value = DType::e4m3;
};
template <>
struct DTypeOf<__nv_fp8_e5m2> {
    static constexpr DType value = DType::e5m2;
};
template <>
struct DTypeOf<int8_t> {
    static constexpr DType value = DType::i8;
};
template <>
struct DTypeOf<int32_t> {
    static constexpr DType value = DType::i32;
};

// Calls f with a value of the C++ type that dtype names: so a run-time dtype becomes a template argument.
//     dispatch(out.dtype, [&](auto zero) { using T = decltype(zero); kernel<T><<<...>>>(out.ptr<T>(), ...); });
template <class F>
void dispatch(DType dtype, F&& f) {
    switch (dtype) {
        case DType::f32: return f(float{});
        case DType::bf16: return f(__nv_bfloat16{});
        case DType::f16: return f(__half{});
        default: fail("this operation works on f32, bf16 or f16 tensors, not on ", dtype_name(dtype));
    }
}
// The same, of operations on tensor cores.
template <class F>
void dispatch_16_bits(DType dtype, F&& f) {
    switch (dtype) {
        case DType::bf16: return f(__nv_bfloat16{});
        case DType::f16: return f(__half{});
        default: fail("this operation works on bf16 or f16 tensors, not on ", dtype_name(dtype));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// tensor.cu: Tensor, a view of row-major device (or host) memory. It owns nothing and is passed by value.

struct Tensor {
    void* data = nullptr;
    DType dtype = DType::f32;
    int ndim = 0;  // number of dimensions, 0 to 4
    int64_t shape[4] = {1, 1, 1, 1};

    // Is there a tensor? One whose arena still counts has a shape and no memory yet.
    bool exists() const { return ndim > 0; }
    explicit operator bool() const { return data != nullptr; }  // does it have memory?
    int64_t n() const { return ndim == 0 ? 0 : shape[0] * shape[1] * shape[2] * shape[3]; }
    size_t bytes() const { return static_cast<size_t>(n()) * dtype_bytes(dtype); }
    int64_t rows() const { return n() == 0 ? 0 : n() / cols(); }  // all dimensions but the last, flattened
    int64_t cols() const { return ndim == 0 ? 0 : shape[ndim - 1]; }

    template <class T>
    T* ptr() const {
        if (dtype != DTypeOf<T>::value) fail_dtype(DTypeOf<T>::value);
#ifdef CUDA_ON_CPU
        cuda_cpu::note_view(data, bytes());  // how far a kernel may go from here: strict mode looks for races
#endif
        return static_cast<T*>(data);
    }
    template <class T>
    T* ptr_or_null() const {
        return data ? ptr<std::remove_const_t<T>>() : nullptr;
    }
    Tensor view(std::initializer_list<int64_t> dims) const;  // the same elements in another shape
    Tensor slice(int64_t first, int64_t count) const;        // rows [first, first + count) of dimension 0

  private:
    [[noreturn]] void fail_dtype(DType read_as) const;
};
// "f32 (4, 64, 768)"; "no tensor" without dimensions.
std::ostream& operator<<(std::ostream& text, const Tensor& tensor);

Tensor make_tensor(void* data, DType dtype, std::initializer_list<int64_t> dims);

// Checks of launchers: operation and argument named, what came and what was wanted. A dimension of -1 matches any size.
//     expect("rmsnorm_forward", "weight", weight, inp.dtype, {C});
void expect(const char* operation, const char* argument, const Tensor& tensor, DType dtype,
            std::initializer_list<int64_t> dims);
// True if data is a multiple of `bytes` (16 for the 128-bit loads of the fast kernels).
bool is_aligned(const void* data, size_t bytes);
// Launchers: 16-byte loads need tensors that start on a 16-byte boundary.
//     expect_aligned("rmsnorm_forward", {{"out", out}, {"inp", inp}});
void expect_aligned(const char* operation, std::initializer_list<std::pair<const char*, Tensor>> arguments);
// The start of an operation's f32 scratch, in the shape it needs now.
Tensor scratch_as(const char* operation, const Tensor& scratch, std::initializer_list<int64_t> dims);

// Copies of whole tensors to and from ordinary host memory, for initialisation, checkpoints and tests. They wait for
// completion. The tensor may lie in any kind of memory that an arena has.
void copy_to_device(const Tensor& tensor, const void* host);
void copy_to_host(void* host, const Tensor& tensor);
std::vector<float> to_floats(const Tensor& tensor);                        // f32, bf16 or f16, converted
void from_floats(const Tensor& tensor, const std::vector<float>& values);  // rounded to the tensor's dtype

// ---------------------------------------------------------------------------------------------------------------------
// arena.cu: memory taken once, before the first step, and handed out in order.
//
// The same code runs twice: once over a counting arena (reserve() not yet called: tensors come back with data ==
// nullptr and only the bytes are counted), then for real. So nothing calls cudaMalloc during training, and the memory
// plan that is printed is the memory that is taken. Every tensor starts on a 256-byte boundary.
//
// ARENA_SEPARATE=1 in the environment gives each tensor an allocation of its own, so that compute-sanitizer and the CPU
// device's guard pages (strict mode switches this on) see where each one ends. In strict mode a tensor ends at a guard
// page, and starts on a boundary of only 16 bytes.

// Where an arena's memory is: on the device; in host memory whose pages stay in place, so that copies can run beside
// the kernels; or in pages that migrate to the processor that accesses them (cudaMallocManaged).
enum class MemoryKind : uint8_t { device, pinned, managed };

class Arena {
  public:
    explicit Arena(std::string name, MemoryKind kind = MemoryKind::device) : name_(std::move(name)), kind_(kind) {}
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // A tensor of its own memory. While counting, data is nullptr. Contents are undefined.
    Tensor take(const std::string& what, DType dtype, std::initializer_list<int64_t> dims);
    // Ends counting: allocates what was counted, and starts handing out from the beginning.
    void reserve();
    bool counting() const { return !reserved_; }

    size_t bytes() const { return reserved_ ? capacity_bytes_ : high_bytes_; }
    const std::string& name() const { return name_; }
    MemoryKind kind() const { return kind_; }
    // Bytes by the name given to take(), in the order of first use: the rows of the memory plan.
    const std::vector<std::pair<std::string, size_t>>& table() const { return table_; }

    // Scratch that is free again after an operation: mark() before, release(mark) after. The largest sum is counted.
    size_t mark() const { return used_bytes_; }
    void release(size_t mark);

  private:
    std::string name_;
    MemoryKind kind_;
    char* base_ = nullptr;
    size_t used_bytes_ = 0, high_bytes_ = 0, capacity_bytes_ = 0;
    bool reserved_ = false;
    std::vector<std::pair<std::string, size_t>> table_;
    std::map<size_t, std::pair<void*, size_t>> separate_;  // offset -> own allocation, with ARENA_SEPARATE
};

// ---------------------------------------------------------------------------------------------------------------------
// Param: one learned tensor under its Hugging Face name. Weights and gradients of all parameters lie in two flat
// buffers at the same offsets, so that optimizers, reductions and checkpoints are loops over one array. (With ZeRO a
// rank may have shards of them only: FlatParameters, parallel/data/data.h.)

// Which part of a parameter this rank has where its layers are divided among ranks (parallel/tensor): some rows of the
// whole one, as they lie here, and of each of them the same columns.
struct Cut {
    // Of the whole parameter, without padding; a vector has 1 column. rows 0: nothing is cut.
    int64_t rows = 0, cols = 0;
    std::vector<std::pair<int64_t, int64_t>> row_ranges = {};  // {first, how many} of the whole parameter
    int64_t first_col = 0, n_cols = 0;                         // columns of these rows
    bool exists() const { return rows > 0; }
};
// A set of axes of the ranks that divide the layers (parallel/tensor/layout.cu): bit a is axis a. With kSameKeys
// only those ranks along the axis of the heads are meant that have the same key heads.
using AxisSet = uint8_t;
constexpr AxisSet kSameKeys = 0x80;

struct Param {
    std::string name;  // "model.layers.0.mlp.up_proj.weight"
    // As the layers use them; value is (rows, C) with rows of padding at the end where padded_rows > 0.
    Tensor value, grad;
    Tensor master;            // f32, in mixed precision: what the optimizer updates, of which value is a rounded copy
    int64_t offset = 0;       // of its first element in the flat buffers
    bool decay = false;       // weight decay applies (matrices, not biases and norm weights)
    bool transposed = false;  // Hugging Face stores it (C, O): GPT-2's Conv1D
    int64_t padded_rows = 0;  // rows that only round the vocabulary up; zero, and never written to files
    int64_t first = 0;        // of a shard of a parameter: its first element in the whole parameter, or in the cut
    Cut cut = {};
    AxisSet sharers = 0;  // along these axes ranks have the same elements, each a part of the gradient: it is their sum
    bool counted = true;  // of the ranks that have the same elements one counts them, in the norm of all gradients
    // Pipelines: a second copy of this parameter, in another unit. Files have it once, and the norm counts it once.
    std::string copy_of = {};

    // Elements without the rows of padding.
    int64_t used_n() const { return value.n() - (padded_rows == 0 ? 0 : padded_rows * (value.n() / value.shape[0])); }
    // In files. Random numbers are a function of it, too, so that copies stay equal.
    const std::string& file_name() const { return copy_of.empty() ? name : copy_of; }
    // The most precise version there is: what checkpoints keep.
    Tensor exact() const { return master ? master : value; }
};

// ---------------------------------------------------------------------------------------------------------------------
// launches.cu: what a launch costs. Launchers state it after the launch, where the sizes are at hand:
//
//     kernel<<<grid, block, 0, stream>>>(...);
//     launched("kernel", {.reads = bytes_of(inp, weight), .writes = bytes_of(out), .flops = 2.0 * N * C});
//
// The account of a training step (train_gpt --account) is made of these, and a test compares them with the bytes that
// the kernels touch on the CPU device.

struct LaunchCost {
    // Bytes of device memory that the launch reads, or writes, each counted once however often it is touched.
    int64_t reads = 0, writes = 0;
    // How many of them (read and written: twice) are intermediate results, which another way to compute does not need.
    int64_t scratch = 0;
    // Bytes that come from memory a second time, because the caches of a GPU cannot hold them until then.
    int64_t again = 0;
    double flops = 0;
    std::array<int64_t, 3> product = {};  // of a matrix product: M, N, K
};

// Checks the launch just before, as cudaCheckLaunch() does, and notes its cost, while there are LaunchNotes.
void launched(const char* kernel, const LaunchCost& cost, const char* file = __builtin_FILE(),
              int line = __builtin_LINE());

// The bytes of those that exist.
template <class... Tensors>
int64_t bytes_of(const Tensors&... tensors) {
    return (0 + ... + (tensors.exists() ? static_cast<int64_t>(tensors.bytes()) : 0));
}

// Zeros, as a launch that is noted.
void set_to_zero(const Tensor& tensor, cudaStream_t stream, const char* file = __builtin_FILE(),
                 int line = __builtin_LINE());

struct NotedLaunch {
    std::string kernel;
    LaunchCost cost;
};
// While this object exists, what this thread launches is noted. One at a time.
class LaunchNotes {
  public:
    LaunchNotes();
    ~LaunchNotes();
    LaunchNotes(const LaunchNotes&) = delete;
    LaunchNotes& operator=(const LaunchNotes&) = delete;
    std::vector<NotedLaunch> launches;
};

// ---------------------------------------------------------------------------------------------------------------------
// device.cu: what one rank computes on. One per thread (a rank is a thread or a process): device() is this thread's.

struct Device {
    int index = 0;
    std::string name;                        // "NVIDIA H200" or "CPU device (AMD EPYC, 2 threads)"
    int sm_count = 1;                        // streaming multiprocessors (on the CPU device: OpenMP threads)
    int capability = 0;                      // compute capability, 10 major + minor: 90 is 9.0
    int block_shared_bytes = 0;              // shared memory that a block may ask for
    cudaStream_t stream = nullptr;           // where the model's kernels run
    struct cublasLtContext* blas = nullptr;  // cublasLtHandle_t (matmul_plan.cu)
    void* blas_workspace = nullptr;
    size_t blas_workspace_bytes = 0;
    // kArrivals counters of blocks that have come to their end (is_last_block, kernel.cuh). They are 0 between
    // launches; kernels that use them never run at the same time.
    unsigned* arrivals = nullptr;
    bool is_cpu = false;
};

constexpr int64_t kArrivals = 1 << 16;
constexpr size_t kBlasWorkspaceBytes = 32 << 20;  // cuBLASLt's own advice for Hopper; the CPU device's needs none

Device& device();                // this thread's device; the first call opens CUDA device 0
int device_count();              // of this machine; without any an Error
Device& open_device(int index);  // makes CUDA device `index` this thread's
void close_device();

// Bytes of the memory of this thread's device.
struct DeviceMemory {
    size_t free = 0, all = 0;
};
DeviceMemory device_memory();

cudaStream_t make_stream();  // one that the default stream does not wait for (cudaStreamNonBlocking)
cudaEvent_t make_event();    // without a time
void copy_tensor(const Tensor& out, const Tensor& inp, cudaStream_t stream);  // on the device; nothing if out is inp

// ---------------------------------------------------------------------------------------------------------------------
// random.cu: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), a counter-based
// generator: number i of stream (seed, key) is a pure function of the three, the same on every device and every mesh.

struct Philox {
    uint32_t v[4];
};
// Ten rounds turn a 128-bit counter, four words c, under a 64-bit key, two words k, into 128 random bits:
//     c <- (hi(M1 c2) ^ c1 ^ k0,  lo(M1 c2),  hi(M0 c0) ^ c3 ^ k1,  lo(M0 c0))     hi, lo: halves of 64-bit products
// The generator's key is the seed; its counter is (counter, key): "which number of which parameter".
__host__ __device__ inline Philox philox(uint64_t seed, uint64_t key, uint64_t counter) {
    uint32_t c[4] = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), static_cast<uint32_t>(key),
                     static_cast<uint32_t>(key >> 32)};
    uint32_t k[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{0xD2511F53u} * c[0], b = uint64_t{0xCD9E8D57u} * c[2];  // M0 c0, M1 c2
        const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(b),
                                  static_cast<uint32_t>(a >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(a)};
        for (int i = 0; i < 4; ++i) c[i] = next[i];
        k[0] += 0x9E3779B9u;  // Weyl sequence: the golden ratio
        k[1] += 0xBB67AE85u;  // sqrt(3) - 1
    }
    return {{c[0], c[1], c[2], c[3]}};
}
double uniform(uint64_t seed, uint64_t key, uint64_t counter);                      // in [0, 1), 53 bits
uint64_t uniform_below(uint64_t seed, uint64_t key, uint64_t counter, uint64_t n);  // in [0, n)
// n numbers from normal(0, std), number i from counter i / 2 (Box-Muller on the host); and a tensor of them,
// rounded to it.
std::vector<float> normal_values(int64_t n, double std, uint64_t seed, uint64_t key);
void fill_normal(const Tensor& tensor, double std, uint64_t seed, uint64_t key);
void fill_constant(const Tensor& tensor, float value);
// A 64-bit key from a name ("model.layers.0.mlp.up_proj.weight"): FNV-1a.
uint64_t hash_name(const std::string& name);

// ---------------------------------------------------------------------------------------------------------------------
// clock.cu: the time in seconds, by a clock that never goes back: only differences mean anything.
double seconds_now();
