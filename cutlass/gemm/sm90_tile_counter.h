// The counter from which the takers of a launch take their tiles after the first. A taker is a thread block; of a
// cluster, whose thread blocks compute a tile together, only the first. The counter is a word of workspace that may
// hold anything before the launch, so that nobody has to clear it (a memset costs 2 µs on the stream).
//
// The word is ticket << 32 | takes; the ticket is the launch's. Every taker opens the counter and then takes until it
// gets a number past the last tile, once. One tile a taker is its first and is not taken, so a launch makes
// tiles - takers takes in range and `takers` out of range: exactly `tiles`, below 2^28. Whoever makes the last of them
// leaves 0.
//
// - Opening, a taker sees either what was there before the launch or a count of 0 to tiles - 1. It never sees the count
//   at its end, nor the 0 after it, however late it starts: its own takes are still missing.
// - In the first case it opens the counter by a compare-and-swap. If that fails, another taker has opened it in
//   between, for nobody else writes to the word: there is nothing to retry. It cannot undo a take either, for what it
//   expects to find is no count of this launch.
// - What was there before is mistaken for a count only if it is ticket << 32 plus less than `tiles`: random bits are
//   once in 2^64 / tiles launches. The 0 of an earlier launch never is, because no ticket is 0: so a CUDA graph may
//   launch one ticket any number of times, whatever else the workspace held in between.
#pragma once

#include <cstdint>

#include <cute/config.hpp>

namespace block_sparse::sm90 {

constexpr int kTicketBits = 32;
constexpr int64_t kMostTiles = (int64_t(1) << 28) - 1;  // of a launch

class TileCounter {
  unsigned long long* word_ = nullptr;
  unsigned long long none_ = 0;  // the word before the first take

 public:
  // Where a taker has one tile, none is taken.
  TileCounter() = default;

  // `ticket`: not 0, and of no other launch that may be writing to `word`.
  TileCounter(uint64_t* word, uint64_t ticket)
      : word_(reinterpret_cast<unsigned long long*>(word)), none_(ticket << (64 - kTicketBits)) {}

  // By one thread of each taker, before its first take.
  CUTE_DEVICE void open(int tiles) const {
    if (word_ == nullptr) return;
    const unsigned long long seen = *static_cast<volatile unsigned long long*>(word_);
    if (seen - none_ >= unsigned(tiles)) atomicCAS(word_, seen, none_);
  }

  // By the same thread, until it gets `tiles` or more.
  CUTE_DEVICE int take(int tiles, int takers) const {
    if (word_ == nullptr) return tiles;
    const int before = int(atomicAdd(word_, 1ull) - none_);
    if (before == tiles - 1) atomicExch(word_, 0ull);
    return takers + before;
  }
};

}  // namespace block_sparse::sm90
