// model/norm.cu: the norms of a model: LayerNorm in GPT-2, RMSNorm elsewhere; and the additions to the residual stream.
//
// x = x + branch is done by the norm that comes next: it reads the sum anyway. It rounds the sum to the model's dtype
// first, and normalises what it has stored, so the result is that of an addition by itself.
#include "model/sublayer.h"

void norm_forward(const Model& model, const Norm& norm, const NormSaved& saved, const Residual& x,
                  cudaStream_t stream) {
    const float eps = static_cast<float>(model.config.norm_eps);
    if (!x.branch) copy_tensor(saved.sum, x.sum, stream);  // nothing to add, but the backward reads saved.sum
    const Tensor sum = x.branch ? saved.sum : Tensor{};
    if (model.config.family == Family::gpt2)
        layernorm_forward(saved.out, sum, saved.mean, saved.rstd, x.sum, x.branch, norm.weight, norm.bias, eps, stream);
    else rmsnorm_forward(saved.out, sum, saved.rstd, x.sum, x.branch, norm.weight, eps, stream);
}

void norm_backward(const Model& model, const Norm& norm, const NormSaved& saved, Tensor dinp, Tensor dout, Tensor dsum,
                   Tensor scratch, cudaStream_t stream) {
    if (model.config.family == Family::gpt2)
        layernorm_backward(dinp, norm.dweight, norm.dbias, dout, dsum, saved.sum, norm.weight, saved.mean, saved.rstd,
                           scratch, stream);
    else rmsnorm_backward(dinp, norm.dweight, dout, dsum, saved.sum, norm.weight, saved.rstd, scratch, stream);
}
