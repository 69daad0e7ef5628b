#include "context_group.h"

#include <gloo/allgatherv.h>
#include <gloo/allreduce.h>
#include <gloo/alltoallv.h>
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
#include <initializer_list>
#include <map>
#include <numeric>
#include <set>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "errors.h"
#include "small_allreduce.h"

namespace elastic {
namespace {

// Connecting and closing each wait for a turn of the device's loop, up to 10 ms; one turn serves all that wait. 8
// threads measured best for 32 ranks on 2 cores (30 to 100 are slower).
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

// The thread is SCHED_BATCH for as long as this lives; threads it starts stay so. Without it Gloo's loop thread
// preempts those that compute at every packet, and where threads outnumber cores it spins through whole time slices.
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

// FNV-1a of what must be the same on all members of a collective.
uint64_t hash(std::initializer_list<uint64_t> values, uint64_t state = 0xcbf29ce484222325u) {
  for (const uint64_t value : values) {
    for (int shift = 0; shift < 64; shift += 8) state = (state ^ ((value >> shift) & 0xff)) * 0x100000001b3u;
  }
  return state;
}

enum Call : uint64_t { kAllreduce, kBroadcast, kAllgather, kBarrier, kAlltoall };

// Starts up to `count` threads that each run `work`; fewer where the system has no more. Returns those that run.
template <typename Work>
std::vector<std::thread> start_threads(size_t count, Work work) {
  std::vector<std::thread> threads;
  threads.reserve(count);
  try {
    while (threads.size() < count) threads.emplace_back(work);
  } catch (const std::system_error&) {
  }
  return threads;
}

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
  std::shared_ptr<AbortableTransport> transport;  // this and the next: none for a group of one
  std::shared_ptr<GlooContext> context;
  std::mutex busy;     // held by the collective under way
  uint64_t calls = 0;  // collectives begun; the same on all members

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
  if (groups.size() > kMostGroups) throw std::invalid_argument("there can be no more than 16 groups");
  for (GroupPlan& plan : groups) {
    if (plan.name.size() > kLongestName) throw std::invalid_argument("a group's name is longer than 256 bytes");
    std::set<int> distinct(plan.members.begin(), plan.members.end());
    if (distinct.size() != plan.members.size() || (!distinct.empty() && *distinct.begin() < 0)) {
      throw std::invalid_argument("the members of group '" + plan.name + "' are not distinct ranks");
    }
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
    // In a forked child the device's thread does not exist; joining it would wait for ever. The memory goes with the
    // child.
    for (auto& group : groups_) new std::shared_ptr<GlooContext>(std::move(group->context));
    for (auto& group : groups_) new std::shared_ptr<AbortableTransport>(std::move(group->transport));
    new std::shared_ptr<gloo::transport::Device>(std::move(device_));
    return;
  }
  abort("its context was dropped");
  close();
}

void ContextGroup::check() const {
  if (getpid() != owner_) throw CollectiveError("the contexts belong to the process that forked this one");
  switch_->check();
}

std::string ContextGroup::prepare() {
  check();
  const std::lock_guard<std::mutex> building(build_mutex_);
  check();
  if (phase_ != Phase::kNew) throw CollectiveError("prepare() was called before");
  phase_ = Phase::kBroken;  // until it has worked
  const bool alone = std::all_of(groups_.begin(), groups_.end(), [](const auto& group) { return group->size() == 1; });
  std::vector<GroupAddresses> addresses;
  size_t pairs = 0;
  for (const auto& group : groups_) pairs += static_cast<size_t>(group->size() - 1);
  // While a pair connects it has its listener and its connection.
  if (pairs != 0) require_descriptors(2 * pairs, std::to_string(pairs) + " connections to other workers");
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
      group->transport = std::make_shared<AbortableTransport>(inner, switch_);
      group->context = std::make_shared<GlooContext>(group->plan.index, group->size(), device_, group->transport);
      for (int member = 0; member < group->size(); ++member) {
        if (member == group->plan.index) continue;
        addresses.back().pairs.push_back(clean_address(inner->createPair(member)->address().bytes()));
        const std::lock_guard<std::mutex> lock(names_mutex_);
        names_.own.insert(endpoint_of(addresses.back().pairs.back()));
      }
    }
  } catch (const std::exception& error) {
    throw CollectiveError("cannot listen on " + host_ + ": " + error.what());
  }
  phase_ = Phase::kPrepared;
  addresses_ = std::move(addresses);
  return pack_addresses(addresses_);
}

