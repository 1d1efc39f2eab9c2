// The paged cache against a model that copies everything: each sequence has its own list of rows.
//
//   run:   build/cpu/run_tests -# "[#test_paged_cache]"
#include "inference/page_pool.h"
#include "simulated_engine.h"
#include "temp_folder.h"

#include <unistd.h>

#include <fstream>

namespace {

using Tokens = std::vector<int32_t>;
using Way = PageCopy::Way;

// What the row of a token depends on: the token and all those before it.
uint64_t row_of(uint64_t row_before, int32_t token) {
    uint64_t row = (row_before ^ static_cast<uint64_t>(token + 1)) * 0xD6E8FEB86659FD93u;
    return row ^ row >> 29;
}

// The cache, the memory of which it disposes, and what each sequence should find there.
struct Machine {
    struct Expected {
        SequenceId id;
        Tokens tokens;
        std::vector<uint64_t> rows;
        bool swapped = false;
    };
    CacheSizes sizes;
    PagedCache cache;
    std::vector<uint64_t> device, host;               // (pages, page_size)
    std::vector<std::pair<size_t, uint64_t>> writes;  // of the step that comes: row of the device, what it gets
    std::vector<Expected> sequences;
    Random random;
    // How often what happened, to know that the test tests it.
    std::map<std::string, int64_t> n;

    Machine(const CacheSizes& sizes, uint64_t seed)
        : sizes(sizes), cache(sizes), device(sizes.n_pages * sizes.page_size),
          host(sizes.n_host_pages * sizes.page_size), random{seed} {}

    int32_t random_token() { return static_cast<int32_t>(random.below(2)); }
    static void append(Expected& e, std::span<const int32_t> tokens) {
        for (const int32_t token : tokens) {
            e.rows.push_back(row_of(e.rows.empty() ? 0 : e.rows.back(), token));
            e.tokens.push_back(token);
        }
    }
    std::vector<size_t> some(bool swapped, size_t most) {
        std::vector<size_t> chosen;
        for (size_t i = 0; i < sequences.size(); ++i)
            if (sequences[i].swapped == swapped && chosen.size() < most && random.below(2)) chosen.push_back(i);
        return chosen;
    }

    // ---- operations -------------------------------------------------------------------------------------------------

