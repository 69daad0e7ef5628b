// An allreduce for small buffers, whose cost is latency rather than bandwidth.
#pragma once

#include <gloo/context.h>

#include <chrono>
#include <cstddef>
#include <cstdint>

#include "arithmetic/reduce.h"

namespace elastic {

// Up to this size, recursive doubling is faster than Gloo's ring (benchmarks/allreduce.py).
constexpr size_t kSmallBytes = 64 * 1024;

// Recursive doubling, in place: log2(members) exchanges of the whole buffer, where the ring needs 2 * (members - 1).
// All members get the same bits. It waits in the context's unbound buffers, so an abort of those ends it.
void small_allreduce(gloo::Context& context, void* data, size_t count, size_t element_bytes, Kernel kernel,
                     uint32_t tag, std::chrono::milliseconds timeout);

}  // namespace elastic
