// model/recompute.cu: activations that are not kept, but computed again in the backward: by the same kernels from the
// same numbers, so with the same bits.                                       (Chen et al. 2016, arXiv:1604.06174)
//
//   none        all activations of L blocks are kept.
//   N           the input of every N-th block is kept, and all activations of N blocks at a time: in the backward, the
//               forward of N blocks is run again from their kept input, then their backward.
//   full        N = 1.
//   selective   all is kept but what is cheap to compute again: the outputs of norms (Qwen3's queries and keys among
//               them) and of activation functions, and MLA's keys. The blocks share one tensor for each, which is
//               filled again before a block's backward.
//               (Korthikanti et al. 2022, arXiv:2205.05198, use this word for computing the core of attention again.
//               Flash attention does that in any case.)
//
// THE LAW. A block's input takes s bytes, all its activations b. With N, L/N inputs and N blocks are there at once:
//
//     memory(N) = fixed + (L/N) s + N b            least at N = sqrt(L s/b)
//
// and not at sqrt(L), because b is many times s: 16 times in GPT-2, where the least memory of 36 blocks is at N = 1.5.
// dev/recompute measures it (doc/recompute.png). The price: the forward of all blocks but those of the last kept
// input a second time (in a pipeline of all blocks), at most a third more FLOPs.
#include "io/io.h"
#include "model/sublayer.h"

Recompute parse_recompute(const std::string& text) {
    if (text == "none") return {};
    if (text == "full") return {.every = 1};
    if (text == "selective") return {.selective = true};
    const bool is_number = !text.empty() && text.find_first_not_of("+0123456789.eE") == std::string::npos;
    const int64_t every = is_number ? parse_whole_number("--recompute", text, INT64_MAX) : 0;
    check(every > 0, "--recompute ", text, ": use none, selective, full, or a number of blocks");
    return {.every = every};
}

std::vector<Visit> chunk_forward_visits(int64_t first, int64_t last) {
    std::vector<Visit> visits;
    for (int64_t l = first; l < last; ++l)
        visits.push_back({.work = Work::forward_block, .block = l, .weights = {block_unit(l)}, .traced = false});
    set_next(visits);
    return visits;
}

// last_is_there: the blocks after the last kept input still have their activations from the forward; those before were
// overwritten.
static void add_blocks(std::vector<Visit>& visits, int64_t first, int64_t last, int64_t every, bool last_is_there) {
    for (int64_t l = last - 1; l >= first; --l) {
        const int64_t kept = every > 0 ? first + (l - first) / every * every : l;
        const bool ends_segment = every > 0 && (l + 1 == last ? !last_is_there : (l + 1 - first) % every == 0);
        for (int64_t again = kept; again <= l && ends_segment; ++again)
            visits.push_back({.work = Work::recompute_block,
                              .block = again,
                              .weights = {block_unit(again)},
                              .first = again == kept,
                              .last = again == l});
        visits.push_back({.work = Work::backward_block, .block = l, .weights = {block_unit(l)}});
    }
}

std::vector<Visit> chunk_backward_visits(int64_t first, int64_t last, const Recompute& recompute) {
    std::vector<Visit> visits;
    add_blocks(visits, first, last, recompute.every, false);
    for (Visit& visit : visits) visit.traced = false;
    set_next(visits);
    return visits;
}

std::vector<Visit> backward_visits(const Model& model, const Recompute& recompute) {
    const size_t head = head_unit(model);
    const bool ties = model.ties_head();
    std::vector<Visit> visits;
    if (model.part.head && ties)
        visits.push_back({.work = Work::backward_head, .weights = {head, 0}, .begin = {head, 0}, .end = {head}});
    else if (model.part.head)
        visits.push_back({.work = Work::backward_head, .weights = {head}, .begin = {head}, .end = {head}});
    add_blocks(visits, 0, model.n_blocks(), recompute.every, true);
    for (Visit& visit : visits)
        if (visit.work == Work::backward_block) visit.begin = visit.end = visit.weights;
    Visit embedding{.work = Work::backward_embedding, .end = {0}};
    if (!ties) embedding.begin = {0};
    if (model.part.embedding) visits.push_back(embedding);
    set_next(visits);
    return visits;
}
