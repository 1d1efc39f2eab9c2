// What computes a product: how cuBLASLt is asked for it (descriptions, epilogues), and the choice among its algorithms
// and ours.
//
// cuBLASLt stores matrices by columns. The memory of a row-major X (rows, cols) is that of the column-major X^T (cols,
// rows) with leading dimension cols, so we ask for the transposed product and swap the factors:
//
//   out^T (N, M) = op(b)^T (N, K) op(a)^T (K, M)       its "A" is our b, its "B" is our a; a factor is transposed for
//                                                      it where it is for us
//
// and bias, one number for each column of out, is one for each row of out^T: what its bias epilogue adds, in float32,
// before the one rounding to out's type. (On an H100 some of its kernels were seen to round before they add, too, and
// so have one rounding more: for rows off 16 bytes, and with beta = 1.) The sum of each row of op(a) is that of a
// column of its "B": BGRADB.
//
// It asks for a description of each matrix, and for an algorithm, of which it has hundreds. Its heuristic orders them
// by type and shape, but only a measurement shows which one is the fastest. So each product of a run can be timed once
// (tune_matmuls), and the choices kept in a file (training/tune_matmul.cu): cuBLASLt's algorithms are 64 bytes that
// mean the same in the same version of it. Both take longer than a small product, so plans are kept in a table: after
// the first step nothing is searched.
//
// The choice has up to two candidates more. Hopper has a product of ours (hopper_matmul.h); and with an epilogue, the
// product by itself, and kernels after it. Without times, ours is taken where the product is large, for the epilogues
// that cuBLASLt was measured to be slow at (dev/RESULTS.md), or has not: GELU, its derivative, sums of rows,
// attention's delta. (In cuBLASLt's DGELU_BGRAD the product that makes the gradient before GELU sums its columns, too:
// the gradient of the bias. It took three times as long as ours. So this bias' gradient is summed as all others are, by
// the product that makes the weight's gradient.)
#include "layers/hopper_matmul.h"

#include <cublasLt.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <limits>
#include <optional>
#include <sstream>

namespace {

constexpr int kCandidates = 16;
constexpr uint32_t kAlignment = 16;  // bytes: where operands start (describe_product checks it)
// CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE: where a kernel cuts K, its parts are added in float32, not in out's type.
constexpr uint32_t kPartsInFloat32 = 2;

cudaDataType cuda_type(DType dtype) {
    switch (dtype) {
        case DType::f32: return CUDA_R_32F;
        case DType::bf16: return CUDA_R_16BF;
        case DType::f16: return CUDA_R_16F;
        case DType::e4m3: return CUDA_R_8F_E4M3;
        case DType::e5m2: return CUDA_R_8F_E5M2;
        default: fail("matmul works on float tensors, not on ", dtype_name(dtype));
    }
}

struct Plan {
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatrixLayoutOpaque_t a, b, out;
    cublasLtMatmulAlgo_t algorithm;
};

struct Choice {
    MatmulWay way = MatmulWay::parts;
    std::optional<cublasLtMatmulAlgo_t> algorithm = {};  // cuBLASLt's; none: the one that its heuristic names first
    std::string measured = {};
};

struct PlannedWay {
    MatmulWay way = MatmulWay::parts;
    Plan plan = {};  // for cuBLASLt
};

// A thread drives one device (core.h), and needs no lock.
thread_local std::map<Product, PlannedWay> plans;
thread_local std::map<std::string, Choice> choices;  // by the product's name
thread_local bool tuning = false, as_hopper = false;

// Describes the row-major matrices (rows, cols) of one operand to cuBLASLt: column-major and transposed.
void describe_operand(cublasLtMatrixLayoutOpaque_t& layout, DType dtype, int64_t rows, int64_t cols,
                      int64_t batch_count) {
    cublasCheck(cublasLtMatrixLayoutInit(&layout, cuda_type(dtype), static_cast<uint64_t>(cols),
                                         static_cast<uint64_t>(rows), cols));
    const int32_t count = narrow(batch_count, "matmul: batch");
    const int64_t stride = rows * cols;
    cublasCheck(cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
    cublasCheck(
        cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride));
}

template <class Value>
void set(cublasLtMatmulDescOpaque_t& operation, cublasLtMatmulDescAttributes_t attribute, Value value) {
    cublasCheck(cublasLtMatmulDescSetAttribute(&operation, attribute, &value, sizeof value));
}
template <class Value>
void set(cublasLtMatmulPreferenceOpaque_t& preference, cublasLtMatmulPreferenceAttributes_t attribute, Value value) {
    cublasCheck(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value));
}

