#include "arithmetic/adasum.h"

namespace elastic {

void adasum(const std::vector<void*>& arrays, size_t count, DType dtype) {
  for (size_t distance = 1; distance < arrays.size(); distance *= 2) {
    for (size_t i = 0; i + distance < arrays.size(); i += 2 * distance) {
      void* const a = arrays[i];
      const void* const b = arrays[i + distance];
      const Dots dots = dot_products(a, b, count, dtype);
      // A zero gradient has nothing in common with the other, which counts whole.
      const double keep_a = dots.aa == 0 ? 1 : 1 - dots.ab / (2 * dots.aa);
      const double keep_b = dots.bb == 0 ? 1 : 1 - dots.ab / (2 * dots.bb);
      combine_scaled(a, b, count, dtype, keep_a, keep_b);
    }
  }
}

}  // namespace elastic
