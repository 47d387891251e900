#include "work_list_back_tiles.h"

#include <algorithm>

namespace block_sparse {
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int count_bits(uint64_t bits) { return __builtin_popcountll(bits); }

struct Match {
  int32_t first;
  int32_t second;  // the first again where no partner is left
};

// Pairs the lists that have many numbers in common, greedily: each with the best partner still free, by twice the
// overlap, less the partner's length where `union_counts` (what the two lists' union holds is then paid for).
// Overlaps are counted on bit sets folded to a few words, and only the nearest free partners are looked at where there
// are many lists, so that the time stays near-linear in the entries.
std::vector<Match> match_lists(const std::vector<int32_t>& start, const std::vector<int32_t>& numbers, int64_t range,
                               bool union_counts) {
  const int64_t lists = int64_t(start.size()) - 1;
  std::vector<int32_t> free_lists;
  for (int64_t list = 0; list < lists; ++list) {
    if (start[list + 1] > start[list]) free_lists.push_back(int32_t(list));
  }
  const int64_t used = int64_t(free_lists.size());
  if (used == 0) return {};
  const int64_t words = std::clamp(std::min(divide_up(range, 64), (int64_t(1) << 22) / used), int64_t(1), int64_t(16));
  std::vector<uint64_t> bits(used * words, 0);
  for (int64_t i = 0; i < used; ++i) {
    for (int32_t entry = start[free_lists[i]]; entry < start[free_lists[i] + 1]; ++entry) {
      const uint64_t bit = uint64_t(numbers[entry]) % uint64_t(words * 64);
      bits[i * words + bit / 64] |= uint64_t(1) << bit % 64;
    }
  }
  const int64_t budget = 1000000 + 20 * int64_t(numbers.size());  // words to compare
  const int64_t window = std::max(int64_t(8), budget / (used * words));
  std::vector<int32_t> next(used), previous(used);  // the free lists, linked
  for (int64_t i = 0; i < used; ++i) next[i] = int32_t(i + 1), previous[i] = int32_t(i - 1);
  std::vector<bool> taken(used, false);
  std::vector<Match> matches;
  for (int64_t i = 0; i < used; ++i) {
    if (taken[i]) continue;
    int64_t best = -1, best_score = 0, looked_at = 0;
    for (int64_t j = next[i]; j < used && looked_at < window; j = next[j], ++looked_at) {
      int64_t overlap = 0;
      for (int64_t word = 0; word < words; ++word)
        overlap += count_bits(bits[i * words + word] & bits[j * words + word]);
      const int64_t length = start[free_lists[j] + 1] - start[free_lists[j]];
      const int64_t score = 2 * overlap - (union_counts ? length : 0);
      if (best < 0 || score > best_score) best = j, best_score = score;
    }
    if (best >= 0) {
      taken[best] = true;
      if (next[best] < used) previous[next[best]] = previous[best];
      next[previous[best]] = next[best];
    }
    matches.push_back({free_lists[i], best < 0 ? free_lists[i] : free_lists[best]});
  }
  return matches;
}

// Bands of one line: 64 features.
Bands single_line_bands(const PieceLines& lines) {
  Bands bands;
  bands.start.push_back(0);
  for (int64_t line = 0; line < lines.lines(); ++line) {
    if (lines.length(line) == 0) continue;
    bands.lines.push_back(int32_t(line));
    bands.start.push_back(lines.start[line + 1]);
  }
  bands.strip = lines.strip;
  bands.piece = lines.piece;
  return bands;
}

// Bands of two lines of 32 features.
Bands two_line_bands(const PieceLines& lines, int64_t strips) {
  Bands bands;
  bands.start.push_back(0);
  for (const Match& match : match_lists(lines.start, lines.strip, strips, true)) {
    bands.lines.insert(bands.lines.end(), {match.first, match.second});
    int32_t i = lines.start[match.first], i_end = lines.start[match.first + 1];
    int32_t j = lines.start[match.second], j_end = lines.start[match.second + 1];
    if (match.second == match.first) j = j_end;
    while (i < i_end || j < j_end) {
      const bool use_first = j == j_end || (i < i_end && lines.strip[i] <= lines.strip[j]);
      const bool use_second = i == i_end || (j < j_end && lines.strip[j] <= lines.strip[i]);
      bands.strip.push_back(use_first ? lines.strip[i] : lines.strip[j]);
      bands.piece.push_back(use_first ? lines.piece[i] : -1);
      bands.piece.push_back(use_second ? lines.piece[j] : -1);
      i += use_first;
      j += use_second;
    }
    bands.start.push_back(int32_t(bands.strip.size()));
  }
  return bands;
}

BandPairs pair_bands(const Bands& bands, const std::vector<Match>& matches) {
  BandPairs result;
  std::vector<int32_t> only[2];
  for (const Match& match : matches) {
    BandPair pair{{match.first, match.second}, {0, 0}, {0, 0}, 0};
    const int32_t begin = int32_t(result.entries.size());
    int32_t i = bands.start[match.first], i_end = bands.start[match.first + 1];
    int32_t j = bands.start[match.second], j_end = bands.start[match.second + 1];
    if (match.second == match.first) j = j_end;
    only[0].clear(), only[1].clear();
    while (i < i_end || j < j_end) {
      if (j == j_end || (i < i_end && bands.strip[i] < bands.strip[j])) {
        only[0].push_back(i++);
      } else if (i == i_end || bands.strip[j] < bands.strip[i]) {
        only[1].push_back(j++);
      } else {
        result.entries.push_back(i++);
        ++j;
        ++pair.common;
      }
    }
    pair.begin[0] = begin;
    pair.length[0] = pair.common + int32_t(only[0].size());
    result.entries.insert(result.entries.end(), only[0].begin(), only[0].end());
    pair.begin[1] = int32_t(result.entries.size());
    pair.length[1] = pair.common + int32_t(only[1].size());
    // The second band's own entries for what both use.
    for (int32_t entry = bands.start[match.second], common = 0; common < pair.common; ++entry) {
      if (bands.strip[entry] != bands.strip[result.entries[begin + common]]) continue;
      result.entries.push_back(entry);
      ++common;
    }
    result.entries.insert(result.entries.end(), only[1].begin(), only[1].end());
    result.pairs.push_back(pair);
  }
  return result;
}

// Tiles of one band: both warpgroups share its M side, each takes half of the strips.
void cut_single(int source, int32_t band, int32_t begin, int32_t length, int piece, int capacity,
                std::vector<Tile>& tiles) {
  if (length <= 0) return;
  const int64_t parts = divide_up(length, capacity);
  const int even = 64 / piece;  // strips that fill a quad
  for (int64_t part = 0; part < parts; ++part) {
    const int32_t first = int32_t(length * part / parts), last = int32_t(length * (part + 1) / parts);
    const int32_t count = last - first;
    const int32_t half = std::min(count, int32_t(divide_up(count, 2 * even) * even));
    tiles.push_back(
        {source, {band, band}, {begin + first, begin + first + half}, {uint8_t(half), uint8_t(count - half)}, 0});
  }
}

// Tiles of two bands side by side, while both last; then the rest of the longer one.
void cut_pair(int source, const BandPair& pair, int piece, int capacity, std::vector<Tile>& tiles) {
  const int even = 64 / piece;
  const int64_t most = std::max(capacity / 2, 1);
  const int32_t shorter = std::min(pair.length[0], pair.length[1]), longer = std::max(pair.length[0], pair.length[1]);
  const int64_t parts = divide_up(shorter, most);
  // Equal parts; the longer list is taken along where it fits.
  const int64_t together = divide_up(longer, most) == parts ? longer : shorter;
  const int32_t each = int32_t(std::min(most, divide_up(divide_up(together, parts), even) * even));
  int32_t taken = 0;
  for (; taken < shorter; taken += each) {
    Tile tile{source, {pair.band[0], pair.band[1]}, {pair.begin[0] + taken, pair.begin[1] + taken}, {0, 0}, 0};
    for (int w = 0; w < 2; ++w) tile.count[w] = uint8_t(std::min(each, pair.length[w] - taken));
    tile.common = uint8_t(std::clamp(pair.common - taken, 0, each));
    tiles.push_back(tile);
  }
  for (int w = 0; w < 2; ++w) {
    cut_single(source, pair.band[w], pair.begin[w] + taken, pair.length[w] - taken, piece, capacity, tiles);
  }
}

void cut(int source, const BandPair& pair, int piece, int capacity, std::vector<Tile>& tiles) {
  if (pair.band[0] == pair.band[1]) {
    cut_single(source, pair.band[0], pair.begin[0], pair.length[0], piece, capacity, tiles);
  } else {
    cut_pair(source, pair, piece, capacity, tiles);
  }
}

Orientation orient(int piece, bool transposed, const PieceLines& lines, int64_t strips) {
  Orientation result;
  result.piece = piece;
  result.transposed = transposed;
  result.bands = piece == 64 ? single_line_bands(lines) : two_line_bands(lines, strips);
  const Bands& bands = result.bands;
  std::vector<Match> alone;
  for (int64_t band = 0; band < bands.size(); ++band) alone.push_back({int32_t(band), int32_t(band)});
  result.single = pair_bands(bands, alone);
  result.paired = pair_bands(bands, match_lists(bands.start, bands.strip, strips, piece == 32));
  return result;
}

// The pieces that bands leave to the other orientation.
class Leftovers {
 public:
  Leftovers(const Bands& bands, int per_band) : bands_(bands), per_band_(per_band) {}

