// The Gloo contexts of one worker in one round: global, local, cross, or any other groups of the round.
//
// prepare() listens and returns the bytes that this worker publishes; connect() takes the bytes of all workers. The
// caller transports them. Gloo provides the algorithms; the connections are established and authenticated here
// (net/handshake.h), and used by one thread (gloo/transport.h).
//
// One thread calls prepare, connect and the collectives; concurrent collectives in one group are rejected. Any thread
// may call abort() at any time. close() ends running calls as abort() does, and waits for them. In a forked child all
// calls except abort() and close() throw, and those two do nothing: the sockets are the parent's.
//
// All members must make the same calls: the same collective with the same sizes, type and operation. A call that
// differs never matches its peers' calls, and times out.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "arithmetic/reduce.h"
#include "gloo/transport.h"
#include "net/handshake.h"
#include "net/sockets.h"

namespace elastic {

using Seconds = std::chrono::duration<double>;

struct GroupPlan {
  std::string name;
  std::vector<int> members;  // global ranks, in the group's order
  int index;                 // this worker's place among them
};

class ContextGroup : public std::enable_shared_from_this<ContextGroup> {
 public:
  // `host` is the local address at which it listens, at one of the `ports`; `key` and `purpose` authenticate the
  // members; see Identity. A wait for a member that is silent for the limit of `reach` throws UnreachableError. Throws
  // std::invalid_argument for an invalid plan.
  ContextGroup(std::vector<GroupPlan> groups, std::string host, std::string key, std::string purpose,
               PortRange ports = {}, Reach reach = {});
  ~ContextGroup();
  ContextGroup(const ContextGroup&) = delete;
  ContextGroup& operator=(const ContextGroup&) = delete;

  // Listens. Returns this worker's blob. Its last kOwnBytes are specific to this worker, the rest is the same for all
  // workers of one host.
  std::string prepare();
  static constexpr size_t kOwnBytes = 2;

  // Connects to all members. `blobs` by global rank; "" for a rank in no group. Throws CollectiveTimeout, which names
  // the missing ranks, AbortedError, and CollectiveError.
  void connect(const std::vector<std::string>& blobs, Seconds timeout);

  // In place on `count` elements. Integers wrap around; their average is rounded toward zero.
  void allreduce(const std::string& group, void* data, size_t count, DType dtype, ReduceOp op, Seconds timeout);
  // Overwrites `bytes` bytes with those of the member with index `root`.
  void broadcast(const std::string& group, void* data, size_t bytes, int root, Seconds timeout);
  // `counts` are the members' sizes in bytes; `output` has room for their sum. The input may be at its own place in the
  // output.
  void allgather(const std::string& group, const void* input, void* output, const std::vector<size_t>& counts,
                 Seconds timeout);
  // `sent` and `received` are bytes to and from each member. In both buffers, the parts follow each other in the
  // members' order; the buffers must not overlap.
  void alltoall(const std::string& group, const void* input, const std::vector<size_t>& sent, void* output,
                const std::vector<size_t>& received, Seconds timeout);
  void barrier(const std::string& group, Seconds timeout);

  // The ranks that could not be reached, or have become silent.
  std::vector<int> unreachable() const { return reach_.found->ranks(); }

  // A group's number of members and this worker's index in it, to check arguments. Throws std::invalid_argument for an
  // unknown name.
  int group_size(const std::string& group) const;
  int group_index(const std::string& group) const;

  void abort(const std::string& reason);

  // Aborts, and closes all sockets. Idempotent; later calls of collectives throw.
  void close();

 private:
  class GlooContext;
  struct Group;

  // The progress of the connection. After a failure it stays kBroken.
  enum class Phase { kNew, kPrepared, kConnected, kBroken };

  void check() const;
  Group& find(const std::string& name) const;
  std::vector<Wanted> wanted(const std::vector<std::string>& blobs) const;
  void disconnect();
  template <typename Operation>
  void run(const std::string& name, const char* what, uint64_t signature, Seconds timeout, Operation operation);

  const std::string host_;
  const PortRange ports_;
  const Reach reach_;
  Identity self_;
  const pid_t owner_;
  const std::shared_ptr<AbortSwitch> switch_ = std::make_shared<AbortSwitch>();
  std::vector<std::unique_ptr<Group>> groups_;
  Descriptor listener_;
  std::atomic<Phase> phase_{Phase::kNew};
  std::mutex build_mutex_;  // held by prepare(), connect() and close(), which change groups_
  std::mutex links_mutex_;  // held while the groups' transports change, and while they are disconnected
  bool closed_ = false;
};

}  // namespace elastic
