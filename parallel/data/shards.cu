// shards.cu: which rank holds which shard of the parameters, and where. Arithmetic and memory only;
// nothing is sent here.
//
//     unit        |      embedding      |   block 0   |   block 1   | ... |   head   |        flat array: whole units
//     shards      |    rank 0 | rank 1  | r 0  |  r 1 | r 0  |  r 1 |     | r 0 | r 1|
//     rank 1      |  r 1  |  r 1 |  r 1 | ... | r 1 |                      packed: its shards side by side
//
// The drawing is for two ranks. Shards are about equal. A boundary lies where an optimizer allows it: at a multiple of
// 1024 elements of a parameter, so that what an optimizer does with an element (a block of 8-bit states, a draw of
// random bits) does not depend on the boundary. Muon and Adafactor need whole matrices, so there boundaries lie between
// parameters only, and the ranks' totals are kept as equal as that allows.
#include "parallel/data/data.h"

#include <algorithm>
#include <cmath>
#include <span>

namespace {

constexpr int64_t kAlignN = 64;  // shards begin on 256 bytes in f32, like parameters

// Those of a unit: `params` lists unit after unit, as they lie. (Not by asking all of them: a model may have thousands
// of units.)
std::span<const Param> params_of(const Unit& unit, const std::vector<Param>& params) {
    const auto lies_before = [](const Param& param, int64_t place) { return param.offset < place; };
    const auto first = std::lower_bound(params.begin(), params.end(), unit.offset, lies_before);
    return {first, std::lower_bound(first, params.end(), unit.offset + unit.n, lies_before)};
}

// Where boundaries of a unit's shards may lie: the beginning of each parameter, in it the multiples of `step` elements
// (0: none), and the unit's end. They are not listed: a large model has hundreds of millions of them, and the plan of a
// pipeline looks for boundaries three times for each rank.
class AllowedPlaces {
  public:
    AllowedPlaces(const Unit& unit, const std::vector<Param>& params, int64_t step) : step_(step) {
        for (const Param& param : params_of(unit, params))
            params_.push_back({param.offset - unit.offset, param.value.n()});
        // The biases of q, k and v lie behind their weights, and are listed between them.
        std::ranges::sort(params_, {}, &Range::first);
        params_.push_back({unit.n, 1});
    }
    int64_t nearest(double place) const {
        const int64_t from = std::min<int64_t>(std::llround(place), params_.back().first);
        auto param = std::ranges::upper_bound(params_, from, {}, &Range::first);
        if (param == params_.begin()) return param->first;
        --param;
        // The first place from there on, so many steps into its parameter; and the last one before it.
        int64_t steps = steps_to(from - param->first);
        if (steps > 0 && steps >= steps_to(param->n)) ++param, steps = 0;
        const int64_t at = param->first + steps * step_;
        if (steps == 0 && param == params_.begin()) return at;
        if (steps == 0) --param, steps = steps_to(param->n);
        const int64_t before = param->first + (steps - 1) * step_;
        return place - static_cast<double>(before) < static_cast<double>(at) - place ? before : at;
    }

  private:
    // How many places lie in the first n elements of a parameter.
    int64_t steps_to(int64_t n) const { return step_ > 0 ? ceil_div(n, step_) : n > 0; }

    int64_t step_;
    std::vector<Range> params_;  // in the order of their places; the last one is the unit's end
};

// The boundaries of a unit's shards, at the allowed places nearest to those that would make all ranks' totals equal.
// loads: elements that each rank has of the units before; this unit's are added.
std::vector<int64_t> shard_boundaries(const Unit& unit, const std::vector<Param>& params, const Sharding& sharding,
                                      std::vector<int64_t>& loads) {
    const size_t size = static_cast<size_t>(sharding.size);
    std::vector<int64_t> bounds(size + 1, unit.n);
    bounds[0] = 0;
    if (sharding.naive || size == 1) return bounds;  // all of it is rank 0's

    const AllowedPlaces allowed(unit, params, sharding.granularity);
    // The unit's elements go to those ranks that have less than the mean, in proportion to what each of them lacks.
    int64_t total = unit.n;
    for (int64_t load : loads) total += load;
    const double mean = static_cast<double>(total) / static_cast<double>(size);
    const auto lack = [&](int64_t load) { return std::max(0.0, mean - static_cast<double>(load)); };
    double all_lack = 0;
    for (int64_t load : loads) all_lack += lack(load);
    double wanted = 0;  // the boundary behind rank r, if any place were allowed
    for (size_t r = 0; r + 1 < size; ++r) {
        wanted += lack(loads[r]) * static_cast<double>(unit.n) / all_lack;
        bounds[r + 1] = std::max(bounds[r], allowed.nearest(wanted));
    }
    for (size_t r = 0; r < size; ++r) loads[r] += bounds[r + 1] - bounds[r];
    return bounds;
}

// What these ranges, in any order, leave of the first n elements.
std::vector<Range> rest_of(int64_t n, std::vector<Range> without) {
    std::ranges::sort(without, {}, &Range::first);
    without.push_back({n, 0});
    std::vector<Range> rest;
    int64_t at = 0;
    for (const Range& range : without) {
        if (at < range.first) rest.push_back({at, range.first - at});
        at = range.first + range.n;
    }
    return rest;
}

}  // namespace

