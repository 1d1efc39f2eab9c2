// inference/paged_cache.cu: which rows of the cache belong to whom. Bookkeeping alone: no row is touched here.
//
// A sequence has a table of pages. Its token s is in row s % page_size of page table[s / page_size]. Each page has a
// count of the tables that it is in:
//
//     count     0  free, or kept: full, and it may be found again
//               1  its sequence may write after its last token
//             > 1  shared: nobody writes. A writer takes a page of its own and copies the rows (copy-on-write)
//
// The host has pages of the same kind. While a page of the device and one of the host hold the same rows, each is the
// other's twin: of sequences that share a page only the first to be swapped out copies it, and only the first to come
// back; not even that, if the device's page is still owned or kept. So a shared page is counted once on either side.
//
// An operation takes time for the tokens and pages that it adds, finds or gives back; only fork and swapping go through
// a whole table.
#include "inference/inference.h"
#include "inference/page_pool.h"

#include <algorithm>
#include <limits>
#include <utility>

struct PagedCache::Impl {
    struct Table {
        std::vector<int32_t> pages;
        int64_t length = 0;    // tokens
        bool swapped = false;  // the pages are the host's
    };
    int64_t page_size;
    PagePool device, host;
    std::unordered_map<SequenceId, Table> tables;
    SequenceId n_begun = 0;
    std::vector<PageCopy> copies;

    explicit Impl(const CacheSizes& sizes)
        : page_size(sizes.page_size), device(sizes.n_pages, sizes.page_size),
          host(sizes.n_host_pages, sizes.page_size) {}

    Table& table(SequenceId sequence) {
        const auto at = tables.find(sequence);
        check(at != tables.end(), "the cache has no sequence ", sequence, ": it has ended, or never began");
        return at->second;
    }
    Table& table_on_device(SequenceId sequence) {
        Table& t = table(sequence);
        check(!t.swapped, "sequence ", sequence, " of the cache is swapped out: swap it in first");
        return t;
    }
    int64_t n_filled(const Table& t) const { return ceil_div(t.length, page_size); }  // pages with tokens
    // The last page first.
    void give_back_from(Table& t, int64_t first) {
        while (std::ssize(t.pages) > first) {
            (t.swapped ? host : device).give_back(t.pages.back());
            t.pages.pop_back();
        }
    }
    // The i-th page of a sequence is full.
    void remember(const Table& t, int64_t i) {
        device.remember(t.pages[i], i == 0 ? PagePool::kNoText : device.text(t.pages[i - 1]));
    }
    void copy(PageCopy::Way way, int32_t from, int32_t to) {
        PagePool& source = way == PageCopy::Way::to_device ? host : device;
        PagePool& target = way == PageCopy::Way::to_host ? host : device;
        std::ranges::copy(source.tokens(from), target.tokens(to).begin());
        copies.push_back({way, from, to});
    }
};

int64_t CacheSizes::most_pages() const { return std::numeric_limits<int32_t>::max() / page_size; }

PagedCache::PagedCache(const CacheSizes& sizes) : sizes_(sizes) {
    check(sizes.page_size >= 1, "a page of the cache has at least 1 row, not ", sizes.page_size);
    check(sizes.n_pages >= 1 && sizes.n_pages <= sizes.most_pages(), "the cache has 1 to ", sizes.most_pages(),
          " pages of ", sizes.page_size, " rows, not ", sizes.n_pages, " (--cache-pages)");
    constexpr int64_t most = std::numeric_limits<int32_t>::max();
    check(sizes.n_host_pages >= 0 && sizes.n_host_pages <= most, "the cache has 0 to ", most,
          " pages on the host, not ", sizes.n_host_pages);
    impl_ = std::make_unique<Impl>(sizes);
}
PagedCache::~PagedCache() = default;

// ---------------------------------------------------------------------------------------------------------------------
// A sequence from its first token to its end

SequenceId PagedCache::begin() {
    impl_->tables.emplace(impl_->n_begun, Impl::Table());
    return impl_->n_begun++;
}

int64_t PagedCache::share_prefix(SequenceId sequence, std::span<const int32_t> tokens) {
    Impl& c = *impl_;
    Impl::Table& t = c.table_on_device(sequence);
    check(t.pages.empty(), "share_prefix: sequence ", sequence, " of the cache has ", t.length, " tokens already");
    int64_t text = PagePool::kNoText;
    while (t.length + c.page_size < std::ssize(tokens)) {
        const int32_t page = c.device.find(text, tokens.subspan(t.length, c.page_size));
        if (page < 0) break;
        c.device.share(page);
        t.pages.push_back(page);
        t.length += c.page_size;
        text = c.device.text(page);
    }
    return t.length;
}