// What changes from call to call of one plan: addresses.
void set_addresses(Plan& plan, const MatmulOptions& options) {
    if (options.bias) set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, options.bias.data);
    if (options.a_row_sums) set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, options.a_row_sums.data);
    const Tensor aux = options.before_gelu ? options.before_gelu : options.gelu_input;
    if (aux) set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux.data);
    if (options.b_scale) set(plan.operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, options.b_scale.data);
    if (options.a_scale) set(plan.operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, options.a_scale.data);
}

#if CUBLAS_VERSION >= 120900
cublasLtMatmulMatrixScale_t cuda_scale_mode(MatmulScale mode) {
    switch (mode) {
        case MatmulScale::row128: return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
        case MatmulScale::block128: return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
        default: return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    }
}
#endif

cublasLtEpilogue_t cuda_epilogue(Epilogue epilogue) {
    switch (epilogue) {
        case Epilogue::bias: return CUBLASLT_EPILOGUE_BIAS;
        case Epilogue::gelu: return CUBLASLT_EPILOGUE_GELU_AUX;
        case Epilogue::bias_gelu: return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
        case Epilogue::gelu_derivative: return CUBLASLT_EPILOGUE_DGELU;
        case Epilogue::row_sums: return CUBLASLT_EPILOGUE_BGRADB;
        default: return CUBLASLT_EPILOGUE_DEFAULT;
    }
}

Plan describe(const Product& p, const MatmulOptions& options) {
    if (is_fp8(p.a_dtype)) expect_fp8_device(p.a_scale_mode != MatmulScale::tensor);
    Plan plan;
    cublasCheck(cublasLtMatmulDescInit(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (p.epilogue != Epilogue::none) set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, cuda_epilogue(p.epilogue));
    if (options.before_gelu || options.gelu_input) set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.N);
    set_addresses(plan, options);
#if CUBLAS_VERSION >= 120900
    if (p.a_scale_mode != MatmulScale::tensor) {
        set(plan.operation, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, static_cast<int32_t>(cuda_scale_mode(p.b_scale_mode)));
        set(plan.operation, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, static_cast<int32_t>(cuda_scale_mode(p.a_scale_mode)));
    }
#endif
    describe_operand(plan.a, p.a_dtype, p.transpose_a ? p.K : p.M, p.transpose_a ? p.M : p.K, p.batch_count);
    describe_operand(plan.b, p.b_dtype, p.transpose_b ? p.N : p.K, p.transpose_b ? p.K : p.N, p.batch_count);
    describe_operand(plan.out, p.out_dtype, p.M, p.N, p.batch_count);
    return plan;
}

// The largest power of two, up to kAlignment, on whose multiples every row of a matrix starts.
uint32_t row_alignment(int64_t cols, DType dtype) {
    const uint64_t bits = static_cast<uint64_t>(cols) * dtype_bytes(dtype) | kAlignment;
    return static_cast<uint32_t>(bits & (~bits + 1));
}

bool reads_or_writes_aux(Epilogue epilogue) {
    return epilogue == Epilogue::gelu || epilogue == Epilogue::bias_gelu || epilogue == Epilogue::gelu_derivative;
}

