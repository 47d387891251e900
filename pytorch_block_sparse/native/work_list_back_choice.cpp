#include "work_list_back_choice.h"

#include <algorithm>
#include <utility>

#include "work_list_back_order.h"
#include "work_list_back_stars.h"

namespace block_sparse {
namespace {

constexpr int64_t kManyTiles = 2048;  // full-size tiles from which smaller ones can't fill the waves better
constexpr int kManyWaves = 8;
constexpr int kMostSizes = 2;   // of tiles, where there are more waves
constexpr int kMostRanges = 4;  // token ranges for which a last wave is made even

class TileChoice {
 public:
  TileChoice(const PieceGrid& grid, int64_t limit)
      : grid_(grid), limit_(limit), edge_pieces_(grid.tiling.star_strips() * grid.tiling.star_strips()) {}

  TileList best() {
    const BackTiling& tiling = grid_.tiling;
    const int largest = 2 * back_max_strips(tiling.piece), step = 64 / tiling.piece;
    const bool few = tiling.max_pieces <= kManyTiles * largest;
    const int smallest = few ? step : largest;
    for (const bool transposed : {false, true}) {
      const auto bands = make_bands(tiling, grid_.lines(transposed), transposed);
      for (const bool paired : {false, true}) {
        const TileSource source = make_source(tiling, bands, transposed, paired);
        for (int capacity = largest; capacity >= smallest; capacity -= step) {
          if (paired && capacity % (2 * step) != 0) continue;
          TileList list;
          add_tiles(list, source, capacity);
          if (few) consider_even_ends(list, capacity);
          consider(std::move(list));
        }
      }
    }
    if (few && tiling.piece == 64) {
      const int64_t pieces = int64_t(grid_.by_row.piece.size());
      // Where there are many waves, smaller tiles gain nothing.
      const int64_t least = std::min<int64_t>(pieces / (kManyWaves * kBackThreadBlocks), largest - kMostSizes);
      for (const bool transposed : {false, true}) {
        for (int capacity = largest; capacity > std::max<int64_t>(least, edge_pieces_); capacity -= edge_pieces_) {
          consider_waves(transposed, capacity);
        }
      }
    }
    return std::move(best_);
  }

  // The fewest tiles of as few pieces as make one wave.
  TileList smallest() {
    const int64_t pieces = int64_t(grid_.by_row.piece.size());
    const int capacity = pieces <= kBackThreadBlocks ? 1 : 2;
    TileList best;
    const auto consider_fewer = [&](TileList&& list) {
      if (best.tiles.empty() || list.tiles.size() < best.tiles.size()) best = std::move(list);
    };
    for (const bool transposed : {false, true}) {
      TileList list;
      add_lines(list, grid_.lines(transposed), transposed, false, capacity);
      consider_fewer(std::move(list));
      if (capacity % edge_pieces_ != 0) continue;
      TileList stars;
      add_run(stars, transposed, 0, pieces, capacity);
      consider_fewer(std::move(stars));
    }
    return best;
  }

 private:
  static void add_tiles(TileList& list, TileSource source, int capacity) {
    cut_tiles(source, int(list.sources.size()), capacity, list.tiles);
    list.sources.push_back(std::move(source));
  }

  void add_lines(TileList& list, const PieceLines& lines, bool transposed, bool paired, int capacity) const {
    const BackTiling& tiling = grid_.tiling;
    add_tiles(list, make_source(tiling, make_bands(tiling, lines, transposed), transposed, paired), capacity);
  }

  // Tiles of `capacity` strips each, from runs of the lines that fill a wave: its strips are then those of few lines.
  // What is left of the last run, in tiles of any size that makes one wave of it.
  void consider_waves(bool transposed, int capacity) {
    const int64_t pieces = int64_t(grid_.by_row.piece.size());
    TileList waves;
    int64_t done = 0;
    for (int64_t wave = int64_t(kBackThreadBlocks) * capacity; done + wave <= pieces; done += wave) {
      add_run(waves, transposed, done, done + wave, capacity);
    }
    for (int last = capacity; last > 0 && last * int64_t(kBackThreadBlocks) >= pieces - done; last -= edge_pieces_) {
      TileList list = waves;
      if (done < pieces) add_run(list, transposed, done, pieces, last);
      consider_even_ends(list, last);
      consider(std::move(list));
      if (done == pieces) return;
    }
  }

  void add_run(TileList& list, bool transposed, int64_t first, int64_t last, int capacity) const {
    const StarSides sides = split_into_stars(grid_, first, last, capacity / edge_pieces_, transposed);
    const bool paired = grid_.tiling.pairs_strips;
    add_lines(list, sides.lines, transposed, paired, capacity);
    add_lines(list, sides.other_lines, !transposed, paired, capacity);
  }

  // A list of tiles of `capacity` strips with smaller ones in its last wave, as even as they can be if every thread
  // block has one, or a token range of one.
  void consider_even_ends(const TileList& list, int capacity) {
    if (int64_t(list.tiles.size()) > limit_) return;
    const int piece = grid_.tiling.piece, step = 64 / piece;
    const std::vector<int32_t> order = costliest_first(list.tiles, piece);
    const int64_t whole = int64_t(order.size()) / kBackThreadBlocks * kBackThreadBlocks;
    TileList even{list.sources, {}};
    for (int64_t i = 0; i < whole; ++i) even.tiles.push_back(list.tiles[order[i]]);
    size_t before = order.size() - whole;  // tiles of the last wave, in what was considered last
    std::vector<Tile> last;
    int size = capacity;  // of the tiles of `last`, in strips
    for (int ranges = kMostRanges; ranges >= 1; --ranges) {
      while (size > step) {
        std::vector<Tile> cut;
        for (size_t i = whole; i < order.size(); ++i) cut_again(list.tiles[order[i]], piece, size - step, cut);
        if (int64_t(cut.size()) > kBackThreadBlocks / ranges) break;
        last = std::move(cut), size -= step;
      }
      if (last.size() <= before) continue;
      before = last.size();
      TileList candidate = even;
      candidate.tiles.insert(candidate.tiles.end(), last.begin(), last.end());
      consider(std::move(candidate));
    }
  }

  void consider(TileList&& list) {
    if (int64_t(list.tiles.size()) > limit_) return;
    const float time = predict_back_time(list, grid_.tiling);
    if (!best_.tiles.empty() && time >= best_time_) return;
    best_ = std::move(list), best_time_ = time;
  }

  const PieceGrid& grid_;
  const int64_t limit_;
  const int edge_pieces_;  // that tiles are made of (work_list_back_stars.h)
  TileList best_;
  float best_time_ = 0.f;
};

}  // namespace

bool has_small_tiles(const BackTiling& tiling) {
  return tiling.piece == 64 && tiling.max_pieces <= 2 * kBackThreadBlocks;
}

TileList choose_small_tiles(const PieceGrid& grid) { return TileChoice(grid, grid.tiling.max_pieces).smallest(); }

TileList choose_tiles(const PieceGrid& grid, int64_t limit) { return TileChoice(grid, limit).best(); }

}  // namespace block_sparse
