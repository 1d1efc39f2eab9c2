// inference/page_pool.h: the pages of the device, or of the host. For paged_cache.cu alone.
#pragma once

#include "core/core.h"

#include <memory>
#include <span>
#include <unordered_map>

// A full page and what comes before it, as the key of a look-up.
struct PageText {
    int64_t before;  // the number of the text that ends where this page begins: PagePool::text()
    std::span<const int32_t> tokens;
    bool operator==(const PageText& other) const;
};
struct PageTextHash {
    size_t operator()(const PageText& text) const;
};

// A page is in `count` tables. With a count of 0 it is free, or kept: full, and it may be found again. What the host
// knows of a page takes memory from the first time that the page is taken: a pool that is only planned costs nothing.
class PagePool {
  public:
    PagePool(int64_t n_pages, int64_t page_size);

    int64_t n() const { return n_; }
    int64_t n_free() const { return std::ssize(free_) + n_untaken(); }
    int64_t n_kept() const { return n_kept_; }
    int64_t n_shared() const { return n_shared_; }  // in several tables
    int64_t n_available() const { return n_free() + n_kept_; }
    int32_t count(int32_t page) const { return pages_[page].count; }

    // A page for one table: a free one, otherwise the one that was kept for the longest time. There must be one.
    int32_t take();
    void share(int32_t page);      // into one table more
    void give_back(int32_t page);  // out of one table; of none: it is kept if it can be found, otherwise free
    // The page of a single table is going to have other rows: what was known of those it had is forgotten.
    void will_change(int32_t page);

    // A token for each row of a page; of a row that holds none it is any number.
    std::span<int32_t> tokens(int32_t page) { return {pages_[page].tokens.get(), static_cast<size_t>(page_size_)}; }

    // Texts. Each text that ends with a full page has a number, which no other text is ever given.
    static constexpr int64_t kNoText = 0;        // the number of the text before the first page
    static constexpr int64_t kUnknownText = -1;  // of a page that is not full, or was never remembered
    int64_t text(int32_t page) const { return pages_[page].text; }
    // The page with these tokens after a text, or -1.
    int32_t find(int64_t before, std::span<const int32_t> tokens) const;
    // This page is full and follows a text: from now on it can be found, unless another page of the same text is.
    void remember(int32_t page, int64_t before);
    bool is_kept(int32_t page) const {
        return page < std::ssize(pages_) && pages_[page].count == 0 && pages_[page].found;
    }

    // Two pages of two pools are twins while they hold the same rows.
    int32_t twin(int32_t page) const { return pages_[page].twin; }  // -1: none
    static void make_twins(PagePool& a, int32_t page_of_a, PagePool& b, int32_t page_of_b);

    // Error if lists and counts contradict each other, or these: in how many tables each page is.
    void check_consistency(const std::vector<int32_t>& counts) const;

  private:
    struct Page {
        int32_t count = 0;
        int64_t text = kUnknownText;     // that ends with this page
        bool found = false;              // look-ups of that text lead here, and not to another page with it
        int64_t before = kNoText;        // found: the text before it
        int32_t older = -1, newer = -1;  // kept: its neighbours in the list of those
        PagePool* twin_pool = nullptr;
        int32_t twin = -1;
        std::unique_ptr<int32_t[]> tokens;  // page_size of them
    };
    int64_t n_untaken() const { return n_ - std::ssize(pages_); }
    std::span<const int32_t> tokens(int32_t page) const {
        return {pages_[page].tokens.get(), static_cast<size_t>(page_size_)};
    }
    void keep(int32_t page);
    void keep_no_longer(int32_t page);

    int64_t n_, page_size_;
    std::vector<Page> pages_;                                    // that were taken once: the first of all n_
    std::vector<int32_t> free_;                                  // of those
    std::unordered_map<PageText, int32_t, PageTextHash> found_;  // the keys' tokens are the pages'
    int32_t oldest_ = -1, newest_ = -1;                          // ends of the list of kept pages
    int64_t n_kept_ = 0, n_shared_ = 0, n_texts_ = 0;
};
