// model/feed_forward_swiglu.cu: LLaMA's gated feed-forward.                           (Shazeer 2020, arXiv:2002.05202)
//
//   [gate | up] = linear(inp)  (N, 2F)      act = silu(gate) * up      out = linear(act)  (N, C)
#include "model/sublayer.h"

namespace {

enum LinearOf { kGateUp, kDown };  // (2F, C), (C, F)
enum Saved { kGateUpRows, kAct };

void check(const Config& c) {
    ::check(c.family == Family::llama,
            "model configuration: the feed-forward 'swiglu' has the names of LLaMA's weights");
}

void place(Placer& placer, const Config& c, const std::string& prefix, SubLayerParameters& p) {
    const std::string m = prefix + "mlp.";
    p.linears[kGateUp] = placer.linear(
        Crossing::enters, {placer.divided(m + "gate_proj", c.F), placer.divided(m + "up_proj", c.F)}, c.C, c.mlp_bias);
    p.linears[kDown] = placer.linear(Crossing::leaves, {{m + "down_proj", c.C}}, c.F, c.mlp_bias);
}

void take_saved(SavedTaker& take, const Config& c, Slots& saved) {
    saved[kGateUpRows] = take.keep("feed-forward", 2 * c.F);
    saved[kAct] = take.recomputable("feed-forward", c.F);
}
void take_gradients(SavedTaker& take, const Config& c, Slots& gradients) {
    gradients[kGateUpRows] = take.keep("gradients of activations", 2 * c.F);
    gradients[kAct] = take.keep("gradients of activations", c.F);
}
int64_t scratch_n(const Model&, int64_t, int64_t) { return 0; }

void recompute(const BlockContext& b, const SubLayerParameters&, const Slots& saved) {
    swiglu_forward(saved[kAct], saved[kGateUpRows], b.stream);
}

void forward(const BlockContext& b, const SubLayerParameters& p, const Slots& saved, Tensor out, Tensor inp) {
    block_linear_swiglu_forward(b, p.linears[kGateUp], saved[kAct], saved[kGateUpRows], inp);
    if (out.exists()) block_linear_forward(b, p.linears[kDown], out, saved[kAct]);
}

void backward(const BlockContext& b, const SubLayerParameters& p, const Slots& saved, Tensor dinp, Tensor dout,
              Tensor inp) {
    const Tensor dgate_up = b.workspace.dfeed_forward[kGateUpRows], dact = b.workspace.dfeed_forward[kAct];
    block_linear_backward_input(b, p.linears[kDown], dact, dout);
    block_linear_backward_weight(b, p.linears[kDown], dout, saved[kAct]);
    swiglu_backward(dgate_up, dact, saved[kGateUpRows], b.stream);
    block_linear_backward_input(b, p.linears[kGateUp], dinp, dgate_up);
    block_linear_backward_weight(b, p.linears[kGateUp], dgate_up, inp);
}

Elements elements(const Config& c) {
    const double F = static_cast<double>(c.F);
    return {.forward = 2 * F + F, .backward = F + 2 * 2 * F, .again = 2 * F + F};
}

}  // namespace

extern const SubLayer kSwiGlu = {.name = "swiglu",
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
