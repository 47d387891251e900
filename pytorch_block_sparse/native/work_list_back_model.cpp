#include "work_list_back_model.h"

#include <algorithm>
#include <cmath>

#include "work_list_back_order.h"

namespace block_sparse {
namespace {

// A list is the same for every number of tokens; it is chosen for these.
constexpr float kTokens = 12288.f;

// Fitted to the times of 3800 lists of 82 patterns (five shapes, five densities, all tile sizes), with most weight on
// the fastest of each pattern: the model's choice takes 1.02 times the best one's time in the mean, 1.16 at most.
struct Constants {
  // Nanoseconds a token and tile: a quad, a strip, and what a tile takes at least.
  float quad, strip, least;
  // Nanoseconds a token and wave: a strip on its way from L2, a distinct strip on its way to it.
  float loaded, distinct;
  float loaded_in_pairs;  // less, where strips come in pairs that lie side by side
  // A wave's tiles, its strips in L2 and those in memory hinder each other: the three times' p-norm.
  float exponent;
  // Microseconds: the launch; to end a tile, and for each quad of it; the same where it is cut into token ranges.
  float launch, tile, tile_quad, cut, cut_quad;
  float cut_in_two, cut_in_three;  // more, of the wave's time
  float gathers_larger;            // N runs along the operand with more features
  float paired;                    // two bands a tile
  float regrouped;                 // some tiles are of the other orientation
};
constexpr Constants kPiece64 = {.quad = 1.189f,
                                .strip = 1.181f,
                                .least = 3.742f,
                                .loaded = 0.00866f,
                                .distinct = 0.03973f,
                                .loaded_in_pairs = 0.2079f,
                                .exponent = 4.288f,
                                .launch = 2.018f,
                                .tile = 3.713f,
                                .tile_quad = 0.6471f,
                                .cut = 2.47f,
                                .cut_quad = 0.4726f,
                                .cut_in_two = 0.04434f,
                                .cut_in_three = 0.07636f,
                                .gathers_larger = 0.07644f,
                                .paired = 0.04171f,
                                .regrouped = 0.01f};
constexpr Constants kPiece32 = {.quad = 0.9327f,
                                .strip = 0.4507f,
                                .least = 2.01f,
                                .loaded = 0.00423f,
                                .distinct = 0.02529f,
                                .loaded_in_pairs = 0.f,
                                .exponent = 1.644f,
                                .launch = 2.301f,
                                .tile = 5.557f,
                                .tile_quad = 0.5625f,
                                .cut = 0.1003f,
                                .cut_quad = 0.01118f,
                                .cut_in_two = 0.02f,
                                .cut_in_three = 0.08085f,
                                .gathers_larger = 0.08582f,
                                .paired = -0.01679f,
                                .regrouped = 0.f};

// A wave's tiles, and the strips they use.
struct Wave {
  float slowest_tile = 0.f;  // nanoseconds a token
  int64_t loaded = 0;
  int64_t distinct = 0;
  int quads = 0;  // of the tile that counts as costliest
  int splits = 1;
};

float wave_time(const Wave& wave, const Constants& k, float loaded_ns) {
  const float tile = wave.slowest_tile / float(wave.splits), l2 = loaded_ns * float(wave.loaded);
  const float memory = k.distinct * float(wave.distinct), slowest = std::max({tile, l2, memory});
  const auto share = [&](float ns) { return std::pow(ns / slowest, k.exponent); };
  float time = slowest * std::pow(share(tile) + share(l2) + share(memory), 1.f / k.exponent) * kTokens / 1000.f;
  time *= 1.f + (wave.splits == 2 ? k.cut_in_two : wave.splits == 3 ? k.cut_in_three : 0.f);
  const float quads = float(wave.quads);
  return time + (wave.splits > 1 ? k.cut + k.cut_quad * quads : k.tile + k.tile_quad * quads);
}

}  // namespace

float predict_back_time(const TileList& list, const BackTiling& tiling) {
  const int piece = list.piece(), per_band = back_lines(piece);
  const Constants& k = piece == 64 ? kPiece64 : kPiece32;
  const float loaded_ns = k.loaded * (tiling.pairs_strips ? 1.f - k.loaded_in_pairs : 1.f);
  const std::vector<int32_t> order = costliest_first(list.tiles, piece);
  std::vector<int64_t> seen[2];  // by operand, x or dy: the last wave that used a strip
  seen[0].assign(tiling.piece_columns, -1), seen[1].assign(tiling.piece_rows, -1);
  float total = k.launch;
  bool regrouped = false;
  const int64_t count = int64_t(order.size());
  for (int64_t first = 0, number = 0; first < count; first += kBackThreadBlocks, ++number) {
    const int64_t last = std::min<int64_t>(first + kBackThreadBlocks, count);
    Wave wave;
    const auto see = [&](bool output_gradient, int32_t strip) {
      wave.distinct += seen[output_gradient][strip] != number;
      seen[output_gradient][strip] = number;
    };
    for (int64_t i = first; i < last; ++i) {
      const Tile& tile = list.tiles[order[i]];
      const TileSource& source = list.sources[tile.source];
      const Bands& bands = source.orientation->bands;
      const bool transposed = source.orientation->transposed;
      const BackTileShape shape = list.shape(tile);
      wave.slowest_tile =
          std::max({wave.slowest_tile, k.least, k.quad * float(shape.quads(piece)), k.strip * float(shape.loaded())});
      wave.loaded += shape.loaded();
      regrouped |= tile.source == 1;
      for (int w = 0; w < 2; ++w) {
        for (int line = 0; line < per_band; ++line) see(!transposed, bands.lines[tile.band[w] * per_band + line]);
        for (int strip = 0; strip < tile.count[w]; ++strip) {
          see(transposed, bands.strip[source.pairs().entries[tile.begin[w] + strip]]);
        }
      }
    }
    const BackTileShape costliest = list.shape(list.tiles[order[first]]);
    wave.quads = costliest.quads(piece);
    const int limit = int(std::min<int64_t>(kBackThreadBlocks / (last - first), kBackMaxSplits));
    const float tile_ns = kTokens * back_token_ns(wave.quads, costliest.loaded(), piece);
    wave.splits = back_splits(tile_ns, wave.quads, limit);
    total += wave_time(wave, k, loaded_ns);
  }
  const TileSource& source = list.sources[0];
  const bool gathers_larger = source.orientation->transposed ? tiling.piece_rows > tiling.piece_columns
                                                             : tiling.piece_columns > tiling.piece_rows;
  return total * (1.f + (gathers_larger ? k.gathers_larger : 0.f)) * (1.f + (source.paired ? k.paired : 0.f)) *
         (1.f + (regrouped ? k.regrouped : 0.f));
}

}  // namespace block_sparse
