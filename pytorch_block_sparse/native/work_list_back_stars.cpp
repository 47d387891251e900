#include "work_list_back_stars.h"

#include <cstddef>
#include <vector>

namespace block_sparse {
namespace {

// Of two kinds of vertices, the first `lines`, then `others`; each edge has one of each and belongs to either.
class StarGraph {
 public:
  StarGraph(int32_t lines, int32_t others) : lines_(lines), first_edge_(lines + others + 1, 0) {
    owned_.assign(lines + others, 0);
  }

  // Before share_out.
  void add(int32_t line, int32_t other) { ends_.push_back({line, lines_ + other}); }

  // Lines keep multiples of `size`; of what others then have beyond such multiples, the least goes to where there is
  // more.
  void share_out(int size) {
    size_ = size;
    connect();
    const int32_t vertices = int32_t(owned_.size());
    for (int32_t line = 0; line < lines_; ++line) shed(line);
    for (int amount = 1; amount < size; ++amount) {
      for (int32_t other = lines_; other < vertices; ++other) {
        if (excess(other) != amount) continue;
        while (excess(other) != 0 && move_one(other)) continue;
      }
    }
  }

  bool line_owns(int64_t edge) const { return owner_[edge] < lines_; }

 private:
  struct Edge {
    int32_t line, other;
  };

  void connect() {
    for (const Edge& edge : ends_) ++first_edge_[edge.line + 1], ++first_edge_[edge.other + 1];
    for (size_t vertex = 0; vertex < owned_.size(); ++vertex) first_edge_[vertex + 1] += first_edge_[vertex];
    edges_.resize(2 * ends_.size());
    std::vector<int32_t> next(first_edge_.begin(), first_edge_.end() - 1);
    for (size_t edge = 0; edge < ends_.size(); ++edge) {
      edges_[next[ends_[edge].line]++] = edges_[next[ends_[edge].other]++] = int32_t(edge);
      owner_.push_back(ends_[edge].line);
      ++owned_[ends_[edge].line];
    }
  }

  int excess(int32_t vertex) const { return owned_[vertex] % size_; }
  int32_t other_end(int32_t edge, int32_t vertex) const {
    return ends_[edge].line == vertex ? ends_[edge].other : ends_[edge].line;
  }
  void give(int32_t edge, int32_t to) {
    --owned_[owner_[edge]];
    ++owned_[to];
    owner_[edge] = to;
  }

  // Gives a line's excess to others, first to those that lack the fewest.
  void shed(int32_t line) {
    while (excess(line) != 0) {
      int32_t best = -1;
      for (int32_t i = first_edge_[line]; i < first_edge_[line + 1]; ++i) {
        const int32_t edge = edges_[i];
        if (owner_[edge] != line) continue;
        if (best < 0 || excess(ends_[edge].other) > excess(ends_[best].other)) best = edge;
      }
      give(best, ends_[best].other);
    }
  }

  // One edge less for `from`, and one more for a vertex that has an excess, too; those between them keep their number.
  // Breadth first over the edges that could change hands. False if there is no such path.
  bool move_one(int32_t from) {
    constexpr int32_t kUnseen = -1;
    std::vector<int32_t> gained(owned_.size(), kUnseen);  // the edge that a vertex on the path would get
    std::vector<int32_t> queue{from};
    gained[from] = 0;
    for (size_t at = 0; at < queue.size(); ++at) {
      const int32_t vertex = queue[at];
      for (int32_t i = first_edge_[vertex]; i < first_edge_[vertex + 1]; ++i) {
        const int32_t edge = edges_[i], other = other_end(edge, vertex);
        if (owner_[edge] != vertex || gained[other] != kUnseen) continue;
        gained[other] = edge;
        if (excess(other) == 0) {
          queue.push_back(other);
          continue;
        }
        for (int32_t to = other; to != from;) {
          const int32_t passed = gained[to], giver = owner_[passed];
          give(passed, to);
          to = giver;
        }
        return true;
      }
    }
    return false;
  }

  const int32_t lines_;
  int size_ = 1;
  std::vector<Edge> ends_;
  std::vector<int32_t> first_edge_, edges_;  // by vertex
  std::vector<int32_t> owner_;               // by edge
  std::vector<int32_t> owned_;               // by vertex: how many edges
};

}  // namespace

StarSides split_into_stars(const PieceGrid& grid, int64_t first, int64_t last, int size, bool transposed) {
  const PieceLines &lines = grid.lines(transposed), &other_lines = grid.lines(!transposed);
  const int side = grid.tiling.star_strips();
  // Of each of the edges, its number among them, a line and an entry of it.
  const auto each_edge = [&](const auto& visit) {
    int64_t piece = 0;
    for (int64_t line = 0; line < lines.lines() && piece < last; line += side) {
      for (int32_t entry = lines.start[line]; entry < lines.start[line + 1]; entry += side, piece += side * side) {
        if (piece >= first && piece < last) visit((piece - first) / (side * side), line, entry);
      }
    }
  };
  StarGraph graph(int32_t(lines.lines() / side), int32_t(other_lines.lines() / side));
  each_edge([&](int64_t, int64_t line, int32_t entry) { graph.add(int32_t(line / side), lines.strip[entry] / side); });
  graph.share_out(size);
  PieceSet kept(lines.piece.size(), false), given(lines.piece.size(), false);
  each_edge([&](int64_t edge, int64_t line, int32_t entry) {
    PieceSet& owner = graph.line_owns(edge) ? kept : given;
    for (int below = 0; below < side; ++below) {
      for (int beside = 0; beside < side; ++beside)
        owner[lines.piece[entry + below * lines.length(line) + beside]] = true;
    }
  });
  return {only(lines, kept), only(other_lines, given)};
}

}  // namespace block_sparse
