#include "gloo/context_group.h"

#include <gloo/allgatherv.h>
#include <gloo/allreduce.h>
#include <gloo/alltoallv.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/context.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <map>
#include <numeric>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "errors.h"
#include "gloo/small_allreduce.h"
#include "net/wire.h"

namespace elastic {
namespace {

// The size of a piece that is reduced while messages are in flight: so small that the kernel's buffers do not run dry.
constexpr size_t kComputeBytes = 128 * 1024;
// The limits of a plan.
constexpr size_t kMostGroups = 16;
constexpr size_t kLongestName = 256;

std::chrono::milliseconds milliseconds(Seconds timeout) {
  // Above zero: for Gloo, zero means no limit.
  const double value = std::min(std::max(timeout.count() * 1e3, 1.0), 1e12);
  return std::chrono::milliseconds(static_cast<int64_t>(value));
}

// FNV-1a of the values that must be the same on all members of a collective.
uint64_t hash(std::initializer_list<uint64_t> values, uint64_t state = 0xcbf29ce484222325u) {
  for (const uint64_t value : values) {
    for (int shift = 0; shift < 64; shift += 8) state = (state ^ ((value >> shift) & 0xff)) * 0x100000001b3u;
  }
  return state;
}

enum Call : uint64_t { kAllreduce, kBroadcast, kAllgather, kBarrier, kAlltoall };

struct PeerBlob {
  Place place;
  std::map<std::string, uint64_t> groups;  // name -> hash of the members
};

PeerBlob read_blob(const std::string& blob) {
  try {
    PeerBlob found;
    Reader reader(blob);
    found.place.host = reader.text();
    for (uint64_t left = reader.number(); left > 0; --left) {
      const std::string name(reader.text());
      found.groups[name] = reader.number();
    }
    const auto port = reader.raw(ContextGroup::kOwnBytes);
    found.place.port =
        static_cast<uint16_t>(static_cast<unsigned char>(port[0]) << 8 | static_cast<unsigned char>(port[1]));
    if (!reader.empty()) throw CollectiveError("");
    return found;
  } catch (const CollectiveError&) {
    throw CollectiveError("cannot read a peer's addresses: they are not of this version of the extension");
  }
}

}  // namespace

// gloo::Context lets only derived classes set the transport.
class ContextGroup::GlooContext : public gloo::Context {
 public:
  explicit GlooContext(std::shared_ptr<gloo::transport::Context> transport)
      : gloo::Context(transport->rank, transport->size) {
    transportContext_ = std::move(transport);
  }
};

struct ContextGroup::Group {
  GroupPlan plan;
  std::shared_ptr<Transport> transport;  // this and the next: null in a group of one, and before connect()
  std::shared_ptr<GlooContext> context;
  std::mutex busy;     // held by a running collective
  uint64_t calls = 0;  // number of collectives so far; the same on all members

  int size() const { return static_cast<int>(plan.members.size()); }
};

ContextGroup::ContextGroup(std::vector<GroupPlan> groups, std::string host, std::string key, std::string purpose,
                           PortRange ports, Reach reach)
    : host_(std::move(host)),
      ports_(ports),
      reach_(std::move(reach)),
      self_{0, std::move(key), std::move(purpose)},
      owner_(getpid()) {
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
    const int rank = plan.members[static_cast<size_t>(plan.index)];
    if (!groups_.empty() && rank != self_.rank) {
      throw std::invalid_argument("this worker has rank " + std::to_string(self_.rank) + ", and in group '" +
                                  plan.name + "' rank " + std::to_string(rank));
    }
    self_.rank = rank;
    groups_.push_back(std::make_unique<Group>());
    groups_.back()->plan = std::move(plan);
  }
}

// In a forked child, this closes only the child's copies of the descriptors.
ContextGroup::~ContextGroup() { close(); }

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
  size_t pairs = 0;
  for (const auto& group : groups_) pairs += static_cast<size_t>(group->size() - 1);
  uint16_t port = 0;
  if (pairs != 0) {
    require_descriptors(pairs, std::to_string(pairs) + " connections to other workers");
    std::tie(listener_, port) = listen_on(host_, ports_, self_.rank);
  }
  Writer writer;
  writer.text(host_);
  writer.number(groups_.size());
  for (const auto& group : groups_) {
    writer.text(group->plan.name);
    writer.number(group->plan.members.size());
  }
  writer.raw(std::string{static_cast<char>(port >> 8), static_cast<char>(port)});
  phase_ = Phase::kPrepared;
  return writer.take();
}

// The connections by group, in the members' order.
std::vector<Wanted> ContextGroup::wanted(const std::vector<std::string>& blobs) const {
  std::map<int, PeerBlob> peers;  // by global rank
  std::vector<Wanted> found;
  for (const auto& group : groups_) {
    for (const int rank : group->plan.members) {
      if (rank == self_.rank) continue;
      if (rank < 0 || rank >= static_cast<int>(blobs.size()) || blobs[static_cast<size_t>(rank)].empty()) {
        throw CollectiveError("no addresses of rank " + std::to_string(rank));
      }
      if (peers.count(rank) == 0) peers[rank] = read_blob(blobs[static_cast<size_t>(rank)]);
      const PeerBlob& peer = peers[rank];
      const auto same = peer.groups.find(group->plan.name);
      if (same == peer.groups.end() || same->second != group->plan.members.size()) {
        throw CollectiveError("rank " + std::to_string(rank) + " has another group '" + group->plan.name + "'");
      }
      // Each rank dials about half of the others.
      const bool dials = ((self_.rank + rank) % 2 == 0) == (self_.rank < rank);
      found.push_back({rank, group->plan.name, dials, peer.place});
    }
  }
  return found;
}

