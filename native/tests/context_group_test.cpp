// Context groups with threads as ranks: collectives, aborts at any moment, and invalid addresses.
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "errors.h"
#include "gloo/context_group.h"
#include "tests/tests.h"

using elastic::ContextGroup;
using elastic::Seconds;

namespace {

constexpr Seconds kLimit{300};

struct Groups {
  std::vector<std::shared_ptr<ContextGroup>> members;
  std::vector<std::string> blobs;

  explicit Groups(int size) {
    std::vector<int> ranks;
    for (int rank = 0; rank < size; ++rank) ranks.push_back(rank);
    for (int rank = 0; rank < size; ++rank) {
      std::vector<elastic::GroupPlan> plans{{"global", ranks, rank}};
      if (size % 2 == 0) {
        const int first = rank - rank % 2;
        plans.push_back({"local", {first, first + 1}, rank % 2});
      }
      members.push_back(std::make_shared<ContextGroup>(plans, "127.0.0.1", "key", "test"));
      blobs.push_back(members.back()->prepare());
    }
  }

  void run(const std::function<void(ContextGroup&, int)>& body) {
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < members.size(); ++rank) {
      threads.emplace_back([&, rank] {
        members[rank]->connect(blobs, kLimit);
        body(*members[rank], static_cast<int>(rank));
        members[rank]->close();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

}  // namespace

void test_collectives() {
  Groups(4).run([](ContextGroup& member, int rank) {
    for (const size_t count : {size_t{1}, size_t{1000}, size_t{100'003}}) {
      std::vector<float> data(count, static_cast<float>(rank));
      member.allreduce("global", data.data(), count, elastic::DType::kFloat32, elastic::ReduceOp::kSum, kLimit);
      CHECK(data.front() == 6 && data.back() == 6);
      std::vector<uint16_t> halves(count, 0x3c00);  // 1.0
      member.allreduce("local", halves.data(), count, elastic::DType::kFloat16, elastic::ReduceOp::kSum, kLimit);
      CHECK(halves.front() == 0x4000 && halves.back() == 0x4000);
      std::vector<int8_t> small(count, 100);
      member.allreduce("global", small.data(), count, elastic::DType::kInt8, elastic::ReduceOp::kProduct, kLimit);
      CHECK(small.front() == static_cast<int8_t>(100 * 100 * 100 * 100));
    }
    std::vector<int> one{rank};
    member.broadcast("global", one.data(), sizeof(int), 3, kLimit);
    CHECK(one[0] == 3);
    const std::vector<size_t> counts{0, 1, 2, 300'000};
    std::vector<char> mine(counts[rank], static_cast<char>(rank)), all(300'003);
    member.allgather("global", mine.data(), all.data(), counts, kLimit);
    CHECK(all[0] == 1 && all[1] == 2 && all[2] == 2 && all[3] == 3 && all.back() == 3);
    member.barrier("local", kLimit);
    member.barrier("global", kLimit);
  });
}

void test_abort_while_blocked() {
  for (int round = 0; round < 10; ++round) {
    Groups world(3);
    world.run([&](ContextGroup& member, int rank) {
      if (rank == 0) {
        member.barrier("global", kLimit);
        // The others are in the barrier's last step, about to enter the collective, or in it: all must end.
        for (auto& other : world.members) other->abort("on purpose");
        return;
      }
      std::vector<float> data(1 << 18);
      bool ended = false;
      try {
        member.barrier("global", kLimit);
        member.allreduce("global", data.data(), data.size(), elastic::DType::kFloat32, elastic::ReduceOp::kSum, kLimit);
      } catch (const elastic::CollectiveError&) {
        ended = true;
      }
      CHECK(ended);
      member.abort("again");
    });
  }
}

void test_abort_while_connecting() {
  for (int round = 0; round < 10; ++round) {
    Groups world(4);
    std::vector<std::thread> threads;
    // Rank 3 never connects.
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          world.members[rank]->connect(world.blobs, kLimit);
        } catch (const elastic::AbortedError&) {
          return;
        } catch (const elastic::CollectiveError&) {
          return;
        }
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(round));
    const auto began = std::chrono::steady_clock::now();
    for (auto& member : world.members) member->abort("stop");
    for (std::thread& thread : threads) thread.join();
    CHECK(std::chrono::steady_clock::now() - began < kLimit / 2);
  }
}

void test_rubbish_for_addresses() {
  const auto refused = [](const std::string& blob) {
    const auto one = std::make_shared<ContextGroup>(std::vector<elastic::GroupPlan>{{"global", {0, 1}, 0}}, "127.0.0.1",
                                                    "key", "test");
    one->prepare();
    try {
      one->connect({"", blob}, Seconds(0.001));
      CHECK(false);
    } catch (const elastic::CollectiveError&) {
    }
  };
  const std::string good = Groups(2).blobs[0];
  for (size_t length = 0; length < good.size(); ++length) refused(good.substr(0, length));
  unsigned state = 1;
  for (int i = 0; i < 500; ++i) {
    std::string bad = good;
    for (int j = 0; j < 4; ++j) {
      state = state * 1664525u + 1013904223u;
      // All but the host, whose name must not be resolved.
      bad[10 + (state >> 8) % (bad.size() - 10)] = static_cast<char>(state >> 24);
    }
    refused(bad);
  }
}
