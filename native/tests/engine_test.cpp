// Engines with threads as ranks, for the sanitizers: the same operations from several threads, with a timeline that
// starts and stops, aborts at any moment, and invalid messages.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
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
    for (int step = 0; step < 3; ++step) {
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
        CHECK(all_are(arrays[static_cast<size_t>(i)], int32_t{3 + 3 * i}));
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
    // No rank leaves before the others are finished.
    finish(engine, engine.submit("end", plan(Kind::kBarrier, kFloat32, {}), {{nullptr, nullptr}}, {}));
  });
  done = true;
  tracer.join();
}

using Contexts = std::vector<std::shared_ptr<elastic::ContextGroup>>;

// The contexts, by place, of ranks that are all on different machines.
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
    world.each([&](Engine& engine, int) {
      std::vector<float> array(size_t{1} << (10 + round % 12), 1.0f);
      try {
        while (true) {
          finish(engine, engine.submit("grad", plan(Kind::kAllreduce, kFloat32, {static_cast<int64_t>(array.size())}),
                                       {{array.data(), array.data()}}, {}));
        }
      } catch (const elastic::AbortedError&) {
      }
      // The engine no longer uses it.
      engine.close();
      std::fill(array.begin(), array.end(), 2.0f);
      CHECK(all_are(array, 2.0f));
    });
    aborter.join();
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
    // Names that are never repeated: the texts are forgotten once, and nothing else changes.
    elastic::Coordinator coordinator(2, 1 << 20, {});
    std::array<elastic::RequestWriter, 2> ranks;
    elastic::ReplyReader reader;
    size_t most = 0;
    for (int i = 0; i < 15'000; ++i) {
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
  for (int i = 0; i < 5'000; ++i) {
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

// More data than socket buffers hold, in both directions at once, and in a cycle: rank 0 sends to rank 1, which waits
// for rank 2, which sends to rank 0.
void test_control_link_both_ways() {
  using elastic::Clock;
  const std::string large(size_t{24} << 20, 'x');
  const auto check = [] {};
  for (const bool around : {false, true}) {
    const int size = around ? 3 : 2;
    std::vector<std::unique_ptr<elastic::ControlLink>> links;
    for (int rank = 0; rank < size; ++rank) {
      links.push_back(std::make_unique<elastic::ControlLink>(elastic::Identity{rank, "", ""}, size));
    }
    const std::string where = links[0]->listen("127.0.0.1");
    std::promise<void> last_has_sent;
    std::shared_future<void> sent = last_has_sent.get_future();
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < size; ++rank) {
      ranks.emplace_back([&, rank] {
        elastic::ControlLink& link = *links[static_cast<size_t>(rank)];
        link.connect(where, Clock::now() + std::chrono::seconds(20), check);
        const auto receive = [&] {
          std::vector<elastic::ControlLink::Frame> frames;
          while (frames.empty()) frames = link.receive(100);
          CHECK(frames.size() == 1 && frames[0].bytes == large);
        };
        if (rank == 0) {
          for (int to = 1; to < size; ++to) link.send(to, large, check);
          for (int from = around ? 2 : 1; from < size; ++from) receive();
        } else if (around && rank == 1) {
          sent.wait();
          receive();
        } else {
          link.send(0, large, check);
          if (around) last_has_sent.set_value();
          receive();
        }
      });
    }
    for (std::thread& rank : ranks) rank.join();
  }
}

// Each rank joins while another of its threads continues to submit unnamed operations.
void test_engine_joins() {
  World world(3);
  world.each([](Engine& engine, int rank) {
    Plan join;
    join.kind = Kind::kJoin;
    const Plan reduce = plan(Kind::kAllreduce, kInt32, {100});
    const auto sum = [&] {
      std::vector<int32_t> data(100, 1);
      finish(engine, engine.submit("", reduce, {{data.data(), data.data()}}, {}));
      return data[99];
    };
    for (int turn = 0; turn < 10; ++turn) {
      for (int i = 0; i < (rank + turn) % 3; ++i) sum();
      const auto joining = engine.submit("", join, {}, {});
      std::thread other([&] {
        for (int i = 0; i < 5; ++i) CHECK(sum() == 3);
      });
      finish(engine, joining);
      other.join();
      finish(engine, engine.submit("turn", plan(Kind::kBarrier, kFloat32, {}), {{nullptr, nullptr}}, {}));
    }
  });
}

// Rank 0 sends entries that this rank has not submitted, or not in this form: always an error, without any memory
// access.
void test_engine_checks_rank_0() {
  using elastic::Clock;
  const auto both = [](elastic::Coordinator& coordinator, const std::string& name, const Plan& what,
                       const std::vector<int64_t>& sizes) {
    for (int rank = 0; rank < 2; ++rank) {
      elastic::RequestWriter writer;
      writer.add(name, what, sizes);
      coordinator.receive(rank, writer.message(), Clock::now());
    }
    return coordinator.flush();
  };
  Plan join;
  join.kind = Kind::kJoin;
  Plan grouped = plan(Kind::kAllreduce, kFloat32, {3});
  grouped.tensors.push_back(grouped.tensors[0]);
  Plan elsewhere = plan(Kind::kBroadcast, kFloat32, {3});
  elsewhere.root = 1;
  const Plan right = plan(Kind::kAllreduce, kFloat32, {3});
  struct Case {
    Plan submitted, answered;
    std::string name;
    std::vector<int64_t> submitted_sizes, answered_sizes;
  };
  const std::vector<Case> cases = {
      {join, plan(Kind::kAllreduce, kFloat32, {3}), "join", {}, {}},
      {right, plan(Kind::kAllreduce, kFloat32, {1 << 20}), "x", {}, {}},
      {right, plan(Kind::kAllreduce, kInt32, {3}), "x", {}, {}},
      {right, plan(Kind::kReducescatter, kFloat32, {3}), "x", {}, {}},
      {right, grouped, "x", {}, {}},
      {right, elsewhere, "x", {}, {}},
      {right, right, "y", {}, {}},
      {right, join, "x", {}, {}},
      {plan(Kind::kAllgather, kFloat32, {}), plan(Kind::kAllgather, kFloat32, {}), "x", {3}, {1 << 30}},
      {plan(Kind::kAlltoall, kFloat32, {}), plan(Kind::kAlltoall, kFloat32, {}), "x", {1, 2}, {2, 1}},
  };
  for (const Case& each : cases) {
    elastic::ControlLink link({0, "", ""}, 2);
    const std::string where = link.listen("127.0.0.1");
    EngineOptions options;
    options.shared_memory = false;
    Engine engine(1, 2, options);
    const auto deadline = Clock::now() + std::chrono::seconds(20);
    std::thread peer([&] {
      link.connect(where, deadline, [] {});
      elastic::Meeting(link, deadline, [] {}).introduce({});
    });
    engine.connect(where, Seconds(20));
    peer.join();
    const std::vector<elastic::GroupPlan> plans{{"global", {0, 1}, 1}, {"cross", {0, 1}, 1}};
    engine.add_process_set(0, {0, 1}, std::make_shared<elastic::ContextGroup>(plans, "127.0.0.1", "key", "all"));
    engine.start();
    std::array<float, 3> data{1, 1, 1};
    std::vector<Memory> memory;
    if (each.submitted.kind != Kind::kJoin) memory.push_back({data.data(), data.data()});
    const auto operation =
        engine.submit(each.submitted.kind == Kind::kJoin ? "" : "x", each.submitted, memory, each.submitted_sizes);
    CHECK(link.receive(20'000).size() == 1);
    elastic::Coordinator liar(2, 1 << 20, {});
    link.send(1, both(liar, each.name, each.answered, each.answered_sizes), [] {});
    std::string said;
    try {
      finish(engine, operation);
    } catch (const elastic::AbortedError& error) {
      said = error.what();
    }
    CHECK(said.find("rank 0 runs") == 0);
    CHECK(data[0] == 1 && data[2] == 1);
  }
}

// Each rank has a thread that uses a process set while another removes it, on one machine and on several.
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
        // The other ranks remove it at the same point of the replies: no thread is left waiting, and the round
        // continues.
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

// An engine need not be closed: its destructor ends it even while it waits for peers, on any machine, that never
// answer.
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
  // Each engine has the connections of another pair, so that both wait for a peer that is connected and does nothing.
  std::vector<Contexts> pairs{connected({0, 1}, "one"), connected({0, 1}, "other")};
  world.each([&](Engine& engine, int rank) {
    const auto place = static_cast<size_t>(rank);
    engine.add_process_set(1, {0, 1}, pairs[place][place]);
    finish(engine, engine.submit("added", plan(Kind::kBarrier, kFloat32, {}), {{nullptr, nullptr}}, {}));
    Plan stuck = reduce;
    stuck.process_set = 1;
    std::vector<float> own(1000, 1.0f);
    const auto operation = engine.submit("grad", stuck, {{own.data(), own.data()}}, {});
    // By then both ranks have agreed on it, and run it.
    CHECK(!engine.wait(operation, std::chrono::milliseconds(200)));
    // Its name stays taken while it runs.
    bool refused = false;
    try {
      engine.submit("grad", stuck, {{own.data(), own.data()}}, {});
    } catch (const elastic::DuplicateNameError&) {
      refused = true;
    }
    CHECK(refused);
    world.engines[place].reset();
    CHECK(operation->state == Operation::State::kFailed);
  });
}
