// The Gloo contexts of one worker in one round: global, local, cross, or whatever groups the round has.
//
// This is the Gloo store over the rendezvous, in one request: prepare() gives the bytes that this worker publishes,
// connect() takes everybody's. Carrying them is the caller's; there is no HTTP here.
//
// One thread calls prepare, connect and the collectives; two at once in one group are refused. abort() may come from any
// thread at any time. close() waits for calls under way, so abort first where one may block.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "abortable_transport.h"
#include "address_blob.h"
#include "reduce.h"

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

  // In place on `count` elements.
  void allreduce(const std::string& group, void* data, size_t count, DType dtype, ReduceOp op, Seconds timeout);
  // Overwrites `bytes` bytes with those of the member at index `root`.
  void broadcast(const std::string& group, void* data, size_t bytes, int root, Seconds timeout);
  // `counts` are the members' bytes; `output` has room for their sum.
  void allgather(const std::string& group, const void* input, void* output, const std::vector<size_t>& counts,
                 Seconds timeout);
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

  Group& find(const std::string& name) const;
  std::vector<Dial> plan_dials(const std::vector<std::string>& blobs);
  void dial(const std::vector<Dial>& dials, Seconds timeout);
  void shut_down_sockets();
  template <typename Operation>
  void run(const std::string& name, const char* what, Seconds timeout, Operation operation);

  const std::string host_;
  const pid_t owner_;  // a forked child must not join threads that it does not have
  const std::shared_ptr<AbortSwitch> switch_ = std::make_shared<AbortSwitch>();
  std::vector<std::unique_ptr<Group>> groups_;
  std::shared_ptr<gloo::transport::Device> device_;
  std::mutex endpoints_mutex_;  // guards the three below
  bool connected_ = false;
  std::set<std::string> own_endpoints_;
  std::set<std::string> peer_endpoints_;
  std::mutex close_mutex_;
  bool closed_ = false;
};

}  // namespace elastic
