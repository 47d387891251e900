// Names a launch in the words of its workspace that nobody clears.
#pragma once

#include <cstdint>

namespace block_sparse {

// `bits` bits (below 64), never all 0, that come again only after all others of that length. They begin at random, so
// that other data left in a workspace is not taken for a ticket. Callable from any thread.
uint64_t next_ticket(int bits);

}  // namespace block_sparse