    void begin() {
        Expected e{cache.begin(), {}, {}};
        Tokens prompt;  // often as another one begins
        if (!sequences.empty()) {
            const Tokens& other = sequences[random.below(sequences.size())].tokens;
            prompt.assign(other.begin(), other.begin() + static_cast<ptrdiff_t>(random.below(other.size() + 1)));
        }
        for (uint64_t i = random.below(4); i > 0; --i) prompt.push_back(random_token());
        const int64_t shared = cache.share_prefix(e.id, prompt);
        if (shared % sizes.page_size != 0 || shared > std::max<int64_t>(0, static_cast<int64_t>(prompt.size()) - 1))
            FAIL("share_prefix gave " << shared << " of " << prompt.size() << " tokens");
        append(e, std::span(prompt).first(shared));
        n["pages found"] += shared / sizes.page_size;
        sequences.push_back(std::move(e));
    }
    // Several sequences reserve; those that could append some of it; new ones begin meanwhile.
    void step() {
        std::vector<std::pair<size_t, int64_t>> reserved;
        for (const size_t i : some(false, 3)) {
            const int64_t rows = 1 + static_cast<int64_t>(random.below(random.below(2) ? 2 : 2 * sizes.page_size + 1));
            const SequenceId id = sequences[i].id;
            const int64_t wanted = cache.pages_wanted(id, rows), available = cache.pages_available();
            if (cache.reserve(id, rows) != (wanted <= available)) FAIL("reserve: " << wanted << " of " << available);
            if (cache.pages_available() != available - (wanted <= available ? wanted : 0))
                FAIL("pages_wanted is wrong");
            if (wanted <= available) reserved.push_back({i, 1 + random.below(rows)});
            ++n[wanted <= available ? "reserved" : "no page"];
        }
        for (const auto& [i, rows] : reserved) {
            Expected& e = sequences[i];
            Tokens tokens(rows);
            for (int32_t& token : tokens) token = random_token();
            cache.append(e.id, tokens);
            append(e, tokens);
            const std::vector<int32_t>& pages = cache.page_table(e.id);
            for (size_t s = e.rows.size() - rows; s < e.rows.size(); ++s)
                writes.push_back({pages[s / sizes.page_size] * sizes.page_size + s % sizes.page_size, e.rows[s]});
            if (random.below(4) == 0 && sequences.size() < 8) begin();  // `e` may have moved
        }
        copy();
        for (const auto& [row, value] : writes) device[row] = value;
        writes.clear();
    }
    void copy() {
        for (const auto& [way, from, to] : cache.take_copies()) {
            const std::vector<uint64_t>& source = way == Way::to_device ? host : device;
            std::vector<uint64_t>& target = way == Way::to_host ? host : device;
            std::copy_n(&source[from * sizes.page_size], sizes.page_size, &target[to * sizes.page_size]);
            ++n[way == Way::on_device ? "copied" : way == Way::to_host ? "copied out" : "copied in"];
        }
    }
    void fork(Expected& e) {
        Expected copy = e;
        copy.id = cache.fork(e.id);
        sequences.push_back(std::move(copy));
    }
    void truncate(Expected& e) {
        const size_t length = random.below(e.rows.size() + 1);
        cache.truncate(e.id, static_cast<int64_t>(length));
        e.rows.resize(length);
        e.tokens.resize(length);
    }
    void swap(bool out) {
        std::vector<SequenceId> ids;
        const std::vector<size_t> chosen = some(!out, 3);
        for (const size_t i : chosen) ids.push_back(sequences[i].id);
        const int64_t available = cache.pages_available(), wanted = out ? 0 : cache.swap_in_pages_wanted(ids);
        const bool done = out ? cache.swap_out(ids) : cache.swap_in(ids);
        if (!out && done != (wanted <= available)) FAIL("swap_in: " << wanted << " pages of " << available);
        if (!out && cache.pages_available() != available - (done ? wanted : 0)) FAIL("swap_in took another number");
        for (const size_t i : chosen) sequences[i].swapped = done ? out : !out;
        ++n[done ? "swapped" : "not swapped"];
    }
    void operate() {
        const uint64_t what = random.below(16);
        if (what < 7) return step();
        if (what < 9 && sequences.size() < 8) return begin();
        if (what < 10) return swap(true);
        if (what < 11) return swap(false);
        if (what < 12) return copy();  // otherwise the next step does
        if (sequences.empty()) return;
        const size_t i = random.below(sequences.size());
        if (what < 13 && sequences.size() < 8 && !sequences[i].swapped) return fork(sequences[i]);
        if (what < 14) return truncate(sequences[i]);
        if (what < 15) return;
        cache.end(sequences[i].id);
        sequences.erase(sequences.begin() + static_cast<ptrdiff_t>(i));
    }

    // ---- checks -----------------------------------------------------------------------------------------------------

    bool rows_are_right() {
        for (const Expected& e : sequences) {
            if (cache.length(e.id) != static_cast<int64_t>(e.rows.size()) || cache.is_swapped(e.id) != e.swapped)
                return false;
            if (e.swapped) continue;
            const std::vector<int32_t>& pages = cache.page_table(e.id);
            for (size_t s = 0; s < e.rows.size(); ++s)
                if (device[pages[s / sizes.page_size] * sizes.page_size + s % sizes.page_size] != e.rows[s])
                    return false;
        }
        return true;
    }
    bool use_is_right() {
        std::vector<int64_t> tables(sizes.n_pages), used(sizes.n_pages);
        CacheUse use;
        for (const Expected& e : sequences) {
            if (e.swapped) continue;
            ++use.n_sequences;
            use.sequence_rows += static_cast<int64_t>(e.rows.size());
            int64_t left = static_cast<int64_t>(e.rows.size());
            for (const int32_t page : cache.page_table(e.id)) {
                ++tables[page];
                used[page] = std::max(used[page], std::clamp<int64_t>(left, 0, sizes.page_size));
                left -= sizes.page_size;
            }
        }
        for (int32_t page = 0; page < sizes.n_pages; ++page) {
            use.owned_pages += tables[page] > 0;
            use.shared_pages += tables[page] > 1;
            use.kept_pages += cache.is_kept(page);
            use.used_rows += used[page];
        }
        const CacheUse given = cache.use();
        return given.owned_pages == use.owned_pages && given.shared_pages == use.shared_pages &&
               given.kept_pages == use.kept_pages && given.used_rows == use.used_rows &&
               given.sequence_rows == use.sequence_rows && given.n_sequences == use.n_sequences &&
               given.n_pages == sizes.n_pages && given.free_pages == sizes.n_pages - use.owned_pages - use.kept_pages &&
               given.free_pages + given.kept_pages == cache.pages_available();
    }
    void run(int64_t n_operations) {
        for (int64_t i = 0; i < n_operations; ++i) {
            operate();
            if (random.below(2)) continue;  // copies of several operations gather
            copy();
            if (!rows_are_right()) FAIL("operation " << i << ": a sequence finds other rows than its own");
            if (random.below(4)) continue;
            if (!use_is_right()) FAIL("operation " << i << ": use() differs from a count");
            cache.check_consistency();
        }
        while (!sequences.empty()) {
            cache.end(sequences.back().id);
            sequences.pop_back();
        }
        cache.check_consistency();
        CHECK(cache.pages_available() == sizes.n_pages);
        CHECK(cache.use().host_pages == 0);
    }
};

Tokens count_up(int64_t n, int32_t first = 0) {
    Tokens tokens(n);
    for (int64_t i = 0; i < n; ++i) tokens[i] = first + static_cast<int32_t>(i);
    return tokens;
}
SequenceId begin_with(PagedCache& cache, const Tokens& tokens) {
    const SequenceId sequence = cache.begin();
    const int64_t shared = cache.share_prefix(sequence, tokens), rest = static_cast<int64_t>(tokens.size()) - shared;
    REQUIRE(cache.reserve(sequence, rest));
    cache.append(sequence, std::span(tokens).last(rest));
    return sequence;
}
// How many of the first tokens are in the cache.
int64_t n_found(PagedCache& cache, const Tokens& tokens) {
    const SequenceId sequence = cache.begin();
    const int64_t shared = cache.share_prefix(sequence, tokens);
    cache.end(sequence);
    return shared;
}

}  // namespace

