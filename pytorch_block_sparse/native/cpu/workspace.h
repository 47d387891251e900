// One allocation per call, cut into aligned pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace block_sparse::cpu {

class Workspace {
 public:
  // Pieces start on cache lines, so that threads never share one.
  static constexpr int64_t kAlignment = 64;

  static constexpr int64_t padded(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  explicit Workspace(int64_t bytes)
      : memory_(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{kAlignment}))) {}

  std::byte* at(int64_t offset) const { return memory_.get() + offset; }

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t{kAlignment}); }
  };
  std::unique_ptr<std::byte, Free> memory_;
};

}  // namespace block_sparse::cpu