  // Entry `entry` of Bands::strip.
  void add(int32_t band, int32_t entry) {
    for (int line = 0; line < per_band_; ++line) {
      const int32_t piece = bands_.piece[entry * per_band_ + line];
      if (piece >= 0) pieces_.push_back({bands_.strip[entry], bands_.lines[band * per_band_ + line], piece});
    }
  }

  // As lines of the other orientation, of which there are `lines`.
  PieceLines regrouped(int64_t lines) {
    std::sort(pieces_.begin(), pieces_.end());
    PieceLines result;
    result.start.assign(lines + 1, 0);
    for (const Piece& piece : pieces_) {
      ++result.start[piece.line + 1];
      result.strip.push_back(piece.strip);
      result.piece.push_back(piece.number);
    }
    for (int64_t line = 0; line < lines; ++line) result.start[line + 1] += result.start[line];
    return result;
  }

 private:
  struct Piece {
    int32_t line, strip, number;
    bool operator<(const Piece& other) const { return line != other.line ? line < other.line : strip < other.strip; }
  };
  const Bands& bands_;
  const int per_band_;
  std::vector<Piece> pieces_;
};

}  // namespace

Orientation orient(const PieceGrid& grid, bool transposed) {
  return transposed ? orient(grid.tiling.piece, true, grid.by_column, grid.tiling.piece_rows)
                    : orient(grid.tiling.piece, false, grid.by_row, grid.tiling.piece_columns);
}

