// Adasum: a sum of gradients in which their common part counts once.
#pragma once

#include <cstddef>
#include <vector>

#include "arithmetic/reduce.h"
#include "interruption.h"

namespace elastic {

// Combines the members' arrays of `count` elements pairwise, in a tree, into the first of them. Dot products are
// computed in float64. Throws std::invalid_argument for other than floating-point types, and what `interruption`
// throws.
void adasum(const std::vector<void*>& arrays, size_t count, DType dtype, const Interruption& interruption);

}  // namespace elastic
