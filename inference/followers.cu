// inference/followers.cu: a model that is divided among ranks (parallel/tensor), with the requests on one of them.
//
// Each rank has some of the heads, and in its cache the keys and values of those: the same pages as all others,
// narrower ones. So rank 0 alone has to know which sequence has which page. It schedules, and before each step it tells
// the others what it is about to compute; they do the same with their part of the weights, and wait for the next.
//
//     rank 0      schedule   tell: copies of pages, tables   compute   gather the logits   draw tokens   ...
//     the others             hear                            compute   give theirs         hear ...
//
// A step as words of 32 bits:
//     number of copies, {way, from, to} of each, the five sizes of the step, its six tables
#include "inference/inference.h"

#include <cstring>

void PagedModel::tell_step(std::span<const PageCopy> copies, const StepSizes& s) {
    std::vector<int32_t> words = {static_cast<int32_t>(copies.size())};
    for (const PageCopy& copy : copies) words.insert(words.end(), {static_cast<int32_t>(copy.way), copy.from, copy.to});
    for (const int64_t size : {s.tokens, s.sequences, s.chunks, s.pages, s.logits})
        words.push_back(static_cast<int32_t>(size));
    for (const Tensor& table : filled_tables(s))
        words.insert(words.end(), table.ptr<int32_t>(), table.ptr<int32_t>() + table.n());
    broadcast_text(*ranks_, {reinterpret_cast<const char*>(words.data()), words.size() * sizeof(int32_t)});
}

void PagedModel::follow() {
    while (true) {
        const std::string text = broadcast_text(*ranks_, "");
        if (text.empty()) return;
        std::vector<int32_t> words(text.size() / sizeof(int32_t));
        std::memcpy(words.data(), text.data(), text.size());
        size_t at = 0;
        std::vector<PageCopy> copies(static_cast<size_t>(words[at++]));
        for (PageCopy& copy : copies) {
            copy = {static_cast<PageCopy::Way>(words[at]), words[at + 1], words[at + 2]};
            at += 3;
        }
        StepSizes s;
        for (int64_t* size : {&s.tokens, &s.sequences, &s.chunks, &s.pages, &s.logits}) *size = words[at++];
        for (const Tensor& table : filled_tables(s)) {
            std::copy_n(words.begin() + static_cast<std::ptrdiff_t>(at), table.n(), table.ptr<int32_t>());
            at += static_cast<size_t>(table.n());
        }
        copy_pages(copies);
        compute(s, false);
        cudaCheck(cudaStreamSynchronize(device().stream));  // the next step fills the same tables
    }
}

void PagedModel::end_followers() { broadcast_text(*ranks_, ""); }
