// model/norm.cu: the norms of a model: LayerNorm in GPT-2, RMSNorm elsewhere; and the additions to the residual stream.
//
// x = x + branch is done by the norm that comes next: it reads the sum anyway. It rounds the sum to the model's dtype
// first, and normalises what it has stored, so the result is that of an addition by itself.
#include "model/sublayer.h"

namespace {

// The columns of a row are divided among ranks (2D, 2.5D and 3D tensor parallelism).
void divided_forward(const Model& model, const Norm& norm, const NormSaved& saved, Tensor inp, Tensor branch,
                     const Workspace& ws, cudaStream_t stream) {
    ColumnGeometry& geometry = *model.tensor_parallel->geometry();
    const int64_t N = inp.rows();
    const Tensor mine = ws.norm_parts.slice(0, N), all = ws.all_norm_parts.slice(0, geometry.columns() * N);
    divided_norm_parts(mine, branch ? saved.sum : Tensor{}, inp, branch, model.config.family == Family::gpt2, stream);
    geometry.gather_statistics(all, mine, stream);
    divided_norm_finish(saved.out, saved.mean, saved.rstd, branch ? saved.sum : inp,
                        all.view({geometry.columns(), N, 2}), norm.weight, norm.bias,
                        static_cast<float>(model.config.norm_eps), stream);
}
void divided_backward(const Model& model, const Norm& norm, const NormSaved& saved, Tensor dinp, Tensor dout,
                      Tensor dsum, const Workspace& ws, cudaStream_t stream) {
    const Tensor parts = ws.norm_parts.slice(0, dout.rows());
    divided_norm_backward_parts(parts, norm.dweight, norm.dbias, dout, saved.sum, norm.weight, saved.mean, saved.rstd,
                                ws.accumulate, ws.scratch, stream);
    model.tensor_parallel->geometry()->sum_statistics(parts, stream);
    divided_norm_backward_finish(dinp, dout, dsum, saved.sum, norm.weight, saved.mean, saved.rstd, parts,
                                 model.config.C, stream);
}

}  // namespace

void norm_forward(const Model& model, const Norm& norm, const NormSaved& saved, const Residual& x,
                  const Workspace& workspace, cudaStream_t stream) {
    const float eps = static_cast<float>(model.config.norm_eps);
    if (!x.branch) copy_tensor(saved.sum, x.sum, stream);  // nothing to add, but the backward reads saved.sum
    const Tensor sum = x.branch ? saved.sum : Tensor{};
    if (model.layout.divides_columns()) return divided_forward(model, norm, saved, x.sum, x.branch, workspace, stream);
    if (model.config.family == Family::gpt2)
        layernorm_forward(saved.out, sum, saved.mean, saved.rstd, x.sum, x.branch, norm.weight, norm.bias, eps, stream);
    else rmsnorm_forward(saved.out, sum, saved.rstd, x.sum, x.branch, norm.weight, eps, stream);
}

BlockContext norm_forward(const BlockContext& b, const SubLayer& sub_layer, const SubLayerParameters& parameters,
                          const Norm& norm, const NormSaved& saved, const Residual& x) {
    BlockContext context = b;
    const bool copies = !x.branch && saved.sum.data != x.sum.data;
    if (sub_layer.first_linear_alone_reads_inp && !copies && is_few_rows(b, parameters.linears[0]))
        context.norm = {saved.out,   saved.sum, saved.mean,
                        saved.rstd,  x.sum,     x.branch,
                        norm.weight, norm.bias, static_cast<float>(b.model.config.norm_eps)};
    else norm_forward(b.model, norm, saved, x, b.workspace, b.stream);
    return context;
}

void norm_backward(const Model& model, const Norm& norm, const NormSaved& saved, Tensor dinp, Tensor dout, Tensor dsum,
                   const Workspace& workspace, cudaStream_t stream) {
    const Tensor scratch = workspace.scratch;
    if (model.layout.divides_columns())
        return divided_backward(model, norm, saved, dinp, dout, dsum, workspace, stream);
    if (model.config.family == Family::gpt2)
        layernorm_backward(dinp, norm.dweight, norm.dbias, dout, dsum, saved.sum, norm.weight, saved.mean, saved.rstd,
                           workspace.accumulate, scratch, stream);
    else
        rmsnorm_backward(dinp, norm.dweight, dout, dsum, saved.sum, norm.weight, saved.rstd, workspace.accumulate,
                         scratch, stream);
}
