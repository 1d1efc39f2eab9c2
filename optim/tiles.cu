// The table that lets one launch update all parameters.
//
//   parameters   |  embedding 10000 (decay)        | bias 300 | matrix 2000 (decay) | ...
//   tiles        | 1024 | 1024 | ... | 1024 | 784  |   300    | 1024 |     976      | ...
//
// One launch per parameter would cost more than the update where parameters are small: a GPT-2 of 124M has 148 of them,
// 98 with a few thousand elements at most, and a launch takes the host a few microseconds, in which a GPU updates some
// hundred thousand. With the table, the threads of tile b read all that they need from tiles[b]. A tile never spans two
// parameters, so whether elements are decayed is one number for all of its threads, and they do not branch.
#include "optim/optim.h"

#include <algorithm>

PlaceInWhole place_in_whole(const Param& param) {
    const Cut& cut = param.cut;
    if (!cut.exists()) return {};
    const auto& ranges = cut.row_ranges;
    const auto [first, n] = ranges[0];
    const int64_t distance = ranges.size() > 1 ? ranges[1].first - first : n;
    for (size_t i = 0; i < ranges.size(); ++i)
        check(ranges[i].second == n && ranges[i].first == first + static_cast<int64_t>(i) * distance, param.name,
              ": this rank's rows of it are not equal groups at equal distances");
    return {.first = first * cut.cols + cut.first_col,
            .run = narrow(std::max<int64_t>(1, cut.n_cols), "columns"),
            .skip = narrow(cut.cols - cut.n_cols, "columns"),
            .group = narrow(std::max<int64_t>(1, n), "rows"),
            .group_skip = narrow(distance - n, "rows")};
}

TileTable count_tiles(const std::vector<UpdatedUnit>& units, int64_t tile_n, bool packed) {
    TileTable table{.tile_n = tile_n, .packed = packed, .first_tile = {0}, .first_element = {0}, .first_state = {0}};
    for (const UpdatedUnit& unit : units) {
        int64_t n_tiles = 0, n_elements = 0;
        for (const Param& param : unit.params) {
            n_tiles += ceil_div(param.value.n(), tile_n);
            n_elements += param.value.n();
        }
        table.first_tile.push_back(table.first_tile.back() + n_tiles);
        table.first_element.push_back(table.first_element.back() + n_elements);
        // States of a unit begin on 256 bytes, as its parameters do.
        table.first_state.push_back(table.first_state.back() + (packed ? n_elements : round_up(unit.n, 64)));
    }
    return table;
}

std::vector<Tile> make_tiles(const std::vector<UpdatedUnit>& units, const TileTable& table) {
    std::vector<Tile> tiles;
    tiles.reserve(static_cast<size_t>(table.n_tiles()));
    for (size_t u = 0; u < units.size(); ++u) {
        const UpdatedUnit& unit = units[u];
        int64_t before = 0;  // elements of the unit's parameters before this one
        for (const Param& param : unit.params) {
            const int64_t n = param.value.n();
            const int64_t state = table.first_state[u] + (table.packed ? before : param.offset);
            const PlaceInWhole place = place_in_whole(param);
            const uint64_t key = hash_name(param.file_name());
            for (int64_t first = 0; first < n; first += table.tile_n)
                tiles.push_back({unit.values + param.offset + first, unit.copy + param.offset + first,
                                 unit.grads + param.offset + first, state + first,
                                 static_cast<int32_t>(std::min(table.tile_n, n - first)), param.decay ? 1 : 0, key,
                                 param.first + first, place});
            before += n;
        }
    }
    return tiles;
}

UnitsPart part_of_units(const std::vector<UpdatedUnit>& units, size_t first, size_t count, const Weights& weights,
                        Tensor grads) {
    const UpdatedUnit &begin = units[first], &last = units[first + count - 1];
    UnitsPart part{weights, grads, {begin.values, begin.copy, begin.grads, 0}};
    part.weights.values = weights.values.slice(begin.values, last.values + last.n - begin.values);
    if (weights.copy.exists()) part.weights.copy = weights.copy.slice(begin.copy, last.copy + last.n - begin.copy);
    part.grads = grads.slice(begin.grads, last.grads + last.n - begin.grads);
    return part;
}
