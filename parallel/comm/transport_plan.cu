// transport_plan.cu: --plan --ranks 64 on one machine: a communicator that knows how many ranks there would be, so that
// all that counts memory sees the same sizes as in the run. Nothing can be sent.
#include "parallel/comm/transport.h"

namespace {

class PlanTransport final : public Transport {
  public:
    using Transport::Transport;
    void send(const void*, size_t, int, cudaStream_t) override { fail("a plan sends nothing"); }
    void recv(void*, size_t, int, cudaStream_t) override { fail("a plan receives nothing"); }
    void begin(cudaStream_t) override { fail("a plan can count the memory of a collective, not run it"); }
    void end(cudaStream_t, size_t) override {}
    std::shared_ptr<Transport> split(const std::vector<int>& members) override {
        return std::make_shared<PlanTransport>(state_, to_world(members), next_id(members));
    }
    // Each rank of the plan has a device of its own, so NCCL would carry the bytes between GPUs.
    bool has_native() override {
        const std::string& comm = state_->options.comm;
        return nccl_is_built_in() && (comm == "nccl" || (comm == "auto" && !device().is_cpu));
    }
};

}  // namespace

std::shared_ptr<Transport> make_plan_transport(std::shared_ptr<RankState> state) {
    std::vector<int> members;
    for (int rank = 0; rank < state->size; ++rank) members.push_back(rank);
    return std::make_shared<PlanTransport>(std::move(state), std::move(members), 0);
}
