#include "work_list.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <vector>

#include "gemm/sm90_work.h"

namespace block_sparse {
namespace sm90 {
namespace {

// The pattern as one direction of dense x sparse sees it: block lines (rows forward, columns for the input gradient),
// each cut into lines of 64 outputs, meet blocks that are cut into chunks of 64 inputs.
struct DirectionView {
  int64_t block_lines;
  int64_t block_chunks;     // blocks along the inner dimension
  int64_t lines_per_block;  // along the outputs
  int64_t chunks_per_block;
  int64_t piece_line_step;  // how the number of a piece grows with its line and its chunk within the block
  int64_t piece_chunk_step;

  DirectionView(const Geometry& geometry, Direction direction) {
    const int64_t tall = geometry.block_height / kPieceSide;
    const int64_t wide = geometry.block_width / kPieceSide;
    const bool forward = direction == Direction::kForward;
    block_lines = forward ? geometry.grid_rows() : geometry.grid_cols();
    block_chunks = forward ? geometry.grid_cols() : geometry.grid_rows();
    lines_per_block = forward ? tall : wide;
    chunks_per_block = forward ? wide : tall;
    piece_line_step = forward ? wide : 1;
    piece_chunk_step = forward ? 1 : wide;
  }

  int64_t lines() const { return block_lines * lines_per_block; }
  int64_t groups() const { return (lines() + kGroupLines - 1) / kGroupLines; }
  int64_t chunks() const { return block_chunks * chunks_per_block; }
  int64_t pieces_per_block() const { return lines_per_block * chunks_per_block; }
  int64_t most_items(int64_t nnz) const { return std::min(nnz * pieces_per_block(), groups() * chunks()); }
  int64_t work_size(int64_t nnz) const { return work_bytes(groups(), most_items(nnz)) / sizeof(int32_t); }
};

struct LineIndexView {
  const int32_t* offsets;  // [block_lines + 1]
  const int32_t* indices;  // [nnz] ascending within a line
  const int32_t* slots;    // [nnz]
};

// An order of the block lines in which neighbours 2 i, 2 i + 1 share blocks: the pair with the most common indices
// first, greedily. Pairs are searched within segments of neighbouring lines, which bounds the time to about
// kOperationsPerBlock word operations a block; what is left over keeps its order.
std::vector<int32_t> pair_lines(const DirectionView& view, const LineIndexView& index, int64_t nnz) {
  constexpr int64_t kOperationsPerBlock = 60;
  constexpr int64_t kLeastOperations = 1 << 20;
  constexpr int64_t kMostSegment = 2048;
  const int64_t lines = view.block_lines;
  const int64_t words = (view.block_chunks + 63) / 64;
  const int64_t operations = std::max(kLeastOperations, kOperationsPerBlock * nnz);
  const int64_t segment = std::clamp(2 * operations / (lines * words), int64_t(2), kMostSegment) / 2 * 2;

  struct Candidate {
    int32_t common, first, second;
  };
  std::vector<uint64_t> bits;
  std::vector<Candidate> candidates, sorted;
  std::vector<int32_t> starts, order;
  std::vector<int32_t> partner(lines, -1);
  order.reserve(lines);
  for (int64_t begin = 0; begin < lines; begin += segment) {
    const int64_t count = std::min(segment, lines - begin);
    bits.assign(count * words, 0);
    for (int64_t i = 0; i < count; ++i) {
      for (int32_t entry = index.offsets[begin + i]; entry < index.offsets[begin + i + 1]; ++entry) {
        bits[i * words + index.indices[entry] / 64] |= uint64_t(1) << (index.indices[entry] % 64);
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
  std::vector<int32_t> single;
  for (int32_t line = 0; line < lines; ++line) {
    if (partner[line] < 0) {
      single.push_back(line);
    } else if (partner[line] > line) {
      order.push_back(line);
      order.push_back(partner[line]);
    }
  }
  order.insert(order.end(), single.begin(), single.end());
  return order;
}

class ListBuilder {
 public:
  ListBuilder(const DirectionView& view, const LineIndexView& index) : view_(view), index_(index) {}

  void build(const std::vector<int32_t>& block_line_order, int32_t* work) {
    auto* header = reinterpret_cast<WorkHeader*>(work);
    const int64_t count = view_.groups();
    header->groups = int32_t(count);
    const WorkLists lists = locate_work(work, count);
    auto* groups = const_cast<Group*>(lists.groups);
    items_ = const_cast<Item*>(lists.items);

    std::vector<int32_t> halves(count);  // pieces of each group: its time
    for (int64_t g = 0; g < count; ++g) {
      Group& group = groups[g];
      group.first_item = int32_t(item_count_);
      for (int half = 0; half < kGroupLines; ++half) {
        const int64_t line = g * kGroupLines + half;
        const bool exists = line < view_.lines();
        const int64_t block_line = exists ? block_line_order[line / view_.lines_per_block] : 0;
        const int64_t within = line % view_.lines_per_block;
        group.first_feature[half] =
            int32_t((exists ? block_line * view_.lines_per_block + within : view_.lines()) * kPieceSide);
        collect_pieces(exists ? block_line : -1, within, half);
      }
      append_items();
      group.items = int32_t(item_count_) - group.first_item;
      halves[g] = int32_t(pieces_[0].size() + pieces_[1].size());
    }

    std::vector<int32_t> longest_first(count);
    std::iota(longest_first.begin(), longest_first.end(), 0);
    std::stable_sort(longest_first.begin(), longest_first.end(),
                     [&](int32_t a, int32_t b) { return halves[a] > halves[b]; });
    for (int64_t g = 0; g < count; ++g) groups[count + g] = groups[longest_first[g]];
  }

 private:
  struct Piece {
    int32_t chunk;
    int32_t number;
  };

  void collect_pieces(int64_t block_line, int64_t line_within, int half) {
    std::vector<Piece>& pieces = pieces_[half];
    pieces.clear();
    if (block_line < 0) return;
    for (int32_t entry = index_.offsets[block_line]; entry < index_.offsets[block_line + 1]; ++entry) {
      const int64_t first = index_.slots[entry] * view_.pieces_per_block() + line_within * view_.piece_line_step;
      for (int64_t chunk = 0; chunk < view_.chunks_per_block; ++chunk) {
        pieces.push_back({int32_t(index_.indices[entry] * view_.chunks_per_block + chunk),
                          int32_t(first + chunk * view_.piece_chunk_step)});
      }
    }
  }

  // Chunks that both lines need come first; those of one line follow in turn, so that neither warpgroup falls behind.
  void append_items() {
    for (auto& lone : lone_) lone.clear();
    auto first = pieces_[0].begin(), second = pieces_[1].begin();
    while (first != pieces_[0].end() || second != pieces_[1].end()) {
      if (second == pieces_[1].end() || (first != pieces_[0].end() && first->chunk < second->chunk)) {
        lone_[0].push_back({first->chunk, {first->number, -1}, 0});
        ++first;
      } else if (first == pieces_[0].end() || second->chunk < first->chunk) {
        lone_[1].push_back({second->chunk, {-1, second->number}, 0});
        ++second;
      } else {
        items_[item_count_++] = {first->chunk, {first->number, second->number}, 0};
        ++first;
        ++second;
      }
    }
    for (size_t i = 0; i < std::max(lone_[0].size(), lone_[1].size()); ++i) {
      for (const auto& lone : lone_) {
        if (i < lone.size()) items_[item_count_++] = lone[i];
      }
    }
  }

  DirectionView view_;
  LineIndexView index_;
  Item* items_ = nullptr;
  int64_t item_count_ = 0;
  std::vector<Piece> pieces_[kGroupLines];
  std::vector<Item> lone_[kGroupLines];
};

}  // namespace

bool has_dense_sparse_work(const Geometry& geometry) {
  return geometry.block_height % kPieceSide == 0 && geometry.block_width % kPieceSide == 0;
}

int64_t group_count(const Geometry& geometry, Direction direction) {
  return DirectionView(geometry, direction).groups();
}

}  // namespace sm90

int64_t work_lists_size(const Geometry& geometry) {
  if (!sm90::has_dense_sparse_work(geometry)) return 0;
  return sm90::DirectionView(geometry, Direction::kForward).work_size(geometry.nnz) +
         sm90::DirectionView(geometry, Direction::kInputGradient).work_size(geometry.nnz);
}

int64_t dense_sparse_work_offset(const Geometry& geometry, Direction direction) {
  return direction == Direction::kForward ? 0
                                          : sm90::DirectionView(geometry, Direction::kForward).work_size(geometry.nnz);
}

void build_work_lists(const Geometry& geometry, const PatternIndex& index, int32_t* work) {
  if (!sm90::has_dense_sparse_work(geometry)) return;
  for (const Direction direction : {Direction::kForward, Direction::kInputGradient}) {
    const bool forward = direction == Direction::kForward;
    const sm90::DirectionView view(geometry, direction);
    const sm90::LineIndexView lines = forward
                                          ? sm90::LineIndexView{index.crow_indices, index.col_indices, index.row_slots}
                                          : sm90::LineIndexView{index.ccol_indices, index.row_indices, index.col_slots};
    std::vector<int32_t> order(view.block_lines);
    std::iota(order.begin(), order.end(), 0);
    // Lines of one block line need the same chunks; only lone ones look for a partner.
    if (view.lines_per_block % sm90::kGroupLines != 0) order = sm90::pair_lines(view, lines, geometry.nnz);
    sm90::ListBuilder(view, lines).build(order, work + dense_sparse_work_offset(geometry, direction));
  }
}

}  // namespace block_sparse
