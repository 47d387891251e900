#include "plan_record.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>

namespace block_sparse {
namespace {

thread_local Plan plan_of_thread = Plan::kNone;

std::string text(const Product& product, const Gpu& gpu, Plan plan) {
  const Geometry& geometry = product.geometry;
  const PlanSeconds seconds = predict_seconds(product, gpu);
  char line[320];
  std::snprintf(line, sizeof line,
                "pytorch_block_sparse plan: %s %s T %lld O %lld I %lld blocks %lld of %lldx%lld: %s "
                "(predicted ms: blocks %.3g, densify %.3g)\n",
                operator_name(product), dtype_name(product), (long long)product.tokens,
                (long long)geometry.out_features, (long long)geometry.in_features, (long long)geometry.nnz,
                (long long)geometry.block_height, (long long)geometry.block_width, plan_name(plan),
                1e3 * seconds.blocks, 1e3 * seconds.densify);
  return line;
}

void print_once(const std::string& line) {
  static std::mutex mutex;
  static std::set<std::string> printed;
  const std::lock_guard<std::mutex> lock(mutex);
  if (printed.insert(line).second) std::fputs(line.c_str(), stderr);
}

}  // namespace

const char* plan_name(Plan plan) {
  switch (plan) {
    case Plan::kSm90:
      return "sm90";
    case Plan::kSm80:
      return "sm80";
    case Plan::kDecode:
      return "decode";
    case Plan::kDensify:
      return "densify";
    default:
      return "none";
  }
}

Plan last_plan() { return plan_of_thread; }

void record_plan(const Product& product, const Gpu& gpu, Plan plan) {
  static const bool logs = [] {
    const char* variable = std::getenv("BLOCK_SPARSE_LOG");
    return variable && std::string(variable) == "plan";
  }();
  plan_of_thread = plan;
  if (logs) print_once(text(product, gpu, plan));
}

}  // namespace block_sparse
