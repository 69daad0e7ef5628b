// Collectives in shared memory without engines: threads as ranks, stopped at critical points.
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

std::vector<std::unique_ptr<Plane>> planes(int size, bool direct, size_t slice_bytes = elastic::kSliceBytes) {
  std::vector<std::unique_ptr<Plane>> made;
  for (int rank = 0; rank < size; ++rank) made.push_back(std::make_unique<Plane>());
  for (int rank = 0; rank < size; ++rank) {
    std::vector<std::unique_ptr<PeerSegment>> peers;
    for (int other = 0; other < size; ++other) {
      if (other == rank) continue;
      peers.push_back(std::make_unique<PeerSegment>(other, made[static_cast<size_t>(other)]->segment->name()));
    }
    Plane& own = *made[static_cast<size_t>(rank)];
    own.plane = std::make_unique<LocalPlane>(
        own.segment, std::move(peers), direct, elastic::Interruption(own.aborted, [&own] { own.look(); }),
        [&own] { own.look(); }, slice_bytes);
  }
  return made;
}

int32_t value(int rank, size_t i) { return static_cast<int32_t>(i % 1000) + 1000 * rank; }

// Numbers in memory that peers can read directly, or not.
struct Numbers {
  Numbers(Plane& plane, bool shared, size_t count, int rank) : own_(shared ? 0 : count) {
    data = own_.data();
    if (shared) {
      keeper_ = plane.segment;
      data = static_cast<int32_t*>(keeper_->allocate(count * sizeof(int32_t)));
    }
    for (size_t i = 0; i < count; ++i) data[i] = value(rank, i);
  }
  ~Numbers() {
    if (keeper_) keeper_->release(data);
  }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;

  int32_t* data;

 private:
  std::shared_ptr<SharedSegment> keeper_;
  std::vector<int32_t> own_;
};

// All operations, as one rank.
void run_all(Plane& own, int rank, int size, size_t count, elastic::Numbering& numbers) {
  using elastic::DType;
  using elastic::ReduceOp;
  Party party{{}, rank};
  for (int i = 0; i < size; ++i) party.ranks.push_back(i);
  LocalPlane& plane = *own.plane;
  const size_t bytes = count * sizeof(int32_t), me = static_cast<size_t>(rank), members = static_cast<size_t>(size);
  const auto sum = [&](size_t i) {
    int32_t all = 0;
    for (int other = 0; other < size; ++other) all += value(other, i);
    return all;
  };
  // Whether memory is shared differs between ranks, and between operations.
  int turn = rank;
  const auto shared = [&] { return turn++ % 3 == 0; };
  for (int spread = 0; spread <= size; ++spread) {
    Numbers data(own, shared(), count, rank), other(own, shared(), count, 0);
    for (int32_t* const out : {other.data, data.data}) {  // the second time in place
      size_t finished = 0;
      const auto finish = [&](void* at, size_t elements) {
        auto* const found = static_cast<int32_t*>(at);
        for (size_t i = 0; i < elements; ++i) found[i] += 1;
        finished += elements;
      };
      plane.allreduce(party, numbers, data.data, out, count, DType::kInt32, ReduceOp::kSum, finish, spread);
      for (size_t i = 0; i < count; ++i) CHECK(out[i] == sum(i) + 1);
      if (spread != 0) CHECK((finished != 0) == (rank < spread));
    }
  }
  {
    std::vector<size_t> counts(members, count / members);
    counts[0] += count % members;
    const size_t first = std::accumulate(counts.begin(), counts.begin() + rank, size_t{0});
    Numbers data(own, shared(), count, rank);
    std::vector<int32_t> out(counts[me]);
    plane.reducescatter(party, numbers, data.data, out.data(), counts, DType::kInt32, ReduceOp::kSum,
                        [](void*, size_t) {});
    for (size_t i = 0; i < counts[me]; ++i) CHECK(out[i] == sum(first + i));
  }
  {
    std::vector<size_t> sizes;
    for (size_t other = 0; other < members; ++other) sizes.push_back(count / (1 + other) * sizeof(int32_t));
    Numbers data(own, shared(), count, rank);
    std::vector<int32_t> out(members * count);
    plane.allgather(party, numbers, data.data, out.data(), sizes);
    const int32_t* at = out.data();
    for (int other = 0; other < size; ++other) {
      for (size_t i = 0; i < count / static_cast<size_t>(1 + other); ++i) CHECK(*at++ == value(other, i));
    }
  }
  for (int root = 0; root < size; ++root) {
    Numbers data(own, shared(), count, rank);
    plane.broadcast(party, numbers, data.data, data.data, bytes, root);
    for (size_t i = 0; i < count; ++i) CHECK(data.data[i] == value(root, i));
  }
  {
    // Parts of all sizes; the last member sends the first one nothing.
    const size_t unit = count / (members * members * members);
    std::vector<std::vector<size_t>> parts(members);
    for (size_t from = 0; from < members; ++from) {
      for (size_t to = 0; to < members; ++to) parts[from].push_back(unit * (from + 1) * (to + 1) * sizeof(int32_t));
    }
    parts.back().front() = 0;
    Numbers data(own, shared(), count, rank);
    std::vector<int32_t> out(members * count);
    plane.alltoall(party, numbers, data.data, out.data(), parts);
    const int32_t* at = out.data();
    for (int from = 0; from < size; ++from) {
      const auto& row = parts[static_cast<size_t>(from)];
      const size_t begin = std::accumulate(row.begin(), row.begin() + rank, size_t{0}) / sizeof(int32_t);
      for (size_t i = 0; i < row[me] / sizeof(int32_t); ++i) CHECK(*at++ == value(from, begin + i));
    }
  }
  plane.barrier(party, numbers);
}

}  // namespace

