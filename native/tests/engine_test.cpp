// Engines with threads as ranks, for the sanitizers: the same operations from several threads, with a timeline that
// comes and goes, aborts at any moment, and rubbish for messages.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/coordinator.h"
#include "engine/engine.h"
#include "tests/tests.h"

namespace {

using elastic::Engine;
using elastic::EngineOptions;
using elastic::Kind;
using elastic::Memory;
using elastic::Operation;
using elastic::Plan;
using elastic::Reduction;
using elastic::Seconds;

constexpr int kFloat32 = 2, kInt32 = 6;

struct World {
  explicit World(int size, EngineOptions options = {}, bool apart = false) {
    std::string where;
    for (int rank = 0; rank < size; ++rank) {
      engines.push_back(std::make_unique<Engine>(rank, size, options));
      const std::string published = engines.back()->prepare("127.0.0.1");
      if (rank == 0) where = published;
    }
    std::vector<int> ranks(static_cast<size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    each([&](Engine& engine, int) {
      engine.connect(where, Seconds(20));
      CHECK(engine.machines().size() == (apart ? ranks.size() : 1));
      std::shared_ptr<elastic::ContextGroup> own;
      if (apart) {
        const int rank = engine.rank();
        const std::vector<elastic::GroupPlan> plans{{"global", ranks, rank}, {"cross", ranks, rank}};
        own = std::make_shared<elastic::ContextGroup>(plans, "127.0.0.1", "key", "all");
        const std::string address = own->prepare();
        own->connect(engine.gather(address, elastic::ContextGroup::kOwnBytes, Seconds(20)), Seconds(20));
      }
      engine.add_process_set(0, ranks, own);
      engine.start();
    });
  }

  template <typename Body>
  void each(Body body) {
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < engines.size(); ++rank) {
      threads.emplace_back([&, rank] { body(*engines[rank], static_cast<int>(rank)); });
    }
    for (std::thread& thread : threads) thread.join();
  }

