// cpu/races.cpp: strict mode's check that two operations which touch the same bytes are in order.
//
//     stream 1   [launch A writes b] [record e]
//     stream 2                                   [wait for e] [launch B reads b]
//
// A comes before B in every order that CUDA allows, because of e. Without the wait some orders have B first: a race,
// even if the order of this run gives the right result. So the check does not look at the order in which operations
// run, but at what puts them in order, at the time when the program asks for them. Each operation has a vector clock
// (Fidge 1988, Mattern 1989): for each stream, how many of its operations come before. An operation joins the clocks of
// the operation before it in its stream, of the events that its stream waits for, and of what the host has waited for.
// Number i of stream s comes before it if its clock for s is at least i.
//
// For each byte we keep which operation wrote it last, and which have read it since (as FastTrack does: Flanagan &
// Freund 2009). A new access must come after the last write; a write must also come after the reads.
//
// Which bytes does an operation touch? Copies, memsets, matrix products and messages between ranks state it. A kernel
// may touch what its pointers point to: each argument that lies in an allocation counts, up to the end of the tensor
// that it was taken from (note_view), as read or written according to the kernel's parameter (const T* or T*). That is
// more than many kernels touch, but never less, as long as a kernel reads no pointers from memory. The check does not
// see what the host reads and writes by itself, and host functions that do not state what they touch.
#include "races.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

namespace cuda_cpu {

void VectorClock::set(size_t stream, uint64_t count) {
    if (counts_.size() <= stream) counts_.resize(stream + 1);
    counts_[stream] = count;
}
void VectorClock::join(const VectorClock& other) {
    if (counts_.size() < other.counts_.size()) counts_.resize(other.counts_.size());
    for (size_t s = 0; s < other.counts_.size(); ++s) counts_[s] = std::max(counts_[s], other.counts_[s]);
}

namespace {

// An operation that has touched some bytes: number `index` of its stream.
struct Seen {
    size_t stream;
    uint64_t index;
    std::shared_ptr<const std::string> name;
    bool before(const VectorClock& clock) const { return !name || index <= clock.of(stream); }
};
// Bytes [the key in `spans`, end), all with the same history.
struct Span {
    uintptr_t end = 0;
    Seen write{};             // without a name: there is none
    std::vector<Seen> reads;  // since then; one a stream, the latest
};

std::mutex mutex;  // guards spans
std::map<uintptr_t, Span> spans;

void split_at(uintptr_t address) {
    auto at = spans.upper_bound(address);
    if (at == spans.begin()) return;
    --at;
    if (at->first == address || address >= at->second.end) return;
    Span tail = at->second;
    at->second.end = address;
    spans.emplace(address, std::move(tail));
}

[[noreturn]] void report_race(const Seen& earlier, bool it_writes, const Seen& now, bool writes, uintptr_t begin,
                              uintptr_t end) {
    report("race between streams: both of these touch " + describe_bytes(begin, end) +
           ", and no event or other wait orders the two:\n  " + *earlier.name + (it_writes ? " writes" : " reads") +
           " them\n  " + *now.name + (writes ? " writes" : " reads") +
           " them\n  Record an event after the first (cudaEventRecord) and let the second's stream wait for it "
           "(cudaStreamWaitEvent)");
}

// A read is added to the history of its bytes.
void read(uintptr_t begin, uintptr_t end, const Seen& now, const VectorClock& clock) {
    for (auto at = spans.lower_bound(begin); begin < end; ++at) {
        if (at == spans.end() || at->first > begin) {
            Span untouched;
            untouched.end = at == spans.end() ? end : std::min(end, at->first);
            at = spans.emplace_hint(at, begin, untouched);
        }
        Span& span = at->second;
        if (!span.write.before(clock)) report_race(span.write, true, now, false, begin, span.end);
        std::erase_if(span.reads, [&](const Seen& seen) { return seen.stream == now.stream; });
        span.reads.push_back(now);
        begin = span.end;
    }
}

// A write replaces the history: an operation that comes after the write also comes after everything before it.
void write(uintptr_t begin, uintptr_t end, const Seen& now, const VectorClock& clock) {
    const auto first = spans.lower_bound(begin), last = spans.lower_bound(end);
    for (auto at = first; at != last; ++at) {
        const Span& span = at->second;
        if (!span.write.before(clock)) report_race(span.write, true, now, true, at->first, span.end);
        for (const Seen& seen : span.reads)
            if (!seen.before(clock)) report_race(seen, false, now, true, at->first, span.end);
    }
    spans.emplace_hint(spans.erase(first, last), begin, Span{end, now, {}});
}

// ---------------------------------------------------------------------------------------------------------------------
// How far a pointer reaches

// The views that this thread has taken pointers from. A pointer of a launch is looked for first in the recent ones,
// which were taken since the launch before, then in the older ones: a launcher may compute its pointers once and launch
// several kernels.
struct Views {
    std::vector<Extent> recent;
    std::map<uintptr_t, uintptr_t> older;  // begin -> end
    void add(uintptr_t begin, uintptr_t end) {
        if (!recent.empty() && recent.back().begin == begin && recent.back().end == end) return;
        if (recent.size() == 1024) close();  // limits the memory if host code takes very many pointers
        recent.push_back({begin, end});
    }
    void close() {
        for (const Extent& view : recent) older[view.begin] = 0;
        for (const Extent& view : recent) older[view.begin] = std::max(older[view.begin], view.end);
        recent.clear();
    }
    uintptr_t end_of(uintptr_t pointer) const {  // 0: not known
        uintptr_t end = 0;
        for (const Extent& view : recent)
            if (view.begin <= pointer && pointer < view.end) end = std::max(end, view.end);
        if (end > 0) return end;
        auto at = older.upper_bound(pointer);
        return at != older.begin() && pointer < (--at)->second ? at->second : 0;
    }
};
thread_local Views views;

}  // namespace

void note_view_strict(const void* data, size_t bytes) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
    if (bytes > 0 && !in_kernel()) views.add(begin, begin + bytes);
}

