// One worker's engine in one round: takes operations from any thread, agrees with the other ranks on what runs when,
// and runs it, on a thread of its own that sleeps when there is nothing to do.
//
// The way of an operation: submit() queues it; the thread tells rank 0 (RequestWriter, ControlLink); rank 0 answers
// when all members have submitted it (Coordinator); the thread runs it with its peers (Executor) and wakes who waits.
//
// Owns the queue, the operations under way and their states, the thread and its end. How ranks find each other is
// Meeting's, who is in which process set ProcessSets', what a collective does Executor's.
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

// The ranks submitted operations of one name that do not fit together.
struct MismatchError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// An operation of this name is under way.
struct DuplicateNameError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct EngineOptions {
  size_t fusion_bytes = size_t{64} << 20;
  Patience patience;
  Seconds collective_timeout{1800};
  bool shared_memory = true;  // whether it is used where it can be
  bool direct_reads = true;   // whether private memory of peers is read where that is allowed
  std::string machine;        // ranks with different ones share no memory
  // What ranks prove to each other; see Identity.
  std::string key, purpose;
  Reach reach;
};

class Engine {
 public:
  Engine(int rank, int size, EngineOptions options);
  // Closes it. In a forked child it only lets go of what the child has a copy of.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // On rank 0: listens, at one of the ports, and returns how the others find it; that is all that has to be published.
  // The others: "".
  std::string prepare(const std::string& host, PortRange ports = {});
  // Connects to rank 0, whose prepare() returned `where`, and through it learns of the others. Throws
  // CollectiveTimeout, AbortedError, CollectiveError.
  void connect(const std::string& where, Seconds timeout);

  // After connect() and before start(), on all ranks at once: see Meeting. Throws as connect() does.
  std::vector<std::string> gather(const std::string& given, size_t own, Seconds timeout);

  // See Acquaintance. After connect().
  const std::vector<std::vector<int>>& machines() const { return machines_; }
  const std::string& unshared() const { return unshared_; }

  // Starts the thread; when process set 0, of all ranks, is there.
  void start();

  // Members by rank, the same on all ranks. `contexts`, for sets on several machines: groups "global", of all
  // members in this order, and "cross": of the members that have this one's place on their machine, for the places that
  // all machines have. Throws std::invalid_argument.
  void add_process_set(int number, std::vector<int> ranks, std::shared_ptr<ContextGroup> contexts);
  // Begins to; all ranks do it alike. It goes at the same point of the replies on all of them, so that what was agreed
  // on before runs everywhere, and what comes after fails everywhere. Throws as submit() does.
  std::shared_ptr<Operation> remove_process_set(int number);

  // `sizes`: see Plan::sized(). `owner`: of the memory; kept until the operation is over, and let go of in any thread.
  // Throws DuplicateNameError, AbortedError, std::invalid_argument.
  std::shared_ptr<Operation> submit(const std::string& name, Plan plan, std::vector<Memory> memory,
                                    std::vector<int64_t> sizes, std::shared_ptr<void> owner = nullptr);
  // Begins to leave the round, in two steps, 0 and 1. From the first on this rank's submissions are refused. It is over
  // when all ranks that have not joined are at it, and all that this rank had under way is done; then the second step
  // keeps the connections open until the other ranks are as far. The round breaks when a rank has left without
  // submitting what others wait for: that can never be completed. Called again, returns the same operation.
  std::shared_ptr<Operation> leave(int step);
  // Whether it is over, after `limit` at the latest.
  bool wait(const std::shared_ptr<Operation>& operation, std::chrono::milliseconds limit);
  // Whether nothing is under way in a process set, after `limit` at the latest; or the round is broken.
  bool settled(int process_set, std::chrono::milliseconds limit);
  // Throws what it failed with, if it did: MismatchError, AbortedError, OutOfMemoryError.
  void check(const std::shared_ptr<Operation>& operation);

  // An operation on a device's memory whose turn it is, the same on all members and in the same order.
  struct Turn {
    std::shared_ptr<Operation> operation;  // none where this rank has joined and others have not
    std::shared_ptr<void> owner;           // of its memory, for as long as the turn lasts
    std::shared_ptr<const Plan> plan;
    std::vector<int64_t> sizes;  // of all members
    std::chrono::steady_clock::time_point answered, taken;
  };
  // The next one; nothing when there is none within `limit`. Throws AbortedError.
  std::optional<Turn> next_turn(std::chrono::milliseconds limit);
  // It was run by the caller; `error`: what it failed with.
  void conclude(const Turn& turn, const std::string& error);

