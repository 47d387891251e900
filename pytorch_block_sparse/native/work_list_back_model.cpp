#include "work_list_back_model.h"

#include <algorithm>
#include <cmath>

#include "work_list_back_order.h"

namespace block_sparse {
namespace {

// A list is the same for every number of tokens; it is chosen for these.
constexpr float kTokens = 12288.f;

// Fitted to measured times, with most weight on the fastest lists of each pattern. Pieces of 64: 4600 lists of 48
// patterns (six shapes, six densities); the model's choice takes 1.02 times the best one's time in the mean, 1.10 at
// most. Pieces of 32: 1700 of 40 (1.02, 1.16).
struct Constants {
  // Nanoseconds a token and tile: a stage however little it has, and a quad; a strip; what a tile takes at least.
  float stage, quad, strip, least;
  float long_stage;  // `stage` and `least` where stages are long, times this
  float long_strip;  // the same of `strip`
  float few_stages;  // what a tile takes more, over the ring's stages
  // Nanoseconds a token and wave: a strip on its way from L2, a distinct strip on its way to it.
  float loaded, distinct;
  // A wave's tiles, its strips in L2 and those in memory hinder each other: the three times' p-norm.
  float exponent;
  // Microseconds: the launch; to end a tile, and for each quad of it; the same where it is cut into token ranges.
  float launch, tile, tile_quad, cut, cut_quad;
  float cut_later;                 // more, where others come before
  float cut_in_two, cut_in_three;  // more, of the wave's time
  float gathers_larger;            // N runs along the operand with more features
  float paired;                    // two bands a tile
  float regrouped;                 // some tiles are of the other orientation
};
// Blocks of whole pairs of strips, which lie side by side.
constexpr Constants kPairsOf64 = {.stage = 0.0561f,
                                  .quad = 1.328f,
                                  .strip = 1.119f,
                                  .least = 0.5254f,
                                  .long_stage = 0.5015f,
                                  .long_strip = 0.8859f,
                                  .few_stages = 0.4098f,
                                  .loaded = 0.0076f,
                                  .distinct = 0.0334f,
                                  .exponent = 3.514f,
                                  .launch = 4.847f,
                                  .tile = 0.f,
                                  .tile_quad = 0.4995f,
                                  .cut = 4.127f,
                                  .cut_quad = 0.6103f,
                                  .cut_later = 0.f,
                                  .cut_in_two = 0.0114f,
                                  .cut_in_three = 0.f,
                                  .gathers_larger = 0.0724f,
                                  .paired = 0.0375f,
                                  .regrouped = 0.0056f};
constexpr Constants kPiece64 = {.stage = 2.327f,
                                .quad = 0.8043f,
                                .strip = 0.8844f,
                                .least = 0.1447f,
                                .long_stage = 0.9014f,
                                .long_strip = 1.f,
                                .few_stages = 1.383f,
                                .loaded = 0.001f,
                                .distinct = 0.0438f,
                                .exponent = 2.978f,
                                .launch = 0.f,
                                .tile = 10.34f,
                                .tile_quad = 0.f,
                                .cut = 0.f,
                                .cut_quad = 0.2869f,
                                .cut_later = 14.71f,
                                .cut_in_two = 0.0609f,
                                .cut_in_three = 0.0847f,
                                .gathers_larger = 0.1809f,
                                .paired = -0.0306f,
                                .regrouped = -0.0259f};
constexpr Constants kPiece32 = {.stage = 0.f,
                                .quad = 0.9327f,
                                .strip = 0.4507f,
                                .least = 2.01f,
                                .long_stage = 1.f,
                                .long_strip = 1.f,
                                .few_stages = 0.f,
                                .loaded = 0.00423f,
                                .distinct = 0.02529f,
                                .exponent = 1.644f,
                                .launch = 2.301f,
                                .tile = 5.557f,
                                .tile_quad = 0.5625f,
                                .cut = 0.1003f,
                                .cut_quad = 0.01118f,
                                .cut_later = 0.f,
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

float wave_time(const Wave& wave, const Constants& k, bool first) {
  const float tile = wave.slowest_tile / float(wave.splits), l2 = k.loaded * float(wave.loaded);
  const float memory = k.distinct * float(wave.distinct), slowest = std::max({tile, l2, memory});
  const auto share = [&](float ns) { return std::pow(ns / slowest, k.exponent); };
  float time = slowest * std::pow(share(tile) + share(l2) + share(memory), 1.f / k.exponent) * kTokens / 1000.f;
  time *= 1.f + (wave.splits == 2 ? k.cut_in_two : wave.splits == 3 ? k.cut_in_three : 0.f);
  const float quads = float(wave.quads);
  if (wave.splits == 1) return time + k.tile + k.tile_quad * quads;
  return time + k.cut + k.cut_quad * quads + (first ? 0.f : k.cut_later);
}

}  // namespace

float predict_back_time(const TileList& list, const BackTiling& tiling) {
  const int piece = list.piece(), per_band = back_lines(piece);
  const Constants& k = piece == 32 ? kPiece32 : tiling.pairs_strips ? kPairsOf64 : kPiece64;
  const std::vector<int32_t> order = costliest_first(list.tiles, piece);
  const StageShape stage = list.stage(tiling);
  const int stage_bytes = stage.strips * piece * 2 * back_stage_tokens(stage.is_long);
  const float depth = 1.f + k.few_stages / float(back_stage_count(stage_bytes));
  const float long_stage = stage.is_long ? k.long_stage : 1.f, long_strip = stage.is_long ? k.long_strip : 1.f;
  std::vector<int64_t> seen[2];  // by operand, x or dy: the last wave that used a strip
  seen[0].assign(tiling.piece_columns, -1), seen[1].assign(tiling.piece_rows, -1);
  float total = k.launch;
  int64_t loaded[2] = {0, 0};  // by tiles that are not transposed, or are
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
      const Bands& bands = *source.bands;
      const bool transposed = source.transposed;
      const BackTileShape shape = list.shape(tile);
      wave.slowest_tile = std::max(wave.slowest_tile,
                                   depth * std::max({long_stage * k.least, long_strip * k.strip * float(shape.loaded()),
                                                     long_stage * k.stage + k.quad * float(shape.quads(piece))}));
      wave.loaded += shape.loaded();
      loaded[transposed] += shape.loaded();
      for (int w = 0; w < 2; ++w) {
        for (int line = 0; line < per_band; ++line) see(!transposed, bands.lines[tile.band[w] * per_band + line]);
        for (int strip = 0; strip < tile.count[w]; ++strip) {
          see(transposed, bands.strip[source.pairs->entries[tile.begin[w] + strip]]);
        }
      }
    }
    const BackTileShape costliest = list.shape(list.tiles[order[first]]);
    wave.quads = costliest.quads(piece);
    const int limit = int(std::min<int64_t>(kBackThreadBlocks / (last - first), kBackMaxSplits));
    const float tile_ns = kTokens * back_token_ns(wave.quads, costliest.loaded(), piece);
    wave.splits = back_splits(tile_ns, wave.quads, limit);
    total += wave_time(wave, k, first == 0);
  }
  const float transposed = float(loaded[true]) / float(loaded[false] + loaded[true]);
  const float gathers_larger = tiling.piece_rows > tiling.piece_columns   ? transposed
                               : tiling.piece_rows < tiling.piece_columns ? 1.f - transposed
                                                                          : 0.f;
  return total * (1.f + gathers_larger * k.gathers_larger) * (1.f + (list.sources.front().paired ? k.paired : 0.f)) *
         (1.f + (loaded[false] > 0 && loaded[true] > 0 ? k.regrouped : 0.f));
}

}  // namespace block_sparse
