// What a choice of plan depends on, and its names. No torch header.
#pragma once

#include <string>

#include "problem.h"

namespace block_sparse {

enum class Operator { kForward, kInputGradient, kWeightGradient };

enum class Kernel {
  kPortable,
  kHopper,
  kDecode,  // for few tokens
};

struct Product {
  Operator op;
  DType dtype;
  bool tf32;      // float32 products may run in TF32
  Kernel kernel;  // what runs if it is not densified
  Activation activation;
  Geometry geometry;
  int64_t tokens;  // T
};

// "linear", "input_grad" or "weight_grad"
const char* operator_name(const Product& product);

// "float64", "float32", "tf32", "bfloat16" or "float16"
const char* dtype_name(const Product& product);

// Sets operator, dtype and tf32 from these names; any other throws std::invalid_argument.
void parse_names(const std::string& operator_name, const std::string& dtype_name, Product* product);

}  // namespace block_sparse
