#include "arithmetic/reduce.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>

namespace elastic {
namespace {

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Without a branch, so that loops are vectorized: for ?: the compiler tends to emit a jump over the arithmetic.
uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

struct BFloat16 {
  uint16_t bits;

  float widen() const { return from_bits(static_cast<uint32_t>(bits) << 16); }

  static BFloat16 narrow(float value) {
    const uint32_t wide = to_bits(value);
    // Round to nearest even; a NaN must not be rounded up into an infinity.
    const uint32_t rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
    const bool nan = (wide & 0x7fffffffu) > 0x7f800000u;
    return {static_cast<uint16_t>(select(nan, (wide >> 16) | 0x40u, rounded))};
  }
};

struct Float16 {
  uint16_t bits;

  float widen() const {
    // Exponent and mantissa are moved into place and scaled, which also handles subnormals; infinities and NaNs get
    // float32's greatest exponent.
    const uint32_t magnitude = (bits & 0x7fffu) << 13;
    const float scaled = from_bits(magnitude) * from_bits(0x77800000u);  // 2**112
    const uint32_t special = select((bits & 0x7c00u) == 0x7c00u, 0x7f800000u, 0u);
    return from_bits(to_bits(scaled) | special | (static_cast<uint32_t>(bits & 0x8000u) << 16));
  }

