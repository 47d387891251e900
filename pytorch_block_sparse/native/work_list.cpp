#include "work_list.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <future>
#include <numeric>
#include <vector>

#include "work_list_back.h"

namespace block_sparse {
namespace sm90 {
namespace {

// The pattern as one direction of dense x sparse sees it: block lines (rows forward, columns for the input gradient) of
// blocks, each cut into pieces of `side`.
struct DirectionView {
  int64_t side;
  int64_t cluster;  // thread blocks that compute a group
  int64_t block_lines;
  int64_t inner_blocks;     // blocks along the inner dimension
  int64_t lines_per_block;  // pieces of a block along the outputs
  int64_t parts_per_block;  // and along the inner dimension
  int64_t piece_line_step;  // how the number of a piece grows with its line and its part within the block
  int64_t piece_part_step;
  int64_t pieces_per_row;  // of `values`
  int64_t nnz;

  DirectionView(const Geometry& geometry, Direction direction)
      : side(dense_sparse_side(geometry)), cluster(cluster_size(geometry, direction)), nnz(geometry.nnz) {
    const int64_t tall = geometry.block_height / side;
    const int64_t wide = geometry.block_width / side;
    const bool forward = direction == Direction::kForward;
    block_lines = forward ? geometry.grid_rows() : geometry.grid_cols();
    inner_blocks = forward ? geometry.grid_cols() : geometry.grid_rows();
    lines_per_block = forward ? tall : wide;
    parts_per_block = forward ? wide : tall;
    piece_line_step = forward ? wide : 1;
    piece_part_step = forward ? 1 : wide;
    pieces_per_row = wide;
  }

  int64_t group_lines() const { return cluster * kGroupOutputs / side; }
  int64_t lines() const { return block_lines * lines_per_block; }
  int64_t groups() const { return (lines() + group_lines() - 1) / group_lines(); }
  int64_t chunk_inputs() const { return side == 32 ? NarrowWork<32>::kChunkInputs : kItemInputs; }
  int64_t chunks() const { return (inner_blocks * parts_per_block * side + chunk_inputs() - 1) / chunk_inputs(); }
  int64_t pieces_per_block() const { return lines_per_block * parts_per_block; }
  int64_t pieces() const { return nnz * pieces_per_block(); }
  // Where a piece begins in `values`, in `side` elements.
  int64_t offset(int64_t piece) const {
    return piece / pieces_per_row * pieces_per_row * side + piece % pieces_per_row;
  }