CutAddresses ContextGroup::cut(size_t size) const {
  std::vector<std::vector<int>> peers;
  for (const auto& group : groups_) {
    peers.emplace_back();
    if (group->size() == 1) continue;
    for (const int rank : group->plan.members) {
      if (rank >= static_cast<int>(size)) throw std::invalid_argument("there is a member above the size");
      if (rank != group->plan.members[static_cast<size_t>(group->plan.index)]) peers.back().push_back(rank);
    }
  }
  if (addresses_.size() != groups_.size()) throw CollectiveError("prepare() was not called");
  return cut_addresses(addresses_, peers, size);
}

std::vector<ContextGroup::Dial> ContextGroup::plan_dials(const Lookup& lookup) const {
  std::vector<Dial> dials;
  for (const auto& group : groups_) {
    for (int member = 0; member < group->size(); ++member) {
      if (member == group->plan.index) continue;
      const int rank = group->plan.members[static_cast<size_t>(member)];
      dials.push_back({group->context->getPair(member).get(), lookup(rank, group->plan, member), rank});
    }
  }
  return dials;
}

void ContextGroup::connect(const std::vector<std::string>& blobs, Seconds timeout) {
  std::map<int, std::vector<GroupAddresses>> peers;  // by global rank
  const auto lookup = [&](int rank, const GroupPlan& plan, int member) {
    if (rank < 0 || rank >= static_cast<int>(blobs.size())) {
      throw CollectiveError("no addresses of rank " + std::to_string(rank) + ": there are " +
                            std::to_string(blobs.size()) + " blobs");
    }
    if (peers.count(rank) == 0) peers[rank] = unpack_addresses(blobs[static_cast<size_t>(rank)]);
    const auto found = std::find_if(peers[rank].begin(), peers[rank].end(),
                                    [&](const GroupAddresses& one) { return one.name == plan.name; });
    // The peer lists all but itself, in the group's order.
    const auto place = static_cast<size_t>(plan.index - (plan.index > member ? 1 : 0));
    if (found == peers[rank].end() || found->pairs.size() != plan.members.size() - 1) {
      throw CollectiveError("rank " + std::to_string(rank) + " has another group '" + plan.name + "'");
    }
    return found->pairs[place];
  };
  connect_all(lookup, timeout);
}

void ContextGroup::connect(const std::vector<std::pair<std::string, std::string>>& given, Seconds timeout) {
  std::map<int, std::map<std::string, Bytes>> peers;
  const auto lookup = [&](int rank, const GroupPlan& plan, int) {
    if (rank < 0 || rank >= static_cast<int>(given.size())) {
      throw CollectiveError("no addresses of rank " + std::to_string(rank));
    }
    if (peers.count(rank) == 0) {
      const auto& [common, part] = given[static_cast<size_t>(rank)];
      peers[rank] = join_addresses(common, part);
    }
    const auto found = peers[rank].find(plan.name);
    if (found == peers[rank].end()) {
      throw CollectiveError("rank " + std::to_string(rank) + " has another group '" + plan.name + "'");
    }
    return found->second;
  };
  connect_all(lookup, timeout);
}