  static Float16 narrow(float value) {
    const uint32_t wide = to_bits(value);
    const uint32_t sign = (wide >> 16) & 0x8000u;
    const uint32_t magnitude = wide & 0x7fffffffu;
    // Subnormal results: adding 0.5 leaves them, rounded to nearest even, in the lowest bits of the sum.
    const uint32_t small = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t result = select(magnitude < 0x38800000u, small, normal);
    result = select(magnitude >= 0x477ff000u, 0x7c00u, result);  // rounds up beyond the greatest value: infinity
    result = select(magnitude > 0x7f800000u, 0x7e00u, result);
    return {static_cast<uint16_t>(sign | result)};
  }
};

template <typename T>
struct Wide {
  using type = T;
  static T in(T value) { return value; }
  static T out(T value) { return value; }
};
template <>
struct Wide<BFloat16> {
  using type = float;
  static float in(BFloat16 value) { return value.widen(); }
  static BFloat16 out(float value) { return BFloat16::narrow(value); }
};
template <>
struct Wide<Float16> {
  using type = float;
  static float in(Float16 value) { return value.widen(); }
  static Float16 out(float value) { return Float16::narrow(value); }
};

// Clamps to the type's range: a cast of a value outside it would be undefined.
template <typename T>
T saturated(double value) {
  if (value != value) return 0;
  if (value <= static_cast<double>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  if (value >= static_cast<double>(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  return static_cast<T>(value);
}

template <typename T, ReduceOp op>
T combine(T a, T b) {
  if constexpr (op == ReduceOp::kSum || op == ReduceOp::kProduct) {
    if constexpr (std::is_integral_v<T>) {
      // By way of the unsigned type, where overflow is defined; with at least 32 bits, because narrower types would be
      // promoted to int.
      using U = std::conditional_t<(sizeof(T) < 4), uint32_t, std::make_unsigned_t<T>>;
      const U x = static_cast<U>(a), y = static_cast<U>(b);
      return static_cast<T>(op == ReduceOp::kSum ? x + y : x * y);
    } else {
      return op == ReduceOp::kSum ? a + b : a * b;
    }
  } else if constexpr (std::is_floating_point_v<T>) {
    const bool take_a = op == ReduceOp::kMin ? a < b : a > b;
    return (take_a || a != a) ? a : b;
  } else {
    return op == ReduceOp::kMin ? (a < b ? a : b) : (a > b ? a : b);
  }
}

template <typename T, ReduceOp op>
void kernel(void* out, const void* a, const void* b, size_t count) {
  T* const to = static_cast<T*>(out);
  const T* const x = static_cast<const T*>(a);
  const T* const y = static_cast<const T*>(b);
  for (size_t i = 0; i < count; ++i) {
    to[i] = Wide<T>::out(combine<typename Wide<T>::type, op>(Wide<T>::in(x[i]), Wide<T>::in(y[i])));
  }
}

template <typename T>
Kernel kernel_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return kernel<T, ReduceOp::kSum>;
    case ReduceOp::kMin:
      return kernel<T, ReduceOp::kMin>;
    case ReduceOp::kMax:
      return kernel<T, ReduceOp::kMax>;
    case ReduceOp::kProduct:
      return kernel<T, ReduceOp::kProduct>;
  }
  throw std::invalid_argument("unknown operation");
}

template <typename T>
void divide_by(void* data, size_t count, int members) {
  using W = typename Wide<T>::type;
  T* const at = static_cast<T*>(data);
  const W divisor = static_cast<W>(members);
  for (size_t i = 0; i < count; ++i) at[i] = Wide<T>::out(static_cast<W>(Wide<T>::in(at[i]) / divisor));
}

// For types that may not hold the number of members.
template <typename T>
void divide_small(void* data, size_t count, int members) {
  T* const at = static_cast<T*>(data);
  for (size_t i = 0; i < count; ++i) at[i] = static_cast<T>(static_cast<int>(at[i]) / members);
}

template <typename T>
void scale_by(void* data, size_t count, double factor) {
  using W = typename Wide<T>::type;
  T* const at = static_cast<T*>(data);
  if constexpr (std::is_floating_point_v<W>) {
    const W by = static_cast<W>(factor);
    for (size_t i = 0; i < count; ++i) at[i] = Wide<T>::out(Wide<T>::in(at[i]) * by);
  } else {
    for (size_t i = 0; i < count; ++i) at[i] = saturated<T>(static_cast<double>(at[i]) * factor);
  }
}

template <typename T>
T neutral(ReduceOp op) {
  using W = typename Wide<T>::type;
  using Limits = std::numeric_limits<W>;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return Wide<T>::out(W{0});
    case ReduceOp::kProduct:
      return Wide<T>::out(W{1});
    case ReduceOp::kMin:
      return Wide<T>::out(Limits::has_infinity ? Limits::infinity() : Limits::max());
    case ReduceOp::kMax:
      return Wide<T>::out(Limits::has_infinity ? -Limits::infinity() : Limits::lowest());
  }
  throw std::invalid_argument("unknown operation");
}

template <typename T>
void fill_as(void* data, size_t count, ReduceOp op) {
  std::fill_n(static_cast<T*>(data), count, neutral<T>(op));
}

template <typename T>
void narrow_as(const int32_t* wide, void* small, size_t count) {
  using Limits = std::numeric_limits<T>;
  T* const to = static_cast<T*>(small);
  for (size_t i = 0; i < count; ++i) to[i] = static_cast<T>(std::clamp<int32_t>(wide[i], Limits::min(), Limits::max()));
}

template <typename T>
void combine_scaled_as(void* a, const void* b, size_t count, double factor_a, double factor_b) {
  using W = typename Wide<T>::type;
  T* const x = static_cast<T*>(a);
  const T* const y = static_cast<const T*>(b);
  const W p = static_cast<W>(factor_a), q = static_cast<W>(factor_b);
  for (size_t i = 0; i < count; ++i) x[i] = Wide<T>::out(p * Wide<T>::in(x[i]) + q * Wide<T>::in(y[i]));
}

template <typename T>
Dots dots_as(const void* a, const void* b, size_t count) {
  const T* const x = static_cast<const T*>(a);
  const T* const y = static_cast<const T*>(b);
  Dots dots{0, 0, 0};
  for (size_t i = 0; i < count; ++i) {
    const double p = static_cast<double>(Wide<T>::in(x[i])), q = static_cast<double>(Wide<T>::in(y[i]));
    dots.ab += p * q;
    dots.aa += p * p;
    dots.bb += q * q;
  }
  return dots;
}

template <template <typename> class Work, typename... Args>
auto for_float(DType dtype, Args... args) {
  switch (dtype) {
    case DType::kFloat16:
      return Work<Float16>::run(args...);
    case DType::kBFloat16:
      return Work<BFloat16>::run(args...);
    case DType::kFloat32:
      return Work<float>::run(args...);
    case DType::kFloat64:
      return Work<double>::run(args...);
    default:
      throw std::invalid_argument("Adasum is for floating point only");
  }
}
template <typename T>
struct CombineWork {
  static void run(void* a, const void* b, size_t count, double p, double q) { combine_scaled_as<T>(a, b, count, p, q); }
};
template <typename T>
struct DotsWork {
  static Dots run(const void* a, const void* b, size_t count) { return dots_as<T>(a, b, count); }
};

struct Named {
  const char* name;
  DType dtype;
  size_t size;
};
constexpr Named kDTypes[] = {
    {"float16", DType::kFloat16, 2}, {"bfloat16", DType::kBFloat16, 2}, {"float32", DType::kFloat32, 4},
    {"float64", DType::kFloat64, 8}, {"int8", DType::kInt8, 1},         {"uint8", DType::kUInt8, 1},
    {"int32", DType::kInt32, 4},     {"int64", DType::kInt64, 8},
};

}  // namespace

DType parse_dtype(const std::string& name) {
  for (const Named& type : kDTypes) {
    if (name == type.name) return type.dtype;
  }
  throw std::invalid_argument("cannot reduce elements of type '" + name +
                              "': it is none of float16, bfloat16, float32, float64, int8, uint8, int32, int64");
}

ReduceOp parse_op(const std::string& name) {
  if (name == "sum") return ReduceOp::kSum;
  if (name == "average") return ReduceOp::kAverage;
  if (name == "min") return ReduceOp::kMin;
  if (name == "max") return ReduceOp::kMax;
  if (name == "product") return ReduceOp::kProduct;
  throw std::invalid_argument("cannot reduce by '" + name + "': it is none of sum, average, min, max, product");
}

size_t element_size(DType dtype) {
  for (const Named& type : kDTypes) {
    if (dtype == type.dtype) return type.size;
  }
  throw std::invalid_argument("unknown element type");
}

Kernel reduce_kernel(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kFloat16:
      return kernel_of<Float16>(op);
    case DType::kBFloat16:
      return kernel_of<BFloat16>(op);
    case DType::kFloat32:
      return kernel_of<float>(op);
    case DType::kFloat64:
      return kernel_of<double>(op);
    case DType::kInt8:
      return kernel_of<int8_t>(op);
    case DType::kUInt8:
      return kernel_of<uint8_t>(op);
    case DType::kInt32:
      return kernel_of<int32_t>(op);
    case DType::kInt64:
      return kernel_of<int64_t>(op);
  }
  throw std::invalid_argument("unknown element type");
}