void FlatParameters::shard_units(const Sharding& wanted, bool tied, const FlatParameters& whole) {
    sharding = wanted;
    shard_n = 0;
    std::vector<int64_t> loads(static_cast<size_t>(sharding.size), 0);
    std::vector<std::vector<int64_t>> bounds;
    for (const Unit& unit : whole.units) bounds.push_back(shard_boundaries(unit, whole.params, sharding, loads));
    const size_t r = static_cast<size_t>(sharding.rank), last = units.size() - 1;
    for (size_t u = 0; u <= last; ++u) {
        Unit& unit = units[u];
        unit.bounds = unit.n > 0 ? bounds[unit.number] : std::vector<int64_t>(bounds[0].size(), 0);
        unit.packed = shard_n;
        shard_n += round_up(unit.bounds[r + 1] - unit.bounds[r], kAlignN);
        // Blocks take turns with buffers 0 and 1. Embedding and head share buffer 2, unless the head uses the
        // embedding's weights, too: then both are in use at the same time, and the head has buffer 3.
        unit.buffer = u == 0 ? 2 : u < last ? static_cast<int>((u - 1) % 2) : tied ? 3 : 2;
    }
}

void FlatParameters::take(DType dtype, DType grad_dtype, bool with_masters, Arena& weight_arena, Arena& grad_arena,
                          Arena& master_arena) {
    std::vector<int64_t> buffer_n(4, 0);
    for (const Unit& unit : units)
        buffer_n[static_cast<size_t>(unit.buffer)] = std::max(buffer_n[static_cast<size_t>(unit.buffer)], unit.n);
    const auto take_buffers = [&](Arena& arena, DType type) {
        std::vector<Tensor> buffers;
        for (int64_t its_n : buffer_n) buffers.push_back(arena.take("units in use", type, {its_n}));
        return buffers;
    };
    Arena& weight_home = sharding.offload == Offload::params ? master_arena : weight_arena;
    weights = weight_home.take("weights", dtype, {sharding.shards_weights() ? shard_n : n});
    grads = grad_arena.take("gradients", grad_dtype, {sharding.shards_grads() ? shard_n : n});
    masters = with_masters ? master_arena.take("master weights", DType::f32, {sharding.shards_states() ? shard_n : n})
                           : Tensor{};
    if (sharding.shards_weights()) weight_buffers = take_buffers(weight_arena, dtype);
    if (sharding.shards_grads()) grad_buffers = take_buffers(grad_arena, grad_dtype);
}

Tensor FlatParameters::unit_weights(size_t u) const {
    const Unit& unit = units[u];
    return sharding.shards_weights() ? weight_buffers[static_cast<size_t>(unit.buffer)].slice(0, unit.n)
                                     : weights.slice(unit.offset, unit.n);
}
Tensor FlatParameters::unit_grads(size_t u) const {
    const Unit& unit = units[u];
    return sharding.shards_grads() ? grad_buffers[static_cast<size_t>(unit.buffer)].slice(0, unit.n)
                                   : grads.slice(unit.offset, unit.n);
}
Tensor FlatParameters::unit_masters(size_t u) const {
    return !masters.exists() || sharding.shards_states() ? Tensor{} : masters.slice(units[u].offset, units[u].n);
}

Range FlatParameters::shard(size_t u) const {
    const size_t r = static_cast<size_t>(sharding.rank);
    return {units[u].bounds[r], units[u].bounds[r + 1] - units[u].bounds[r]};
}
Range FlatParameters::updated(size_t u) const { return sharding.shards_states() ? shard(u) : Range{0, units[u].n}; }

Tensor FlatParameters::slice(const Tensor& array, bool is_sharded, size_t u, Range range) const {
    return array.slice(is_sharded ? units[u].packed : units[u].offset + range.first, range.n);
}
Tensor FlatParameters::weight_shard(size_t u) const { return slice(weights, sharding.shards_weights(), u, shard(u)); }
Tensor FlatParameters::grad_shard(size_t u) const { return slice(grads, sharding.shards_grads(), u, shard(u)); }
int64_t FlatParameters::grad_shard_place(size_t u) const {
    return sharding.shards_grads() ? units[u].packed : units[u].offset + shard(u).first;
}
Tensor FlatParameters::master_shard(size_t u) const { return slice(masters, sharding.shards_states(), u, shard(u)); }
Tensor FlatParameters::updated_grads(size_t u) const { return slice(grads, sharding.shards_grads(), u, updated(u)); }