TEST_CASE("paged cache: a million random operations against a model that copies everything", "[paged_cache]") {
#if defined(__SANITIZE_ADDRESS__)
    constexpr int64_t n_operations = 20'000;  // without optimisation, each memory access checked
#else
    constexpr int64_t n_operations = 200'000;
#endif
    // page_size, n_pages, n_host_pages, share_prefixes: pools in which eight sequences find no room.
    const CacheSizes machines[] = {
        {1, 37, 19, true}, {2, 17, 8, true}, {3, 14, 40, true}, {16, 9, 5, true}, {5, 11, 6, false}};
    uint64_t seed = 1;
    for (const CacheSizes& sizes : machines) {
        Machine machine(sizes, seed++);
        machine.run(n_operations);
        for (const char* what : {"reserved", "no page", "copied out", "copied in", "swapped", "not swapped"}) {
            INFO("pages of " << sizes.page_size << " rows: " << what << " " << machine.n[what] << " times");
            CHECK(machine.n[what] > n_operations / 1000);
        }
        CHECK((machine.n["copied"] > n_operations / 1000) == (sizes.page_size > 1));  // a page of one row is full
        CHECK((machine.n["pages found"] > n_operations / 1000) == sizes.share_prefixes);
    }
}

TEST_CASE("paged cache: full pages are found while a sequence has them, and after it has ended", "[paged_cache]") {
    PagedCache cache({.page_size = 4, .n_pages = 20});
    const Tokens tokens = count_up(11);
    const SequenceId first = begin_with(cache, tokens);
    CHECK(cache.page_table(first) == std::vector<int32_t>{0, 1, 2});
    CHECK(n_found(cache, tokens) == 8);
    CHECK(n_found(cache, count_up(9)) == 8);
    CHECK(n_found(cache, count_up(8)) == 4);  // the logits behind the last token have to be computed
    CHECK(n_found(cache, count_up(4)) == 0);
    CHECK(n_found(cache, {}) == 0);
    Tokens other = tokens;
    other[1] = 77;  // the second page has the same tokens, and others before them
    CHECK(n_found(cache, other) == 0);
    CHECK(n_found(cache, Tokens(tokens.begin() + 4, tokens.end())) == 0);

    const SequenceId second = begin_with(cache, tokens);
    CHECK(cache.page_table(second) == std::vector<int32_t>{0, 1, 3});
    CHECK(cache.use().shared_pages == 2);
    CHECK(cache.use().used_rows == 14);
    CHECK(cache.use().sequence_rows == 22);
    cache.end(first);
    cache.end(second);
    CHECK(cache.use().kept_pages == 2);
    CHECK(cache.use().free_pages == 18);
    CHECK(cache.pages_available() == 20);
    CHECK(n_found(cache, tokens) == 8);

    // Two sequences compute the same page in one step: what follows it in either can be found.
    const SequenceId third = cache.begin(), fourth = cache.begin();
    for (const SequenceId sequence : {third, fourth}) {
        REQUIRE(cache.reserve(sequence, 4));
        cache.append(sequence, count_up(4, 50));
    }
    REQUIRE(cache.reserve(fourth, 4));
    cache.append(fourth, count_up(4, 54));
    CHECK(n_found(cache, count_up(9, 50)) == 8);

    PagedCache without({.page_size = 4, .n_pages = 20, .share_prefixes = false});
    without.end(begin_with(without, tokens));
    CHECK(n_found(without, tokens) == 0);
    CHECK(without.use().kept_pages == 0);
}

