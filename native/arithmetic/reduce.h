// Element types, operations, and the kernels that combine two buffers of elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace elastic {

enum class DType { kFloat16, kBFloat16, kFloat32, kFloat64, kInt8, kUInt8, kInt32, kInt64 };
enum class ReduceOp { kSum, kAverage, kMin, kMax, kProduct };

// By the names that numpy and PyTorch use. Throws std::invalid_argument for another.
DType parse_dtype(const std::string& name);

// "sum", "average", "min", "max" or "product". Throws std::invalid_argument for another.
ReduceOp parse_op(const std::string& name);

size_t element_size(DType dtype);

// out[i] = op(a[i], b[i]) for `count` elements; out may be a. 16-bit floats are combined as float32 and rounded to
// nearest even. Integers wrap around on overflow. Minimum and maximum keep a NaN of either side, as numpy does.
using Kernel = void (*)(void* out, const void* a, const void* b, size_t count);
// That of an average is the sum's.
Kernel reduce_kernel(DType dtype, ReduceOp op);

// Divides `count` elements by the number of members, which makes a sum an average. Integers are rounded toward zero.
void divide(void* data, size_t count, DType dtype, int members);

// Multiplies `count` elements. Integers are multiplied in float64 and rounded toward zero; what is beyond their range
// becomes its end, and NaN 0.
void scale(void* data, size_t count, DType dtype, double factor);

// Fills `count` elements with what changes no other value that it is combined with: 0, 1, or an end of the range.
void fill_neutral(void* data, size_t count, DType dtype, ReduceOp op);

// 8-bit integers as 32-bit ones, whose sums do not wrap around, and back: what is beyond their range becomes its end.
void widen(const void* small, int32_t* wide, size_t count, DType dtype);
void narrow(const int32_t* wide, void* small, size_t count, DType dtype);

// a = factor_a * a + factor_b * b, and the three dot products that it takes to find the factors of Adasum. For types of
// floating point only; throws std::invalid_argument for another.
void combine_scaled(void* a, const void* b, size_t count, DType dtype, double factor_a, double factor_b);
struct Dots {
  double ab, aa, bb;
};
Dots dot_products(const void* a, const void* b, size_t count, DType dtype);

}  // namespace elastic
