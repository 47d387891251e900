// Streams the stored blocks of one line, and the tokens that they meet, to one warp: 16-byte vectors by cp.async into a
// ring that belongs to the warp. W comes back as the operand A of m16n8k16 (features are M), the tokens as operand B.
// No other warp takes part, so there is no barrier.
//
// K runs over the stored blocks of the line, one after the other, in *octets* of 8 neighbours. A chunk is 4 octets, one
// for each lane % 4 = q of a fragment: register s of the lane holds elements 2s and 2s + 1 of octet q. That is a
// permutation of the K that the instruction means; both operands take part in it, so that a lane's share of the tokens
// is 16 contiguous bytes. The octets of a chunk may lie in different blocks.
#pragma once

#include <cutlass/fast_math.h>

#include "gemm/copy_vector.h"
#include "gemm/index_ring.h"

namespace block_sparse {

constexpr int kOctet = 8;
constexpr int kChunkOctets = 4;
constexpr int kChunk = kOctet * kChunkOctets;

// Blocks along K.
struct DecodeSteps {
  int block_k;                       // side of a block along K
  cutlass::FastDivmod block_octets;  // octets of a block
  int blocks;                        // from a chunk to the next one: so many blocks
  int elements;                      // and so many elements
  int last_position;                 // of a block along K
  int past;                          // octets of a block in that position that lie past K: they are not read
};

// The blocks of one line.
struct DecodeLine {
  int begin;   // first entry of the index
  int octets;  // to read

  CUTE_DEVICE DecodeLine(const LineIndex& index, const DecodeSteps& steps, int line)
      : begin(__ldg(index.offsets + line)) {
    const int end = __ldg(index.offsets + line + 1);
    octets = (end - begin) * steps.block_octets.divisor;
    if (steps.past > 0 && end > begin && __ldg(index.positions + end - 1) == steps.last_position) octets -= steps.past;
  }
};

// T rows of K elements.
struct DecodeTokens {
  const void* input;
  int64_t tile_bytes;  // from a token to that 8 further
  int64_t token_bytes;
  int tokens;  // T
};

// kRows: features of the line's piece, 16, 32 or 64. kTokenTiles: of 8 tokens.
template <class Element, bool kTransposed, int kRows, int kTokenTiles, int kStages, bool kCacheTokens>
class DecodeStream {
  static_assert(sizeof(Element) == 2);

 public:
  static constexpr int kWeightVectors = kRows * kChunkOctets;  // of 16 bytes
  static constexpr int kStageVectors = kWeightVectors + kTokenTiles * 8 * kChunkOctets;
  static constexpr int kRingBytes = kStages * kStageVectors * 16;

  // `values`: the piece's first feature in block 0. This warp takes the line's octets from `begin` to `end`.
  CUTE_DEVICE DecodeStream(const Element* values, uint32_t block_bytes, int block_width, const LineIndex& index,
                           const DecodeSteps& steps, const DecodeTokens& tokens, const DecodeLine& line, int begin,
                           int end, uint4* ring, int lane)
      : steps_(steps),
        tokens_(tokens),
        block_bytes_(block_bytes),
        octets_left_(end - begin - lane % kChunkOctets),
        lane_tokens_(tokens.tokens - lane / kChunkOctets) {
    const int q = lane % kChunkOctets, group = lane / kChunkOctets;
    int block, octet;
    steps.block_octets(block, octet, begin + q);
    offset_ = octet * kOctet;
    slot_entry_ = index.slots + line.begin + block;
    position_entry_ = index.positions + line.begin + block;
    // Transposed, neighbouring lanes take a row's neighbouring vectors.
    const int row = kTransposed ? group / kPasses : group;
    const int column = kTransposed ? group % kPasses * kOctet : 0;
    weights_ = reinterpret_cast<const char*>(values + row * block_width + column);
    pass_bytes_ = kPassRows * block_width * int(sizeof(Element));
    k_bytes_ = (kTransposed ? block_width : 1) * int(sizeof(Element));
    token_ = static_cast<const char*>(tokens.input) + group * tokens.token_bytes;
    write_ = ring + (kTransposed ? shared_vector(row, group % kPasses, q) : lane);
    write_tokens_ = ring + kWeightVectors + lane;
    read_ = ring + (kTransposed ? lane / 8 * 16 + lane % 8 : lane);

    read_entry();
    CUTE_UNROLL
    for (int stage = 0; stage < kStages - 1; ++stage) load(stage);
  }

