#include "work_list_back.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "work_list_back_choice.h"
#include "work_list_back_order.h"

namespace block_sparse {
namespace {

constexpr int64_t kMaxStrips = 65535;  // their numbers have 16 bits
constexpr int64_t kFewTiles = 1024;    // lists up to this length may have tiles below full size

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

int64_t align(int64_t words) { return divide_up(words, 4) * 4; }  // a list's header is read as vectors

int64_t list_size(const BackTiling& tiling) {
  // A tile's directory entry, the strips of its M side (of two bands at most), of its N side (one a piece at most) and
  // half a word to fill the last; the slots of its pieces.
  const int64_t cells = tiling.cells(), lines = back_lines(tiling.piece);
  const int64_t half_words = (2 * (2 + lines) + 1) * tile_limit(tiling) + tiling.max_pieces;
  return align(kBackHeaderWords + divide_up(half_words, 2) + lines * cells * cells * tiling.max_pieces);
}

// Of tiles of one or two pieces: four words of the first kind, six of the second.
int64_t small_list_size(const BackTiling& tiling) {
  return has_small_tiles(tiling) ? align(kBackHeaderWords + 4 * tiling.max_pieces) : 0;
}

class ListWriter {
 public:
  ListWriter(const PieceGrid& grid, TileList list, int32_t* work)
      : grid_(grid), list_(std::move(list)), work_(work), piece_(grid.tiling.piece), cell_(grid.tiling.cell) {}

  void write() {
    const std::vector<Tile>& tiles = list_.tiles;
    const std::vector<int32_t> order = order_tiles(tiles, piece_);
    const StageShape stage = list_.stage(grid_.tiling);
    const int32_t header[kBackHeaderWords] = {int32_t(tiles.size()), stage.strips, stage.quads, stage.is_long};
    std::memcpy(work_, header, sizeof(header));
    int64_t at = kBackHeaderWords + 2 * int64_t(tiles.size());
    for (size_t i = 0; i < order.size(); ++i) {
      const Tile& tile = tiles[order[i]];
      const BackTileShape shape = list_.shape(tile);
      work_[kBackHeaderWords + 2 * i] = int32_t(at);
      work_[kBackHeaderWords + 2 * i + 1] = int32_t(shape.encode());
      write_record(tile, shape, work_ + at);
      at += back_record_words(shape, piece_, cell_);
    }
  }

 private:
  const TileSource& source(const Tile& tile) const { return list_.sources[tile.source]; }

  // Both warpgroups' own strips around those that both use: warpgroup 0 takes the common ones last, 1 takes them first.
  int32_t entry(const Tile& tile, int warpgroup, int strip) const {
    const int own = tile.count[0] - tile.common;
    if (warpgroup == 0) strip = strip < own ? strip + tile.common : strip - own;
    return source(tile).pairs->entries[tile.begin[warpgroup] + strip];
  }

  void write_record(const Tile& tile, const BackTileShape& shape, int32_t* record) const {
    const Bands& bands = *source(tile).bands;
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
  const TileList list_;
  int32_t* work_;
  const int piece_;
  const int cell_;
};

}  // namespace

int64_t back_work_size(const Geometry& geometry) {
  if (!is_served(geometry)) return 0;
  const BackTiling tiling(geometry);
  return list_size(tiling) + small_list_size(tiling);
}

const int32_t* back_list(const Geometry& geometry, const int32_t* work, int64_t tokens) {
  const BackTiling tiling(geometry);
  return tokens <= kBackFewTokens && has_small_tiles(tiling) ? work + list_size(tiling) : work;
}
int64_t back_max_pieces(const Geometry& geometry) { return BackTiling(geometry).max_pieces; }

void build_back_work(const Geometry& geometry, const PatternIndex& index, int32_t* work) {
  if (!is_served(geometry)) return;
  const PieceGrid grid(geometry, index);
  ListWriter(grid, choose_tiles(grid, tile_limit(grid.tiling)), work).write();
  if (has_small_tiles(grid.tiling)) ListWriter(grid, choose_small_tiles(grid), work + list_size(grid.tiling)).write();
}

}  // namespace block_sparse
