// shards.cu: who holds what of the parameters, and where. Arithmetic and memory only; nobody talks here.
//
//     unit        |      embedding      |   block 0   |   block 1   | ... |   head   |        flat array: whole units
//     cuts (n=2)  |    rank 0 | rank 1  | r 0  |  r 1 | r 0  |  r 1 |     | r 0 | r 1|
//     rank 1      |  r 1  |  r 1 |  r 1 | ... | r 1 |                                         packed: its parts side by side
//
// Parts are about equal. A cut lies where an optimizer allows it: at a multiple of 1024 elements of a parameter, so that what an
// optimizer does with an element (a block of 8-bit states, a draw of random bits) does not depend on the cut; Muon and Adafactor
// need whole matrices, and get them: parameter by parameter, the ranks' totals are kept as even as they can be.
#include "parallel/data/data.h"

#include <algorithm>
#include <cmath>

namespace {

constexpr int64_t kAlignN = 64;  // parts begin on 256 bytes in f32, like parameters

// The cuts of a unit, at the allowed places nearest to those that would make all ranks' loads even. loads: elements that each
// rank has of the units before; grows.
std::vector<int64_t> cut_unit(const Unit& unit, const std::vector<Param>& params, const Sharding& sharding,
                              std::vector<int64_t>& loads) {
    const size_t size = static_cast<size_t>(sharding.size);
    std::vector<int64_t> cuts(size + 1, unit.n);
    cuts[0] = 0;
    if (sharding.naive) return cuts;  // all of it is rank 0's

    std::vector<int64_t> allowed;
    for (const Param& param : params) {
        const int64_t first = param.offset - unit.offset, step = sharding.granularity;
        if (first < 0 || first >= unit.n) continue;
        allowed.push_back(first);
        for (int64_t e = step; step > 0 && e < param.value.n(); e += step) allowed.push_back(first + e);
    }
    allowed.push_back(unit.n);

    int64_t total = unit.n;
    for (int64_t load : loads) total += load;
    double wanted = 0, missing = 0;
    for (int64_t load : loads)
        missing += std::max(0.0, static_cast<double>(total) / static_cast<double>(size) - static_cast<double>(load));
    for (size_t r = 0; r + 1 < size; ++r) {
        const double gap =
            std::max(0.0, static_cast<double>(total) / static_cast<double>(size) - static_cast<double>(loads[r]));
        wanted += gap * static_cast<double>(unit.n) / missing;
        auto at = std::lower_bound(allowed.begin(), allowed.end(), std::llround(wanted));
        if (at == allowed.end() ||
            (at != allowed.begin() && wanted - static_cast<double>(at[-1]) < static_cast<double>(*at) - wanted))
            --at;
        cuts[r + 1] = std::max(cuts[r], *at);
    }
    for (size_t r = 0; r < size; ++r) loads[r] += cuts[r + 1] - cuts[r];
    return cuts;
}

}  // namespace

void FlatParameters::cut(const Sharding& wanted, bool tied) {
    sharding = wanted;
    part_n = 0;
    std::vector<int64_t> loads(static_cast<size_t>(sharding.size), 0);
    const size_t r = static_cast<size_t>(sharding.rank), last = units.size() - 1;
    for (size_t u = 0; u <= last; ++u) {
        Unit& unit = units[u];
        unit.cuts = cut_unit(unit, params, sharding, loads);
        unit.packed = part_n;
        part_n += round_up(unit.cuts[r + 1] - unit.cuts[r], kAlignN);
        // Blocks take turns. Embedding and head, too, unless the head uses the embedding's weights.
        unit.room = u == 0 ? 2 : u < last ? static_cast<int>((u - 1) % 2) : tied ? 3 : 2;
    }
}

void FlatParameters::take(DType dtype, DType grad_dtype, bool with_masters, Arena& value_arena, Arena& grad_arena,
                          Arena& master_arena) {
    std::vector<int64_t> room_n(4, 0);
    for (const Unit& unit : units)
        room_n[static_cast<size_t>(unit.room)] = std::max(room_n[static_cast<size_t>(unit.room)], unit.n);
    const auto take_rooms = [&](Arena& arena, DType type) {
        std::vector<Tensor> rooms;
        for (int64_t its_n : room_n) rooms.push_back(arena.take("units in use", type, {its_n}));
        return rooms;
    };
    Arena& value_home = sharding.offload == Offload::params ? master_arena : value_arena;
    values = value_home.take("weights", dtype, {sharding.cuts_values() ? part_n : n});
    grads = grad_arena.take("gradients", grad_dtype, {sharding.cuts_grads() ? part_n : n});
    masters = with_masters ? master_arena.take("master weights", DType::f32, {sharding.cuts_states() ? part_n : n})
                           : Tensor{};
    if (sharding.cuts_values()) value_rooms = take_rooms(value_arena, dtype);
    if (sharding.cuts_grads()) grad_rooms = take_rooms(grad_arena, grad_dtype);
}

