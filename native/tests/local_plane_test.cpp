// Collectives in shared memory without engines: threads as ranks, stopped at the points where they hurt.
#include "shared_memory/local_plane.h"

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "errors.h"
#include "tests/tests.h"

namespace {

using elastic::LocalPlane;
using elastic::Party;
using elastic::PeerSegment;
using elastic::SharedSegment;

struct Plane {
  std::shared_ptr<SharedSegment> segment = std::make_shared<SharedSegment>();
  std::atomic<bool> aborted{false};
  std::function<void()> look = [this] {
    if (aborted) throw elastic::AbortedError("aborted");
  };
  std::unique_ptr<LocalPlane> plane;
};

std::vector<std::unique_ptr<Plane>> planes(int size, bool direct) {
  std::vector<std::unique_ptr<Plane>> made;
  for (int rank = 0; rank < size; ++rank) made.push_back(std::make_unique<Plane>());
  for (int rank = 0; rank < size; ++rank) {
    std::vector<std::unique_ptr<PeerSegment>> peers;
    for (int other = 0; other < size; ++other) {
      if (other == rank) continue;
      peers.push_back(std::make_unique<PeerSegment>(other, made[static_cast<size_t>(other)]->segment->name()));
    }
    Plane& own = *made[static_cast<size_t>(rank)];
    own.plane = std::make_unique<LocalPlane>(own.segment, std::move(peers), direct,
                                             elastic::Interruption(own.aborted, [&own] { own.look(); }),
                                             [&own] { own.look(); });
  }
  return made;
}

}  // namespace

// A member that has read all it needs, and then gives up, may use its memory for something else while another still
// reads it: that one must not take what it has read for the result.
void test_local_plane_member_gives_up() {
  for (const bool direct : {true, false}) {
    auto made = planes(3, direct);
    const uint64_t number = elastic::operation_number(1, 0);
    constexpr size_t kBytes = 1 << 20;
    // Ranks 0 and 1 send to rank 2, which reads them in this order.
    const std::vector<std::vector<size_t>> sizes{{0, 0, kBytes}, {0, 0, kBytes}, {0, 0, 0}};
    std::vector<char> late(kBytes, 'a'), gone(kBytes, 'b'), none(1), all(2 * kBytes);
    std::promise<void> gave_up;
    made[1]->look = [&] { throw elastic::AbortedError("aborted"); };  // it waits: it has nothing to read
    std::thread second([&] {
      try {
        made[1]->plane->alltoall({{0, 1, 2}, 1}, number, gone.data(), none.data(), sizes);
        CHECK(false);
      } catch (const elastic::AbortedError&) {
      }
      made[1]->segment->words().gave_up = 1;
      std::fill(gone.begin(), gone.end(), 'x');
      gave_up.set_value();
    });
    bool failed = false;
    std::thread third([&] {
      try {
        made[2]->plane->alltoall({{0, 1, 2}, 2}, number, none.data(), all.data(), sizes);
      } catch (const elastic::CollectiveError&) {
        failed = true;
      }
      made[0]->aborted = true;
    });
    gave_up.get_future().get();
    try {
      made[0]->plane->alltoall({{0, 1, 2}, 0}, number, late.data(), none.data(), sizes);
    } catch (const elastic::CollectiveError&) {  // what has failed for one may have for all
    }
    second.join();
    third.join();
    CHECK(failed);
  }
}
