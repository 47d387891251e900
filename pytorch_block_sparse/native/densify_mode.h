// When products run as densify + cuBLAS: a setting of the process.
#pragma once

#include <string>

namespace block_sparse {

enum class DensifyMode {
  kAuto,  // where it is the faster plan
  kNever,
  kAlways,  // wherever memory allows
};

// Atomic, and as cheap as reading a variable. It begins as BLOCK_SPARSE_DENSIFY says: auto (or unset), never or always.
DensifyMode densify_mode();
void set_densify_mode(DensifyMode mode);

// "auto", "never" or "always"; parse_densify_mode: anything else is a ValueError that names `argument`.
const char* densify_mode_name(DensifyMode mode);
DensifyMode parse_densify_mode(const char* argument, const std::string& name);

}  // namespace block_sparse