  // Shared memory that peers read without copies, zeroed; nullptr where there is none. Lives as long as `keeper`.
  void* allocate(size_t bytes, std::shared_ptr<SharedSegment>& keeper);

  // Operations finished so far, and whether others are under way.
  std::pair<uint64_t, bool> progress() const;

  // Of this rank's own operations, those that are over: not those of others that it takes part in when it has joined.
  uint64_t own_finished() const;
  // Whether an operation that all members have submitted is being run, here or on a device. Until own_finished() has
  // counted it, if it is this rank's.
  bool carries_out() const;

  Timeline& timeline() { return timeline_; }
  int rank() const { return rank_; }

  // The ranks that could not be reached, or of which nothing was heard any more while something was awaited of them.
  // All are known when an operation has failed of it.
  std::vector<int> unreachable() const { return options_.reach.found->ranks(); }

  // Ends everything under way and refuses what comes. Any thread, any time.
  void abort(const std::string& reason);
  // After abort(): whether the thread touches no memory of operations any more, after `limit` at the latest.
  bool quiesce(std::chrono::milliseconds limit);
  // Aborts what is under way, and ends the thread.
  void close();

 private:
  // While the ranks connect: calls `talk` with a Meeting.
  template <typename Talk>
  void meet(Seconds timeout, Talk talk);
  std::shared_ptr<Operation> enter(std::shared_ptr<Operation> operation);
  // Does nothing where it is over already. Its name is free then.
  void finish(const std::shared_ptr<Operation>& operation, Operation::State state, const std::string& error);
  // Fails all that is under way, for a thread that has ended; without what was taken as a Turn, unless `taken`.
  void fail_left(bool taken) noexcept;
  void throw_if_aborted() const;
  // Called with the mutex.
  [[noreturn]] void throw_broken() const;
  // Throws where there is nothing to wait for any more.
  void look();
  // With the mutex: whether anything but leave() is under way, in one process set or in any.
  bool busy(std::optional<int> process_set) const;
  // Whether operations wait for other ranks, here or on rank 0.
  bool awaits() const;
  // See vitals::Source.
  std::optional<std::string> what_lacks_ranks() const;

  // The thread, and what it calls.
  void run();
  void tell();
  void answer();
  void take(const std::vector<Reply>& replies);
  void run_entries(const std::vector<Entry>& entries);
  void drop_set(int number);
  // This rank's operation that rank 0 answers to, for the first time; none where there is none, or it is not meant.
  std::shared_ptr<Operation> answered(const Entry& entry);
  // Throws CollectiveError where rank 0 wants what these operations, this rank's own of the entries, are not.
  void check_entries(const ProcessSet& set, const std::vector<Entry>& entries,
                     const std::vector<std::shared_ptr<Operation>>& operations) const;

  const int rank_, size_;
  const EngineOptions options_;
  const pid_t owner_;
  ControlLink link_;
  // What connect() learns.
  std::vector<std::vector<int>> machines_;
  std::string unshared_;
  std::unique_ptr<Executor> executor_;
  Timeline timeline_;
  ProcessSets sets_;

  // The thread's, while it runs.
  RequestWriter requests_;
  ReplyReader replies_;
  Notices notices_;
  Timeline::Clock::time_point answered_at_;  // when the reply under way came

  mutable std::mutex mutex_;  // guards what follows
  Condition changed_;
  std::unique_ptr<Coordinator> coordinator_;  // on rank 0
  SharedMemory memory_;
  std::deque<std::shared_ptr<Operation>> queue_;
  std::deque<Turn> turns_;
  std::multiset<int> turns_taken_;  // process sets of those taken and not concluded yet
  // By key, from submit() until they are over, whoever runs them then.
  std::unordered_map<std::string, std::shared_ptr<Operation>> inflight_;
  uint64_t joins_ = 0;                                // submitted so far
  std::map<std::pair<int, Kind>, uint64_t> unnamed_;  // since the last of them; see unnamed_key()
  std::string broken_;
  std::shared_ptr<Operation> leaving_[2];  // the steps of leave(), once begun
  bool running_ = false;                   // whether the thread may touch the memory of operations
  bool out_of_memory_ = false;             // it broke for that
  uint64_t finished_ = 0, own_finished_ = 0;

  std::atomic<bool> aborted_{false};
  std::atomic<bool> asleep_{false};
  std::atomic<bool> executes_{false};
  std::mutex close_mutex_;
  std::thread thread_;
  std::unique_ptr<vitals::Source> source_;  // on rank 0, from start() to close()
};

}  // namespace elastic
