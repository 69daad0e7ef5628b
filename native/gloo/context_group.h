// The Gloo contexts of one worker in one round: global, local, cross, or whatever groups the round has.
//
// prepare() listens and gives the bytes that this worker publishes, connect() takes everybody's. Carrying them is the
// caller's. Gloo has the algorithms; the connections are made and proven here (net/handshake.h), and used by one thread
// (gloo/transport.h).
//
// One thread calls prepare, connect and the collectives; two at once in one group are refused. abort() may come from
// any thread at any time. close() ends calls under way as abort() does, and waits for them. In a forked child all calls
// but abort() and close() throw, and those two do nothing: the sockets are the parent's.
//
// Members must call alike: the same collective with the same sizes, type and operation. One that does not is never
// taken for its peers' counterpart, and the call ends at its time limit.
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
  // `host` is the local address at which it listens, at one of the `ports`; `key` and `purpose` are what the members
  // prove to each other; see Identity. What waits for a member of which nothing is heard for the limit of `reach`
  // throws UnreachableError. Throws std::invalid_argument for a plan that cannot be.
  ContextGroup(std::vector<GroupPlan> groups, std::string host, std::string key, std::string purpose,
               PortRange ports = {}, Reach reach = {});
  ~ContextGroup();
  ContextGroup(const ContextGroup&) = delete;
  ContextGroup& operator=(const ContextGroup&) = delete;

  // Listens. Returns this worker's blob. Its last kOwnBytes are this worker's own, the rest is what all workers at one
  // host have in common.
  std::string prepare();
  static constexpr size_t kOwnBytes = 2;

  // Connects to all. `blobs` by global rank, of who is in none of the groups "". Throws CollectiveTimeout, naming who
  // is missing, when it is not done in time; AbortedError; CollectiveError.
  void connect(const std::vector<std::string>& blobs, Seconds timeout);

  // In place on `count` elements. Integers wrap around; their average is rounded toward zero.
  void allreduce(const std::string& group, void* data, size_t count, DType dtype, ReduceOp op, Seconds timeout);
  // Overwrites `bytes` bytes with those of the member at index `root`.
  void broadcast(const std::string& group, void* data, size_t bytes, int root, Seconds timeout);
  // `counts` are the members' bytes; `output` has room for their sum. The input may be its own place in the output.
  void allgather(const std::string& group, const void* input, void* output, const std::vector<size_t>& counts,
                 Seconds timeout);
  // Bytes to and from each member; both buffers are end to end in the members' order, and apart.
  void alltoall(const std::string& group, const void* input, const std::vector<size_t>& sent, void* output,
                const std::vector<size_t>& received, Seconds timeout);
  void barrier(const std::string& group, Seconds timeout);

  // The ranks that could not be reached, or of which nothing was heard any more.
  std::vector<int> unreachable() const { return reach_.found->ranks(); }

  // Members of a group, for checks of arguments. Throws std::invalid_argument for an unknown name.
  int group_size(const std::string& group) const;
  int group_index(const std::string& group) const;

  void abort(const std::string& reason);

  // Closes all sockets and ends the device's thread. Idempotent; later calls of collectives throw.
  void close();

 private:
  class GlooContext;
  struct Group;

  // How far it is. What failed to connect stays kBroken.
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
  std::mutex build_mutex_;  // held by prepare(), connect() and close(), in which groups_ change
  std::mutex links_mutex_;  // held while the groups' transports change, and while they are disconnected
  bool closed_ = false;
};

}  // namespace elastic
