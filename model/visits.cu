// model/visits.cu: which units a step visits, in which order, as data: the forward's list is here, the backward's in
// recompute.cu.
#include "model/sublayer.h"

void set_next(std::vector<Visit>& visits) {
    for (size_t i = 0; i + 1 < visits.size(); ++i)
        if (!visits[i + 1].weights.empty()) visits[i].next = static_cast<int64_t>(visits[i + 1].weights[0]);
}

std::vector<Visit> forward_visits(const Model& model) {
    std::vector<Visit> visits;
    if (model.part.embedding) visits.push_back({.work = Work::embed, .weights = {0}});
    for (int64_t l = 0; l < model.n_blocks(); ++l)
        visits.push_back({.work = Work::forward_block, .block = l, .weights = {block_unit(l)}});
    if (model.part.head) visits.push_back({.work = Work::forward_head, .weights = {head_unit(model)}});
    if (model.part.head && model.ties_head()) visits.back().weights.push_back(0);
    set_next(visits);
    return visits;
}

namespace {

// For --trace: "backward of block 3" of the whole model.
std::string name_of(const Model& model, const Visit& visit) {
    const int64_t block = visit.block < 0 ? -1 : model.part.blocks[static_cast<size_t>(visit.block)];
    switch (visit.work) {
        case Work::embed: return "forward of embedding";
        case Work::forward_block: return concat("forward of block ", block);
        case Work::forward_head: return "forward of head";
        case Work::backward_head: return "backward of head";
        case Work::recompute_block: return concat("recompute of block ", block);
        case Work::backward_block: return concat("backward of block ", block);
        case Work::backward_embedding: return "backward of embedding";
    }
    return "";
}

}  // namespace

void begin_visit(const Model& model, const Visit& visit, cudaStream_t stream) {
    DataParallel* const ranks = model.data_parallel;
    if (!ranks) return;
    for (size_t unit : visit.weights)
        ranks->gather(model, unit, unit == visit.weights.back() ? visit.next : -1, stream);
    // ZeRO 3: the 8-bit weights of a block come with its 16-bit ones.
    if (visit.block >= 0 && model.precision.fp8 != Fp8Recipe::none && model.sharding.shards_weights())
        quantise_block(model, visit.block, stream);
    for (size_t unit : visit.begin) ranks->begin_grads(model, unit, stream);
    if (visit.traced) ranks->comm().trace_computing(name_of(model, visit), stream);
}

void end_visit(const Model& model, const Visit& visit, cudaStream_t stream) {
    if (!model.data_parallel) return;
    if (visit.traced) model.data_parallel->comm().trace_computing("", stream);
    for (size_t unit : visit.end) model.data_parallel->end_grads(model, unit, stream);
}