std::vector<Tile> cut_tiles(const TileSource& source, int capacity) {
  std::vector<Tile> tiles;
  for (const BandPair& pair : source.pairs().pairs) cut(0, pair, source.orientation->piece, capacity, tiles);
  return tiles;
}

std::vector<Tile> cut_full_tiles(const TileSource& source, int capacity, const PieceGrid& grid, Orientation& rest) {
  const Orientation& orientation = *source.orientation;
  const int piece = orientation.piece, per_band = back_lines(piece);
  const std::vector<int32_t>& entries = source.pairs().entries;
  std::vector<Tile> tiles;
  Leftovers leftovers(orientation.bands, per_band);
  for (BandPair pair : source.pairs().pairs) {
    const bool alone = pair.band[0] == pair.band[1];
    const int32_t length = pair.length[0], most = alone ? capacity : std::max(capacity / 2, 1);
    const int32_t last = length % most;
    if (last != 0 && last <= most / 2 && (alone || (pair.common == length && pair.length[1] == length))) {
      for (int w = 0; w < (alone ? 1 : 2); ++w) {
        for (int32_t i = length - last; i < length; ++i) leftovers.add(pair.band[w], entries[pair.begin[w] + i]);
      }
      pair.length[0] = pair.length[1] = length - last;
      pair.common = std::min(pair.common, length - last);
    }
    if (pair.length[0] + pair.length[1] > 0) cut(0, pair, piece, capacity, tiles);
  }
  const bool transposed = !orientation.transposed;
  const int64_t rows = grid.tiling.piece_rows, columns = grid.tiling.piece_columns;
  rest = orient(piece, transposed, leftovers.regrouped(transposed ? columns : rows), transposed ? rows : columns);
  for (const BandPair& pair : TileSource{&rest, source.paired}.pairs().pairs) cut(1, pair, piece, capacity, tiles);
  return tiles;
}

}  // namespace block_sparse