  // An item has as many chunks as it can; each group's last may have fewer.
  int64_t most_items() const {
    const int64_t item_chunks = kItemInputs / chunk_inputs();
    return std::min((pieces() + groups() * (item_chunks - 1)) / item_chunks,
                    groups() * ((chunks() + item_chunks - 1) / item_chunks));
  }
};

struct LineIndexView {
  const int32_t* offsets;  // [block_lines + 1]
  const int32_t* indices;  // [nnz] ascending within a line
  const int32_t* slots;    // [nnz]
};

// Bundles of block lines that share blocks, all of the same size but the last, which may be smaller. Each round joins
// those of the same size in pairs, the pairs with the most common blocks first, greedily, and those left over with one
// another: a smaller bundle in between would shift the lines behind it, and a half's would be of two bundles. Pairs are
// searched within segments of neighbouring bundles, which bounds a round to about kOperationsPerBlock word operations a
// block.
using Bundle = std::vector<int32_t>;

std::vector<Bundle> pair_bundles(const DirectionView& view, const LineIndexView& index,
                                 const std::vector<Bundle>& bundles) {
  constexpr int64_t kOperationsPerBlock = 60;
  constexpr int64_t kLeastOperations = 1 << 20;
  constexpr int64_t kMostSegment = 2048;
  const int64_t total = bundles.size();
  const int64_t equal = bundles.back().size() < bundles.front().size() ? total - 1 : total;
  const int64_t words = (view.inner_blocks + 63) / 64;
  const int64_t operations = std::max(kLeastOperations, kOperationsPerBlock * view.nnz);
  const int64_t segment = std::clamp(2 * operations / (total * words), int64_t(2), kMostSegment) / 2 * 2;

  struct Candidate {
    int32_t common, first, second;
  };
  std::vector<uint64_t> bits;
  std::vector<Candidate> candidates, sorted;
  std::vector<int32_t> starts;
  std::vector<int32_t> partner(equal, -1);
  for (int64_t begin = 0; begin < equal; begin += segment) {
    const int64_t count = std::min(segment, equal - begin);
    bits.assign(count * words, 0);
    for (int64_t i = 0; i < count; ++i) {
      for (const int32_t line : bundles[begin + i]) {
        for (int32_t entry = index.offsets[line]; entry < index.offsets[line + 1]; ++entry) {
          bits[i * words + index.indices[entry] / 64] |= uint64_t(1) << (index.indices[entry] % 64);
        }
      }
    }
    candidates.clear();
    int32_t most = 0;
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j = i + 1; j < count; ++j) {
        int32_t common = 0;
        for (int64_t word = 0; word < words; ++word) {
          common += std::popcount(bits[i * words + word] & bits[j * words + word]);
        }
        if (common == 0) continue;
        most = std::max(most, common);
        candidates.push_back({common, int32_t(begin + i), int32_t(begin + j)});
      }
    }
    // A stable counting sort, most common first.
    starts.assign(most + 2, 0);
    for (const Candidate& candidate : candidates) ++starts[most - candidate.common + 1];
    std::partial_sum(starts.begin(), starts.end(), starts.begin());
    sorted.resize(candidates.size());
    for (const Candidate& candidate : candidates) sorted[starts[most - candidate.common]++] = candidate;
    for (const Candidate& candidate : sorted) {
      if (partner[candidate.first] >= 0 || partner[candidate.second] >= 0) continue;
      partner[candidate.first] = candidate.second;
      partner[candidate.second] = candidate.first;
    }
  }
  int32_t left = -1;  // has no partner yet
  for (int32_t i = 0; i < equal; ++i) {
    if (partner[i] >= 0) continue;
    if (left < 0) {
      left = i;
    } else {
      partner[left] = i;
      partner[i] = left;
      left = -1;
    }
  }
  std::vector<Bundle> joined;
  const auto append = [&](const Bundle& lines) {
    joined.back().insert(joined.back().end(), lines.begin(), lines.end());
  };
  for (int32_t i = 0; i < equal; ++i) {
    if (partner[i] < i) continue;
    joined.push_back(bundles[i]);
    append(bundles[partner[i]]);
  }
  if (left >= 0 || equal < total) joined.emplace_back();
  if (left >= 0) append(bundles[left]);
  if (equal < total) append(bundles.back());
  return joined;
}

// The block lines in the order in which lines fill groups. Lines of one block need the same chunks; where a group is
// more than one block, those that share blocks come together.
std::vector<int32_t> order_block_lines(const DirectionView& view, const LineIndexView& index) {
  std::vector<Bundle> bundles(view.block_lines);
  for (int64_t line = 0; line < view.block_lines; ++line) bundles[line] = {int32_t(line)};
  for (int64_t lines = view.lines_per_block; lines < view.group_lines(); lines *= 2) {
    bundles = pair_bundles(view, index, bundles);
  }
  std::vector<int32_t> order;
  for (const Bundle& bundle : bundles) order.insert(order.end(), bundle.begin(), bundle.end());
  return order;
}

// One piece of a line of the group, as the builders below want it.
struct Piece {
  int32_t chunk;
  int32_t part;  // within the chunk
  int32_t number;
};

// Calls visit(group, line of the group, first feature, pieces by ascending chunk and part) for each line; a line that
// does not exist has no pieces and a feature past the last.
template <class Visit>
void for_each_line(const DirectionView& view, const LineIndexView& index, Visit visit) {
  const std::vector<int32_t> order = order_block_lines(view, index);
  const int64_t chunk_parts = view.chunk_inputs() / view.side;
  std::vector<Piece> pieces;
  for (int64_t place = 0; place < view.groups() * view.group_lines(); ++place) {
    pieces.clear();
    int64_t line = view.lines();
    if (place < view.lines()) {
      const int32_t block_line = order[place / view.lines_per_block];
      const int64_t within = place % view.lines_per_block;
      line = block_line * view.lines_per_block + within;
      for (int32_t entry = index.offsets[block_line]; entry < index.offsets[block_line + 1]; ++entry) {
        const int64_t first = index.slots[entry] * view.pieces_per_block() + within * view.piece_line_step;
        for (int64_t i = 0; i < view.parts_per_block; ++i) {
          const int64_t part = index.indices[entry] * view.parts_per_block + i;
          pieces.push_back(
              {int32_t(part / chunk_parts), int32_t(part % chunk_parts), int32_t(first + i * view.piece_part_step)});
        }
      }
    }
    visit(place / view.group_lines(), int(place % view.group_lines()), int32_t(line * view.side), pieces);
  }
}

// Appends the groups once more, longest first. `time` [groups]: of each group, in any unit.
template <class Group>
void append_longest_first(Group* groups, const std::vector<int64_t>& time) {
  std::vector<int32_t> order(time.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return time[a] > time[b]; });
  for (size_t i = 0; i < order.size(); ++i) groups[order.size() + i] = groups[order[i]];
}

