// offload.cu: optimizer states in the host's memory, updated there while the backward goes on.
//                                              (ZeRO-Offload: Ren et al. 2021, arXiv:2101.06840;
//                                               ZeRO-Infinity: arXiv:2104.07857)
//
//     computing   backward of 3 | backward of 2 | backward of 1 | backward of 0 |                       next forward
//                         final v         final v         final v         final v                        ^ all are done
//     to_host               [gradients 3]   [gradients 2]   [gradients 1]   [gradients 0]
//     host                               [AdamW 3]       [AdamW 2]       [AdamW 1]       [AdamW 0]
//     to_device                                   [weights 3]     [weights 2]     [weights 1]    [weights 0]
//
// Three streams, because three machines can work at once: each direction of the bus, and the host's cores. An update is
// a host function in a stream: CUDA calls it when the gradients are there, and the copy back waits until it returns.
//
// That picture needs an update that knows its unit's gradients alone. Clipping divides by the norm of ALL gradients,
// and float16 must see that none of them is inf. Then the updates come after the backward, and after the norm:
//
//     computing   ... | backward of 0 | norm |
//     to_host        [gradients 1]  [gradients 0] [norm]
//     host                                              [AdamW 0] [AdamW 1] [AdamW 2] ...
//     to_device                                                   [weights 0] [weights 1] ...
//
// The same bits either way, and those of an update without offloading: each element's update is the same function of
// the same numbers (optim/adam.h). Neither g++ nor, for Adam's kernels (-fmad=false in the Makefile), nvcc joins a
// multiplication and an addition of that function, which would then round once instead of twice.
//
// Who may touch what. The pinned gradients of a unit are written by to_host and read by host; masters, m, v and the
// pinned copies are host's alone, and to_device reads them after it. Device weights are written by to_device after the
// unit's backward, which is the last to read them in a step. Everything of a step is over before the next backward:
// update() makes the computing stream wait for it.
//
// unified: the ordinary update on the device, on memory whose pages move when they are touched. A page fault costs some
// 20 us, for which the kernel waits, and moves 2 MiB at most; so the pages of a unit are sent for while the unit before
// is updated, and sent home when it is done. Two units' states are on the device at a time, at most.
#include "core/names.h"
#include "parallel/data/data.h"

namespace {

void copy_across(const Tensor& out, const Tensor& inp, cudaMemcpyKind kind, cudaStream_t stream) {
    if (out.n() > 0) cudaCheck(cudaMemcpyAsync(out.data, inp.data, out.bytes(), kind, stream));
}

// Names a place for CUDA 13, and for CUDA 12, where it is a number.
auto place_of_pages(bool on_device) {
#if CUDART_VERSION >= 13000
    cudaMemLocation place{};
    place.type = on_device ? cudaMemLocationTypeDevice : cudaMemLocationTypeHost;
    place.id = on_device ? device().index : 0;
    return place;
#else
    return on_device ? device().index : cudaCpuDeviceId;
#endif
}
void prefetch(const Tensor& tensor, bool to_device, cudaStream_t stream) {
#if CUDART_VERSION >= 13000
    cudaCheck(cudaMemPrefetchAsync(tensor.data, tensor.bytes(), place_of_pages(to_device), 0, stream));
#else
    cudaCheck(cudaMemPrefetchAsync(tensor.data, tensor.bytes(), place_of_pages(to_device), stream));
#endif
}

}  // namespace

Offload offload_from_name(const std::string& name) {
    return choose<Offload>("--offload", name,
                           {{"none", Offload::none},
                            {"optimizer", Offload::optimizer},
                            {"params", Offload::params},
                            {"unified", Offload::unified}});
}

OffloadedUpdate::OffloadedUpdate(const FlatParameters& p, const std::unique_ptr<Optimizer>& optimizer, bool norm_first)
    : p_(p), optimizer_(optimizer), norm_first_(norm_first), to_host_(make_stream()), host_(make_stream()),
      to_device_(make_stream()), reached_(make_event()) {}

OffloadedUpdate::~OffloadedUpdate() {
    for (cudaStream_t stream : {to_host_, host_, to_device_})
        cudaStreamSynchronize(stream);  // host functions read this object
    for (cudaStream_t stream : {to_host_, host_, to_device_}) cudaStreamDestroy(stream);
    for (const auto& events : {arrived_, done_, {reached_}})
        for (cudaEvent_t event : events) cudaEventDestroy(event);
}