Footprint kernel_footprint(const Launch& launch, std::initializer_list<Argument> arguments) {
    Footprint footprint{std::string("kernel '") + launch.kernel + "' launched", {launch.file, launch.line}, {}};
    for (const Argument& argument : arguments)
        for (size_t at = 0; at + sizeof(uintptr_t) <= argument.bytes; at += sizeof(uintptr_t)) {
            uintptr_t word;
            std::memcpy(&word, static_cast<const char*>(argument.value) + at, sizeof word);
            const Extent allocation = allocation_around(word);
            if (allocation.end == 0) continue;
            const uintptr_t view_end = views.end_of(word);
            const uintptr_t end = view_end ? std::min(view_end, allocation.end) : allocation.end;
            footprint.accesses.push_back({reinterpret_cast<const void*>(word), end - word, !argument.only_reads});
        }
    views.close();
    return footprint;
}

void check_races(const Footprint& footprint, size_t stream, const std::string& stream_name, const VectorClock& clock) {
    Seen now{stream, clock.of(stream), nullptr};
    std::string name = footprint.name;
    if (footprint.place.file)
        name += std::string(" at ") + footprint.place.file + ":" + std::to_string(footprint.place.line);
    now.name = std::make_shared<const std::string>(name + " on " + stream_name);
    const std::lock_guard lock(mutex);
    for (const bool writes : {false, true})
        for (const Access& access : footprint.accesses) {
            const uintptr_t begin = reinterpret_cast<uintptr_t>(access.data), end = begin + access.bytes;
            // Ordinary memory of the host is read and written before a call returns.
            if (access.writes != writes || begin == end || allocation_around(begin).end == 0) continue;
            split_at(begin);
            split_at(end);
            if (writes) write(begin, end, now, clock);
            else read(begin, end, now, clock);
        }
}

void forget_accesses(uintptr_t begin, uintptr_t end) {
    const std::lock_guard lock(mutex);
    split_at(begin);
    split_at(end);
    spans.erase(spans.lower_bound(begin), spans.lower_bound(end));
}

}  // namespace cuda_cpu
