#include "cuda_launch_ticket.h"

#include <atomic>
#include <random>

namespace block_sparse {

uint64_t next_ticket(int bits) {
  static std::atomic<uint64_t> last{[] {
    std::random_device random;
    return uint64_t(random()) << 32 | random();
  }()};
  const uint64_t mask = (uint64_t(1) << bits) - 1;
  const uint64_t ticket = ++last & mask;
  return ticket != 0 ? ticket : ++last & mask;
}

}  // namespace block_sparse