void ContextGroup::connect(const std::vector<std::string>& blobs, Seconds timeout) {
  check();
  const auto deadline = std::chrono::steady_clock::now() + milliseconds(timeout);
  const std::lock_guard<std::mutex> building(build_mutex_);
  check();
  if (phase_ == Phase::kNew) throw CollectiveError("prepare() was not called");
  if (phase_ != Phase::kPrepared) throw CollectiveError("connect() was called before, or prepare() failed");
  const std::vector<Wanted> peers = wanted(blobs);
  phase_ = Phase::kBroken;                           // until it has worked
  const Descriptor listener = std::move(listener_);  // closed also on failure, so that no peer dials any more
  std::vector<Descriptor> sockets =
      shake_hands(self_, listener.get(), peers, deadline, [this] { switch_->check(); }, reach_);
  {
    const std::lock_guard<std::mutex> lock(links_mutex_);
    size_t next = 0;
    for (auto& group : groups_) {
      if (group->size() == 1) continue;
      std::vector<Descriptor> own(group->plan.members.size());
      for (size_t member = 0; member < own.size(); ++member) {
        if (group->plan.members[member] != self_.rank) own[member] = std::move(sockets[next++]);
      }
      group->transport =
          std::make_shared<Transport>(group->plan.index, group->plan.members, std::move(own), switch_, reach_);
      group->context = std::make_shared<GlooContext>(group->transport);
    }
  }
  phase_ = Phase::kConnected;
  if (!switch_->aborted()) return;
  disconnect();
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
void ContextGroup::run(const std::string& name, const char* what, uint64_t signature, Seconds timeout,
                       Operation operation) {
  check();
  Group& group = find(name);
  const std::unique_lock<std::mutex> busy(group.busy, std::try_to_lock);
  if (!busy.owns_lock()) {
    throw CollectiveError(std::string("cannot begin ") + what + ": another thread is in a collective of group '" +
                          name + "'");
  }
  check();  // under `busy`, which close() holds when it frees the context
  if (group.size() == 1) return;
  if (phase_ != Phase::kConnected) {
    throw CollectiveError(std::string("cannot begin ") + what + ": the contexts are not connected");
  }
  // Gloo would accept a message of another size than expected, and end the process or leave the rest unchanged. Since
  // the tag has all that must be alike, it waits for a message that never arrives instead.
  const auto tag = static_cast<uint32_t>(hash({group.calls++, signature}) >> 32);
  const std::chrono::milliseconds limit = milliseconds(timeout);
  group.transport->set_deadline(std::chrono::steady_clock::now() + limit);
  group.transport->check();
  try {
    operation(group.context, tag, limit);
  } catch (const CollectiveTimeout&) {
    throw CollectiveTimeout(std::string(what) + " did not end within " + std::to_string(timeout.count()) +
                            " s: a member is late, or its call differs in size, type or operation");
  } catch (const UnreachableError& error) {
    throw UnreachableError(std::string(what) + " failed: " + error.what());
  } catch (const AbortedError&) {
    throw;
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
      // Gloo only needs the width of the elements; the kernel knows their type.
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
      // No thread sends and receives meanwhile, so this one does so between the pieces.
      Transport& transport = *find(group).transport;
      options.setReduceFunction([&transport, kernel, width](void* out, const void* a, const void* b, size_t elements) {
        for (size_t at = 0; at < elements; at += kComputeBytes / width) {
          const size_t offset = at * width;
          kernel(static_cast<char*>(out) + offset, static_cast<const char*>(a) + offset,
                 static_cast<const char*>(b) + offset, std::min(kComputeBytes / width, elements - at));
          transport.move_some();
        }
      });
      // Never BCUBE: if a member dies, some of the survivors would wait until they time out.
      options.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
      options.setTag(tag);
      options.setTimeout(limit);
      gloo::allreduce(options);
    }
    if (op != ReduceOp::kAverage) return;
    switch_->interruption().in_pieces(count * width, [&](size_t at, size_t size) {
      divide(static_cast<char*>(data) + at, size / width, dtype, context->size);
    });
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
    // Without an input, Gloo uses its place in the output. Gloo's own copy could not be aborted.
    switch_->interruption().copy(own, input, counts[static_cast<size_t>(index)]);
    gloo::AllgathervOptions options(context);
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
  // A member knows only its own sizes, so the tag does not include them.
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
  disconnect();
}

void ContextGroup::disconnect() {
  const std::lock_guard<std::mutex> lock(links_mutex_);
  for (const auto& group : groups_) {
    if (group->transport) group->transport->disconnect();
  }
}

void ContextGroup::close() {
  if (getpid() != owner_) return;
  switch_->abort("the contexts are closed");
  const std::lock_guard<std::mutex> building(build_mutex_);  // a running connect() ends by itself now
  if (std::exchange(closed_, true)) return;
  listener_ = Descriptor();
  for (auto& group : groups_) {
    const std::lock_guard<std::mutex> idle(group->busy);  // a running collective ends first
    const std::lock_guard<std::mutex> lock(links_mutex_);
    group->context.reset();
    group->transport.reset();
  }
  switch_->retire();
}

}  // namespace elastic
