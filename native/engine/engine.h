// One worker's engine in one round: it accepts operations from any thread, agrees with the other ranks on their order,
// and runs them, in a thread of its own that sleeps when there is nothing to do.
//
// The path of an operation: submit() queues it; the thread reports it to rank 0 (RequestWriter, ControlLink); rank 0
// answers when all members have submitted it (Coordinator); the thread runs it with its peers (Executor) and wakes the
// waiting threads.
//
// Owns the queue, the operations in flight and their states, the thread and its end. Meeting introduces the ranks to
// each other, ProcessSets has the members of process sets, and Executor runs collectives.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/condition.h"
#include "engine/control_link.h"
#include "engine/coordinator.h"
#include "engine/executor.h"
#include "engine/meeting.h"
#include "engine/notices.h"
#include "engine/operation.h"
#include "engine/process_sets.h"
#include "engine/timeline.h"
#include "gloo/context_group.h"
#include "shared_memory/shared_segment.h"
#include "vitals/page.h"

namespace elastic {

// The ranks submitted operations of one name that do not match.
struct MismatchError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// An operation of this name is in flight.
struct DuplicateNameError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct EngineOptions {
  size_t fusion_bytes = size_t{64} << 20;
  Patience patience;
  Seconds collective_timeout{1800};
  bool shared_memory = true;  // whether to use it if possible
  bool direct_reads = true;   // whether to read peers' private memory if permitted
  std::string machine;        // ranks with different values share no memory
  // Authenticate the ranks; see Identity.
  std::string key, purpose;
  Reach reach;
};

class Engine {
 public:
  Engine(int rank, int size, EngineOptions options);
  // Closes it. In a forked child it only frees the child's copies.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // On rank 0: listens, at one of the ports, and returns its address; nothing else has to be published. On the others:
  // returns "".
  std::string prepare(const std::string& host, PortRange ports = {});
  // Connects to rank 0, whose prepare() returned `where`, and gets the other ranks' data through it. Throws
  // CollectiveTimeout, AbortedError, CollectiveError.
  void connect(const std::string& where, Seconds timeout);

  // Called after connect() and before start(), on all ranks: see Meeting. Throws as connect() does.
  std::vector<std::string> gather(const std::string& given, size_t own, Seconds timeout);

  // See Acquaintance. Known after connect().
  const std::vector<std::vector<int>>& machines() const { return machines_; }
  const std::string& unshared() const { return unshared_; }

  // Starts the thread. Process set 0, of all ranks, must have been added.
  void start();

  // `ranks` are the members, the same on all ranks. `contexts`, for sets on several machines, has the groups "global",
  // of all members in this order, and "cross", of the members with this one's place on their machine, for the places
  // that all machines have. Throws std::invalid_argument.
  void add_process_set(int number, std::vector<int> ranks, std::shared_ptr<ContextGroup> contexts);
  // Begins to remove a process set; all ranks call this. It is removed at the same point of the replies on all ranks,
  // so that operations agreed on before run everywhere, and later ones fail everywhere. Throws as submit() does.
  std::shared_ptr<Operation> remove_process_set(int number);

  // `sizes`: see Plan::sized(). `owner`: the memory's owner; kept until the operation is over, and released in any
  // thread.
  // Throws DuplicateNameError, AbortedError, std::invalid_argument.
  std::shared_ptr<Operation> submit(const std::string& name, Plan plan, std::vector<Memory> memory,
                                    std::vector<int64_t> sizes, std::shared_ptr<void> owner = nullptr);
  // Begins to leave the round, in two steps, 0 and 1. After the first call, this rank's submissions are rejected. The
  // first step is over when all ranks that have not joined have begun it, and this rank's operations in flight are
  // done; the second step keeps the connections open until the other ranks have got there. The round breaks if a rank
  // has left without submitting an operation that others wait for, since it can never be completed. Repeated calls
  // return the same operation.
  std::shared_ptr<Operation> leave(int step);
  // Waits at most for `limit`. Returns whether the operation is over.
  bool wait(const std::shared_ptr<Operation>& operation, std::chrono::milliseconds limit);
  // Waits at most for `limit`. Returns whether no operation is in flight in a process set, or the round is broken.
  bool settled(int process_set, std::chrono::milliseconds limit);
  // Throws the operation's error, if it has failed: MismatchError, AbortedError, OutOfMemoryError.
  void check(const std::shared_ptr<Operation>& operation);

  // An operation on a device's memory that the caller has to run now. Turns have the same order on all members.
  struct Turn {
    std::shared_ptr<Operation> operation;  // null if this rank has joined and others have not
    std::shared_ptr<void> owner;           // of its memory, until the end of the turn
    std::shared_ptr<const Plan> plan;
    std::vector<int64_t> sizes;  // of all members
    std::chrono::steady_clock::time_point answered, taken;
  };
  // Returns the next turn; nothing if there is none within `limit`. Throws AbortedError.
  std::optional<Turn> next_turn(std::chrono::milliseconds limit);
  // Reports that the caller has run it; `error`: the error, if it failed.
  void conclude(const Turn& turn, const std::string& error);

