#include "context_group.h"

#include <gloo/allgatherv.h>
#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/common/error.h>
#include <gloo/context.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "errors.h"
#include "sockets.h"

namespace elastic {
namespace {

// Connecting and closing each wait for a turn of the device's loop, up to 10 ms; one turn serves all that wait. 8 threads
// measured best for 32 ranks on 2 cores (30 to 100 are slower).
constexpr size_t kThreads = 8;
// Gloo waits five times this for a peer to connect, which nothing but our own limit is to end.
constexpr std::chrono::milliseconds kPairTimeout = std::chrono::hours(1);
// How often a build that was aborted looks for sockets that were made meanwhile.
constexpr std::chrono::milliseconds kSweepPeriod{10};

std::chrono::milliseconds milliseconds(Seconds timeout) {
  // Above zero: Gloo takes zero for no limit at all.
  const double value = std::min(std::max(timeout.count() * 1e3, 1.0), 1e12);
  return std::chrono::milliseconds(static_cast<int64_t>(value));
}

// The thread is SCHED_BATCH for as long as this lives; threads it starts stay so. Without it Gloo's loop thread preempts
// those that compute at every packet, and where threads outnumber cores it spins through whole time slices.
class BatchScheduling {
 public:
  BatchScheduling() : policy_(sched_getscheduler(0)) {
    sched_getparam(0, &param_);
    const sched_param none{};
    changed_ = policy_ == SCHED_OTHER && sched_setscheduler(0, SCHED_BATCH, &none) == 0;
  }
  ~BatchScheduling() {
    if (changed_) sched_setscheduler(0, policy_, &param_);
  }
  BatchScheduling(const BatchScheduling&) = delete;
  BatchScheduling& operator=(const BatchScheduling&) = delete;

 private:
  const int policy_;
  sched_param param_{};
  bool changed_ = false;
};

std::string endpoint_of(const Bytes& address) {
  sockaddr_storage storage{};
  if (address.size() < sizeof(storage)) return "";
  std::memcpy(&storage, address.data(), sizeof(storage));
  return endpoint(storage);
}

}  // namespace

// gloo::Context lets only its heirs set the transport.
class ContextGroup::GlooContext : public gloo::Context {
 public:
  GlooContext(int index, int members, std::shared_ptr<gloo::transport::Device> device,
              std::shared_ptr<gloo::transport::Context> transport)
      : gloo::Context(index, members) {
    device_ = std::move(device);
    transportContext_ = std::move(transport);
  }
};

struct ContextGroup::Group {
  GroupPlan plan;
  std::shared_ptr<GlooContext> context;  // none for a group of one
  std::mutex busy;                       // held by the collective under way
  uint32_t tag = 0;                      // another for each collective, the same on all members

