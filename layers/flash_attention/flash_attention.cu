// Flash attention: softmax(q k^T) v without the T x T matrix.
//                                       (Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691)
//
// READING ORDER of this folder:
//
//     flash_attention.cu     this file: the maths, the picture, the checks, and which tier runs where
//     flash_attention.cuh    what the tiers share: heads inside of rows, the mask
//     cores.cuh, cores_forward.cu, cores_backward.cu       plain float32 arithmetic: read these first
//     mma.cuh, mma_forward.cu, mma_backward.cu             the same tiles on the tensor cores of all GPUs since sm_75
//     hopper.cuh, hopper_forward.cu, hopper_backward.cu    the same with wgmma and the copy engine of sm_90a
//     hopper_backward_wide.cu                              its backward where registers do not hold all in one pass
//     delta.cu               what the backward computes first
//     merge.cu               attention over two sets of keys from that over each
//     paged_attention.cu, paged_tile.cuh, paged_attention.cuh, paged_latent_attention.cu
//                            the forward over a cache in pages
//     paged_decode.cuh       the same for steps that decode
//
// The climb from a naive kernel to these, rung by rung, is dev/attention_forward.cu and dev/attention_backward.cu.
//
// As plain loops, for one head (causal), which need a row of T numbers of storage for each query:
//
//     for t < T:
//         for s <= t:  P[s] = exp(scale * dot(q[t], k[s]))
//         out[t] = (sum over s of P[s] * v[s]) / sum(P);  lse[t] = log(sum(P))
//     for t < T, s <= t:                                                    # backward
//         P = exp(scale * dot(q[t], k[s]) - lse[t]);  dS = P * (dot(dout[t], v[s]) - dot(dout[t], out[t]))
//         dv[s] += P * dout[t];  dq[t] += scale * dS * k[s];  dk[s] += scale * dS * q[t]
//
// FORWARD. For one query the sums over its keys can be computed tile by tile, if what has been summed so far is scaled
// down whenever a larger score is found (Milakov & Gimelshein 2018, arXiv:1805.02867). With scores S_s
// = scale q.k_s, kept between tiles: the maximum so far m, the sum l, and the unfinished output o,
//
//     m' = max(m, max of the tile)      P_s = exp(S_s - m')
//     l  <- l exp(m - m') + sum P_s     o <- o exp(m - m') + sum P_s v_s              at the end  o <- o / l
//
// One number per row is saved for the backward, lse = m + log(l) = log sum_s exp(S_s): with it any probability of the
// row is exp(S_s - lse), in any order, with no further sum. (Exponentials are computed as powers of two: scale includes
// the factor log2(e), which saves a multiplication for each score.)
//
// BACKWARD, with the probabilities P computed again from q, k and lse. Written for all pairs of a query t and a key s,
//
//     dv_s = sum_t P_ts do_t         dP_ts = do_t . v_s          dS_ts = P_ts (dP_ts - delta_t)
//     dq_t = scale sum_s dS_ts k_s   dk_s = scale sum_t dS_ts q_t
//
// delta_t = sum_s P_ts dP_ts is softmax's own gradient. It looks like a sum over a row of the matrix, but
// sum_s P_ts (do_t . v_s) = do_t . sum_s P_ts v_s = do_t . o_t: a sum over D columns, computed once, before the tiles.
//
// Sums over s (dq) and sums over t (dk, dv) need opposite loops. So cores and mma have two kernels, which work like
// this:
//
//     a block owns some rows, which stay; the others are read tile by tile; the rows' sums stay in registers
//
// forward, dq: rows = queries, others = keys.   dk and dv: rows = keys, others = queries, of all the heads of a group.
// Nothing is shared between blocks, so there are no atomics, and each sum has one order: a run repeats bit for bit. The
// cost is that the second kernel computes S and dP again: 7 products of T T D instead of 5. One kernel that adds to dq
// with atomics takes 5/7 of the work, but adds in an order that differs from run to run. Two tiers have 5 products and
// one order, for heads of up to 128 columns. On Hopper, where products are the limit, blocks add to dq in turns
// (hopper_backward.cu). On the CPU device, which has few threads, one of them does all tiles of a head in order
// (flash_backward_kernel in cores_backward.cu).
//
// WHERE THINGS ARE, for a head of D columns and tiles of R rows and N others:
//
//     registers        S and P of a tile; o, dq, or dk and dv; m and l, or lse and delta       R (N + D), R (2 N + 2 D)
//     shared memory    the rows, and the tiles of others that stream past               R D + 2 N D, 2 R D + 4 N D
//     device memory    q, k, v, o and their gradients; lse and delta, 1 number per row         never T x T
//
// BYTES MOVED, for B H heads (K = H) of a full mask and numbers of w bytes:
//
//     naive forward    B H (4 T D + 4 T^2) w       q, k, v, o once; S and P written and read
//     flash forward    B H (2 T D + 2 T D T/R) w   q, o once; k and v once for each tile of R rows
//     naive backward   B H (7 T D + 7 T^2) w       P read twice; dP and dS written and read, dS twice
//     flash backward   B H (9 T D + 4 T D T/R) w   k, v once for each tile of queries, q, do for each of keys
//
// At T = 4096, D = 128, R = 128 and 16 bits a naive forward moves 4 + 134 MB per head, flash 2 + 67 MB, of which all
// but 4 MB can come from L2. A causal mask halves the second term of flash, and not that of naive matrix products.
//
// THE MASK. A causal mask, a sliding window and packed documents have the same form: a query sees an interval of keys
// (flash_attention.cuh). A block goes through the union of its rows' intervals, and tests each pair only in tiles in
// which an interval ends: a causal mask takes half the time of a full one, a window is proportional to T window instead
// of T^2.
//
// THE TIERS behind one function: CUDA cores (flash_attention/cores.cuh) for f32. For bf16 and f16 wgmma with the copy
// engine, where the GPU has them (sm_90a, flash_attention/hopper.cuh), and mma.sync otherwise, the tensor cores of all
// GPUs since sm_75 (flash_attention/mma.cuh). `--attention` chooses another one.
#include "core/names.h"
#include "layers/chunk.cuh"
#include "layers/flash_attention/flash_attention.cuh"

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Checks