Tensor FlatParameters::updated_copy(size_t u) const { return slice(weights, sharding.shards_weights(), u, updated(u)); }

Weights FlatParameters::updated_weights(uint64_t seed) const {
    if (masters.exists()) return {.values = masters, .copy = weights};
    return {.values = weights, .stochastic = weights.dtype != DType::f32, .seed = seed};
}

std::vector<UpdatedUnit> FlatParameters::updated_units() const {
    std::vector<UpdatedUnit> all;
    int64_t on_host = 0;
    for (size_t u = 0; u < units.size(); ++u) {
        const Range range = updated(u);
        const auto place = [&](bool is_sharded) {
            return is_sharded ? units[u].packed : units[u].offset + range.first;
        };
        UpdatedUnit unit{.params = updated_params(u), .n = range.n};
        unit.copy = place(sharding.shards_weights());
        unit.values = masters.exists() ? place(sharding.shards_states()) : unit.copy;
        unit.grads = place(sharding.shards_grads());
        if (sharding.host_updates()) unit.grads = on_host;
        if (sharding.offload == Offload::optimizer) unit.copy = on_host;
        on_host = round_up(on_host + range.n, kAlignN);
        all.push_back(std::move(unit));
    }
    return all;
}

std::vector<Param> FlatParameters::updated_params(size_t u) const {
    const Range range = updated(u);
    std::vector<Param> pieces;
    for (const Param& param : params_of(units[u], params)) {
        const int64_t begin = param.offset - units[u].offset, end = begin + param.value.n();
        const int64_t low = std::max(begin, range.first), high = std::min(end, range.first + range.n);
        if (low >= high) continue;
        Param piece = param;
        piece.offset = low - range.first;
        piece.first = low - begin;
        if (high - low < end - begin) piece.value = make_tensor(nullptr, param.value.dtype, {high - low});
        pieces.push_back(piece);
    }
    return pieces;
}

std::vector<Range> FlatParameters::gaps(size_t u) const {
    std::vector<Range> taken;
    for (const Param& param : params_of(units[u], params))
        taken.push_back({param.offset - units[u].offset, param.value.n()});
    return rest_of(units[u].n, taken);
}

size_t FlatParameters::unit_of(const Param& param) const {
    size_t u = units.size() - 1;
    while (param.offset < units[u].offset) --u;
    return u;
}

std::vector<Range> FlatParameters::counted(size_t u) const {
    const Range its = shard(u);
    std::vector<Range> left_out;  // in the shard
    for (const Param& param : params_of(units[u], params)) {
        if (param.counted && param.copy_of.empty()) continue;
        const int64_t begin = param.offset - units[u].offset - its.first;
        const int64_t low = std::max<int64_t>(0, begin), high = std::min(its.n, begin + param.value.n());
        if (low < high) left_out.push_back({low, high - low});
    }
    return rest_of(its.n, left_out);
}

std::map<AxisSet, std::vector<Tensor>> FlatParameters::shared_grads() const {
    std::map<AxisSet, std::vector<Tensor>> parts;
    for (size_t u = 0; u < units.size(); ++u)
        for (const Param& piece : updated_params(u))
            if (piece.sharers != 0)
                parts[piece.sharers].push_back(updated_grads(u).slice(piece.offset, piece.value.n()));
    return parts;
}

void FlatParameters::write(const Param& param, const std::vector<float>& whole) const {
    const std::vector<float> cut = param.cut.exists() ? cut_from(param, whole) : std::vector<float>{};
    const std::vector<float>& rows = param.cut.exists() ? cut : whole;
    const size_t u = unit_of(param);
    const int64_t begin = param.offset - units[u].offset, end = begin + static_cast<int64_t>(rows.size());
    for (const auto& [array, is_sharded] :
         {std::pair(weights, sharding.shards_weights()), {masters, sharding.shards_states()}}) {
        if (!array.exists()) continue;
        const Range range = is_sharded ? shard(u) : Range{0, units[u].n};
        const int64_t high = std::min(end, range.first + range.n);
        // In pieces: from_floats copies what it is given, and an embedding may be large.
        for (int64_t low = std::max(begin, range.first), n = 0; low < high; low += n) {
            n = std::min(high - low, int64_t{1} << 20);
            from_floats(slice(array, is_sharded, u, range).slice(low - range.first, n),
                        {rows.begin() + (low - begin), rows.begin() + (low - begin + n)});
        }
    }
}