// What cuBLASLt's heuristic names, best first. Not told the alignment of the rows, it would return algorithms that need
// 256-byte boundaries.
std::vector<cublasLtMatmulAlgo_t> algorithms_of(const Product& p, Plan& plan, int most) {
    if (reads_or_writes_aux(p.epilogue) && p.N % 8 != 0) return {};  // its rule for AUX
    if (p.epilogue == Epilogue::delta) return {};                    // it has none
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasCheck(cublasLtMatmulPreferenceInit(&preference));
    set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(device().blas_workspace_bytes));
    if (p.out_dtype != DType::f32) set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, kPartsInFloat32);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, row_alignment(p.transpose_b ? p.K : p.N, p.b_dtype));
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, row_alignment(p.transpose_a ? p.M : p.K, p.a_dtype));
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, row_alignment(p.N, p.out_dtype));
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, row_alignment(p.N, p.out_dtype));

    std::vector<cublasLtMatmulHeuristicResult_t> found(static_cast<size_t>(most));
    int n_found = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(device().blas, &plan.operation, &plan.b, &plan.a, &plan.out, &plan.out,
                                       &preference, most, found.data(), &n_found);
    std::vector<cublasLtMatmulAlgo_t> algorithms;
    for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < n_found; ++i)
        if (found[static_cast<size_t>(i)].state == CUBLAS_STATUS_SUCCESS)
            algorithms.push_back(found[static_cast<size_t>(i)].algo);
    return algorithms;
}

cublasStatus_t launch(Plan& plan, Tensor out, Tensor a, Tensor b, const MatmulOptions& options, cudaStream_t stream) {
    set_addresses(plan, options);
    return cublasLtMatmul(device().blas, &plan.operation, &options.alpha, b.data, &plan.b, a.data, &plan.a,
                          &options.beta, options.added ? options.added.data : out.data, &plan.out, out.data, &plan.out,
                          &plan.algorithm, device().blas_workspace, device().blas_workspace_bytes, stream);
}

// A choice may be from a file.
bool can_run(Plan& plan, const cublasLtMatmulAlgo_t& algorithm) {
    cublasLtMatmulHeuristicResult_t result;
    return cublasLtMatmulAlgoCheck(device().blas, &plan.operation, &plan.b, &plan.a, &plan.out, &plan.out, &algorithm,
                                   &result) == CUBLAS_STATUS_SUCCESS &&
           result.workspaceSize <= device().blas_workspace_bytes;
}

// The least of five, after a first one that is not counted.
template <class Run>
double seconds_of(Run&& run, cudaStream_t stream) {
    double least = std::numeric_limits<double>::infinity();
    for (int i = 0; i <= 5; ++i) {
        cudaCheck(cudaStreamSynchronize(stream));
        const double start = seconds_now();
        if (!run()) return std::numeric_limits<double>::infinity();
        cudaCheck(cudaStreamSynchronize(stream));
        if (i > 0) least = std::min(least, seconds_now() - start);
    }
    return least;
}

bool has_epilogue(Epilogue epilogue) { return epilogue != Epilogue::none && epilogue != Epilogue::bias; }

// Without times.
bool is_for_hopper(const Product& p) {
    constexpr int64_t kLarge = 512;
    return has_epilogue(p.epilogue) && std::min({p.M, p.N, p.K}) >= kLarge && (!device().is_cpu || as_hopper) &&
           hopper_matmul_takes(p);
}

constexpr const char* kWayNames[] = {"cublaslt", "hopper", "parts"};  // MatmulWay's
constexpr int kWords = sizeof(cublasLtMatmulAlgo_t) / sizeof(uint64_t);

std::string text_of(const Choice& choice) {
    if (!choice.algorithm) return kWayNames[static_cast<size_t>(choice.way)];
    std::string text;
    for (const uint64_t word : choice.algorithm->data)
        text += format("%s%llx", text.empty() ? "" : ".", static_cast<unsigned long long>(word));
    return text;
}