int64_t PagedCache::pages_wanted(SequenceId sequence, int64_t n) const {
    const Impl::Table& t = impl_->table_on_device(sequence);
    if (n == 0) return 0;
    const int64_t more = ceil_div(t.length + n, impl_->page_size) - std::ssize(t.pages);
    const bool copies =
        t.length % impl_->page_size > 0 && impl_->device.count(t.pages[t.length / impl_->page_size]) > 1;
    return std::max<int64_t>(0, more) + copies;
}

int64_t PagedCache::pages_available() const { return impl_->device.n_available(); }

bool PagedCache::reserve(SequenceId sequence, int64_t n) {
    Impl& c = *impl_;
    if (pages_wanted(sequence, n) > c.device.n_available()) return false;
    Impl::Table& t = c.table_on_device(sequence);
    if (n > 0 && t.length % c.page_size > 0) {
        int32_t& page = t.pages[t.length / c.page_size];
        if (c.device.count(page) > 1) {
            const int32_t own = c.device.take();
            c.copy(PageCopy::Way::on_device, page, own);
            c.device.give_back(page);
            page = own;
        } else {
            c.device.will_change(page);
        }
    }
    const auto n_pages = static_cast<size_t>(ceil_div(t.length + n, c.page_size));
    while (t.pages.size() < n_pages) t.pages.push_back(c.device.take());
    return true;
}

void PagedCache::append(SequenceId sequence, std::span<const int32_t> tokens) {
    Impl& c = *impl_;
    Impl::Table& t = c.table_on_device(sequence);
    const int64_t end = t.length + std::ssize(tokens);
    bool own = end <= std::ssize(t.pages) * c.page_size;
    if (own && !tokens.empty()) {
        const int32_t page = t.pages[t.length / c.page_size];
        own = c.device.count(page) == 1 && c.device.text(page) == PagePool::kUnknownText;
    }
    check(own, "sequence ", sequence, " of the cache has ", t.length, " tokens and no rows of its own for ",
          tokens.size(), " more: reserve them before append, and after a fork or truncate again");
    for (const int32_t token : tokens) {
        const int64_t i = t.length / c.page_size;
        c.device.tokens(t.pages[i])[t.length % c.page_size] = token;
        if (++t.length % c.page_size == 0 && sizes_.share_prefixes) c.remember(t, i);
    }
}

SequenceId PagedCache::fork(SequenceId sequence) {
    Impl& c = *impl_;
    Impl::Table copy = c.table_on_device(sequence);
    copy.pages.resize(c.n_filled(copy));
    for (const int32_t page : copy.pages) c.device.share(page);
    c.tables.emplace(c.n_begun, std::move(copy));
    return c.n_begun++;
}

void PagedCache::truncate(SequenceId sequence, int64_t length) {
    Impl::Table& t = impl_->table(sequence);
    check(length >= 0 && length <= t.length, "truncate: sequence ", sequence, " of the cache has ", t.length,
          " tokens, not ", length);
    t.length = length;
    impl_->give_back_from(t, impl_->n_filled(t));
}

void PagedCache::end(SequenceId sequence) {
    impl_->give_back_from(impl_->table(sequence), 0);
    impl_->tables.erase(sequence);
}

// ---------------------------------------------------------------------------------------------------------------------
// To the host and back

bool PagedCache::swap_out(std::span<const SequenceId> sequences) {
    Impl& c = *impl_;
    std::vector<int32_t> without_twin;
    for (const SequenceId sequence : sequences) {
        const Impl::Table& t = c.table_on_device(sequence);
        for (int64_t i = 0; i < c.n_filled(t); ++i)
            if (c.device.twin(t.pages[i]) < 0) without_twin.push_back(t.pages[i]);
    }
    std::ranges::sort(without_twin);
    without_twin.erase(std::ranges::unique(without_twin).begin(), without_twin.end());
    if (std::ssize(without_twin) > c.host.n_free()) return false;
    for (const SequenceId sequence : sequences) {
        Impl::Table& t = c.table(sequence);
        Impl::Table out{{}, t.length, true};
        for (int64_t i = 0; i < c.n_filled(t); ++i) {
            const int32_t page = t.pages[i];
            if (c.device.twin(page) >= 0) {
                c.host.share(c.device.twin(page));
            } else {
                PagePool::make_twins(c.device, page, c.host, c.host.take());
                c.copy(PageCopy::Way::to_host, page, c.device.twin(page));
            }
            out.pages.push_back(c.device.twin(page));
        }
        c.give_back_from(t, 0);
        t = std::move(out);
    }
    return true;
}

