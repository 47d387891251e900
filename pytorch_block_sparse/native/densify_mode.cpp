#include "densify_mode.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdlib>

namespace block_sparse {
namespace {

constexpr DensifyMode kModes[] = {DensifyMode::kAuto, DensifyMode::kNever, DensifyMode::kAlways};

std::atomic<DensifyMode>& mode_of_process() {
  static std::atomic<DensifyMode> mode{[] {
    const char* variable = std::getenv("BLOCK_SPARSE_DENSIFY");
    return variable && *variable ? parse_densify_mode("BLOCK_SPARSE_DENSIFY", variable) : DensifyMode::kAuto;
  }()};
  return mode;
}

}  // namespace

DensifyMode densify_mode() { return mode_of_process().load(std::memory_order_relaxed); }

void set_densify_mode(DensifyMode mode) { mode_of_process().store(mode, std::memory_order_relaxed); }

const char* densify_mode_name(DensifyMode mode) {
  switch (mode) {
    case DensifyMode::kNever:
      return "never";
    case DensifyMode::kAlways:
      return "always";
    default:
      return "auto";
  }
}

DensifyMode parse_densify_mode(const char* argument, const std::string& name) {
  for (const DensifyMode mode : kModes) {
    if (name == densify_mode_name(mode)) return mode;
  }
  TORCH_CHECK_VALUE(false, argument, " must be auto, never or always, got ", name);
}

}  // namespace block_sparse