// Two lines: one item a chunk, ascending (see order_chunks).
void build_list(const DirectionView& view, const LineIndexView& index, const WideWork& work) {
  using Item = WideWork::Item;
  auto* groups = const_cast<WideWork::Group*>(work.groups);
  auto* items = const_cast<Item*>(work.items);
  int64_t item_count = 0;
  std::vector<int64_t> time(view.groups());
  std::vector<Piece> first_line;
  for_each_line(view, index, [&](int64_t g, int line, int32_t feature, const std::vector<Piece>& pieces) {
    WideWork::Group& group = groups[g];
    group.first_feature[line] = feature;
    time[g] += pieces.size();
    if (line == 0) {
      first_line = pieces;
      return;
    }
    group.first_item = int32_t(item_count);
    auto first = first_line.begin();
    auto second = pieces.begin();
    while (first != first_line.end() || second != pieces.end()) {
      if (second == pieces.end() || (first != first_line.end() && first->chunk < second->chunk)) {
        items[item_count++] = {{first->chunk}, {first->number, -1}, 0};
        ++first;
      } else if (first == first_line.end() || second->chunk < first->chunk) {
        items[item_count++] = {{second->chunk}, {-1, second->number}, 0};
        ++second;
      } else {
        items[item_count++] = {{first->chunk}, {first->number, second->number}, 0};
        ++first;
        ++second;
      }
    }
    group.items = int32_t(item_count) - group.first_item;
  });
  append_longest_first(groups, time);
}

constexpr int kMostGroupHalves = 2 * kHalves;  // in a cluster of two

// A chunk that a group needs, and which of its pieces each half does; they lie in `entries` half by half.
struct NeededChunk {
  int32_t chunk;
  int32_t first_entry;
  uint32_t mask[kMostGroupHalves];  // bit part of the chunk * kHalfLines + line
};

// The order in which the chunks of a group, given by number, become items. Where an item takes two: two that follow one
// another, since the copy engine takes as long for both as for one; then two that both halves need, then one of each
// half, so that neither half has many items without work (of a cluster's four halves few chunks have only one). Items
// then ascend by their first chunk, as all groups' do: thread blocks which run side by side read the same tokens at
// about the same time, while these are in L2.
template <class Work>
void order_chunks(std::vector<NeededChunk>& chunks) {
  if constexpr (Work::kChunks == 2) {
    std::vector<std::array<NeededChunk, 2>> items;
    std::vector<NeededChunk> both, lone[kHalves], rest;
    for (size_t i = 0; i < chunks.size(); ++i) {
      const NeededChunk& needed = chunks[i];
      if (i + 1 < chunks.size() && chunks[i + 1].chunk == needed.chunk + 1) {
        items.push_back({needed, chunks[++i]});
      } else {
        const bool shared = (needed.mask[0] && needed.mask[1]) || Work::kCluster > 1;
        (shared ? both : lone[needed.mask[0] ? 0 : 1]).push_back(needed);
      }
    }
    const auto join = [&](const std::vector<NeededChunk>& list) {
      for (size_t i = 1; i < list.size(); i += 2) items.push_back({list[i - 1], list[i]});
      return list.size() % 2 ? &list.back() : nullptr;
    };
    if (const NeededChunk* last = join(both)) rest.push_back(*last);
    const size_t pairs = std::min(lone[0].size(), lone[1].size());
    for (size_t i = 0; i < pairs; ++i) items.push_back({lone[0][i], lone[1][i]});
    for (const auto& list : lone) rest.insert(rest.end(), list.begin() + pairs, list.end());
    const NeededChunk* last = join(rest);

    std::sort(items.begin(), items.end(), [](const auto& a, const auto& b) { return a[0].chunk < b[0].chunk; });
    chunks.clear();
    for (const auto& item : items) chunks.insert(chunks.end(), item.begin(), item.end());
    if (last) chunks.push_back(*last);
  }
}

// About how long an item's halves take, in matrix instructions: a part is multiplied whole if any of a half's lines
// has a block there.
template <class Work>
int64_t instruction_count(const typename Work::Item& item) {
  int64_t count = 0;
  for (int rank = 0; rank < Work::kCluster; ++rank) {
    for (int half = 0; half < kHalves; ++half) {
      count += part_count(item.parts(rank) >> (half * kPartsHalfBits)) * Work::kSide / 16;
    }
  }
  return count;
}