// A page whose twin is owned by a sequence of the device costs nothing.
int64_t PagedCache::swap_in_pages_wanted(std::span<const SequenceId> sequences) const {
    const Impl& c = *impl_;
    std::vector<int32_t> wanted;
    for (const SequenceId sequence : sequences) {
        const Impl::Table& t = impl_->table(sequence);
        check(t.swapped, "sequence ", sequence, " of the cache is not swapped out");
        for (const int32_t page : t.pages) {
            const int32_t twin = c.host.twin(page);
            if (twin < 0 || c.device.count(twin) == 0) wanted.push_back(page);
        }
    }
    std::ranges::sort(wanted);
    return std::ranges::unique(wanted).begin() - wanted.begin();
}

bool PagedCache::swap_in(std::span<const SequenceId> sequences) {
    Impl& c = *impl_;
    if (swap_in_pages_wanted(sequences) > c.device.n_available()) return false;
    // First what is there already: the pages that are taken after that could be these, which are kept.
    std::vector<Impl::Table> back;
    for (const SequenceId sequence : sequences) {
        const Impl::Table& t = c.table(sequence);
        back.push_back({{}, t.length, false});
        for (const int32_t page : t.pages) {
            const int32_t twin = c.host.twin(page);
            if (twin >= 0) c.device.share(twin);
            back.back().pages.push_back(twin);
        }
    }
    for (size_t s = 0; s < sequences.size(); ++s) {
        Impl::Table& t = c.table(sequences[s]);
        for (size_t i = 0; i < t.pages.size(); ++i) {
            int32_t& page = back[s].pages[i];
            if (page >= 0) continue;
            page = c.host.twin(t.pages[i]);
            if (page >= 0) {  // a sequence before this one has brought it back
                c.device.share(page);
            } else {
                page = c.device.take();
                PagePool::make_twins(c.device, page, c.host, t.pages[i]);
                c.copy(PageCopy::Way::to_device, t.pages[i], page);
            }
        }
        c.give_back_from(t, 0);
        t = std::move(back[s]);
        for (int64_t i = 0; sizes_.share_prefixes && i < t.length / c.page_size; ++i) c.remember(t, i);
    }
    return true;
}

bool PagedCache::is_swapped(SequenceId sequence) const { return impl_->table(sequence).swapped; }

// ---------------------------------------------------------------------------------------------------------------------
// What there is

int64_t PagedCache::length(SequenceId sequence) const { return impl_->table(sequence).length; }

const std::vector<int32_t>& PagedCache::page_table(SequenceId sequence) const {
    return impl_->table_on_device(sequence).pages;
}

std::vector<PageCopy> PagedCache::take_copies() { return std::exchange(impl_->copies, {}); }

bool PagedCache::is_kept(int32_t page) const {
    check(page >= 0 && page < sizes_.n_pages, "the cache has pages 0 to ", sizes_.n_pages - 1, ", not ", page);
    return impl_->device.is_kept(page);
}

CacheUse PagedCache::use() const {
    const Impl& c = *impl_;
    CacheUse use;
    use.n_pages = sizes_.n_pages;
    use.free_pages = c.device.n_free();
    use.kept_pages = c.device.n_kept();
    use.owned_pages = use.n_pages - use.free_pages - use.kept_pages;
    use.shared_pages = c.device.n_shared();
    use.host_pages = sizes_.n_host_pages - c.host.n_free();
    // All rows of an owned page hold tokens, unless it is one of the last of every table that it is in.
    std::vector<std::pair<int32_t, int64_t>> last;  // page, rows that hold tokens of one table
    for (const auto& [sequence, t] : c.tables) {
        if (t.swapped) continue;
        ++use.n_sequences;
        use.sequence_rows += t.length;
        for (int64_t i = t.length / c.page_size; i < std::ssize(t.pages); ++i)
            last.push_back({t.pages[i], std::max<int64_t>(0, t.length - i * c.page_size)});
    }
    std::ranges::sort(last);
    use.used_rows = use.owned_pages * c.page_size;
    for (size_t i = 0, n = 0; i < last.size(); ++i) {
        const bool ends = i + 1 == last.size() || last[i + 1].first != last[i].first;
        ++n;  // tables of which this page is one of the last
        if (!ends) continue;
        if (c.device.count(last[i].first) == static_cast<int32_t>(n))
            use.used_rows -= c.page_size - last[i].second;  // the most of these tables
        n = 0;
    }
    return use;
}

void PagedCache::check_consistency() const {
    const Impl& c = *impl_;
    std::vector<int32_t> device_counts(c.device.n()), host_counts(c.host.n());
    for (const auto& [sequence, t] : c.tables) {
        check(std::ssize(t.pages) >= c.n_filled(t), "sequence ", sequence, " of the cache has ", t.length,
              " tokens and ", t.pages.size(), " pages");
        for (const int32_t page : t.pages) ++(t.swapped ? host_counts : device_counts)[page];
    }
    c.device.check_consistency(device_counts);
    c.host.check_consistency(host_counts);
}
