// An allreduce for buffers whose cost is the waiting, not the bytes.
#pragma once

#include <gloo/context.h>

#include <chrono>
#include <cstddef>
#include <cstdint>

#include "arithmetic/reduce.h"

namespace elastic {

// Up to this many bytes recursive doubling is quicker than Gloo's ring (benchmarks/allreduce.py).
constexpr size_t kSmallBytes = 64 * 1024;

// Recursive doubling, in place: log2(members) exchanges of the whole buffer, where the ring takes 2 * (members - 1).
// All members end with the same bits. Waits are the context's unbound buffers', so what ends those ends this.
void small_allreduce(gloo::Context& context, void* data, size_t count, size_t element_bytes, Kernel kernel,
                     uint32_t tag, std::chrono::milliseconds timeout);

}  // namespace elastic
