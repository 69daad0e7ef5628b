// The Gloo contexts of one worker in one round: global, local, cross, or whatever groups the round has.
//
// This is the Gloo store over the rendezvous, in one request: prepare() gives the bytes that this worker publishes,
// connect() takes everybody's. Carrying them is the caller's; there is no HTTP here.
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
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "abortable_transport.h"
#include "address_blob.h"
#include "reduce.h"
#include "sockets.h"

namespace gloo::transport {
class Device;
}

namespace elastic {

using Seconds = std::chrono::duration<double>;

struct GroupPlan {
  std::string name;
  std::vector<int> members;  // global ranks, in the group's order
  int index;                 // this worker's place among them
};

class ContextGroup {
 public:
  // `host` is the local address on which pairs listen. Throws std::invalid_argument for a plan that cannot be.
  ContextGroup(std::vector<GroupPlan> groups, std::string host);
  ~ContextGroup();
  ContextGroup(const ContextGroup&) = delete;
  ContextGroup& operator=(const ContextGroup&) = delete;

  // Starts the device and listens, for every pair. Returns this worker's blob.
  std::string prepare();

  // Connects all pairs, in parallel. `blobs` by global rank. Throws CollectiveTimeout, naming who is missing, when
  // it is not done in time; AbortedError; CollectiveError.
  void connect(const std::vector<std::string>& blobs, Seconds timeout);

  // The other way, for many workers: after prepare(), what each of `size` ranks needs of this one; and what this one was
  // given, (common, part) by global rank.
  CutAddresses cut(size_t size) const;
  void connect(const std::vector<std::pair<std::string, std::string>>& given, Seconds timeout);

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

  // Members of a group, for checks of arguments. Throws std::invalid_argument for an unknown name.
  int group_size(const std::string& group) const;
  int group_index(const std::string& group) const;

  void abort(const std::string& reason);

  // Closes all sockets and ends the device's thread. Idempotent; later calls of collectives throw.
  void close();

 private:
  class GlooContext;
  struct Group;
  struct Dial;

  // How far it is. What failed to connect stays kBroken.
  enum class Phase { kNew, kPrepared, kConnected, kBroken };

  void check() const;
  Group& find(const std::string& name) const;
  // Where a peer listens for this worker: its global rank, the group, and its place in that.
  using Lookup = std::function<Bytes(int rank, const GroupPlan& plan, int member)>;
  void connect_all(const Lookup& lookup, Seconds timeout);
  std::vector<Dial> plan_dials(const Lookup& lookup) const;
  void dial(const std::vector<Dial>& dials, Seconds timeout);
  void shut_down_sockets();
  template <typename Operation>
  void run(const std::string& name, const char* what, uint64_t signature, Seconds timeout, Operation operation);

  const std::string host_;
  const pid_t owner_;  // a forked child must not join threads that it does not have
  const std::shared_ptr<AbortSwitch> switch_ = std::make_shared<AbortSwitch>();
  std::vector<std::unique_ptr<Group>> groups_;
  std::vector<GroupAddresses> addresses_;  // of this worker; after prepare()
  std::shared_ptr<gloo::transport::Device> device_;
  std::atomic<Phase> phase_{Phase::kNew};
  std::mutex build_mutex_;  // held by prepare(), connect() and close(), in which groups_ and device_ change
  std::mutex names_mutex_;  // guards names_
  SocketNames names_;
  bool closed_ = false;
};

}  // namespace elastic
