#include "product.h"

#include <stdexcept>

namespace block_sparse {
namespace {

constexpr const char* kOperatorNames[] = {"linear", "input_grad", "weight_grad"};  // in the order of Operator

struct DTypeName {
  const char* name;
  DType dtype;
  bool tf32;
};
constexpr DTypeName kDTypeNames[] = {{"float64", DType::kFloat64, false},
                                     {"float32", DType::kFloat32, false},
                                     {"tf32", DType::kFloat32, true},
                                     {"bfloat16", DType::kBFloat16, false},
                                     {"float16", DType::kFloat16, false}};

}  // namespace

const char* operator_name(const Product& product) { return kOperatorNames[int(product.op)]; }

const char* dtype_name(const Product& product) {
  for (const DTypeName& row : kDTypeNames) {
    if (row.dtype == product.dtype && (row.dtype != DType::kFloat32 || row.tf32 == product.tf32)) return row.name;
  }
  return "unknown";
}

void parse_names(const std::string& operator_name, const std::string& dtype_name, Product* product) {
  int found = 0;
  for (int i = 0; i < 3; ++i) {
    if (operator_name == kOperatorNames[i]) product->op = Operator(i), ++found;
  }
  for (const DTypeName& row : kDTypeNames) {
    if (dtype_name == row.name) product->dtype = row.dtype, product->tf32 = row.tf32, ++found;
  }
  if (found != 2) throw std::invalid_argument("no product is called " + operator_name + " " + dtype_name);
}

}  // namespace block_sparse
