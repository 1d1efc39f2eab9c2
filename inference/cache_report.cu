// inference/cache_report.cu: how much of the cache holds tokens, in pages and in contiguous slots.
//
// Before pages, a request had one contiguous piece of memory for the longest text that it could become. A sequence of
// p prompt tokens that is given a tokens takes a steps and ends with p + a - 1 rows. In its k-th step, k = 0 ... a - 1,
// of the max_length rows of its slot
//
//     p + k                        hold tokens
//     (p + a - 1) - (p + k)        are reserved for tokens to come
//     max_length - (p + a - 1)     are internal fragmentation
//
// Summed over its steps these are a p + a (a - 1) / 2, a (a - 1) / 2 and the rest of a max_length: so the average over
// all slots needs no simulation. What is left of the pool after its last slot is external fragmentation.
#include "inference/inference.h"

#include <algorithm>

namespace {

using Color = Canvas::Color;
constexpr Color kInk{38, 38, 38}, kWhite{255, 255, 255};
// Okabe and Ito's colours (io/plot.cu).
constexpr Color kTokens{0, 158, 115}, kReserved{230, 159, 0}, kInternal{213, 94, 0}, kExternal{120, 120, 120},
    kKept{86, 180, 233}, kFree{232, 232, 232};

struct Piece {
    double share;
    Color color;
};

// Pieces one on the other, from the bottom.
void draw_stack(Canvas& canvas, double left, double right, double top, double bottom, const std::vector<Piece>& pieces,
                bool with_numbers) {
    double y = bottom;
    for (const auto& [share, color] : pieces) {
        const double height = share * (bottom - top);
        canvas.fill(left, y - height, right, y, color);
        const std::string text = format("%.1f %%", 100 * share);
        if (with_numbers && height > 16)
            canvas.text({(left + right) / 2, y - height / 2 + 5}, text, 10, kWhite, Canvas::Align::center, true);
        else if (with_numbers && share > 0) canvas.text({right + 6, y - height / 2 + 5}, text, 10, kInk);
        y -= height;
    }
}

void draw_legend(Canvas& canvas, double x, double y, const std::vector<std::pair<std::string, Color>>& entries) {
    for (const auto& [text, color] : entries) {
        canvas.fill(x, y - 10, x + 12, y + 2, color);
        canvas.text({x + 18, y}, text, 9, kInk);
        x += 18 + Canvas::text_width(text, 9) + 20;
    }
}

void draw_percent_axis(Canvas& canvas, double x, double top, double bottom) {
    for (const int percent : {0, 25, 50, 75, 100}) {
        const double y = bottom - percent / 100.0 * (bottom - top);
        canvas.fill(x - 5, y - 0.5, x, y + 0.5, kInk);
        canvas.text({x - 9, y + 4}, concat(percent, " %"), 9, kInk, Canvas::Align::right);
    }
}

}  // namespace

CacheReport::CacheReport(const CacheSizes& sizes, int64_t max_length) : sizes_(sizes), max_length_(max_length) {
    check(max_length >= 1, "cache report: the longest sequence has at least 1 row, not ", max_length);
}

void CacheReport::step(const CacheUse& use) {
    sum_.free_pages += use.free_pages;
    sum_.kept_pages += use.kept_pages;
    sum_.owned_pages += use.owned_pages;
    sum_.n_sequences += use.n_sequences;
    sum_.used_rows += use.used_rows;
    sum_.sequence_rows += use.sequence_rows;
    if (n_steps_++ % stride_ == 0) history_.push_back(use);
    constexpr size_t most = 2048;  // more than the picture has columns
    if (history_.size() < most) return;
    for (size_t i = 0; i < most / 2; ++i) history_[i] = history_[2 * i];
    history_.resize(most / 2);
    stride_ *= 2;
}

void CacheReport::finished(int64_t prompt_tokens, int64_t drawn_tokens) {
    const double p = static_cast<double>(prompt_tokens), a = static_cast<double>(drawn_tokens);
    slot_tokens_ += a * p + a * (a - 1) / 2;
    slot_reserved_ += a * (a - 1) / 2;
    slot_rows_ += a * static_cast<double>(max_length_);
}

CacheReport::Shares CacheReport::paged() const {
    const double rows = static_cast<double>(std::max<int64_t>(1, sum_.owned_pages) * sizes_.page_size);
    const double tokens = static_cast<double>(sum_.used_rows) / rows;
    return {tokens, 0, 1 - tokens, 0};
}

