#include "work_list_back.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "work_list_back_model.h"
#include "work_list_back_order.h"

namespace block_sparse {
namespace {

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

// The fastest list by the model. `rest`: where its second source lives.
TileList best_list(const Orientation (&orientations)[2], const PieceGrid& grid, Orientation& rest) {
  const BackTiling& tiling = grid.tiling;
  const int piece = tiling.piece, largest = 2 * back_max_strips(piece), step = 64 / piece;
  const bool few = tiling.max_pieces <= kManyTiles * largest;
  const int64_t limit = tile_limit(tiling);
  TileList best;
  float best_time = 0.f;
  Orientation rest_now;
  const auto consider = [&](TileList&& list) {
    if (int64_t(list.tiles.size()) > limit) return false;
    const float time = predict_back_time(list, tiling);
    if (!best.tiles.empty() && time >= best_time) return false;
    best = std::move(list), best_time = time;
    return true;
  };
  for (const Orientation& orientation : orientations) {
    for (const bool paired : {false, true}) {
      const TileSource source{&orientation, paired};
      for (int capacity = largest; capacity >= (few ? step : largest); capacity -= step) {
        if (paired && capacity % (2 * step) != 0) continue;
        consider({{source, {}}, cut_tiles(source, capacity)});
        if (!few || !tiling.pairs_strips) continue;  // others do not gain
        std::vector<Tile> tiles = cut_full_tiles(source, capacity, grid, rest_now);
        if (rest_now.bands.size() == 0 || !consider({{source, {&rest_now, paired}}, std::move(tiles)})) continue;
        rest = std::move(rest_now);
        best.sources[1].orientation = &rest;
      }
    }
  }
  return best;
}

class ListWriter {
 public:
  ListWriter(const PieceGrid& grid, const TileList& list, int32_t* work)
      : grid_(grid), list_(list), work_(work), piece_(grid.tiling.piece), cell_(grid.tiling.cell) {}

  void write() {
    const std::vector<Tile>& tiles = list_.tiles;
    const std::vector<int32_t> order = order_tiles(tiles, piece_);
    int64_t at = kBackHeaderWords + 2 * int64_t(tiles.size());
    int stage_strips = 0, largest_quads = 0;
    for (size_t i = 0; i < order.size(); ++i) {
      const Tile& tile = tiles[order[i]];
      const BackTileShape shape = list_.shape(tile);
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
  const TileSource& source(const Tile& tile) const { return list_.sources[tile.source]; }

  // Both warpgroups' own strips around those that both use: warpgroup 0 takes the common ones last, 1 takes them first.
  int32_t entry(const Tile& tile, int warpgroup, int strip) const {
    const int own = tile.count[0] - tile.common;
    if (warpgroup == 0) strip = strip < own ? strip + tile.common : strip - own;
    return source(tile).pairs().entries[tile.begin[warpgroup] + strip];
  }

  void write_record(const Tile& tile, const BackTileShape& shape, int32_t* record) const {
    const Bands& bands = source(tile).orientation->bands;
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
              slots[(line * cells + row) * columns + strip * cells + column] =
                  slot(number, row, column, shape.transposed);
            }
          }
        }
      }
    }
    if (shape.loaded() % 2 != 0) strips[shape.loaded()] = 0;
  }

  // Of a cell, by its place along M and along N.
  int32_t slot(int32_t number, int along_m, int along_n, bool transposed) const {
    if (number < 0) return -1;
    const int cells = piece_ / cell_;
    const int row = transposed ? along_n : along_m;
    const int column = transposed ? along_m : along_n;
    return grid_.slots[(int64_t(number) * cells + row) * cells + column];
  }

  const PieceGrid& grid_;
  const TileList& list_;
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
  Orientation rest;
  const TileList best = best_list(orientations, grid, rest);
  ListWriter(grid, best, work).write();
}

}  // namespace block_sparse