void ContextGroup::connect_all(const Lookup& lookup, Seconds timeout) {
  check();
  const std::lock_guard<std::mutex> building(build_mutex_);
  check();
  if (phase_ == Phase::kNew) throw CollectiveError("prepare() was not called");
  if (phase_ != Phase::kPrepared) throw CollectiveError("connect() was called before, or prepare() failed");
  const std::vector<Dial> dials = plan_dials(lookup);
  {
    const std::lock_guard<std::mutex> lock(names_mutex_);
    for (const Dial& one : dials) names_.peers.insert(endpoint_of(one.address));
  }
  phase_ = Phase::kBroken;  // until it has worked
  dial(dials, timeout);
  {
    // Of each pair, one side's port is free again and may come back as that of any socket of this process.
    const std::lock_guard<std::mutex> lock(names_mutex_);
    names_ = names_in_use(names_);
    phase_ = Phase::kConnected;
  }
  switch_->check();
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
  const size_t wanted = running;
  std::vector<std::thread> threads = start_threads(wanted, work);

  std::unique_lock<std::mutex> lock(mutex);
  running -= wanted - threads.size();
  if (threads.empty() && wanted != 0) error = "cannot connect: the system has no more threads";
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
void ContextGroup::run(const std::string& name, const char* what, uint64_t signature, Seconds timeout,
                       Operation operation) {
  check();
  Group& group = find(name);
  const std::unique_lock<std::mutex> busy(group.busy, std::try_to_lock);
  if (!busy.owns_lock()) {
    throw CollectiveError(std::string("cannot begin ") + what + ": another thread is in a collective of group '" +
                          name + "'");
  }
  check();  // close() holds `busy` when it frees the context
  if (group.size() == 1) return;
  if (phase_ != Phase::kConnected) {
    throw CollectiveError(std::string("cannot begin ") + what + ": the contexts are not connected");
  }
  // Gloo would take a message of another size for the one it expects, and end the process or leave the rest as it was.
  // With all that must be alike in the tag, it waits for what never comes.
  const auto tag = static_cast<uint32_t>(hash({group.calls++, signature}) >> 32);
  const std::chrono::milliseconds limit = milliseconds(timeout);
  group.transport->set_deadline(std::chrono::steady_clock::now() + limit);
  try {
    operation(group.context, tag, limit);
  } catch (const CollectiveError&) {
    throw;
  } catch (const gloo::IoException& error) {
    switch_->check();
    const std::string text = error.what();
    if (text.find("Timed out") != std::string::npos || text.find("timeout") != std::string::npos) {
      throw CollectiveTimeout(std::string(what) + " did not end within " + std::to_string(timeout.count()) +
                              " s: a member is late, or its call differs in size, type or operation");
    }
    throw CollectiveError(std::string(what) + " failed: " + text);
  } catch (const std::exception& error) {
    switch_->check();
    throw CollectiveError(std::string(what) + " failed: " + error.what());
  }
}

void ContextGroup::allreduce(const std::string& group, void* data, size_t count, DType dtype, ReduceOp op,
                             Seconds timeout) {
  const size_t width = element_size(dtype);
  const Kernel kernel = reduce_kernel(dtype, op);
  const uint64_t signature = hash({kAllreduce, count, static_cast<uint64_t>(dtype), static_cast<uint64_t>(op)});
  run(group, "allreduce", signature, timeout, [&](const auto& context, uint32_t tag, std::chrono::milliseconds limit) {
    if (count == 0) return;
    if (count * width <= kSmallBytes) {
      small_allreduce(*context, data, count, width, kernel, tag, limit);
    } else {
      gloo::AllreduceOptions options(context);
      // The buffer goes in as bytes of the element's width; the kernel knows what they are.
      switch (width) {
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
      options.setReduceFunction(kernel);
      // Never BCUBE: of its survivors, some wait until the time is up when a member dies.
      options.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
      options.setTag(tag);
      options.setTimeout(limit);
      gloo::allreduce(options);
    }
    if (op == ReduceOp::kAverage) divide(data, count, dtype, context->size);
  });
}

void ContextGroup::broadcast(const std::string& group, void* data, size_t bytes, int root, Seconds timeout) {
  if (root < 0 || root >= group_size(group)) {
    throw std::invalid_argument("there is no member number " + std::to_string(root) + " in group '" + group + "'");
  }
  const uint64_t signature = hash({kBroadcast, bytes, static_cast<uint64_t>(root)});
  run(group, "broadcast", signature, timeout, [&](const auto& context, uint32_t tag, std::chrono::milliseconds limit) {
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
  auto* const out = static_cast<uint8_t*>(output);
  uint8_t* const own = out + std::accumulate(counts.begin(), counts.begin() + index, size_t{0});
  if (counts.size() == 1) {
    check();
    if (total != 0 && input != own) std::memcpy(own, input, total);
    return;
  }
  uint64_t signature = hash({kAllgather});
  for (const size_t count : counts) signature = hash({count}, signature);
  run(group, "allgather", signature, timeout, [&](const auto& context, uint32_t tag, std::chrono::milliseconds limit) {
    if (total == 0) return;
    gloo::AllgathervOptions options(context);
    // Gloo reads the input only, but its buffers know no const. Without an input it takes it from the output.
    if (input != own) options.setInput(static_cast<uint8_t*>(const_cast<void*>(input)), counts[index]);
    options.setOutput(out, counts);
    options.setTag(tag);
    options.setTimeout(limit);
    gloo::allgatherv(options);
  });
}

void ContextGroup::alltoall(const std::string& group, const void* input, const std::vector<size_t>& sent, void* output,
                            const std::vector<size_t>& received, Seconds timeout) {
  const auto members = static_cast<size_t>(group_size(group));
  if (sent.size() != members || received.size() != members) {
    throw std::invalid_argument("there must be a size for each of the " + std::to_string(members) +
                                " members of group '" + group + "'");
  }
  if (members == 1) {
    check();
    if (sent[0] != 0) std::memcpy(output, input, sent[0]);
    return;
  }
  // Each member knows its own sizes only, so they are no part of what must be alike.
  run(group, "alltoall", hash({kAlltoall}), timeout,
      [&](const auto& context, uint32_t tag, std::chrono::milliseconds limit) {
        gloo::AlltoallvOptions options(context);
        options.setInput(static_cast<uint8_t*>(const_cast<void*>(input)),
                         std::vector<int64_t>(sent.begin(), sent.end()));
        options.setOutput(static_cast<uint8_t*>(output), std::vector<int64_t>(received.begin(), received.end()));
        options.setTag(tag);
        options.setTimeout(limit);
        gloo::alltoallv(options);
      });
}

void ContextGroup::barrier(const std::string& group, Seconds timeout) {
  run(group, "barrier", hash({kBarrier}), timeout,
      [&](const auto& context, uint32_t tag, std::chrono::milliseconds limit) {
        gloo::BarrierOptions options(context);
        options.setTag(tag);
        options.setTimeout(limit);
        gloo::barrier(options);
      });
}

void ContextGroup::abort(const std::string& reason) {
  if (getpid() != owner_) return;
  switch_->abort(reason);
  shut_down_sockets();
}

void ContextGroup::shut_down_sockets() {
  const std::lock_guard<std::mutex> lock(names_mutex_);
  if (names_.own.empty() && names_.peers.empty()) return;
  // While pairs connect, what blocks is the wait for a peer, on a listener or on an answer to a SYN. Connections are
  // left alone until Gloo has made pairs of them.
  shutdown_sockets(names_, phase_ == Phase::kConnected ? Which::kAll : Which::kUnconnected);
}

void ContextGroup::close() {
  if (getpid() != owner_) return;
  switch_->abort("the contexts are closed");
  const std::lock_guard<std::mutex> building(build_mutex_);  // a connect() under way ends by itself now
  if (closed_) return;
  closed_ = true;
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
  const auto work = [&] {
    for (size_t mine = next++; mine < pairs.size(); mine = next++) {
      try {
        pairs[mine]->close();
      } catch (const std::exception&) {
        // A pair that failed before is closed already.
      }
    }
  };
  std::vector<std::thread> threads = start_threads(std::min(kThreads, pairs.size()), work);
  work();
  for (std::thread& thread : threads) thread.join();
  for (auto& group : groups_) {
    const std::lock_guard<std::mutex> idle(group->busy);
    group->context.reset();
    group->transport.reset();
  }
  const std::lock_guard<std::mutex> lock(names_mutex_);
  names_ = {};
  device_.reset();
}

}  // namespace elastic