Tensor FlatParameters::unit_values(size_t u) const {
    const Unit& unit = units[u];
    return sharding.cuts_values() ? value_rooms[static_cast<size_t>(unit.room)].slice(0, unit.n)
                                  : values.slice(unit.offset, unit.n);
}
Tensor FlatParameters::unit_grads(size_t u) const {
    const Unit& unit = units[u];
    return sharding.cuts_grads() ? grad_rooms[static_cast<size_t>(unit.room)].slice(0, unit.n)
                                 : grads.slice(unit.offset, unit.n);
}
Tensor FlatParameters::unit_masters(size_t u) const {
    return masters.rank == 0 || sharding.cuts_states() ? Tensor{} : masters.slice(units[u].offset, units[u].n);
}

Range FlatParameters::part(size_t u) const {
    const size_t r = static_cast<size_t>(sharding.rank);
    return {units[u].cuts[r], units[u].cuts[r + 1] - units[u].cuts[r]};
}
Range FlatParameters::updated(size_t u) const { return sharding.cuts_states() ? part(u) : Range{0, units[u].n}; }

Tensor FlatParameters::slice(const Tensor& array, bool is_cut, size_t u, Range range) const {
    return array.slice(is_cut ? units[u].packed : units[u].offset + range.first, range.n);
}
Tensor FlatParameters::part_of_values(size_t u) const { return slice(values, sharding.cuts_values(), u, part(u)); }
Tensor FlatParameters::part_of_grads(size_t u) const { return slice(grads, sharding.cuts_grads(), u, part(u)); }
Tensor FlatParameters::part_of_masters(size_t u) const { return slice(masters, sharding.cuts_states(), u, part(u)); }
Tensor FlatParameters::updated_grads(size_t u) const { return slice(grads, sharding.cuts_grads(), u, updated(u)); }

Weights FlatParameters::updated_weights(size_t u, uint64_t seed) const {
    const Tensor its_values = slice(values, sharding.cuts_values(), u, updated(u));
    if (masters.rank > 0) return {.values = slice(masters, sharding.cuts_states(), u, updated(u)), .copy = its_values};
    return {.values = its_values, .stochastic = values.dtype != DType::f32, .seed = seed};
}

std::vector<Param> FlatParameters::updated_params(size_t u) const {
    const Range range = updated(u);
    std::vector<Param> pieces;
    for (const Param& param : params) {
        const int64_t begin = param.offset - units[u].offset, end = begin + param.value.n();
        const int64_t low = std::max(begin, range.first), high = std::min(end, range.first + range.n);
        if (begin < 0 || end > units[u].n || low >= high) continue;
        Param piece = param;
        piece.offset = low - range.first;
        piece.first = low - begin;
        if (high - low < end - begin) piece.value = make_tensor(nullptr, param.value.dtype, {high - low});
        pieces.push_back(piece);
    }
    return pieces;
}

size_t FlatParameters::unit_of(const Param& param) const {
    size_t u = units.size() - 1;
    while (param.offset < units[u].offset) --u;
    return u;
}

void FlatParameters::write(const Param& param, const std::vector<float>& rows) const {
    const size_t u = unit_of(param);
    const int64_t begin = param.offset - units[u].offset, end = begin + static_cast<int64_t>(rows.size());
    for (const auto& [array, is_cut] : {std::pair(values, sharding.cuts_values()), {masters, sharding.cuts_states()}}) {
        if (array.rank == 0) continue;
        const Range range = is_cut ? part(u) : Range{0, units[u].n};
        const int64_t low = std::max(begin, range.first), high = std::min(end, range.first + range.n);
        if (low < high)
            from_floats(slice(array, is_cut, u, range).slice(low - range.first, high - low),
                        {rows.begin() + (low - begin), rows.begin() + (high - begin)});
    }
}