// Memory that peers cannot read is sent in slices, whatever its size and the kind of the others' memory.
void test_local_plane_slices() {
  for (const int size : {2, 3}) {
    for (const size_t slice : {size_t{4096}, size_t{16384}}) {
      auto made = planes(size, false, slice);
      std::vector<std::thread> threads;
      for (int rank = 0; rank < size; ++rank) {
        threads.emplace_back([&, rank] {
          elastic::Numbering numbers;
          for (const size_t count : {size_t{700}, size_t{9'001}, size_t{40'000}}) {
            numbers.begin_reply();
            run_all(*made[static_cast<size_t>(rank)], rank, size, count, numbers);
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
    }
  }
}

// A member that has read all that it needs, and then gives up, may reuse its memory while another still reads it: that
// one must not return the data as the result.
void test_local_plane_member_gives_up() {
  for (const bool direct : {true, false}) {
    auto made = planes(3, direct);
    std::vector<elastic::Numbering> numbers(3);
    constexpr size_t kBytes = 1 << 20;
    // Ranks 0 and 1 send to rank 2, which reads them in this order.
    const std::vector<std::vector<size_t>> sizes{{0, 0, kBytes}, {0, 0, kBytes}, {0, 0, 0}};
    std::vector<char> late(kBytes, 'a'), gone(kBytes, 'b'), none(1), all(2 * kBytes);
    std::promise<void> gave_up;
    made[1]->look = [&] { throw elastic::AbortedError("aborted"); };  // it waits: it has nothing to read
    std::thread second([&] {
      try {
        made[1]->plane->alltoall({{0, 1, 2}, 1}, numbers[1], gone.data(), none.data(), sizes);
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
        made[2]->plane->alltoall({{0, 1, 2}, 2}, numbers[2], none.data(), all.data(), sizes);
      } catch (const elastic::CollectiveError&) {
        failed = true;
      }
      made[0]->aborted = true;
    });
    gave_up.get_future().get();
    try {
      made[0]->plane->alltoall({{0, 1, 2}, 0}, numbers[0], late.data(), none.data(), sizes);
    } catch (const elastic::CollectiveError&) {  // a failure of one may have failed the others
    }
    second.join();
    third.join();
    CHECK(failed);
  }
}
