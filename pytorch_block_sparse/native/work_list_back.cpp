#include "work_list_back.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "work_list_back_order.h"

namespace block_sparse {
namespace {

// The list is the same for every device and every number of tokens; tile sizes are weighed for these.
constexpr float kTokens = 8192.f;
constexpr float kLaunchNs = 5000.f;
constexpr float kTileNs = 400.f;  // to start and to store a tile

// Nanoseconds per token that a wave's strips take together: all that are loaded, on the way from L2, and the distinct
// ones, on the way to it. Strips of 64 and of 32 features.
constexpr float loaded_ns(int piece) { return piece == 64 ? 1.06f / kBackThreadBlocks : 0.81f / kBackThreadBlocks; }
constexpr float distinct_ns(int piece) { return piece == 64 ? 0.028f : 0.019f; }

constexpr int64_t kMaxStrips = 65535;  // their numbers have 16 bits
constexpr int64_t kFewTiles = 1024;    // lists up to this length may have tiles below full size
constexpr int64_t kManyTiles = 2048;   // full-size tiles from which smaller ones can't fill the waves better

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool is_served(const Geometry& geometry) {
  if (geometry.block_height % 16 != 0 || geometry.block_width % 16 != 0 || geometry.nnz == 0) return false;
  const BackTiling tiling(geometry);
  return tiling.piece_rows <= kMaxStrips && tiling.piece_columns <= kMaxStrips && tiling.max_pieces < (1 << 28);
}

// Tiles that the list has at most: one a piece; or with full-size tiles, whose lists are cut at half the capacity, so
// that every band has at most one short tile for each side's lists.
int64_t tile_limit(const BackTiling& tiling) {
  const int64_t bands = divide_up(std::min(tiling.piece_rows, tiling.piece_columns), back_lines(tiling.piece));
  return std::min(tiling.max_pieces,
                  std::max(kFewTiles, 2 * bands + divide_up(tiling.max_pieces, back_max_strips(tiling.piece))));
}

struct Candidate {
  const Orientation* orientation = nullptr;
  const BandPairs* pairs = nullptr;
  int capacity = 0;
  std::vector<Tile> tiles() const { return cut_tiles(*pairs, orientation->piece, capacity); }
};

// Nanoseconds that the tiles take together: every wave its costliest tile, or the strips of all its tiles.
float predict_ns(const Candidate& candidate, const std::vector<Tile>& tiles) {
  const int piece = candidate.orientation->piece;
  const Bands& bands = candidate.orientation->bands;
  const std::vector<int32_t> order = costliest_first(tiles, piece);
  const int per_band = back_lines(piece);
  std::vector<int64_t> seen[2];  // the last wave that used a strip of N, of M
  seen[0].assign(kMaxStrips + 1, -1), seen[1].assign(kMaxStrips + 1, -1);
  float total = kLaunchNs;
  const int64_t count = int64_t(tiles.size());
  for (int64_t first = 0, wave = 0; first < count; first += kBackThreadBlocks, ++wave) {
    const int64_t last = std::min<int64_t>(first + kBackThreadBlocks, count);
    int64_t distinct = 0, loaded = 0;
    const auto see = [&](int side, int32_t strip) {
      distinct += seen[side][strip] != wave;
      seen[side][strip] = wave;
    };
    for (int64_t i = first; i < last; ++i) {
      const Tile& tile = tiles[order[i]];
      loaded += tile.lines(piece) + tile.strips();
      for (int w = 0; w < 2; ++w) {
        for (int line = 0; line < per_band; ++line) see(1, bands.lines[tile.band[w] * per_band + line]);
        for (int strip = 0; strip < tile.count[w]; ++strip) {
          see(0, bands.strip[candidate.pairs->entries[tile.begin[w] + strip]]);
        }
      }
    }
    const BackTileShape costliest = tiles[order[first]].shape(piece, false);
    const float tile_ns = kTokens * back_token_ns(costliest.quads(piece), costliest.loaded(), piece);
    const int limit = int(std::min<int64_t>(kBackThreadBlocks / (last - first), kBackMaxSplits));
    const int splits = back_splits(tile_ns, costliest.quads(piece), limit);
    const float strips_ns = kTokens * (loaded_ns(piece) * float(loaded) + distinct_ns(piece) * float(distinct));
    total += std::max(tile_ns / float(splits), strips_ns) + back_split_ns(costliest.quads(piece), splits) + kTileNs;
  }
  return total;
}

// What the model misses, measured: lists of the operand with more features are gathered from more places, and where two
// bands of 32-feature lines meet, their lists disagree too much for the copy engine.
float correction(const Candidate& candidate, const BackTiling& tiling) {
  const bool paired = candidate.pairs == &candidate.orientation->paired;
  const bool transposed = candidate.orientation->transposed;  // N runs along dy
  const bool gathers_larger =
      transposed ? tiling.piece_rows > tiling.piece_columns : tiling.piece_columns > tiling.piece_rows;
  return (gathers_larger ? 1.06f : 1.f) * (paired && candidate.orientation->piece == 32 ? 1.06f : 1.f);
}

Candidate best_candidate(const Orientation (&orientations)[2], const BackTiling& tiling) {
  const int piece = tiling.piece, largest = 2 * back_max_strips(piece), step = 64 / piece;
  const bool few = tiling.max_pieces <= kManyTiles * largest;
  const int64_t limit = tile_limit(tiling);
  Candidate best;
  float best_ns = 0.f;
  for (const Orientation& orientation : orientations) {
    for (const BandPairs* pairs : {&orientation.single, &orientation.paired}) {
      for (int capacity = largest; capacity >= (few ? step : largest); capacity -= step) {
        if (pairs == &orientation.paired && capacity % (2 * step) != 0) continue;
        const Candidate candidate{&orientation, pairs, capacity};
        const std::vector<Tile> tiles = candidate.tiles();
        if (int64_t(tiles.size()) > limit) break;
        const float ns = predict_ns(candidate, tiles) * correction(candidate, tiling);
        if (best.pairs == nullptr || ns < best_ns) best = candidate, best_ns = ns;
      }
    }
  }
  return best;
}

class ListWriter {
 public:
  ListWriter(const PieceGrid& grid, const Candidate& candidate, int32_t* work)
      : grid_(grid), candidate_(candidate), work_(work), piece_(grid.tiling.piece), cell_(grid.tiling.cell) {}

