// Element types, operations, and the kernels that combine two buffers of elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace elastic {

enum class DType { kFloat16, kBFloat16, kFloat32, kFloat64, kInt8, kUInt8, kInt32, kInt64 };
enum class ReduceOp { kSum, kAverage, kMin, kMax, kProduct };

// Parses the names that numpy and PyTorch use. Throws std::invalid_argument for other names.
DType parse_dtype(const std::string& name);

// Parses "sum", "average", "min", "max" or "product". Throws std::invalid_argument for other names.
ReduceOp parse_op(const std::string& name);

size_t element_size(DType dtype);

// out[i] = op(a[i], b[i]) for `count` elements; out may be a. 16-bit floats are combined as float32 and rounded to
// nearest even. Integers wrap around on overflow. Minimum and maximum propagate a NaN of either side, as numpy does.
using Kernel = void (*)(void* out, const void* a, const void* b, size_t count);
// An average has the kernel of the sum.
Kernel reduce_kernel(DType dtype, ReduceOp op);

// Divides `count` elements by the number of members, to convert a sum to an average. Integers are rounded toward zero.
void divide(void* data, size_t count, DType dtype, int members);

// Multiplies `count` elements. Integers are multiplied in float64 and rounded toward zero; results outside their range
// are clamped to it, and NaN becomes 0.
void scale(void* data, size_t count, DType dtype, double factor);

// Fills `count` elements with the operation's neutral element: 0, 1, or an end of the type's range.
void fill_neutral(void* data, size_t count, DType dtype, ReduceOp op);

// Converts 8-bit integers to 32-bit ones, whose sums do not wrap around, and back, clamped to their range.
void widen(const void* small, int32_t* wide, size_t count, DType dtype);
void narrow(const int32_t* wide, void* small, size_t count, DType dtype);

// a = factor_a * a + factor_b * b, and the three dot products from which Adasum's factors are computed. Throws
// std::invalid_argument for other than floating-point types.
void combine_scaled(void* a, const void* b, size_t count, DType dtype, double factor_a, double factor_b);
struct Dots {
  double ab, aa, bb;
};
Dots dot_products(const void* a, const void* b, size_t count, DType dtype);

}  // namespace elastic