TEST_CASE("paged cache: of the kept pages the one that was used the longest time ago goes first", "[paged_cache]") {
    PagedCache cache({.page_size = 2, .n_pages = 8});
    const Tokens a = count_up(7, 100), b = count_up(7, 200);  // three full pages each, and a part of one
    const SequenceId sequence_a = begin_with(cache, a);
    cache.end(begin_with(cache, b));
    cache.end(sequence_a);
    CHECK(cache.use().kept_pages == 6);
    const SequenceId other = begin_with(cache, count_up(4, 300));  // takes the two that are free
    REQUIRE(cache.reserve(other, 1));                              // the last page of b, which ended first
    CHECK(n_found(cache, b) == 4);                                 // which is a use of its pages
    REQUIRE(cache.reserve(other, 3));                              // the last page of a
    CHECK(n_found(cache, a) == 4);
    CHECK(n_found(cache, b) == 4);
    REQUIRE(cache.reserve(other, 5));  // a was looked up before b
    CHECK(n_found(cache, b) == 4);
    CHECK(n_found(cache, a) == 2);
    CHECK_FALSE(cache.reserve(other, 13));  // needs four pages more, and three are kept
    CHECK(n_found(cache, b) == 4);          // it has taken none
    REQUIRE(cache.reserve(other, 11));
    CHECK(cache.pages_available() == 0);
    CHECK(n_found(cache, b) == 0);
    cache.check_consistency();
}

TEST_CASE("paged cache: rows that a sequence has taken back and writes again are no longer found", "[paged_cache]") {
    PagedCache cache({.page_size = 4, .n_pages = 10});
    const Tokens tokens = count_up(9);
    const SequenceId sequence = begin_with(cache, tokens);
    cache.truncate(sequence, 6);
    CHECK(cache.use().owned_pages == 2);
    CHECK(n_found(cache, tokens) == 8);  // nobody has written there
    CHECK_THROWS_AS(cache.append(sequence, std::vector{50}), Error);
    REQUIRE(cache.reserve(sequence, 1));
    cache.append(sequence, std::vector{50});
    CHECK(n_found(cache, tokens) == 4);
    CHECK(cache.take_copies().empty());

    // While somebody else has the page, the one who writes gets a copy.
    const SequenceId other = cache.fork(sequence);
    cache.truncate(other, 5);
    CHECK(cache.pages_wanted(other, 0) == 0);
    REQUIRE(cache.reserve(other, 0));
    CHECK(cache.take_copies().empty());  // nobody writes
    CHECK(cache.pages_wanted(other, 1) == 1);
    REQUIRE(cache.reserve(other, 1));
    const std::vector<PageCopy> copies = cache.take_copies();
    REQUIRE(copies.size() == 1);
    CHECK(copies[0].way == Way::on_device);
    CHECK(copies[0].from == cache.page_table(sequence)[1]);
    CHECK(copies[0].to == cache.page_table(other)[1]);
    CHECK(cache.pages_wanted(sequence, 1) == 0);
    cache.check_consistency();
}

