// Adasum: a sum of gradients in which what they have in common counts once.
#pragma once

#include <cstddef>
#include <vector>

#include "arithmetic/reduce.h"
#include "interruption.h"

namespace elastic {

// Combines the members' arrays of `count` elements pairwise, in a tree, into the first of them. Dot products are
// computed in float64. Only for types of floating point; throws std::invalid_argument for another, and what
// `interruption` does.
void adasum(const std::vector<void*>& arrays, size_t count, DType dtype, const Interruption& interruption);

}  // namespace elastic
