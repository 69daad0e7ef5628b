#include "arithmetic/adasum.h"

namespace elastic {

void adasum(const std::vector<void*>& arrays, size_t count, DType dtype, const Interruption& interruption) {
  const size_t width = element_size(dtype);
  for (size_t distance = 1; distance < arrays.size(); distance *= 2) {
    for (size_t i = 0; i + distance < arrays.size(); i += 2 * distance) {
      auto* const a = static_cast<char*>(arrays[i]);
      const auto* const b = static_cast<const char*>(arrays[i + distance]);
      Dots dots{0, 0, 0};
      interruption.in_pieces(count * width, [&](size_t at, size_t size) {
        const Dots part = dot_products(a + at, b + at, size / width, dtype);
        dots.ab += part.ab;
        dots.aa += part.aa;
        dots.bb += part.bb;
      });
      // A zero gradient has nothing in common with the other one, which is added in full.
      const double keep_a = dots.aa == 0 ? 1 : 1 - dots.ab / (2 * dots.aa);
      const double keep_b = dots.bb == 0 ? 1 : 1 - dots.ab / (2 * dots.bb);
      interruption.in_pieces(count * width, [&](size_t at, size_t size) {
        combine_scaled(a + at, b + at, size / width, dtype, keep_a, keep_b);
      });
    }
  }
}

}  // namespace elastic
