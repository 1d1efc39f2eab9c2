// The table that lets one launch update all parameters.
//
//   parameters   |  embedding 10000 (decay)        | bias 300 | matrix 2000 (decay) | ...
//   tiles        | 1024 | 1024 | ... | 1024 | 784  |   300    | 1024 |     976      | ...
//
// One launch per parameter would cost more than the update where parameters are small: a GPT-2 of 124M has 148 of them,
// 98 with a few thousand elements at most, and a launch takes about as long as updating a million. With the table,
// block b reads all that it needs from tiles[b]. A tile never spans two parameters, so whether elements are decayed is
// one number for the whole block, and its threads do not branch.
#include "optim/optim.h"

#include <algorithm>

std::vector<Tile> make_tiles(const std::vector<Param>& params, int64_t tile_n, bool packed) {
    std::vector<Tile> tiles;
    int64_t n_packed = 0;
    for (const Param& param : params) {
        const int64_t n = param.value.n(), state_offset = packed ? n_packed : param.offset;
        for (int64_t first = 0; first < n; first += tile_n)
            tiles.push_back({param.offset + first, state_offset + first,
                             static_cast<int32_t>(std::min(tile_n, n - first)), param.decay ? 1.0f : 0.0f,
                             hash_name(param.name), param.first + first});
        n_packed += n;
    }
    return tiles;
}
