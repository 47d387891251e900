#include "capability.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string>

#include "brgemm.h"
#include "cpu_kernels.h"

namespace block_sparse::cpu {

namespace {

enum class Capability { kPortable, kAvx2, kAvx512, kAvx512BFloat16 };

Capability supported() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) {
    return Capability::kPortable;
  }
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!avx512) return Capability::kAvx2;
  return __builtin_cpu_supports("avx512bf16") ? Capability::kAvx512BFloat16 : Capability::kAvx512;
#else
  return Capability::kPortable;
#endif
}

// The environment can only lower the choice.
Capability allowed() {
  const char* variable = std::getenv("BLOCK_SPARSE_CPU_CAPABILITY");
  const std::string name = variable ? variable : "";
  if (name == "portable") return Capability::kPortable;
  if (name == "avx2") return Capability::kAvx2;
  if (name == "avx512") return Capability::kAvx512;
  return Capability::kAvx512BFloat16;
}

Capability in_use() {
  static const Capability capability = std::min(supported(), allowed());
  return capability;
}

}  // namespace

const KernelTable& kernels(DType dtype) {
#if defined(__x86_64__)
  if (in_use() >= Capability::kAvx512) return avx512_kernels(dtype);
  if (in_use() == Capability::kAvx2) return avx2_kernels(dtype);
#endif
  return portable_kernels(dtype);
}

std::string capability() {
  switch (in_use()) {
    case Capability::kAvx512BFloat16:
      return "avx512_bf16";
    case Capability::kAvx512:
      return "avx512";
    case Capability::kAvx2:
      return "avx2";
    case Capability::kPortable:
      return "portable";
  }
  return "portable";
}

const KernelTable* pair_kernels() {
#if defined(__x86_64__)
  if (in_use() == Capability::kAvx512BFloat16) return &avx512_bf16_kernels();
#endif
  return nullptr;
}

std::string bfloat16_arithmetic() {
  if (has_brgemm()) return "brgemm";
  return pair_kernels() ? "pairs" : "float32";
}

int measured_threads() {
  // A thread counts itself once: the value it last saw tells it whether it has already been here.
  static std::atomic<int64_t> calls{0};
  thread_local int64_t last_call = 0;
  const int64_t call = ++calls;
  std::atomic<int> threads{0};
  const int64_t pieces = at::get_num_threads();
  at::parallel_for(0, pieces, 1, [&](int64_t, int64_t) {
    if (last_call != call) {
      last_call = call;
      ++threads;
    }
  });
  return threads;
}

}  // namespace block_sparse::cpu