  // Allocates zeroed shared memory that peers read without copies; nullptr if there is none. Valid while `keeper`
  // lives.
  void* allocate(size_t bytes, std::shared_ptr<SharedSegment>& keeper);

  // The number of operations finished so far, and whether others are in flight.
  std::pair<uint64_t, bool> progress() const;

  // The number of this rank's own operations that are over, without those of others that it runs after it has joined.
  uint64_t own_finished() const;
  // Whether an operation that all members have submitted is being run, here or on a device; for this rank's own ones,
  // until own_finished() has counted it.
  bool carries_out() const;

  Timeline& timeline() { return timeline_; }
  int rank() const { return rank_; }

  // The ranks that could not be reached, or have become silent while a message of theirs was awaited. Complete once an
  // operation has failed for that reason.
  std::vector<int> unreachable() const { return options_.reach.found->ranks(); }

  // Ends all operations in flight, and rejects new ones. Any thread, any time.
  void abort(const std::string& reason);
  // After abort(): waits at most for `limit`. Returns whether the thread no longer accesses the memory of operations.
  bool quiesce(std::chrono::milliseconds limit);
  // Aborts operations in flight, and ends the thread.
  void close();

 private:
  // Calls `talk` with a Meeting, while the ranks connect.
  template <typename Talk>
  void meet(Seconds timeout, Talk talk);
  std::shared_ptr<Operation> enter(std::shared_ptr<Operation> operation);
  // Ends an operation, and frees its name. Does nothing if it is over already.
  void finish(const std::shared_ptr<Operation>& operation, Operation::State state, const std::string& error);
  // Fails all operations in flight after the thread's end; those taken as a Turn only if `taken`.
  void fail_left(bool taken) noexcept;
  void throw_if_aborted() const;
  // Called with the mutex.
  [[noreturn]] void throw_broken() const;
  // Throws if it is useless to wait any longer.
  void look();
  // Whether any operation except leave() is in flight, in one process set or in any. Called with the mutex.
  bool busy(std::optional<int> process_set) const;
  // Whether operations wait for other ranks, here or on rank 0.
  bool awaits() const;
  // See vitals::Source.
  std::optional<std::string> what_lacks_ranks() const;

  // The thread, and the functions that it calls.
  void run();
  void tell();
  void answer();
  void take(const std::vector<Reply>& replies);
  void run_entries(const std::vector<Entry>& entries);
  void drop_set(int number);
  // Marks this rank's operation of an entry as answered, and returns it; null if there is none, or it is absent.
  std::shared_ptr<Operation> answered(const Entry& entry);
  // Throws CollectiveError if rank 0's entries differ from these operations, which are this rank's own.
  void check_entries(const ProcessSet& set, const std::vector<Entry>& entries,
                     const std::vector<std::shared_ptr<Operation>>& operations) const;

  const int rank_, size_;
  const EngineOptions options_;
  const pid_t owner_;
  ControlLink link_;
  // Set by connect().
  std::vector<std::vector<int>> machines_;
  std::string unshared_;
  std::unique_ptr<Executor> executor_;
  Timeline timeline_;
  ProcessSets sets_;

  // Used only by the thread, while it runs.
  RequestWriter requests_;
  ReplyReader replies_;
  Notices notices_;
  Timeline::Clock::time_point answered_at_;  // when the current reply arrived

  mutable std::mutex mutex_;  // guards the following, up to own_finished_
  Condition changed_;
  std::unique_ptr<Coordinator> coordinator_;  // on rank 0
  SharedMemory memory_;
  std::deque<std::shared_ptr<Operation>> queue_;
  std::deque<Turn> turns_;
  std::multiset<int> turns_taken_;  // process sets of those taken and not concluded yet
  // Key -> operation, from submit() until it is over.
  std::unordered_map<std::string, std::shared_ptr<Operation>> inflight_;
  uint64_t joins_ = 0;                                // submitted so far
  std::map<std::pair<int, Kind>, uint64_t> unnamed_;  // counts since the last join; see unnamed_key()
  std::string broken_;
  std::shared_ptr<Operation> leaving_[2];  // the steps of leave(), once begun
  bool running_ = false;                   // whether the thread may access the memory of operations
  bool out_of_memory_ = false;             // the reason why it is broken
  uint64_t finished_ = 0, own_finished_ = 0;

  std::atomic<bool> aborted_{false};
  std::atomic<bool> asleep_{false};
  std::atomic<bool> executes_{false};
  std::mutex close_mutex_;
  std::thread thread_;
  std::unique_ptr<vitals::Source> source_;  // on rank 0, from start() to close()
};

}  // namespace elastic