void OffloadedUpdate::take_memory(Arena& pinned) {
    const size_t n_units = p_.units.size();
    while (arrived_.size() < n_units) arrived_.push_back(make_event()), done_.push_back(make_event());
    if (p_.sharding.offload == Offload::unified) {
        int moves = 0;
        cudaCheck(cudaDeviceGetAttribute(&moves, cudaDevAttrConcurrentManagedAccess, device().index));
        check(moves != 0, "--offload unified: ", device().name,
              " cannot move pages while kernels run: use --offload optimizer");
        pages_ = all_pages();
        for (const auto& pages : pages_)
            for (const Tensor& tensor : pages)
                if (tensor && tensor.n() > 0)  // home is the host
                    cudaCheck(cudaMemAdvise(tensor.data, tensor.bytes(), cudaMemAdviseSetPreferredLocation,
                                            place_of_pages(false)));
        return;
    }
    units_ = p_.updated_units();
    const int64_t n = units_.back().grads + units_.back().n;
    host_grads_ = pinned.take("gradients", p_.grads.dtype, {n});
    host_copies_ = {};
    if (p_.sharding.offload == Offload::optimizer && p_.weights.dtype != DType::f32)
        host_copies_ = pinned.take("new weights", p_.weights.dtype, {n});
    host_norm_ = pinned.take("gradients", DType::f32, {2});
    if (host_copies_)  // the gaps between parameters stay zero, on the device as well
        cudaCheck(cudaMemsetAsync(host_copies_.data, 0, host_copies_.bytes(), host_));
}

void OffloadedUpdate::begin_step(double lr, int64_t t, float unscale, uint64_t seed) {
    lr_ = lr, t_ = t, seed_ = seed;
    if (p_.sharding.host_updates() && !norm_first_)
        host_norm_.ptr<float>()[1] = unscale;  // what clip_scale says without clipping
}

void OffloadedUpdate::after(cudaStream_t later, cudaStream_t earlier) {
    cudaCheck(cudaEventRecord(reached_, earlier));
    cudaCheck(cudaStreamWaitEvent(later, reached_));
}

void OffloadedUpdate::grads_are_final(size_t u, cudaStream_t stream) {
    if (!p_.sharding.host_updates()) return;
    after(to_host_, stream);
    copy_across(host_grads_.slice(units_[u].grads, units_[u].n), p_.updated_grads(u), cudaMemcpyDeviceToHost, to_host_);
    if (norm_first_) return;
    after(host_, to_host_);
    update_on_host(u);
}

void OffloadedUpdate::update(size_t u, Tensor norm_scale, cudaStream_t stream) {
    if (!p_.sharding.host_updates()) return update_on_device(u, norm_scale, stream);
    if (norm_first_ && u == 0) {
        after(to_host_, stream);
        copy_across(host_norm_, norm_scale, cudaMemcpyDeviceToHost, to_host_);
        after(host_, to_host_);  // the norm has arrived, and before it all gradients
    }
    if (norm_first_) update_on_host(u);
    cudaCheck(cudaStreamWaitEvent(stream, done_[u]));
}

// optimizer: the masters are on the host, and the weights that they are rounded to on the device. params:
// both are on the host.
void OffloadedUpdate::update_on_host(size_t u) {
    const UpdatedUnit& unit = units_[u];
    Weights weights = p_.updated_weights(seed_);
    Tensor on_device, on_host;
    if (p_.sharding.offload == Offload::optimizer) {
        weights.copy = host_copies_;
        on_device = p_.updated_copy(u);
        on_host =
            host_copies_.exists() ? host_copies_.slice(unit.copy, unit.n) : weights.values.slice(unit.values, unit.n);
    }
    optimizer_->step_units(u, 1, weights, host_grads_, host_norm_, lr_, t_, host_);
    after(to_device_, host_);
    copy_across(on_device, on_host, cudaMemcpyHostToDevice, to_device_);
    cudaCheck(cudaEventRecord(done_[u], to_device_));
}

// ---------------------------------------------------------------------------------------------------------------------
// Unified memory

std::vector<std::vector<Tensor>> OffloadedUpdate::all_pages() const {
    std::vector<std::vector<Tensor>> pages(p_.units.size());
    for (const OptimizerState& state : optimizer_->states()) pages[state.unit].push_back(state.tensor);
    const std::vector<UpdatedUnit> units = p_.updated_units();
    for (size_t u = 0; u < units.size(); ++u)
        if (p_.masters.exists()) pages[u].push_back(p_.masters.slice(units[u].values, units[u].n));
    return pages;
}

void OffloadedUpdate::move_pages(size_t u, bool to_device, cudaStream_t stream) {
    for (const Tensor& tensor : pages_[u])
        if (tensor.n() > 0) prefetch(tensor, to_device, stream);
}

void OffloadedUpdate::update_on_device(size_t u, Tensor norm_scale, cudaStream_t stream) {
    const auto send_for = [&](size_t unit) {
        // Not more than two units at a time; the first ones when all have gone home after the step before.
        cudaCheck(cudaStreamWaitEvent(to_device_, unit >= 2 ? done_[unit - 2] : done_.back()));
        move_pages(unit, true, to_device_);
        cudaCheck(cudaEventRecord(arrived_[unit], to_device_));
    };
    if (u == 0) send_for(0);
    if (u + 1 < p_.units.size()) send_for(u + 1);
    cudaCheck(cudaStreamWaitEvent(stream, arrived_[u]));
    optimizer_->step_units(u, 1, p_.updated_weights(seed_), p_.grads, norm_scale, lr_, t_, stream);
    after(to_host_, stream);
    move_pages(u, false, to_host_);
    cudaCheck(cudaEventRecord(done_[u], to_host_));
}