  std::vector<std::unique_ptr<Engine>> engines;
};

Plan plan(Kind kind, int type, std::vector<int64_t> shape) {
  Plan made;
  made.kind = kind;
  made.tensors.push_back({type, std::move(shape)});
  return made;
}

void finish(Engine& engine, const std::shared_ptr<Operation>& operation) {
  while (!engine.wait(operation, std::chrono::milliseconds(100))) {
  }
  engine.check(operation);
}

void operations(bool direct) {
  EngineOptions options;
  options.direct_reads = direct;
  World world(3, options);
  std::atomic<bool> done{false};
  std::thread tracer([&] {
    elastic::Timeline& timeline = world.engines[0]->timeline();
    while (!done) {
      timeline.start("/dev/null", 0, true);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      timeline.stop();
    }
  });
  world.each([](Engine& engine, int rank) {
    std::mt19937 random(static_cast<unsigned>(rank));
    for (int step = 0; step < 5; ++step) {
      std::vector<std::vector<int32_t>> arrays;
      std::vector<int> order;
      for (int i = 0; i < 12; ++i) {
        arrays.emplace_back(static_cast<size_t>(1 + 5000 * i * i), rank + i);
        order.push_back(i);
      }
      std::shuffle(order.begin(), order.end(), random);
      std::vector<std::shared_ptr<Operation>> running;
      for (const int i : order) {
        auto& array = arrays[static_cast<size_t>(i)];
        running.push_back(engine.submit("t" + std::to_string(i),
                                        plan(Kind::kAllreduce, kInt32, {static_cast<int64_t>(array.size())}),
                                        {{array.data(), array.data()}}, {}));
      }
      for (const auto& operation : running) finish(engine, operation);
      for (int i = 0; i < 12; ++i) {
        for (const int32_t value : arrays[static_cast<size_t>(i)]) CHECK(value == 3 + 3 * i);
      }
    }
    std::vector<float> mine(static_cast<size_t>(20'000 * rank), static_cast<float>(rank));
    const auto gathered = engine.submit("", plan(Kind::kAllgather, kFloat32, {}), {{mine.data(), nullptr}},
                                        {static_cast<int64_t>(mine.size())});
    finish(engine, gathered);
    CHECK(gathered->outputs[0].rows == 60'000);
    for (const size_t count : {size_t{5}, size_t{100'000}}) {
      std::vector<float> token(count, static_cast<float>(rank));
      Plan broadcast = plan(Kind::kBroadcast, kFloat32, {static_cast<int64_t>(count)});
      broadcast.root = 1;
      finish(engine, engine.submit("", broadcast, {{token.data(), token.data()}}, {}));
      CHECK(token.front() == 1 && token.back() == 1);
      std::vector<float> spread(3 * count, static_cast<float>(rank));
      const auto sent = static_cast<int64_t>(count);
      const auto swapped =
          engine.submit("", plan(Kind::kAlltoall, kFloat32, {}), {{spread.data(), nullptr}}, {sent, sent, sent});
      finish(engine, swapped);
      const auto* const from = reinterpret_cast<const float*>(swapped->outputs[0].memory.get());
      CHECK(from[0] == 0 && from[count] == 1 && from[3 * count - 1] == 2);
      const auto scattered =
          engine.submit("", plan(Kind::kReducescatter, kFloat32, {3 * sent}), {{spread.data(), nullptr}}, {});
      finish(engine, scattered);
      CHECK(reinterpret_cast<const float*>(scattered->outputs[0].memory.get())[0] == 3);
    }
    // Nobody leaves while others look for this one.
    finish(engine, engine.submit("end", plan(Kind::kBarrier, kFloat32, {}), {{nullptr, nullptr}}, {}));
  });
  done = true;
  tracer.join();
}

using Contexts = std::vector<std::shared_ptr<elastic::ContextGroup>>;

// Contexts of ranks that are each on a machine of their own, by place.
Contexts connected(const std::vector<int>& ranks, const std::string& purpose) {
  Contexts contexts;
  std::vector<std::string> blobs;
  for (size_t place = 0; place < ranks.size(); ++place) {
    const int index = static_cast<int>(place);
    const std::vector<elastic::GroupPlan> plans{{"global", ranks, index}, {"cross", ranks, index}};
    contexts.push_back(std::make_shared<elastic::ContextGroup>(plans, "127.0.0.1", "key", purpose));
    blobs.push_back(contexts.back()->prepare());
  }
  std::vector<std::thread> threads;
  for (const auto& own : contexts) threads.emplace_back([&] { own->connect(blobs, Seconds(20)); });
  for (std::thread& thread : threads) thread.join();
  return contexts;
}

}  // namespace

void test_engine_operations() {
  operations(true);
  operations(false);
}

void test_engine_aborts() {
  for (int round = 0; round < 20; ++round) {
    EngineOptions options;
    options.direct_reads = round % 2 == 0;
    World world(3, options);
    std::thread aborter([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(round));
      world.engines[static_cast<size_t>(round % 3)]->abort("stop");
    });
    const auto began = std::chrono::steady_clock::now();
    world.each([&](Engine& engine, int) {
      std::vector<float> array(size_t{1} << (10 + round % 12), 1.0f);
      try {
        while (true) {
          finish(engine, engine.submit("grad", plan(Kind::kAllreduce, kFloat32, {static_cast<int64_t>(array.size())}),
                                       {{array.data(), array.data()}}, {}));
        }
      } catch (const elastic::AbortedError&) {
      }
      // The engine has let go of it.
      engine.close();
      std::fill(array.begin(), array.end(), 2.0f);
      for (const float value : array) CHECK(value == 2.0f);
    });
    aborter.join();
    CHECK(std::chrono::steady_clock::now() - began < Seconds(10));
  }
}

void test_engine_messages() {
  elastic::RequestWriter requests;
  requests.add("a", plan(Kind::kAllreduce, kFloat32, {3, 4}), {});
  requests.add("", plan(Kind::kAllgather, kInt32, {4}), {7});
  const std::string good = requests.message();
  const auto now = std::chrono::steady_clock::now();
  std::string reply;
  {
    elastic::Coordinator coordinator(1, 1 << 20, {});
    coordinator.receive(0, good, now);
    reply = coordinator.flush();
    CHECK(elastic::ReplyReader().read(reply).size() == 2);
  }
  {
    // Names that are never the same again: what was said is forgotten now and then, and nothing else changes.
    elastic::Coordinator coordinator(2, 1 << 20, {});
    std::array<elastic::RequestWriter, 2> ranks;
    elastic::ReplyReader reader;
    size_t most = 0;
    for (int i = 0; i < 30'000; ++i) {
      const std::string name = "step." + std::to_string(i);
      for (int rank = 0; rank < 2; ++rank) {
        auto& writer = ranks[static_cast<size_t>(rank)];
        writer.add("always", plan(Kind::kAllreduce, kFloat32, {5}), {});
        writer.add(name, plan(Kind::kAllgather, kInt32, {i % 1000}), {i});
        const std::string message = writer.message();
        if (i > 0) most = std::max(most, message.size());
        coordinator.receive(rank, message, now);
      }
      const auto replies = reader.read(coordinator.flush());
      CHECK(replies.size() == 2);
      CHECK(elastic::key_name(replies[0].entries[0].key) == "always");
      CHECK(replies[0].entries[0].plan->elements(0) == 5);
      CHECK(elastic::key_name(replies[1].entries[0].key) == name);
      CHECK(replies[1].entries[0].plan->elements(0) == static_cast<size_t>(i % 1000));
      CHECK((replies[1].entries[0].sizes == std::vector<int64_t>{i, i}));
    }
    CHECK(most < 200);
  }
  std::mt19937 random(1);
  const auto spoil = [&](std::string text) {
    for (int i = 0; i < 3; ++i) text[random() % text.size()] = static_cast<char>(random());
    return random() % 2 == 0 ? text : text.substr(0, random() % text.size());
  };
  for (int i = 0; i < 20'000; ++i) {
    try {
      elastic::Coordinator coordinator(2, 1 << 20, {});
      coordinator.receive(0, spoil(good), now);
      coordinator.receive(1, spoil(good), now);
      coordinator.flush();
    } catch (const elastic::CollectiveError&) {
    }
    try {
      elastic::ReplyReader().read(spoil(reply));
    } catch (const elastic::CollectiveError&) {
    }
  }
}

// Each rank has a thread that uses a process set while another takes it away, on one machine and on several.
void test_engine_process_sets() {
  for (int round = 0; round < 6; ++round) {
    const bool apart = round % 2 == 1;
    EngineOptions options;
    options.shared_memory = !apart;
    World world(2, options, apart);
    for (int number = 1; number <= 8; ++number) {
      Contexts contexts(2);
      if (apart) contexts = connected({0, 1}, std::to_string(number));
      world.each([&](Engine& engine, int rank) {
        engine.add_process_set(number, {0, 1}, contexts[static_cast<size_t>(rank)]);
        finish(engine, engine.submit("added", plan(Kind::kBarrier, kFloat32, {}), {{nullptr, nullptr}}, {}));
        std::thread user([&] {
          std::vector<float> data(1000, 1.0f);
          try {
            for (int step = 0;; ++step) {
              Plan reduce = plan(Kind::kAllreduce, kFloat32, {static_cast<int64_t>(data.size())});
              reduce.process_set = number;
              finish(engine, engine.submit("s" + std::to_string(step), reduce, {{data.data(), data.data()}}, {}));
            }
          } catch (const elastic::MismatchError&) {
          } catch (const std::invalid_argument&) {
          }
        });
        // The others see it go at the same point of the replies: nobody is left waiting, and the round goes on.
        finish(engine, engine.remove_process_set(number));
        if (contexts[static_cast<size_t>(rank)]) contexts[static_cast<size_t>(rank)]->close();
        contexts[static_cast<size_t>(rank)].reset();
        user.join();
        std::vector<float> data(3, 1.0f);
        finish(engine, engine.submit("after", plan(Kind::kAllreduce, kFloat32, {3}), {{data.data(), data.data()}}, {}));
        CHECK(data[0] == 2);
      });
    }
  }
}

// Nobody has to close an engine: it ends also while it waits for peers, in the machine or on others, that never come.
void test_engine_ends_without_close() {
  std::vector<float> data(1000, 1.0f);
  const Plan reduce = plan(Kind::kAllreduce, kFloat32, {1000});
  {
    World world(2);
    world.engines[0]->submit("grad", reduce, {{data.data(), data.data()}}, {});
  }
  EngineOptions options;
  options.shared_memory = false;
  options.collective_timeout = Seconds(3600);
  World world(2, options, true);
  // Each engine has the connections of another pair, so that both wait for a peer that is there and does nothing.
  std::vector<Contexts> pairs{connected({0, 1}, "one"), connected({0, 1}, "other")};
  world.each([&](Engine& engine, int rank) {
    const auto place = static_cast<size_t>(rank);
    engine.add_process_set(1, {0, 1}, pairs[place][place]);
    finish(engine, engine.submit("added", plan(Kind::kBarrier, kFloat32, {}), {{nullptr, nullptr}}, {}));
    Plan stuck = reduce;
    stuck.process_set = 1;
    std::vector<float> own(1000, 1.0f);
    const auto operation = engine.submit("grad", stuck, {{own.data(), own.data()}}, {});
    // By then both have agreed on it, and run it.
    CHECK(!engine.wait(operation, std::chrono::milliseconds(200)));
    world.engines[place].reset();
    CHECK(operation->state == Operation::State::kFailed);
  });
}