  // Loads one more chunk into `stage`, which the warp has read.
  CUTE_DEVICE void load(int stage) {
    const int valid = octets_left_ > 0 ? kOctet : 0;  // what no block supplies is zero
    const char* weights = weights_ + uint64_t(block_bytes_) * uint32_t(slot_) + offset_ * k_bytes_;
    const char* token = token_ + int64_t(position_ * steps_.block_k + offset_) * int64_t(sizeof(Element));
    advance();
    read_entry();  // of the chunk after this one: the latency of the index is hidden by a whole chunk
    uint4* to = write_ + stage * kStageVectors;
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      copy(to + shared_pass(pass), weights, valid);
      weights += pass_bytes_;
    }
    to = write_tokens_ + stage * kStageVectors;
    CUTE_UNROLL
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      copy_token(to + tile * 32, token, 8 * tile < lane_tokens_ ? valid : 0);
      token += tokens_.tile_bytes;
    }
    cute::cp_async_fence();
  }

  // Waits for the oldest chunk that is under way. The warp has read the one before it.
  CUTE_DEVICE static void wait() {
    cute::cp_async_wait<kStages - 2>();
    __syncwarp();
  }

  // Features m * 16 + 0..7 (`low`) and 8..15 (`high`) of this lane's octet.
  CUTE_DEVICE void read_weights(int stage, int m, uint32_t (&low)[4], uint32_t (&high)[4]) const {
    const uint4* from = read_ + stage * kStageVectors + m * 64;
    read(from, low);
    read(from + (kTransposed ? 8 : 32), high);
  }

  // This lane's octet of token 8 * tile + lane / 4.
  CUTE_DEVICE uint4 read_tokens(int stage, int tile) const { return write_tokens_[stage * kStageVectors + tile * 32]; }

 private:
  static constexpr int kPasses = kRows / 8;  // vectors of an octet that a lane copies
  static constexpr int kPassRows = kTransposed ? kOctet / kPasses : 8;

  CUTE_DEVICE static void copy(uint4* shared, const char* global, int valid) {
    copy_vector_async(reinterpret_cast<Element*>(shared), reinterpret_cast<const Element*>(global), valid);
  }

  CUTE_DEVICE static void copy_token(uint4* shared, const char* global, int valid) {
    if constexpr (kCacheTokens) {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;\n" ::"r"(cute::cast_smem_ptr_to_uint(shared)),
                   "l"(global), "r"(valid * 2));
    } else {
      copy(shared, global, valid);
    }
  }

  CUTE_DEVICE void read_entry() {
    if (octets_left_ > 0) {
      slot_ = __ldg(slot_entry_);
      position_ = __ldg(position_entry_);
    }
  }

  CUTE_DEVICE void advance() {
    octets_left_ -= kChunkOctets;
    offset_ += steps_.elements;
    int blocks = steps_.blocks;
    if (offset_ >= steps_.block_k) {
      offset_ -= steps_.block_k;
      ++blocks;
    }
    slot_entry_ += blocks;
    position_entry_ += blocks;
  }

  // Not transposed, lanes read back what they have copied. Transposed: 8 x 8 matrices whose rows are k = 2q + e of
  // register s, so that ldmatrix hands out octets; a matrix is 128 contiguous bytes, which no two banks share.
  // `row` of octet q, 2s + e; vector `half` of the piece's features.
  CUTE_DEVICE static constexpr int shared_vector(int row, int half, int q) {
    return half / 2 * 64 + row / 2 * 16 + half % 2 * 8 + 2 * q + row % 2;
  }

  // From a lane's first vector to that of `pass`.
  CUTE_DEVICE static constexpr int shared_pass(int pass) {
    if constexpr (!kTransposed) return pass * 32;
    return shared_vector(pass * kPassRows, 0, 0);
  }
  static_assert(!kTransposed || kPassRows % 2 == 0 || kPassRows == 1);

  CUTE_DEVICE static void read(const uint4* from, uint32_t (&registers)[4]) {
    if constexpr (kTransposed) {
      cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<const cute::uint128_t*>(from), registers[0], registers[1],
                                    registers[2], registers[3]);
    } else {
      const uint4 vector = *from;
      registers[0] = vector.x, registers[1] = vector.y, registers[2] = vector.z, registers[3] = vector.w;
    }
  }

  const DecodeSteps& steps_;
  const DecodeTokens& tokens_;
  uint32_t block_bytes_;
  // Of the next chunk to load: octets from this lane's own to `end`, and what the index says.
  int octets_left_;
  int offset_;  // element along K within the block
  const int32_t* slot_entry_;
  const int32_t* position_entry_;
  int slot_ = 0;
  int position_ = 0;
  int lane_tokens_;  // tokens from this lane's first on
  const char* weights_;
  const char* token_;
  int pass_bytes_;
  int k_bytes_;
  uint4* write_;
  uint4* write_tokens_;
  const uint4* read_;
};

}  // namespace block_sparse
