#include "work_list_back_tiles.h"

#include <algorithm>
#include <utility>

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

}  // namespace

std::shared_ptr<const Bands> make_bands(const BackTiling& tiling, const PieceLines& lines, bool transposed) {
  return std::make_shared<const Bands>(tiling.piece == 64 ? single_line_bands(lines)
                                                          : two_line_bands(lines, tiling.strips(transposed)));
}

TileSource make_source(const BackTiling& tiling, std::shared_ptr<const Bands> bands, bool transposed, bool paired) {
  std::vector<Match> matches;
  if (paired && !tiling.pairs_strips) {
    matches = match_lists(bands->start, bands->strip, tiling.strips(transposed), tiling.piece == 32);
  } else {
    const int32_t next = paired ? 1 : 0;  // neighbours have the same strips
    for (int32_t band = 0; band < bands->size(); band += 1 + next) matches.push_back({band, band + next});
  }
  auto pairs = std::make_shared<const BandPairs>(pair_bands(*bands, matches));
  return {tiling.piece, transposed, paired, std::move(bands), std::move(pairs)};
}

StageShape TileList::stage(const BackTiling& tiling) const {
  const int piece = tiling.piece;
  StageShape stage{0, 0, false};
  for (const Tile& tile : tiles) {
    const BackTileShape shape = this->shape(tile);
    stage.strips = std::max(stage.strips, shape.loaded());
    for (int w = 0; w < 2; ++w) {
      const int quads = shape.quads(w, piece);
      stage.quads = std::max(stage.quads, quads);
      // A half-filled last quad is multiplied whole: what it reads must lie in the stage too.
      stage.strips = std::max(stage.strips, shape.first_strip(w) + quads * 64 / piece);
    }
  }
  // Where the copy engine has few strips to copy, twice as long boxes are faster: 20 % with two strips, 5 with five;
  // but with three, unless blocks are of whole pairs of strips, they are 7 % slower, which is not understood.
  const int strips = stage.strips * piece / 64;
  const bool gains = piece == 32 ? stage.strips == 8
                                 : strips == 2 || strips == 4 || strips == 5 || (strips == 3 && tiling.pairs_strips);
  stage.is_long = stage.quads <= kBackLongStageQuads && gains;
  return stage;
}

void cut_tiles(const TileSource& source, int number, int capacity, std::vector<Tile>& tiles) {
  for (const BandPair& pair : source.pairs->pairs) cut(number, pair, source.piece, capacity, tiles);
}

void cut_again(const Tile& tile, int piece, int capacity, std::vector<Tile>& tiles) {
  BandPair pair{
      {tile.band[0], tile.band[1]}, {tile.begin[0], tile.begin[1]}, {tile.count[0], tile.count[1]}, tile.common};
  if (tile.band[0] == tile.band[1]) pair.length[0] += tile.count[1];  // the warpgroups' strips follow one another
  cut(tile.source, pair, piece, capacity, tiles);
}

}  // namespace block_sparse