TEST_CASE("paged cache: a page that several sequences share is copied to the host and back once", "[paged_cache]") {
    PagedCache cache({.page_size = 4, .n_pages = 6, .n_host_pages = 4});
    const SequenceId a = begin_with(cache, count_up(10)), b = cache.fork(a), c = cache.fork(a);
    REQUIRE(cache.reserve(b, 1));  // pages of b: two shared, one of its own
    cache.append(b, std::vector{1000});
    cache.take_copies();
    CHECK(cache.use().owned_pages == 4);
    const std::vector<SequenceId> two = {a, b}, all = {a, b, c};
    REQUIRE(cache.swap_out(two));
    CHECK(cache.take_copies().size() == 4);
    CHECK(cache.use().host_pages == 4);
    CHECK(cache.use().owned_pages == 3);  // those of c
    CHECK(cache.is_swapped(a));
    CHECK_THROWS_AS(cache.page_table(a), Error);
    CHECK_THROWS_AS(cache.fork(a), Error);
    CHECK(cache.swap_in_pages_wanted(two) == 1);  // the others are still there
    REQUIRE(cache.swap_out(std::vector{c}));
    CHECK(cache.take_copies().empty());
    CHECK(cache.use().host_pages == 4);
    CHECK(cache.use().owned_pages == 0);
    CHECK(cache.use().kept_pages == 2);

    const SequenceId d = begin_with(cache, count_up(12, 500));  // takes three pages of the four that are free
    CHECK_FALSE(cache.swap_in(all));
    CHECK(cache.swap_in_pages_wanted(all) == 4);
    CHECK(cache.take_copies().empty());
    cache.truncate(d, 8);
    REQUIRE(cache.swap_in(all));
    CHECK(cache.take_copies().size() == 2);  // the two that were kept have their rows still
    CHECK(cache.use().host_pages == 0);
    CHECK(cache.use().owned_pages == 6);
    CHECK(cache.use().sequence_rows == 10 + 11 + 10 + 8);

    CHECK_FALSE(cache.swap_out(std::vector{a, b, c, d}));  // six pages, and the host has four
    CHECK_FALSE(cache.is_swapped(a));
    CHECK(cache.take_copies().empty());
    cache.check_consistency();
}

TEST_CASE("paged cache: pages that are only reserved need none of the host", "[paged_cache]") {
    PagedCache cache({.page_size = 4, .n_pages = 3, .n_host_pages = 1});
    const SequenceId sequence = begin_with(cache, count_up(3));
    REQUIRE(cache.reserve(sequence, 6));
    CHECK(cache.pages_available() == 0);
    REQUIRE(cache.swap_out(std::vector{sequence}));
    CHECK(cache.take_copies().size() == 1);
    CHECK(cache.pages_available() == 3);
    cache.check_consistency();
}

TEST_CASE("paged cache: of sequences that come back only what is no longer there is copied", "[paged_cache]") {
    PagedCache cache({.page_size = 2, .n_pages = 2, .n_host_pages = 2});
    const std::vector<SequenceId> two = {begin_with(cache, count_up(2)), begin_with(cache, count_up(2, 50))};
    REQUIRE(cache.swap_out(two));
    CHECK(cache.take_copies().size() == 2);
    cache.end(begin_with(cache, count_up(2, 90)));  // in the page of the first, and kept
    REQUIRE(cache.swap_in(two));
    CHECK(cache.take_copies().size() == 1);
    CHECK(n_found(cache, count_up(3)) == 2);
    CHECK(n_found(cache, count_up(3, 50)) == 2);
    cache.check_consistency();
}

// Two texts with one hash: of a hundred thousand beginnings two are likely to have hashes with the same upper half (the
// birthday paradox), and the last token is chosen so that the lower halves agree, too.
TEST_CASE("paged cache: texts with the same hash are told apart", "[paged_cache]") {
    const auto hash = [](const Tokens& tokens) { return PageTextHash()({PagePool::kNoText, tokens}); };
    std::map<uint32_t, Tokens> beginnings;
    Tokens a, b;
    for (int32_t i = 0; i < 1'000'000 && a.empty(); ++i) {
        const Tokens beginning = {i, i % 997};
        const auto [at, is_new] = beginnings.try_emplace(static_cast<uint32_t>(hash(beginning) >> 32), beginning);
        if (is_new) continue;
        a = at->second;
        b = beginning;
        a.push_back(7);
        b.push_back(static_cast<int32_t>(7 ^ static_cast<uint32_t>(hash(at->second) ^ hash(beginning))));
    }
    REQUIRE(a != b);
    REQUIRE(hash(a) == hash(b));
    PagedCache cache({.page_size = 3, .n_pages = 4});
    begin_with(cache, a);
    CHECK(n_found(cache, {a[0], a[1], a[2], 5}) == 3);
    CHECK(n_found(cache, {b[0], b[1], b[2], 5}) == 0);
    // So are the same tokens after different texts, whose hashes differ.
    CHECK_FALSE(PageText{1, a} == PageText{2, a});
    CHECK(PageTextHash()({1, a}) != PageTextHash()({2, a}));
}

