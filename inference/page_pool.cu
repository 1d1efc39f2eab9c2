// inference/page_pool.cu: pages that are free, in tables, or kept because they may be found again.
//
// A full page is found by its tokens and by what comes before them. Each text that ends with a full page gets a number
// when it is first met, and its page is looked up by
//
//     (number of the text before the page, the page's tokens)  ->  page
//
// A hash alone would be wrong as soon as two texts had the same: one request would read the cache of another. Here the
// tokens are compared, and the text before them by its number, which is never given twice. So a page that is found
// holds the right rows for certain, and finding n pages costs n look-ups.
//
// Kept pages are in a list by the time at which their last table gave them back. A sequence gives its pages back from
// the last to the first, so that a text loses its end first, and what is left of it can be found.
#include "inference/page_pool.h"

#include <algorithm>

bool PageText::operator==(const PageText& other) const {
    return before == other.before && std::ranges::equal(tokens, other.tokens);
}

size_t PageTextHash::operator()(const PageText& text) const {
    uint64_t hash = 0;
    const auto mix = [&](uint64_t number) {
        hash = (hash ^ number) * 0x9E3779B97F4A7C15u;  // 2^64 / the golden ratio
        hash ^= hash >> 32;                            // the upper half depends on all numbers so far
    };
    mix(static_cast<uint64_t>(text.before));
    for (const int32_t token : text.tokens) mix(static_cast<uint32_t>(token));
    return hash;
}

PagePool::PagePool(int64_t n_pages, int64_t page_size) : n_(n_pages), page_size_(page_size) {}

// ---------------------------------------------------------------------------------------------------------------------
// In tables or not

int32_t PagePool::take() {
    if (free_.empty() && n_untaken() > 0) {
        free_.push_back(static_cast<int32_t>(pages_.size()));
        pages_.emplace_back().tokens = std::make_unique<int32_t[]>(static_cast<size_t>(page_size_));
    } else if (free_.empty()) {
        const int32_t page = oldest_;
        keep_no_longer(page);
        will_change(page);
        free_.push_back(page);
    }
    const int32_t page = free_.back();
    free_.pop_back();
    pages_[page].count = 1;
    return page;
}

void PagePool::share(int32_t page) {
    if (pages_[page].count == 0) keep_no_longer(page);
    n_shared_ += ++pages_[page].count == 2;
}

void PagePool::give_back(int32_t page) {
    n_shared_ -= --pages_[page].count == 1;
    if (pages_[page].count > 0) return;
    if (pages_[page].found) return keep(page);
    will_change(page);
    free_.push_back(page);
}

void PagePool::will_change(int32_t page) {
    Page& p = pages_[page];
    if (p.found) found_.erase({p.before, tokens(page)});
    p.found = false;
    p.text = kUnknownText;
    if (p.twin >= 0) p.twin_pool->pages_[p.twin].twin = -1;
    p.twin = -1;
}

void PagePool::keep(int32_t page) {
    Page& p = pages_[page];
    p.older = newest_;
    p.newer = -1;
    (newest_ < 0 ? oldest_ : pages_[newest_].newer) = page;
    newest_ = page;
    ++n_kept_;
}

void PagePool::keep_no_longer(int32_t page) {
    const Page& p = pages_[page];
    (p.older < 0 ? oldest_ : pages_[p.older].newer) = p.newer;
    (p.newer < 0 ? newest_ : pages_[p.newer].older) = p.older;
    --n_kept_;
}

// ---------------------------------------------------------------------------------------------------------------------
// What is known of their rows

int32_t PagePool::find(int64_t before, std::span<const int32_t> tokens) const {
    const auto at = found_.find({before, tokens});
    return at == found_.end() ? -1 : at->second;
}

void PagePool::remember(int32_t page, int64_t before) {
    Page& p = pages_[page];
    if (p.text != kUnknownText) return;
    const auto [at, is_new] = found_.try_emplace({before, tokens(page)}, page);
    if (is_new) {
        p.found = true;
        p.before = before;
        p.text = ++n_texts_;
    } else {
        p.text = pages_[at->second].text;
    }
}

void PagePool::make_twins(PagePool& a, int32_t page_of_a, PagePool& b, int32_t page_of_b) {
    a.pages_[page_of_a].twin_pool = &b;
    a.pages_[page_of_a].twin = page_of_b;
    b.pages_[page_of_b].twin_pool = &a;
    b.pages_[page_of_b].twin = page_of_a;
}

void PagePool::check_consistency(const std::vector<int32_t>& counts) const {
    int64_t n_shared = 0, n_free = 0, n_found = 0, n_kept = 0;
    check(std::all_of(counts.begin() + std::ssize(pages_), counts.end(), [](int32_t count) { return count == 0; }),
          "a page is in a table, and was never taken");
    for (int32_t page = 0; page < std::ssize(pages_); ++page) {
        const Page& p = pages_[page];
        check(p.count == counts[page], "page ", page, " is in ", counts[page], " tables, and its count is ", p.count);
        n_shared += p.count > 1;
        n_free += p.count == 0 && !p.found;
        n_found += p.found;
        check(p.twin < 0 || p.twin_pool->pages_[p.twin].twin == page, "page ", page, " is not the twin of its twin ",
              p.twin);
        check(p.count > 0 || p.found || (p.twin < 0 && p.text == kUnknownText), "page ", page,
              " is free, and something is known of its rows");
        check(!p.found || find(p.before, tokens(page)) == page, "page ", page, " is not found by its text");
    }
    check(n_shared == n_shared_, n_shared, " pages are shared, not ", n_shared_);
    check(n_found == std::ssize(found_), n_found, " pages can be found, by ", found_.size(), " texts");
    std::vector<bool> is_listed(pages_.size());
    for (const int32_t page : free_) {
        check(pages_[page].count == 0 && !pages_[page].found && !is_listed[page], "page ", page,
              " is not free, or twice");
        is_listed[page] = true;
    }
    check(n_free == std::ssize(free_), n_free, " pages are free, and the list has ", free_.size());
    for (int32_t page = oldest_, older = -1; page >= 0; older = page, page = pages_[page].newer) {
        check(is_kept(page) && pages_[page].older == older && !is_listed[page], "page ", page,
              " is not kept, or twice");
        is_listed[page] = true;
        ++n_kept;
    }
    check(n_kept == n_kept_ && n_kept + n_free + n_untaken() == std::ranges::count(counts, 0), n_kept,
          " pages are listed as kept, not ", n_kept_);
}