// What is worth timing here. (The CPU device has our product for Hopper, too: instruction by instruction.)
std::vector<Choice> candidates_of(const Product& product, const std::vector<cublasLtMatmulAlgo_t>& algorithms) {
    std::vector<Choice> candidates;
    for (const cublasLtMatmulAlgo_t& algorithm : algorithms)
        candidates.push_back({.way = MatmulWay::cublas_lt, .algorithm = algorithm});
    if (!device().is_cpu && hopper_matmul_takes(product)) candidates.push_back({.way = MatmulWay::hopper});
    if (has_epilogue(product.epilogue) || candidates.empty()) candidates.push_back({.way = MatmulWay::parts});
    return candidates;
}

Choice time_candidates(std::vector<Choice> candidates, Plan& plan, Tensor out, Tensor a, Tensor b,
                       const MatmulOptions& options, cudaStream_t stream) {
    std::vector<double> seconds;
    for (const Choice& candidate : candidates) {
        if (candidate.algorithm) plan.algorithm = *candidate.algorithm;
        const auto run = [&] {
            if (candidate.way == MatmulWay::cublas_lt)
                return launch(plan, out, a, b, options, stream) == CUBLAS_STATUS_SUCCESS;
            (candidate.way == MatmulWay::hopper ? hopper_matmul : multiply_in_parts)(out, a, b, options, stream);
            return true;
        };
        seconds.push_back(seconds_of(run, stream));
    }
    const auto us = [&](size_t i) { return format("%.1f us", 1e6 * seconds[i]); };
    const size_t best = fastest(seconds);
    std::string measured = concat(us(best), "; ", seconds.size(), " candidates, the first ", us(0));
    for (size_t i = 1; i < candidates.size(); ++i)
        if (candidates[i].way != MatmulWay::cublas_lt) measured += concat(", ", text_of(candidates[i]), " ", us(i));
    candidates[best].measured = measured;
    return candidates[best];
}

// A choice that is known, or made now.
PlannedWay make_plan(const Product& product, Tensor out, Tensor a, Tensor b, const MatmulOptions& options,
                     cudaStream_t stream) {
    PlannedWay planned{.plan = describe(product, options)};
    Plan& plan = planned.plan;
    const std::string name = name_of(product);
    auto known = choices.find(name);
    const bool times = tuning && known == choices.end();
    const std::vector<cublasLtMatmulAlgo_t> algorithms = algorithms_of(product, plan, times ? kCandidates : 1);
    check(!algorithms.empty() || !is_fp8(product.a_dtype), "matmul: cuBLASLt has no algorithm for ", name);
    if (times) {
        const Choice fastest = time_candidates(candidates_of(product, algorithms), plan, out, a, b, options, stream);
        known = choices.emplace(name, fastest).first;
    }
    if (!algorithms.empty()) planned.way = MatmulWay::cublas_lt, plan.algorithm = algorithms[0];
    if (known == choices.end()) {
        if (is_for_hopper(product)) planned.way = MatmulWay::hopper;
        return planned;
    }
    // A choice may be from a file, and what it names not be here: then it is none.
    Choice& choice = known->second;
    const bool has_parts = !is_fp8(product.a_dtype) || has_epilogue(product.epilogue);  // no kernel multiplies fp8
    if (choice.way == MatmulWay::parts && has_parts) planned.way = MatmulWay::parts;
    else if (choice.way == MatmulWay::hopper && hopper_matmul_takes(product)) planned.way = MatmulWay::hopper;
    else if (choice.algorithm && !algorithms.empty() && can_run(plan, *choice.algorithm))
        planned.way = MatmulWay::cublas_lt, plan.algorithm = *choice.algorithm;
    return planned;
}

const char* epilogue_name(Epilogue epilogue) {
    switch (epilogue) {
        case Epilogue::bias: return "bias";
        case Epilogue::gelu: return "gelu";
        case Epilogue::bias_gelu: return "bias_gelu";
        case Epilogue::gelu_derivative: return "gelu_derivative";
        case Epilogue::row_sums: return "row_sums";
        case Epilogue::delta: return "delta";
        default: return "plain";
    }
}