constexpr int64_t kItemTime = 4;  // what an item takes besides, in the same unit

// Several lines a half: items by chunk; pieces by half, item and bit.
template <int kSide, int kCluster>
void build_list(const DirectionView& view, const LineIndexView& index, const NarrowWork<kSide, kCluster>& work) {
  using Work = NarrowWork<kSide, kCluster>;
  using Item = typename Work::Item;
  constexpr int kChunkBits = Work::kChunkParts * Work::kHalfLines;
  auto* groups = const_cast<typename Work::Group*>(work.groups);
  auto* items = const_cast<Item*>(work.items);
  auto* listed = const_cast<int32_t*>(work.pieces);
  int64_t item_count = 0;
  int64_t piece_count = 0;
  std::vector<int64_t> time(view.groups());
  struct Entry {
    int32_t chunk;
    int32_t place;  // half * kMaskBits + bit
    int32_t number;
  };
  std::vector<Entry> entries;
  std::vector<NeededChunk> chunks;
  for_each_line(view, index, [&](int64_t g, int line, int32_t feature, const std::vector<Piece>& pieces) {
    typename Work::Group& group = groups[g];
    group.first_feature[line] = feature;
    const int half = line / Work::kHalfLines;
    for (const Piece& piece : pieces) {
      const int bit = piece.part * Work::kHalfLines + line % Work::kHalfLines;
      entries.push_back({piece.chunk, half * Work::kMaskBits + bit, piece.number});
    }
    if (line + 1 < Work::kGroupLines) return;

    std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
      return a.chunk != b.chunk ? a.chunk < b.chunk : a.place < b.place;
    });
    chunks.clear();
    for (size_t i = 0; i < entries.size(); ++i) {
      if (i == 0 || entries[i - 1].chunk != entries[i].chunk) chunks.push_back({entries[i].chunk, int32_t(i), {}});
      const auto [entry_half, bit] = std::div(entries[i].place, Work::kMaskBits);
      chunks.back().mask[entry_half] |= uint32_t(1) << bit;
    }
    order_chunks<Work>(chunks);

    group.first_item = int32_t(item_count);
    group.items = int32_t((chunks.size() + Work::kChunks - 1) / Work::kChunks);
    for (size_t i = 0; i < chunks.size(); ++i) {
      const int place = int(i % Work::kChunks);
      Item& item = items[item_count + i / Work::kChunks];
      if (place == 0) item = Work::empty_item();
      item.chunk[place] = chunks[i].chunk;
      for (int h = 0; h < Work::kGroupHalves; ++h)
        item.mask |= chunks[i].mask[h] << (h * Work::kMaskBits + place * kChunkBits);
    }
    for (int h = 0; h < Work::kGroupHalves; ++h) {
      group.first_piece[h] = int32_t(piece_count);
      for (const NeededChunk& needed : chunks) {
        const Entry* entry = &entries[needed.first_entry];
        for (int before = 0; before < h; ++before) entry += std::popcount(needed.mask[before]);
        for (int i = 0; i < std::popcount(needed.mask[h]); ++i) {
          listed[piece_count++] = int32_t(view.offset(entry[i].number));
        }
      }
    }
    for (int64_t i = 0; i < group.items; ++i) time[g] += kItemTime + instruction_count<Work>(items[item_count + i]);
    item_count += group.items;
    entries.clear();
  });
  append_longest_first(groups, time);
}

// Length of a direction's list in int32 elements, a multiple of 4, and its parts at `at`.
template <class Work>
int64_t groups_and_items_size(const DirectionView& view) {
  return (2 * view.groups() * sizeof(typename Work::Group) + view.most_items() * sizeof(typename Work::Item)) /
         sizeof(int32_t);
}

int64_t list_size(const DirectionView& view, const WideWork&) { return groups_and_items_size<WideWork>(view); }

template <int kSide, int kCluster>
int64_t list_size(const DirectionView& view, const NarrowWork<kSide, kCluster>&) {
  using Work = NarrowWork<kSide, kCluster>;
  return (groups_and_items_size<Work>(view) + view.pieces() + Work::kPiecesPadding + 3) / 4 * 4;
}

template <class Work>
void place_list(const DirectionView& view, const int32_t* at, Work& work) {
  work.groups = reinterpret_cast<const typename Work::Group*>(at);
  work.items = reinterpret_cast<const typename Work::Item*>(work.groups + 2 * view.groups());
  if constexpr (requires { work.pieces; }) {
    work.pieces = reinterpret_cast<const int32_t*>(work.items + view.most_items());
  }
}