constexpr int64_t kMaxD = 256;
// Shared memory that heads of more columns take: more than GPUs of compute capability 8.6 and 8.9 have (99 KiB), and
// more than those of 7.5 (64 KiB).
struct Need {
    int64_t columns;
    int bytes;
};
constexpr Need kNeeds[] = {{192, 112 << 10}, {128, 90 << 10}};

void check_heads(const char* operation, const char* name, const HeadColumns& heads, DType dtype, int64_t B, int64_t T,
                 int64_t count, int64_t D) {
    expect_heads(operation, name, heads, dtype, B, T, count, D);
    expect_aligned(operation, {{name, heads.rows}});
}

FlashArguments check_arguments(const char* operation, const char* out_name, const HeadColumns& out, Tensor lse,
                               const HeadColumns& q, const HeadColumns& k, const HeadColumns& v,
                               const FlashAttentionOptions& options) {
    const DType dtype = q.rows.dtype;
    check(q.rows.data && (dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16), operation, ": q is ",
          q.rows, ", expected f32, bf16 or f16 of (B, T, columns)");
    expect(operation, "q", q.rows, dtype, {-1, -1, -1});
    const int64_t B = q.rows.shape[0], T = q.rows.shape[1];
    check(B >= 1 && T >= 1, operation, ": q is ", q.rows, ": there must be a token");
    const int64_t whole_T = options.whole_T == 0 ? T : options.whole_T;
    // Kernels add two tokens' numbers in 32 bits, and grids have 16 bits for sequences and for heads.
    check(whole_T < (1 << 30) && B < (1 << 16) && q.count < (1 << 16), operation, ": q is ", q.rows, " with ", q.count,
          " heads, of sequences of ", whole_T, " tokens; at most 2^30 - 1 tokens, 65535 sequences and 65535 heads are ",
          "possible: use a smaller --seq or --micro-batch");
    for (const auto& [D, name] : {std::pair{q.D, "q"}, std::pair{v.D, "v"}})
        check(D >= 1 && D <= kMaxD, operation, ": heads of ", name, " have ", D, " columns; 1 to ", kMaxD,
              " are possible");
    check(k.count >= 1 && q.count >= 1 && q.count % k.count == 0, operation, ": H = ", q.count,
          " query heads are not a multiple of K = ", k.count, " key/value heads");
    check_heads(operation, "q", q, dtype, B, T, q.count, q.D);
    check_heads(operation, "k", k, dtype, B, T, k.count, q.D);
    check_heads(operation, "v", v, dtype, B, T, k.count, v.D);
    check_heads(operation, out_name, out, dtype, B, T, q.count, v.D);
    expect(operation, "lse", lse, DType::f32, {B, q.count, T});
    check(std::isfinite(options.scale) && options.scale > 0, operation, ": scale is ", options.scale);
    check(options.window >= 0, operation, ": window is ", options.window, "; 0 means none");
    if (options.documents) expect(operation, "options.documents", options.documents, DType::i32, {B, whole_T, 2});
    check(is_aligned(options.documents.data, 8), operation, ": options.documents starts at ", options.documents.data,
          ", which is not a multiple of 8 bytes");
    FlashArguments a{};
    a.q = q, a.k = k, a.v = v, a.out = out;
    a.lse = lse.ptr<float>();
    a.B = B, a.T = T;
    // No window is the same as one of all tokens, and a whole sequence is one chunk: so kernels have one case.
    a.scale = options.scale, a.causal = options.causal, a.window = options.window == 0 ? whole_T : options.window;
    a.whole_T = whole_T;
    a.queries = options.whole_T == 0 ? TokenChunks{T, {0, T}} : options.queries;
    a.keys = options.whole_T == 0 ? TokenChunks{T, {0, T}} : options.keys;
    expect_chunks(operation, "options.queries", a.queries, T, whole_T);
    expect_chunks(operation, "options.keys", a.keys, T, whole_T);
    a.documents = static_cast<const int2*>(options.documents.data);
    a.packed = is_packed({q, k, v, out});
    return a;
}

