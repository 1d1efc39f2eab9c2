// Loss scaling, for f16 gradients that would otherwise be rounded to 0.  (Micikevicius et al. 2018, arXiv:1710.03740)
//
//   loss' = scale * loss        so every gradient is `scale` times as large (the chain rule is linear),
//   g     = g' / scale          and is divided by it in f32, where nothing is too small, as the update reads it
//
//   f16       6e-8 ........ 6e-5 ................................................ 65504
//             subnormal     normal
//   gradients    1e-10 ............ 1e-4            many are 0 in f16;
//             x 65536:  6e-6 ............ 6         now few are
//
// How large may scale be? As large as it can without an overflow; but that changes during a run. Dynamic scaling adapts
// it: it doubles the scale after every 2000 good steps, and when a gradient becomes inf it halves the scale and skips
// that step. So about one step in 2000 is lost. (65536 at first, 2, 1/2 and 2000 are also PyTorch's defaults.) bf16 has
// the exponents of f32 and needs none of this.
#include "optim/optim.h"

#include <algorithm>
#include <cmath>

namespace {

constexpr int64_t kMostOverflows = 20;  // in a row, of a static scale

}  // namespace

LossScaleOptions parse_loss_scale(const std::string& text) {
    LossScaleOptions options;
    if (text == "dynamic") return options;
    options.dynamic = false;
    size_t n_read = 0;
    try {
        options.start = std::stod(text, &n_read);
    } catch (const std::logic_error&) {  // no number, or one beyond double
        n_read = 0;
    }
    check(n_read > 0 && n_read == text.size(), "loss scale '", text, "': use dynamic, or a number such as 1024");
    LossScaler check_it(options);
    return options;
}

LossScaler::LossScaler(const LossScaleOptions& o) : options(o), scale(o.start) {
    // Written so that a NaN fails, too. The gradients' factor 1 / scale is an f32.
    check(o.start >= 1 && o.start <= 0x1p120, "the loss scale is ", o.start, ": it must be a number from 1 to 2^120");
    if (!o.dynamic) return;
    check(o.growth > 1 && std::isfinite(o.growth), "the loss scale's growth is ", o.growth,
          ": it must be a number above 1");
    check(o.backoff > 0 && o.backoff < 1, "the loss scale's backoff is ", o.backoff, ": it must lie between 0 and 1");
    check(o.largest >= o.start && o.largest <= 0x1p120, "the largest loss scale is ", o.largest,
          ": it must be a number from the first one, ", o.start, ", to 2^120");
    check(o.interval >= 1, "the loss scale grows after ", o.interval, " good steps: it must be 1 or more");
}

void LossScaler::update(bool overflow) {
    overflows = overflow ? overflows + 1 : 0;
    good_steps = overflow ? 0 : good_steps + 1;
    if (!options.dynamic) {
        check(overflows < kMostOverflows, "gradients were infinite or NaN in ", overflows,
              " steps in a row with the loss scale ", scale,
              ": use a smaller one, or the dynamic one; if that does not help, a smaller learning rate or bf16");
    } else if (overflow) {
        scale *= options.backoff;
        check(scale >= 1, "gradients are infinite or NaN even with a loss scale of ", scale / options.backoff,
              ": it is not the scale that is too large. Use a smaller learning rate, a longer warmup or bf16");
    } else if (good_steps == options.interval) {
        scale = std::min(scale * options.growth, options.largest);
        good_steps = 0;
    }
}