void divide(void* data, size_t count, DType dtype, int members) {
  switch (dtype) {
    case DType::kFloat16:
      return divide_by<Float16>(data, count, members);
    case DType::kBFloat16:
      return divide_by<BFloat16>(data, count, members);
    case DType::kFloat32:
      return divide_by<float>(data, count, members);
    case DType::kFloat64:
      return divide_by<double>(data, count, members);
    case DType::kInt8:
      return divide_small<int8_t>(data, count, members);
    case DType::kUInt8:
      return divide_small<uint8_t>(data, count, members);
    case DType::kInt32:
      return divide_by<int32_t>(data, count, members);
    case DType::kInt64:
      return divide_by<int64_t>(data, count, members);
  }
}

void scale(void* data, size_t count, DType dtype, double factor) {
  switch (dtype) {
    case DType::kFloat16:
      return scale_by<Float16>(data, count, factor);
    case DType::kBFloat16:
      return scale_by<BFloat16>(data, count, factor);
    case DType::kFloat32:
      return scale_by<float>(data, count, factor);
    case DType::kFloat64:
      return scale_by<double>(data, count, factor);
    case DType::kInt8:
      return scale_by<int8_t>(data, count, factor);
    case DType::kUInt8:
      return scale_by<uint8_t>(data, count, factor);
    case DType::kInt32:
      return scale_by<int32_t>(data, count, factor);
    case DType::kInt64:
      return scale_by<int64_t>(data, count, factor);
  }
}

void fill_neutral(void* data, size_t count, DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kFloat16:
      return fill_as<Float16>(data, count, op);
    case DType::kBFloat16:
      return fill_as<BFloat16>(data, count, op);
    case DType::kFloat32:
      return fill_as<float>(data, count, op);
    case DType::kFloat64:
      return fill_as<double>(data, count, op);
    case DType::kInt8:
      return fill_as<int8_t>(data, count, op);
    case DType::kUInt8:
      return fill_as<uint8_t>(data, count, op);
    case DType::kInt32:
      return fill_as<int32_t>(data, count, op);
    case DType::kInt64:
      return fill_as<int64_t>(data, count, op);
  }
}

void widen(const void* small, int32_t* wide, size_t count, DType dtype) {
  if (dtype == DType::kInt8) {
    std::copy_n(static_cast<const int8_t*>(small), count, wide);
  } else {
    std::copy_n(static_cast<const uint8_t*>(small), count, wide);
  }
}

void narrow(const int32_t* wide, void* small, size_t count, DType dtype) {
  if (dtype == DType::kInt8) {
    narrow_as<int8_t>(wide, small, count);
  } else {
    narrow_as<uint8_t>(wide, small, count);
  }
}

void combine_scaled(void* a, const void* b, size_t count, DType dtype, double factor_a, double factor_b) {
  for_float<CombineWork>(dtype, a, b, count, factor_a, factor_b);
}

Dots dot_products(const void* a, const void* b, size_t count, DType dtype) {
  return for_float<DotsWork>(dtype, a, b, count);
}

}  // namespace elastic