// On an H100 FlashAttention-2, with mma.sync, reaches 35 % of what the tensor cores can do, FlashAttention-3, with
// wgmma, 75 % (Shah et al. 2024, arXiv:2407.08608). `make bench` times ours: "attention mma" and "attention hopper".
// On the CPU device a function emulates each tensor core instruction: tens of times slower than its CUDA cores' loops.
// The copy engine moves 16 bytes at least, so heads that are not packed take mma.sync on a Hopper GPU too.
FlashTier automatic_tier(DType dtype, bool packed) {
    if (dtype == DType::f32 || device().is_cpu) return FlashTier::cuda_cores;
    return packed && has_wgmma() ? FlashTier::hopper : FlashTier::mma;
}
FlashTier tier_of(const char* operation, FlashTier wanted, DType dtype, bool packed) {
    if (wanted == FlashTier::automatic) return automatic_tier(dtype, packed);
    expect_flash_tier(wanted, dtype);
    check(wanted != FlashTier::hopper || packed, operation,
          ": the tier hopper needs heads that start and end at multiples ", "of 8 columns: use mma or auto");
    return wanted;
}

constexpr Named<FlashTier> kTierNames[] = {{"auto", FlashTier::automatic},
                                           {"cores", FlashTier::cuda_cores},
                                           {"mma", FlashTier::mma},
                                           {"hopper", FlashTier::hopper}};

// ---------------------------------------------------------------------------------------------------------------------
// Scratch of the backward

// scratch = [delta (B, H, T) | counts | sums of dq], each from a multiple of 16 bytes on; only delta with two kernels.
struct BackwardScratch {
    DqSums sums;
    int64_t first_count, first_sum, n;
    BackwardScratch(int64_t B, int64_t T, int64_t H, int64_t K, int64_t D, int64_t Dv, DType dtype, FlashTier tier) {
        if (tier == FlashTier::hopper) sums = hopper_sums(B, T, H, K, D, Dv);
        if (tier == FlashTier::cuda_cores) sums = cores_sums(B, T, H, K, D, Dv, dtype);
        const int64_t rows = B * H * T;
        first_count = round_up(rows, 4), first_sum = first_count + round_up(sums.counts(), 4);
        n = sums.floats() > 0 ? first_sum + sums.floats() : rows;
    }
};