// Calls visit(Work{}) with the kind of list that these blocks have in this direction, if any.
template <class Visit>
void with_work_kind(const Geometry& geometry, Direction direction, Visit visit) {
  switch (dense_sparse_side(geometry)) {
    case 64:
      return visit(WideWork{});
    case 32:
      if (cluster_size(geometry, direction) > 1) return visit(NarrowWork<32, 2>{});
      return visit(NarrowWork<32>{});
    case 16:
      return visit(NarrowWork<16>{});
  }
}

constexpr Direction kDirections[] = {Direction::kForward, Direction::kInputGradient};

int64_t list_size(const Geometry& geometry, Direction direction) {
  int64_t size = 0;
  with_work_kind(geometry, direction, [&](auto work) { size = list_size(DirectionView(geometry, direction), work); });
  return size;
}

}  // namespace

int dense_sparse_side(const Geometry& geometry) {
  for (const int side : {64, 32, 16}) {
    if (geometry.block_height % side == 0 && geometry.block_width % side == 0) {
      const int64_t pieces = geometry.nnz * (geometry.block_height / side) * (geometry.block_width / side);
      const int64_t most = side == 64 ? INT32_MAX : INT32_MAX / side;  // their offsets are listed
      return pieces < most ? side : 0;
    }
  }
  return 0;
}

int cluster_size(const Geometry& geometry, Direction direction) {
  if (dense_sparse_side(geometry) != 32) return 1;
  // Each thread block loads half of the chunks that either needs. At density .5 that is 1 to 10 % faster (H200, two
  // shapes, both directions). Of sparser patterns the two have too little in common: at .25 it is up to 8 % slower.
  const bool dense = 8 * geometry.nnz >= 3 * geometry.grid_rows() * geometry.grid_cols();
  // Of an odd number the last thread block has no features, but runs.
  const int64_t features = direction == Direction::kForward ? geometry.out_features : geometry.in_features;
  const int64_t blocks = (features + kGroupOutputs - 1) / kGroupOutputs;
  return dense && (blocks % 2 == 0 || blocks > 16) ? 2 : 1;
}

int64_t group_count(const Geometry& geometry, Direction direction) {
  return DirectionView(geometry, direction).groups();
}

template <class Work>
Work dense_sparse_work(const Geometry& geometry, Direction direction, const int32_t* work_lists) {
  Work work;
  if (direction == Direction::kInputGradient) work_lists += list_size(geometry, Direction::kForward);
  place_list(DirectionView(geometry, direction), work_lists, work);
  return work;
}

template WideWork dense_sparse_work(const Geometry&, Direction, const int32_t*);
template NarrowWork<32> dense_sparse_work(const Geometry&, Direction, const int32_t*);
template NarrowWork<32, 2> dense_sparse_work(const Geometry&, Direction, const int32_t*);
template NarrowWork<16> dense_sparse_work(const Geometry&, Direction, const int32_t*);

}  // namespace sm90

int64_t work_lists_size(const Geometry& geometry) {
  int64_t size = back_work_size(geometry);
  for (const Direction direction : sm90::kDirections) size += sm90::list_size(geometry, direction);
  return size;
}

const int32_t* back_work(const Geometry& geometry, const int32_t* work_lists) {
  return work_lists + work_lists_size(geometry) - back_work_size(geometry);
}

void build_work_lists(const Geometry& geometry, const PatternIndex& index, int32_t* work_lists) {
  std::vector<std::future<void>> directions;  // beside the weight gradient's list
  for (const Direction direction : sm90::kDirections) {
    sm90::with_work_kind(geometry, direction, [&, direction](auto kind) {
      directions.push_back(std::async(std::launch::async, [&geometry, &index, work_lists, direction] {
        const bool forward = direction == Direction::kForward;
        const sm90::LineIndexView lines =
            forward ? sm90::LineIndexView{index.crow_indices, index.col_indices, index.row_slots}
                    : sm90::LineIndexView{index.ccol_indices, index.row_indices, index.col_slots};
        const auto work = sm90::dense_sparse_work<decltype(kind)>(geometry, direction, work_lists);
        sm90::build_list(sm90::DirectionView(geometry, direction), lines, work);
      }));
    });
  }
  build_back_work(geometry, index, const_cast<int32_t*>(back_work(geometry, work_lists)));
  for (auto& direction : directions) direction.get();
}

}  // namespace block_sparse