CacheReport::Shares CacheReport::contiguous() const {
    const double pool = static_cast<double>(sizes_.n_pages * sizes_.page_size);
    const double slots = static_cast<double>(sizes_.n_pages * sizes_.page_size / max_length_ * max_length_) / pool;
    const double rows = std::max(1.0, slot_rows_);
    const double tokens = slots * slot_tokens_ / rows, reserved = slots * slot_reserved_ / rows;
    return {tokens, reserved, slots - tokens - reserved, 1 - slots};
}

std::string CacheReport::text() const {
    if (n_steps_ == 0) return "cache       not used: there was no step\n";
    const double pages = static_cast<double>(n_steps_ * sizes_.n_pages);
    const double P = static_cast<double>(sizes_.page_size), owned = static_cast<double>(sum_.owned_pages);
    const double rows = static_cast<double>(sum_.used_rows), unshared = static_cast<double>(sum_.sequence_rows);
    const double used = rows / P;  // in pages
    const Shares in_pages = paged(), slots = contiguous();
    return format(
        "cache       %lld pages of %lld rows over %lld steps: %.1f %% tokens, %.1f %% unused in pages, %.1f %% "
        "kept, %.1f %% free\n"
        "  allocated   %.1f %% hold tokens; %.1f sequences at a time\n"
        "  sharing     saves %.1f %% of the rows\n"
        "  contiguous  slots of %lld rows: %.1f %% tokens, %.1f %% reserved, %.1f %% internal and %.1f %% "
        "external fragmentation; %lld sequences at a time\n",
        static_cast<long long>(sizes_.n_pages), static_cast<long long>(sizes_.page_size),
        static_cast<long long>(n_steps_), 100 * used / pages, 100 * (owned - used) / pages,
        100 * static_cast<double>(sum_.kept_pages) / pages, 100 * static_cast<double>(sum_.free_pages) / pages,
        100 * in_pages.tokens, static_cast<double>(sum_.n_sequences) / static_cast<double>(n_steps_),
        unshared > 0 ? 100 * (1 - rows / unshared) : 0.0, static_cast<long long>(max_length_), 100 * slots.tokens,
        100 * slots.reserved, 100 * slots.internal, 100 * slots.external,
        static_cast<long long>(sizes_.n_pages * sizes_.page_size / max_length_));
}

void CacheReport::write_png(const std::string& path) const {
    Canvas canvas(1120, 430);
    const double top = 56, bottom = 360;
    canvas.text({24, 26}, "Allocated cache, average", 12, kInk, Canvas::Align::left, true);
    draw_percent_axis(canvas, 80, top, bottom);
    double bar = 100;
    for (const auto& [name, shares] : {std::pair("contiguous", contiguous()), std::pair("pages", paged())}) {
        draw_stack(canvas, bar, bar + 110, top, bottom,
                   {{shares.tokens, kTokens},
                    {shares.reserved, kReserved},
                    {shares.internal, kInternal},
                    {shares.external, kExternal}},
                   true);
        canvas.text({bar + 55, bottom + 20}, name, 10, kInk, Canvas::Align::center);
        bar += 170;  // between them the numbers of parts that are too thin for theirs
    }
    draw_legend(canvas, 24, 412,
                {{"tokens", kTokens},
                 {"reserved", kReserved},
                 {"internal fragmentation", kInternal},
                 {"external fragmentation", kExternal}});

    const double left = 520, right = 1090;
    canvas.text({left - 56, 26}, concat("All ", sizes_.n_pages, " pages of ", sizes_.page_size, " rows over the steps"),
                12, kInk, Canvas::Align::left, true);
    draw_percent_axis(canvas, left, top, bottom);
    for (double x = left; x < right && !history_.empty(); ++x) {  // a column of pixels
        const CacheUse& use =
            history_[static_cast<size_t>((x - left) / (right - left) * static_cast<double>(history_.size()))];
        const double pages = static_cast<double>(use.n_pages), owned = static_cast<double>(use.owned_pages) / pages;
        const double used = static_cast<double>(use.used_rows) / static_cast<double>(sizes_.page_size) / pages;
        draw_stack(canvas, x, x + 1, top, bottom,
                   {{used, kTokens},
                    {owned - used, kInternal},
                    {static_cast<double>(use.kept_pages) / pages, kKept},
                    {static_cast<double>(use.free_pages) / pages, kFree}},
                   false);
    }
    canvas.text({left, bottom + 20}, "step 1", 10, kInk);
    canvas.text({right, bottom + 20}, concat("step ", n_steps_), 10, kInk, Canvas::Align::right);
    draw_legend(canvas, left, 412,
                {{"tokens", kTokens}, {"unused rows of a page", kInternal}, {"kept", kKept}, {"free", kFree}});
    canvas.save(path);
}