  int size() const { return static_cast<int>(plan.members.size()); }
};

// A connection to make.
struct ContextGroup::Dial {
  gloo::transport::Pair* pair;
  Bytes address;
  int rank;  // global, of the peer
};

ContextGroup::ContextGroup(std::vector<GroupPlan> groups, std::string host)
    : host_(std::move(host)), owner_(getpid()) {
  for (GroupPlan& plan : groups) {
    if (plan.index < 0 || plan.index >= static_cast<int>(plan.members.size())) {
      throw std::invalid_argument("group '" + plan.name + "' has no member number " + std::to_string(plan.index));
    }
    for (const auto& other : groups_) {
      if (other->plan.name == plan.name) throw std::invalid_argument("group '" + plan.name + "' is named twice");
    }
    groups_.push_back(std::make_unique<Group>());
    groups_.back()->plan = std::move(plan);
  }
}

ContextGroup::~ContextGroup() {
  if (getpid() != owner_) {
    // In a forked child the device's thread does not exist; joining it would wait for ever. The memory goes with the child.
    for (auto& group : groups_) new std::shared_ptr<GlooContext>(std::move(group->context));
    new std::shared_ptr<gloo::transport::Device>(std::move(device_));
    return;
  }
  abort("its context was dropped");
  close();
}

std::string ContextGroup::prepare() {
  switch_->check();
  if (device_) throw CollectiveError("prepare() was called before");
  const bool alone = std::all_of(groups_.begin(), groups_.end(), [](const auto& group) { return group->size() == 1; });
  std::vector<GroupAddresses> addresses;
  try {
    if (!alone) {
      const BatchScheduling batch;
      gloo::transport::tcp::attr attributes;
      attributes.hostname = host_;
      device_ = gloo::transport::tcp::CreateDevice(attributes);
    }
    for (auto& group : groups_) {
      addresses.push_back({group->plan.name, {}});
      if (group->size() == 1) continue;
      const auto inner = device_->createContext(group->plan.index, group->size());
      inner->setTimeout(kPairTimeout);
      group->context = std::make_shared<GlooContext>(group->plan.index, group->size(), device_,
                                                     std::make_shared<AbortableTransport>(inner, switch_));
      for (int member = 0; member < group->size(); ++member) {
        if (member == group->plan.index) continue;
        addresses.back().pairs.push_back(inner->createPair(member)->address().bytes());
        const std::lock_guard<std::mutex> lock(endpoints_mutex_);
        own_endpoints_.insert(endpoint_of(addresses.back().pairs.back()));
      }
    }
  } catch (const std::exception& error) {
    throw CollectiveError("cannot listen on " + host_ + ": " + error.what());
  }
  return pack_addresses(addresses);
}

std::vector<ContextGroup::Dial> ContextGroup::plan_dials(const std::vector<std::string>& blobs) {
  std::map<int, std::vector<GroupAddresses>> peers;  // by global rank
  std::vector<Dial> dials;
  for (const auto& group : groups_) {
    for (int member = 0; member < group->size(); ++member) {
      if (member == group->plan.index) continue;
      const int rank = group->plan.members[member];
      if (rank < 0 || rank >= static_cast<int>(blobs.size())) {
        throw CollectiveError("no addresses of rank " + std::to_string(rank) + ": there are " +
                              std::to_string(blobs.size()) + " blobs");
      }
      if (peers.count(rank) == 0) peers[rank] = unpack_addresses(blobs[rank]);
      const auto found = std::find_if(peers[rank].begin(), peers[rank].end(),
                                      [&](const GroupAddresses& one) { return one.name == group->plan.name; });
      // The peer lists all but itself, in the group's order.
      const size_t place = group->plan.index - (group->plan.index > member ? 1 : 0);
      if (found == peers[rank].end() || found->pairs.size() != group->plan.members.size() - 1) {
        throw CollectiveError("rank " + std::to_string(rank) + " has another group '" + group->plan.name + "'");
      }
      dials.push_back({group->context->getPair(member).get(), found->pairs[place], rank});
    }
  }
  return dials;
}

void ContextGroup::connect(const std::vector<std::string>& blobs, Seconds timeout) {
  switch_->check();
  const bool unprepared = std::any_of(groups_.begin(), groups_.end(),
                                      [](const auto& group) { return group->size() > 1 && !group->context; });
  if (unprepared) throw CollectiveError("prepare() was not called");
  const std::vector<Dial> dials = plan_dials(blobs);
  {
    const std::lock_guard<std::mutex> lock(endpoints_mutex_);
    for (const Dial& one : dials) peer_endpoints_.insert(endpoint_of(one.address));
  }
  dial(dials, timeout);
}

void ContextGroup::dial(const std::vector<Dial>& dials, Seconds timeout) {
  std::mutex mutex;
  std::condition_variable changed;
  std::string error;                // of the first that failed
  std::set<size_t> open;            // not connected yet
  size_t next = 0;
  size_t running = std::min(kThreads, dials.size());
  for (size_t i = 0; i < dials.size(); ++i) open.insert(i);

  const auto work = [&] {
    std::unique_lock<std::mutex> lock(mutex);
    while (next < dials.size() && error.empty() && !switch_->aborted()) {
      const size_t mine = next++;
      lock.unlock();
      std::string failed;
      try {
        dials[mine].pair->connect(dials[mine].address);
      } catch (const std::exception& exception) {
        failed = exception.what();
      }
      lock.lock();
      if (failed.empty()) {
        open.erase(mine);
      } else if (error.empty()) {
        error = "cannot connect to rank " + std::to_string(dials[mine].rank) + ": " + failed;
      }
    }
    --running;
    changed.notify_all();
  };
  std::vector<std::thread> threads;
  for (size_t i = 0, count = running; i < count; ++i) threads.emplace_back(work);

  std::unique_lock<std::mutex> lock(mutex);
  const auto deadline = std::chrono::steady_clock::now() + milliseconds(timeout);
  bool late = false;
  const auto finished = [&] { return running == 0; };
  while (!finished()) {
    // abort() shuts down the sockets that there are; what a thread makes after that is found here.
    const bool over = late || !error.empty() || switch_->aborted();
    const auto sweep = std::chrono::steady_clock::now() + kSweepPeriod;
    changed.wait_until(lock, over ? sweep : std::min(deadline, sweep), finished);
    if (finished()) break;
    late = late || std::chrono::steady_clock::now() >= deadline;
    if (late || !error.empty() || switch_->aborted()) {
      if (late && error.empty()) error = "late";
      lock.unlock();
      shut_down_sockets();
      lock.lock();
    }
  }
  lock.unlock();
  for (std::thread& thread : threads) thread.join();

  switch_->check();
  if (late && !open.empty()) {
    std::set<int> ranks;
    for (const size_t i : open) ranks.insert(dials[i].rank);
    std::string names;
    for (const int rank : ranks) names += (names.empty() ? "" : ", ") + std::to_string(rank);
    throw CollectiveTimeout("cannot connect within " + std::to_string(timeout.count()) + " s to ranks " + names);
  }
  if (!open.empty()) throw CollectiveError(error);
  {
    const std::lock_guard<std::mutex> connected(endpoints_mutex_);
    connected_ = true;
  }
  switch_->check();
}

ContextGroup::Group& ContextGroup::find(const std::string& name) const {
  for (const auto& group : groups_) {
    if (group->plan.name == name) return *group;
  }
  throw std::invalid_argument("there is no group '" + name + "'");
}

int ContextGroup::group_size(const std::string& group) const { return find(group).size(); }

int ContextGroup::group_index(const std::string& group) const { return find(group).plan.index; }

template <typename Operation>
void ContextGroup::run(const std::string& name, const char* what, Seconds timeout, Operation operation) {
  Group& group = find(name);
  switch_->check();
  const std::unique_lock<std::mutex> busy(group.busy, std::try_to_lock);
  if (!busy.owns_lock()) {
    throw CollectiveError(std::string("cannot begin ") + what + ": another thread is in a collective of group '" + name +
                          "'");
  }
  if (group.size() == 1) return;
  if (!group.context) throw CollectiveError(std::string("cannot begin ") + what + ": the contexts are not connected");
  try {
    operation(group.context, group.tag++, milliseconds(timeout));
  } catch (const CollectiveError&) {
    throw;
  } catch (const gloo::IoException& error) {
    switch_->check();
    const std::string text = error.what();
    if (text.find("Timed out") != std::string::npos || text.find("timeout") != std::string::npos) {
      throw CollectiveTimeout(std::string(what) + " did not end within " + std::to_string(timeout.count()) + " s");
    }
    throw CollectiveError(std::string(what) + " failed: " + text);
  } catch (const std::exception& error) {
    switch_->check();
    throw CollectiveError(std::string(what) + " failed: " + error.what());
  }
}

void ContextGroup::allreduce(const std::string& group, void* data, size_t count, DType dtype, ReduceOp op,
                             Seconds timeout) {
  run(group, "allreduce", timeout, [&](const auto& context, uint32_t tag, std::chrono::milliseconds limit) {
    if (count == 0) return;
    const size_t size = element_size(dtype);
    gloo::AllreduceOptions options(context);
    // The buffer goes in as bytes of the element's width; the kernel knows what they are.
    switch (size) {
      case 1:
        options.setOutput(static_cast<uint8_t*>(data), count);
        break;
      case 2:
        options.setOutput(static_cast<uint16_t*>(data), count);
        break;
      case 4:
        options.setOutput(static_cast<uint32_t*>(data), count);
        break;
      default:
        options.setOutput(static_cast<uint64_t*>(data), count);
    }
    options.setReduceFunction(reduce_kernel(dtype, op));
    // Never BCUBE: of its survivors, some wait until the time is up when a member dies.
    options.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
    options.setTag(tag);
    options.setTimeout(limit);
    gloo::allreduce(options);
  });
}

void ContextGroup::broadcast(const std::string& group, void* data, size_t bytes, int root, Seconds timeout) {
  if (root < 0 || root >= group_size(group)) {
    throw std::invalid_argument("there is no member number " + std::to_string(root) + " in group '" + group + "'");
  }
  run(group, "broadcast", timeout, [&](const auto& context, uint32_t tag, std::chrono::milliseconds limit) {
    if (bytes == 0) return;
    gloo::BroadcastOptions options(context);
    options.setOutput(static_cast<uint8_t*>(data), bytes);
    options.setRoot(root);
    options.setTag(tag);
    options.setTimeout(limit);
    gloo::broadcast(options);
  });
}

void ContextGroup::allgather(const std::string& group, const void* input, void* output,
                             const std::vector<size_t>& counts, Seconds timeout) {
  const int index = group_index(group);
  if (static_cast<int>(counts.size()) != group_size(group)) {
    throw std::invalid_argument("allgather needs a count for each of the " + std::to_string(group_size(group)) +
                                " members of group '" + group + "'");
  }
  const size_t total = std::accumulate(counts.begin(), counts.end(), size_t{0});
  if (counts.size() == 1) {
    switch_->check();
    if (total != 0) std::memcpy(output, input, total);
    return;
  }
  run(group, "allgather", timeout, [&](const auto& context, uint32_t tag, std::chrono::milliseconds limit) {
    if (total == 0) return;
    gloo::AllgathervOptions options(context);
    // Gloo reads the input only, but its buffers know no const.
    options.setInput(static_cast<uint8_t*>(const_cast<void*>(input)), counts[index]);
    options.setOutput(static_cast<uint8_t*>(output), counts);
    options.setTag(tag);
    options.setTimeout(limit);
    gloo::allgatherv(options);
  });
}

void ContextGroup::barrier(const std::string& group, Seconds timeout) {
  run(group, "barrier", timeout, [&](const auto& context, uint32_t tag, std::chrono::milliseconds limit) {
    gloo::BarrierOptions options(context);
    options.setTag(tag);
    options.setTimeout(limit);
    gloo::barrier(options);
  });
}

void ContextGroup::abort(const std::string& reason) {
  switch_->abort(reason);
  shut_down_sockets();
}

void ContextGroup::shut_down_sockets() {
  const std::lock_guard<std::mutex> lock(endpoints_mutex_);
  if (own_endpoints_.empty()) return;
  // While pairs connect, nothing but the wait for a peer blocks, and that is on a listener. A connection must be left alone
  // until Gloo has made a pair of it: its loop thread asks for the peer's name and ends the process when there is none.
  if (connected_) {
    shutdown_sockets(own_endpoints_, peer_endpoints_);
  } else {
    shutdown_listeners(own_endpoints_);
  }
}

void ContextGroup::close() {
  const std::lock_guard<std::mutex> closing(close_mutex_);
  if (closed_) return;
  closed_ = true;
  switch_->abort("the contexts are closed");
  std::vector<gloo::transport::Pair*> pairs;
  for (auto& group : groups_) {
    const std::lock_guard<std::mutex> idle(group->busy);  // a collective under way ends first
    if (!group->context) continue;
    for (int member = 0; member < group->size(); ++member) {
      if (member == group->plan.index) continue;
      const auto& pair = group->context->getPair(member);
      if (pair) pairs.push_back(pair.get());
    }
  }
  std::atomic<size_t> next{0};
  std::vector<std::thread> threads;
  for (size_t i = 0; i < std::min(kThreads, pairs.size()); ++i) {
    threads.emplace_back([&] {
      for (size_t mine = next++; mine < pairs.size(); mine = next++) {
        try {
          pairs[mine]->close();
        } catch (const std::exception&) {
          // A pair that failed before is closed already.
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (auto& group : groups_) {
    const std::lock_guard<std::mutex> idle(group->busy);
    group->context.reset();
  }
  const std::lock_guard<std::mutex> lock(endpoints_mutex_);
  own_endpoints_.clear();
  peer_endpoints_.clear();
  device_.reset();
}

}  // namespace elastic