// The name of a way, or an algorithm of cuBLASLt's: eight hexadecimal words with dots between them.
bool read_choice(const std::string& text, Choice& choice) {
    for (const MatmulWay way : {MatmulWay::cublas_lt, MatmulWay::hopper, MatmulWay::parts}) {
        choice.way = way;
        if (text == text_of(choice)) return true;
    }
    choice.way = MatmulWay::cublas_lt;
    cublasLtMatmulAlgo_t& algorithm = choice.algorithm.emplace();
    const char* at = text.c_str();
    for (int i = 0; i < kWords; ++i) {
        char* end = nullptr;
        if (!std::isxdigit(static_cast<unsigned char>(*at))) return false;
        algorithm.data[i] = std::strtoull(at, &end, 16);
        if (*end != (i + 1 < kWords ? '.' : 0)) return false;
        at = end + 1;
    }
    return true;
}

}  // namespace

std::string name_of(const Product& p) {
    std::string name = concat(p.M, "x", p.N, "x", p.K, " ", dtype_name(p.a_dtype), " ", dtype_name(p.b_dtype), " ",
                              dtype_name(p.out_dtype), " ", p.transpose_a ? "t" : "n", p.transpose_b ? "t" : "n", " ",
                              epilogue_name(p.epilogue));
    if (p.batch_count > 1) name += concat(" batch ", p.batch_count);
    if (p.head_size > 0) name += concat(" heads of ", p.head_size);
    if (p.adds_other) name += " added";
    if (p.a_scale_mode != MatmulScale::tensor)
        name += concat(" scales ", static_cast<int>(p.a_scale_mode), " ", static_cast<int>(p.b_scale_mode));
    return name;
}

MatmulWay multiply_by_plan(const Product& product, Tensor out, Tensor a, Tensor b, const MatmulOptions& options,
                           cudaStream_t stream) {
    auto at = plans.find(product);
    if (at == plans.end()) at = plans.emplace(product, make_plan(product, out, a, b, options, stream)).first;
    auto& [way, plan] = at->second;
    if (way == MatmulWay::cublas_lt) cublasCheck(launch(plan, out, a, b, options, stream));
    if (way == MatmulWay::hopper) hopper_matmul(out, a, b, options, stream);
    return way;
}

void tune_matmuls(bool on) {
    tuning = on;
    plans.clear();  // those that were made without timing
}
void choose_matmuls_as_hopper(bool on) {
    as_hopper = on;
    plans.clear();
}

std::string matmul_choices() {
    std::string text;
    for (const auto& [name, choice] : choices)
        text += concat(name, ": ", text_of(choice), choice.measured.empty() ? "" : "  # ", choice.measured, "\n");
    return text;
}

void set_matmul_choices(const std::string& text) {
    std::map<std::string, Choice> read;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
        const size_t colon = line.find(": "), comment = line.find("  # ");
        Choice choice;
        const bool named = colon != std::string::npos && colon > 0 && (comment == std::string::npos || comment > colon);
        const size_t first = colon + 2;
        check(
            named && read_choice(line.substr(first, comment == std::string::npos ? comment : comment - first), choice),
            "choices of matrix products: '", line, "' is not a line 'PRODUCT: CHOICE  # what was measured'");
        if (comment != std::string::npos) choice.measured = line.substr(comment + 4);
        check(read.emplace(line.substr(0, colon), choice).second, "choices of matrix products: '",
              line.substr(0, colon), "' is there twice");
    }
    choices = read;
    plans.clear();
}

size_t fastest(const std::vector<double>& seconds) {
    const double least = *std::min_element(seconds.begin(), seconds.end());
    size_t i = 0;
    while (seconds[i] > 1.01 * least) ++i;
    return i;
}