TEST_CASE("paged cache: pages that no sequence has had cost the host no memory", "[paged_cache]") {
    const auto resident_bytes = [] {
        int64_t all = 0, resident = 0;
        std::ifstream("/proc/self/statm") >> all >> resident;
        return resident * ::sysconf(_SC_PAGESIZE);
    };
    const int64_t before = resident_bytes(), n = 1 << 21;
    PagedCache cache({.page_size = 16, .n_pages = n, .n_host_pages = n});
    CHECK(cache.pages_available() == n);
    CHECK_FALSE(cache.is_kept(0));
    const SequenceId sequence = begin_with(cache, count_up(17));
    CHECK(cache.page_table(sequence) == Tokens{0, 1});
    cache.end(sequence);
    CHECK(cache.is_kept(0));
    CHECK(cache.use().free_pages == n - 1);
    CHECK(resident_bytes() - before < 16 << 20);
}

TEST_CASE("paged cache: errors", "[paged_cache]") {
    CHECK_THAT(error_of([] { PagedCache({.page_size = 0, .n_pages = 4}); }), ContainsSubstring("at least 1 row"));
    CHECK_THAT(error_of([] { PagedCache({.page_size = 16, .n_pages = 0}); }), ContainsSubstring("not 0"));
    // The tables of a step have numbers of rows in 32 bits: the last page's would be below 0.
    CHECK_THAT(error_of([] { PagedCache({.page_size = 1 << 20, .n_pages = 2048}); }),
               ContainsSubstring("the cache has 1 to 2047 pages of 1048576 rows, not 2048 (--cache-pages)"));
    CHECK(PagedCache({.page_size = 1 << 20, .n_pages = 2047}).pages_available() == 2047);  // the most
    CHECK_THAT(error_of([] { PagedCache({.n_pages = 1, .n_host_pages = -1}); }), ContainsSubstring("on the host"));
    PagedCache cache({.page_size = 4, .n_pages = 4});
    const SequenceId sequence = begin_with(cache, count_up(3));
    CHECK_THAT(error_of([&] { cache.length(sequence + 1); }), ContainsSubstring("no sequence 1"));
    CHECK_THAT(error_of([&] { cache.append(sequence, count_up(2)); }), ContainsSubstring("reserve them before"));
    CHECK_THAT(error_of([&] { cache.truncate(sequence, 4); }), ContainsSubstring("has 3 tokens, not 4"));
    CHECK_THAT(error_of([&] { cache.truncate(sequence, -1); }), ContainsSubstring("has 3 tokens, not -1"));
    CHECK_THAT(error_of([&] { cache.share_prefix(sequence, {}); }), ContainsSubstring("has 3 tokens already"));
    CHECK_THAT(error_of([&] { cache.swap_in(std::vector{sequence}); }), ContainsSubstring("not swapped out"));
    CHECK_FALSE(cache.swap_out(std::vector{sequence}));  // the host has no pages
    const SequenceId empty = cache.begin();
    REQUIRE(cache.reserve(empty, 1));  // pages that are found would stand behind this one
    CHECK_THAT(error_of([&] { cache.share_prefix(empty, count_up(5)); }), ContainsSubstring("share_prefix: sequence"));
    cache.end(empty);
    // After a fork the last page is shared: what was reserved in it is no longer the sequence's own.
    REQUIRE(cache.reserve(sequence, 1));
    cache.fork(sequence);
    CHECK_THAT(error_of([&] { cache.append(sequence, count_up(1)); }), ContainsSubstring("after a fork"));
    CHECK_THAT(error_of([&] { cache.is_kept(4); }), ContainsSubstring("pages 0 to 3, not 4"));
    cache.end(sequence);
    CHECK_THAT(error_of([&] { cache.end(sequence); }), ContainsSubstring("it has ended"));
}

// It takes 1.5 us where this was written. The bound has room for sanitizers and for what else the machine does.
TEST_CASE("paged cache: a step of 64 sequences costs microseconds", "[paged_cache]") {
    PagedCache cache({.page_size = 16, .n_pages = 64 * 64});
    std::vector<SequenceId> sequences;
    for (int32_t i = 0; i < 64; ++i) sequences.push_back(begin_with(cache, count_up(500, 10'000 * i)));
    double fastest = 1;
    for (int32_t step = 0; step < 400; ++step) {
        const double start = seconds_now();
        for (const SequenceId sequence : sequences) {
            if (cache.reserve(sequence, 1)) cache.append(sequence, std::span(&step, 1));
        }
        cache.use();
        fastest = std::min(fastest, seconds_now() - start);
    }
    CHECK(cache.use().sequence_rows == 64 * 900);
    CAPTURE(fastest);
    CHECK(fastest < 600e-6);
}
