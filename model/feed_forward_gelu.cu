// model/feed_forward_gelu.cu: GPT-2's feed-forward.                                            (Radford et al. 2019)
//
//   up = linear(inp)  (N, F)      act = gelu(up)      out = linear(act)  (N, C)
#include "model/sublayer.h"

namespace {

enum LinearOf { kUp, kDown };  // (F, C), (C, F)
enum Saved { kUpRows, kAct };

void check(const Config& c) {
    ::check(c.family == Family::gpt2, "model configuration: the feed-forward 'gelu' has the names of GPT-2's weights");
}

void place(Placer& placer, const Config& c, const std::string& prefix, SubLayerParameters& p) {
    p.linears[kUp] = placer.linear(Crossing::enters, {placer.divided(prefix + "mlp.c_fc", c.F)}, c.C, true, true);
    p.linears[kDown] = placer.linear(Crossing::leaves, {{prefix + "mlp.c_proj", c.C}}, c.F, true, true);
}

void take_saved(SavedTaker& take, const Config& c, Slots& saved) {
    saved[kUpRows] = take.keep("feed-forward", c.F);
    saved[kAct] = take.recomputable("feed-forward", c.F);
}
void take_gradients(SavedTaker& take, const Config& c, Slots& gradients) {
    gradients[kUpRows] = take.keep("gradients of activations", c.F);
}
int64_t scratch_n(const Model&, int64_t, int64_t) { return 0; }

void recompute(const BlockContext& b, const SubLayerParameters&, const Slots& saved) {
    gelu_forward(saved[kAct], saved[kUpRows], b.stream);
}

void forward(const BlockContext& b, const SubLayerParameters& p, const Slots& saved, Tensor out, Tensor inp) {
    block_linear_gelu_forward(b, p.linears[kUp], saved[kAct], saved[kUpRows], inp);
    if (out.exists()) block_linear_forward(b, p.linears[kDown], out, saved[kAct]);
}

void backward(const BlockContext& b, const SubLayerParameters& p, const Slots& saved, Tensor dinp, Tensor dout,
              Tensor inp) {
    const Tensor dup = b.workspace.dfeed_forward[kUpRows];
    block_linear_gelu_backward_input(b, p.linears[kDown], dup, dout, saved[kUpRows]);
    block_linear_backward_weight(b, p.linears[kDown], dout, saved[kAct]);
    block_linear_backward_input(b, p.linears[kUp], dinp, dup);
    block_linear_backward_weight(b, p.linears[kUp], dup, inp);
}

// GELU is part of the products: one writes up beside its result, the other reads it. Only what is run again is alone,
// and GELU beside products in fp8: then up is read once more, and its gradient read and written.
Elements elements(const Config& c) {
    const double F = static_cast<double>(c.F);
    return {.forward = F, .backward = F, .again = 2 * F, .fp8_forward = F, .fp8_backward = 2 * F};
}

}  // namespace

extern const SubLayer kGelu = {.name = "gelu",
                               .check = check,
                               .place = place,
                               .take_saved = take_saved,
                               .take_gradients = take_gradients,
                               .scratch_n = scratch_n,
                               .forward = forward,
                               .recompute = recompute,
                               .backward = backward,
                               .elements = elements,
                               .first_linear_alone_reads_inp = true};
