#include "gloo/small_allreduce.h"

#include <gloo/transport/unbound_buffer.h>
#include <gloo/types.h>

#include <algorithm>
#include <memory>
#include <vector>

namespace elastic {

void small_allreduce(gloo::Context& context, void* data, size_t count, size_t element_bytes, Kernel kernel,
                     uint32_t tag, std::chrono::milliseconds timeout) {
  const size_t bytes = count * element_bytes;
  const int rank = context.rank, size = context.size;
  int core = 1;  // members of the doubling: a power of two
  while (core * 2 <= size) core *= 2;
  // The other members first send their buffer to a neighbor in the core, and get the result from it.
  const int outside = size - core;
  const bool paired = rank < 2 * outside;
  const bool carried = paired && rank % 2 == 0;
  const int place = paired ? rank / 2 : rank - outside;  // in the core
  const auto rank_at = [&](int where) { return where < outside ? 2 * where + 1 : where + outside; };
  const gloo::Slot tags = gloo::Slot::build(gloo::kAllreduceSlotPrefix, tag);
  constexpr uint8_t kIn = 0, kOut = 1, kFirstStep = 2;

  const auto mine = context.createUnboundBuffer(data, bytes);
  const auto send = [&](int to, uint8_t step) {
    mine->send(to, tags + step);
    mine->waitSend(timeout);
  };
  if (carried) {
    const auto result = context.createUnboundBuffer(data, bytes);
    send(rank + 1, kIn);
    result->recv(rank + 1, tags + kOut);
    result->waitRecv(timeout);
    return;
  }

  struct Step {
    int peer;
    std::unique_ptr<char[]> bytes;
    std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
  };
  std::vector<Step> steps;
  const auto expect = [&](int from, uint8_t step) {
    std::unique_ptr<char[]> room(new char[bytes]);
    auto buffer = context.createUnboundBuffer(room.get(), bytes);
    buffer->recv(from, tags + step);
    steps.push_back({from, std::move(room), std::move(buffer)});
  };
  // All receives are posted before the first send: a member reads only requested messages, so two members that both
  // send would otherwise wait for each other.
  if (paired) expect(rank - 1, kIn);
  uint8_t step = kFirstStep;
  for (int distance = 1; distance < core; distance *= 2) expect(rank_at(place ^ distance), step++);

  step = kFirstStep;
  for (const Step& one : steps) {
    const bool is_carried = paired && one.peer == rank - 1;
    if (!is_carried) send(one.peer, step++);
    one.buffer->waitRecv(timeout);
    // The lower rank's value is always the left one, so that both sides compute the same bits.
    if (one.peer < rank) {
      kernel(data, one.bytes.get(), data, count);
    } else {
      kernel(data, data, one.bytes.get(), count);
    }
  }
  if (paired) send(rank - 1, kOut);
}

}  // namespace elastic
