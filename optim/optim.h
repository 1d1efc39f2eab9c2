// optim/optim.h: everything that turns gradients into new weights.
//
// Parameters, gradients and optimizer states are flat arrays with the same offsets (Param::offset). One launch covers all
// parameters: a table of tiles says which elements a block updates and whether they are decayed.
#pragma once

#include "core/core.h"

// ---------------------------------------------------------------------------------------------------------------------
// schedule.cu: the learning rate at each step. Steps count from 1; every schedule starts with a linear warmup
//   lr(s) = peak * s / warmup                                 for s <= warmup
// and then, with u = (s - warmup) / (steps - warmup) in [0, 1]:
//   constant   peak
//   linear     peak + (floor - peak) u
//   cosine     floor + (peak - floor) (1 + cos(pi u)) / 2                         (Loshchilov & Hutter 2017, arXiv:1608.03983)
//   wsd        peak until the last `decay_fraction` of all steps, then linear to floor    (Hu et al. 2024, arXiv:2404.06395)
// floor = peak * min_ratio.

struct Schedule {
    std::string name = "cosine";  // constant, linear, cosine, wsd
    double peak = 1e-3, min_ratio = 0.1, decay_fraction = 0.2;
    int64_t warmup = 0, steps = 1;
};
double learning_rate(const Schedule& schedule, int64_t step);
void check_schedule(const Schedule& schedule);  // Error for an unknown name, warmup > steps, ...

// ---------------------------------------------------------------------------------------------------------------------
// grad_clip.cu: clipping by the global norm                                   (Pascanu et al. 2013, arXiv:1211.5063)
//   norm = sqrt(sum over all gradients of g^2)       scale = min(1, max_norm / (norm + 1e-6))
// grads: flat (n), f32, bf16 or f16.   result: (2) f32 on the device = {norm, scale}: no round trip to the host; the update
// multiplies each gradient by scale. max_norm <= 0: no clipping, scale = 1. A norm that is inf or NaN gives scale NaN, which
// makes the update leave everything as it is.   scratch: grad_norm_scratch_n(n) f32.

void grad_norm(Tensor result, Tensor grads, float max_norm, Tensor scratch, cudaStream_t stream);
int64_t grad_norm_scratch_n(int64_t n);

// ---------------------------------------------------------------------------------------------------------------------
// tiles.cu: the table that lets one launch update all parameters. A tile is at most kTileN consecutive elements of one
// parameter; a block updates one tile, a thread one element.

constexpr int kTileN = 1024;
struct Tile {
    int64_t first;  // offset of its first element in the flat arrays
    int32_t n;
    float decay;  // 1 where weight decay applies, otherwise 0
};
std::vector<Tile> make_tiles(const std::vector<Param>& params);

// ---------------------------------------------------------------------------------------------------------------------
// adamw.cu                     (Kingma & Ba 2015, arXiv:1412.6980; Loshchilov & Hutter 2019, arXiv:1711.05101)
//   g = scale * grad
//   m = beta1 m + (1 - beta1) g          m^ = m / (1 - beta1^t)
//   v = beta2 v + (1 - beta2) g^2        v^ = v / (1 - beta2^t)
//   w = w - lr * (m^ / (sqrt(v^) + eps) + weight_decay * w)

struct AdamWOptions {
    float beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, weight_decay = 0.1f;
};

class AdamW {
  public:
    // Takes m and v (f32, n elements each: 8 bytes a parameter) and the tile table from the arena; works while it counts.
    AdamW(Arena& arena, const std::vector<Param>& params, int64_t n, const AdamWOptions& options);
    // After arena.reserve(): zeroes the states and uploads the table.
    void init(cudaStream_t stream);
    // t counts updates from 1. norm_scale: the result of grad_norm.
    void step(Tensor values, Tensor grads, Tensor norm_scale, double lr, int64_t t, cudaStream_t stream);
    // For checkpoints: {"m", (n)}, {"v", (n)}.
    std::vector<std::pair<std::string, Tensor>> states() const { return {{"m", m_}, {"v", v_}}; }

  private:
    AdamWOptions options_;
    std::vector<Tile> host_tiles_;
    Tensor tiles_, m_, v_;
};