// Its pointers.
void take_scratch(const char* operation, FlashArguments& a, FlashTier tier, Tensor scratch) {
    const BackwardScratch parts(a.B, a.T, a.q.count, a.k.count, a.q.D, a.v.D, a.q.rows.dtype, tier);
    a.delta = scratch_as(operation, scratch, {parts.n}).ptr<float>();
    a.n_slots = parts.sums.n_slots;
    if (parts.sums.floats() == 0) return;
    a.dq_counts = reinterpret_cast<int*>(a.delta + parts.first_count);
    a.dq_sums = a.delta + parts.first_sum;
}
// The tier of packed heads.
FlashTier tier_of_columns(FlashTier tier, DType dtype, int64_t D, int64_t Dv) {
    return tier == FlashTier::automatic ? automatic_tier(dtype, D % 8 == 0 && Dv % 8 == 0) : tier;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Tiers by name

bool has_wgmma() { return device().capability == 90; }

FlashTier flash_tier_from_name(const std::string& name) { return find_named(kTierNames, "--attention", name).value; }

void expect_flash_tier(FlashTier tier, DType dtype) {
    const char* name = name_of(kTierNames, tier);
    const bool f32 = dtype == DType::f32;
    if (tier == FlashTier::cuda_cores)
        check(f32 || device().is_cpu, "attention on '", name, "' is for f32 on a GPU, not for ", dtype_name(dtype),
              ": use mma or auto");
    if (tier == FlashTier::mma || tier == FlashTier::hopper)
        check(!f32, "attention on '", name, "' is for bf16 and f16, not for f32: use cores or auto");
    if (tier == FlashTier::hopper)
        check(has_wgmma(), "attention on 'hopper' needs a GPU of compute capability 9.0 (H100, H200): use mma or auto");
}

void expect_head_size(FlashTier tier, DType dtype, int64_t D, int64_t Dv) {
    expect_flash_tier(tier, dtype);
    check(D >= 1 && D <= kMaxD && Dv >= 1 && Dv <= kMaxD, "attention: heads of ", D, " columns (values: ", Dv,
          ") are beyond the ", kMaxD, " that its kernels can have: use more and smaller heads");
    for (const auto& [columns, bytes] : kNeeds)
        check(std::max(D, Dv) <= columns || device().block_shared_bytes >= bytes, "attention: heads of more than ",
              columns, " columns need ", bytes >> 10, " KiB of shared memory a block, and this GPU has ",
              device().block_shared_bytes >> 10, ": use more and smaller heads");
    check(tier != FlashTier::hopper || (D % 8 == 0 && Dv % 8 == 0), "attention on 'hopper' needs head sizes that are ",
          "multiples of 8, not ", D, " (values: ", Dv, "): use mma or auto");
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

QkvHeads qkv_heads(Tensor qkv, int64_t H, int64_t K) {
    check(H >= 1 && K >= 1, "qkv_heads: H = ", H, ", K = ", K);
    const int64_t D = div_exact(qkv.cols(), H + 2 * K, "columns of a head");
    return {{qkv, H, D, 0}, {qkv, K, D, H * D}, {qkv, K, D, (H + K) * D}};
}

void flash_attention_forward(const HeadColumns& out, Tensor lse, const HeadColumns& q, const HeadColumns& k,
                             const HeadColumns& v, const FlashAttentionOptions& options, cudaStream_t stream) {
    const char* operation = "flash_attention_forward";
    const FlashArguments a = check_arguments(operation, "out", out, lse, q, k, v, options);
    switch (tier_of(operation, options.tier, q.rows.dtype, a.packed)) {
        case FlashTier::cuda_cores: return flash_forward_cores(a, stream);
        case FlashTier::hopper: return flash_forward_hopper(a, stream);
        default: return flash_forward_mma(a, stream);
    }
}

int64_t flash_attention_backward_scratch_n(int64_t B, int64_t T, int64_t H, int64_t K, int64_t D, int64_t Dv,
                                           DType dtype, FlashTier tier) {
    return BackwardScratch(B, T, H, K, D, Dv, dtype, tier_of_columns(tier, dtype, D, Dv)).n;
}

FlashDelta flash_delta_in(Tensor scratch, int64_t B, int64_t T, int64_t H, int64_t K, int64_t D, int64_t Dv,
                          DType dtype, FlashTier tier) {
    const BackwardScratch parts(B, T, H, K, D, Dv, dtype, tier_of_columns(tier, dtype, D, Dv));
    const Tensor floats = scratch_as("flash_attention_backward", scratch, {parts.n});
    FlashDelta in{floats.slice(0, B * H * T).view({B, H, T}), {}};
    if (parts.sums.counts() == 0) return in;
    in.zeros = floats.slice(parts.first_count, parts.sums.counts());
    in.zeros.dtype = DType::i32;
    return in;
}

void flash_attention_backward(const HeadColumns& dq, const HeadColumns& dk, const HeadColumns& dv,
                              const HeadColumns& dout, const HeadColumns& out, Tensor lse, const HeadColumns& q,
                              const HeadColumns& k, const HeadColumns& v, const FlashAttentionOptions& options,
                              Tensor scratch, cudaStream_t stream) {
    const char* operation = "flash_attention_backward";
    FlashArguments a = check_arguments(operation, "dout", dout, lse, q, k, v, options);
    const DType dtype = q.rows.dtype;
    check_heads(operation, "out", out, dtype, a.B, a.T, q.count, v.D);
    check_heads(operation, "dq", dq, dtype, a.B, a.T, q.count, q.D);
    check_heads(operation, "dk", dk, dtype, a.B, a.T, k.count, q.D);
    check_heads(operation, "dv", dv, dtype, a.B, a.T, k.count, v.D);
    a.dq = dq, a.dk = dk, a.dv = dv;
    a.packed = a.packed && is_packed({out, dq, dk, dv});
    const FlashTier tier = tier_of(operation, options.tier, dtype, a.packed);
    take_scratch(operation, a, tier, scratch);
    const FlashDelta in = flash_delta_in(scratch, a.B, a.T, q.count, k.count, q.D, v.D, dtype, tier);
    if (options.scratch == FlashAttentionOptions::empty) flash_delta(in, dout, out, stream);
    if (options.scratch == FlashAttentionOptions::of_other_keys && in.zeros)
        cudaCheck(cudaMemsetAsync(in.zeros.data, 0, in.zeros.bytes(), stream));
    switch (tier) {
        case FlashTier::cuda_cores: return flash_backward_cores(a, stream);
        case FlashTier::hopper: return flash_backward_hopper(a, stream);
        default: return flash_backward_mma(a, stream);
    }
}