  void write(const std::vector<Tile>& tiles) {
    const std::vector<int32_t> order = order_tiles(tiles, piece_);
    int64_t at = kBackHeaderWords + 2 * int64_t(tiles.size());
    int stage_strips = 0, largest_quads = 0;
    for (size_t i = 0; i < order.size(); ++i) {
      const Tile& tile = tiles[order[i]];
      const BackTileShape shape = tile.shape(piece_, candidate_.orientation->transposed);
      stage_strips = std::max(stage_strips, shape.loaded());
      for (int w = 0; w < 2; ++w) {
        const int quads = shape.quads(w, piece_);
        largest_quads = std::max(largest_quads, quads);
        // A half-filled last quad is multiplied whole: what it reads must lie in the stage too.
        stage_strips = std::max(stage_strips, shape.first_strip(w) + quads * 64 / piece_);
      }
      work_[kBackHeaderWords + 2 * i] = int32_t(at);
      work_[kBackHeaderWords + 2 * i + 1] = int32_t(shape.encode());
      write_record(tile, shape, work_ + at);
      at += back_record_words(shape, piece_, cell_);
    }
    const int32_t header[kBackHeaderWords] = {int32_t(tiles.size()), stage_strips, largest_quads};
    std::memcpy(work_, header, sizeof(header));
  }

 private:
  // Both warpgroups' own strips around those that both use: warpgroup 0 takes the common ones last, 1 takes them first.
  int32_t entry(const Tile& tile, int warpgroup, int strip) const {
    const int own = tile.count[0] - tile.common;
    if (warpgroup == 0) strip = strip < own ? strip + tile.common : strip - own;
    return candidate_.pairs->entries[tile.begin[warpgroup] + strip];
  }

  void write_record(const Tile& tile, const BackTileShape& shape, int32_t* record) const {
    const Bands& bands = candidate_.orientation->bands;
    const int per_band = back_lines(piece_), cells = piece_ / cell_;
    auto* strips = reinterpret_cast<uint16_t*>(record);
    for (int w = 0; w < 2; ++w) {
      for (int line = 0; line < per_band; ++line) {
        strips[shape.first_line(w, piece_) + line] = uint16_t(bands.lines[tile.band[w] * per_band + line]);
      }
      int32_t* slots = record + back_slots_offset(shape, w, piece_, cell_);
      const int columns = tile.count[w] * cells;
      for (int strip = 0; strip < tile.count[w]; ++strip) {
        const int32_t at = entry(tile, w, strip);
        strips[shape.first_strip(w) + strip] = uint16_t(bands.strip[at]);
        for (int line = 0; line < per_band; ++line) {
          const int32_t number = bands.piece[at * per_band + line];
          for (int row = 0; row < cells; ++row) {
            for (int column = 0; column < cells; ++column) {
              slots[(line * cells + row) * columns + strip * cells + column] = slot(number, row, column);
            }
          }
        }
      }
    }
    if (shape.loaded() % 2 != 0) strips[shape.loaded()] = 0;
  }

  // Of a cell, by its place along M and along N.
  int32_t slot(int32_t number, int along_m, int along_n) const {
    if (number < 0) return -1;
    const int cells = piece_ / cell_;
    const int row = candidate_.orientation->transposed ? along_n : along_m;
    const int column = candidate_.orientation->transposed ? along_m : along_n;
    return grid_.slots[(int64_t(number) * cells + row) * cells + column];
  }

  const PieceGrid& grid_;
  const Candidate& candidate_;
  int32_t* work_;
  const int piece_;
  const int cell_;
};

}  // namespace

int64_t back_work_size(const Geometry& geometry) {
  if (!is_served(geometry)) return 0;
  const BackTiling tiling(geometry);
  // A tile of e strip entries (at most one a piece): its directory entry, its lines of M, then half a word and the
  // slots of each entry.
  const int64_t cells = tiling.cells();
  const int64_t slots_of_entry = back_lines(tiling.piece) * cells * cells;
  const int64_t words_of_tile = 2 + back_lines(tiling.piece) + 1;
  return kBackHeaderWords + words_of_tile * tile_limit(tiling) + (tiling.max_pieces + 1) / 2 +
         slots_of_entry * tiling.max_pieces;
}

int64_t back_max_pieces(const Geometry& geometry) { return BackTiling(geometry).max_pieces; }

void build_back_work(const Geometry& geometry, const PatternIndex& index, int32_t* work) {
  if (!is_served(geometry)) return;
  const PieceGrid grid(geometry, index);
  const Orientation orientations[2] = {orient(grid, false), orient(grid, true)};
  const Candidate best = best_candidate(orientations, grid.tiling);
  ListWriter(grid, best, work).write(best.tiles());
}

}  // namespace block_sparse
