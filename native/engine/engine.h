// One worker's engine in one round: takes operations from any thread, agrees with the other ranks on what runs when, and
// runs it, on a thread of its own that sleeps when there is nothing to do.
//
// The way of an operation: submit() queues it; the thread tells rank 0 (RequestWriter, ControlLink); rank 0 answers when
// all members have submitted it (Coordinator); the thread runs it with its peers (LocalPlane inside the machine,
// ContextGroup between machines) and wakes who waits.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "engine/control_link.h"
#include "engine/coordinator.h"
#include "engine/operation.h"
#include "engine/timeline.h"
#include "gloo/context_group.h"
#include "shared_memory/local_plane.h"
#include "shared_memory/shared_segment.h"

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
};

struct Memory {
  const void* input;
  void* output;
};

// An operation of this rank, from submit() until nobody holds it.
class Operation {
 public:
  enum class State { kPending, kDone, kMismatch, kFailed };

  const std::string& key() const { return key_; }
  // After it is done. The memory stays this object's.
  struct Output {
    std::unique_ptr<char[]> memory;
    size_t bytes = 0;
    int64_t rows = 0;
    std::vector<int64_t> received;  // alltoall: rows from each member
  };
  std::vector<Output>& outputs() { return outputs_; }
  int last_joined() const { return last_joined_; }

 private:
  friend class Engine;

  std::string key_, name_;
  Plan plan_;
  std::vector<Memory> memory_;
  std::vector<int64_t> sizes_;
  std::vector<Output> outputs_;
  int last_joined_ = -1;
  int removes_ = -1;  // a process set that goes when this, a barrier, is done
  std::chrono::steady_clock::time_point submitted_;
  State state_ = State::kPending;  // this and the next: guarded by the engine's mutex
  std::string error_;
};

class Engine {
 public:
  Engine(int rank, int size, EngineOptions options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // On rank 0: listens, and returns how the others find it; that is all that has to be published. The others: "".
  std::string prepare(const std::string& host);
  // Connects to rank 0, whose prepare() returned `where`, and through it learns of the others. Throws
  // CollectiveTimeout, AbortedError, CollectiveError.
  void connect(const std::string& where, Seconds timeout);

  // After connect() and before start(), on all ranks at once: what each rank gives, by rank, through rank 0. The last
  // bytes, `own` of them, are each rank's own, the rest is mostly what others have too. Throws as connect() does.
  std::vector<std::string> gather(const std::string& given, size_t own, Seconds timeout);

  // The ranks by machine, in the order of their first ranks; after connect(), the same on all ranks. Ranks that cannot
  // share memory are on machines of their own.
  const std::vector<std::vector<int>>& machines() const { return machines_; }
  // Why ranks of one machine do not share memory; "" when they do.
  const std::string& unshared() const { return unshared_; }

  // Starts the thread; when process set 0, of all ranks, is there.
  void start();

  // Members by rank, the same on all ranks. `contexts`, for sets on several machines: groups "global", of all
  // members in this order, and "lane": of the members that have this one's place on their machine, for the places that
  // all machines have.
  void add_process_set(int number, std::vector<int> ranks, std::shared_ptr<ContextGroup> contexts);
  // Begins to; all ranks do it alike. It goes at the same point of the replies on all of them, so that what was agreed on
  // before runs everywhere, and what comes after fails everywhere. Throws as submit() does.
  std::shared_ptr<Operation> remove_process_set(int number);

  // `sizes`: see Plan::sized(). Throws DuplicateNameError, AbortedError, std::invalid_argument.
  std::shared_ptr<Operation> submit(const std::string& name, Plan plan, std::vector<Memory> memory,
                                    std::vector<int64_t> sizes);
  // Whether it is over, after `limit` at the latest.
  bool wait(const std::shared_ptr<Operation>& operation, std::chrono::milliseconds limit);
  // Throws what it failed with, if it did: MismatchError, AbortedError.
  void check(const std::shared_ptr<Operation>& operation);

  // An operation on a device's memory whose turn it is, the same on all members and in the same order.
  struct Turn {
    std::shared_ptr<Operation> operation;  // none where this rank has joined and others have not
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

  Timeline& timeline() { return timeline_; }
  int rank() const { return rank_; }
  int size() const { return size_; }

  // Ends everything under way and refuses what comes. Any thread, any time.
  void abort(const std::string& reason);
  // Aborts what is under way, and ends the thread.
  void close();

 private:
  struct ProcessSet {
    std::vector<int> ranks;
    int place = -1;  // this rank's; -1: not a member
    Party party;     // the members on this machine
    bool one_machine = true;
    int lanes = 0;   // with several machines: members that all machines have at least
    std::shared_ptr<ContextGroup> contexts;
  };
  struct Span {
    std::string what;
    Clock::time_point begin, end;
  };
  struct Piece {
    const void* in;
    void* out;
    size_t count;
    DType type;
  };
  // What ranks tell each other through rank 0 while they connect.
  std::map<int, SegmentName> introduce(Clock::time_point deadline, const Check& check);
  void agree_on_memory(const std::map<int, SegmentName>& neighbours, Clock::time_point deadline,
                       const Check& check);
  template <typename Talk>
  void connecting(Talk talk);
  void run();
  void tell();
  void answer();
  void take(const std::vector<Reply>& replies);
  void look();
  void run_entries(const std::vector<Entry>& entries);
  void run_allreduces(const ProcessSet& set, const std::vector<Entry>& entries,
                      const std::vector<std::shared_ptr<Operation>>& operations);
  void allreduce(const ProcessSet& set, const Piece& piece, Reduction reduction, double prescale, double postscale);
  void reduce_adasum(const ProcessSet& set, const Piece& piece, double prescale, double postscale);
  void run_allgather(const ProcessSet& set, const Entry& entry, Operation* operation);
  void run_broadcast(const ProcessSet& set, const Entry& entry, Operation* operation);
  void run_alltoall(const ProcessSet& set, const Entry& entry, Operation* operation);
  void run_reducescatter(const ProcessSet& set, const Entry& entry, Operation* operation);
  void allgather_bytes(const ProcessSet& set, const void* in, void* out, const std::vector<size_t>& sizes);
  void finish(const std::shared_ptr<Operation>& operation, Operation::State state, const std::string& error);
  std::shared_ptr<Operation> take_inflight(const std::string& key);
  char* pack_buffer(size_t bytes);
  // Runs `work`, which is what the timeline calls it.
  template <typename Work>
  void timed(const char* what, Work work);
  // Puts an operation of this rank that was run into the timeline.
  void trace(const Operation& operation, const Plan& plan, Clock::time_point answered, const Span& whole,
             const std::vector<Span>& parts);
  std::shared_ptr<const ProcessSet> find_set(int number);
  void drop_set(int number);
  std::shared_ptr<Operation> enter(std::shared_ptr<Operation> operation);
  void throw_if_aborted() const;
  uint64_t next_number() { return turn_number(reply_, turn_++); }

  const int rank_, size_;
  const EngineOptions options_;
  const pid_t owner_;
  ControlLink link_;
  std::shared_ptr<SharedSegment> segment_;  // none where memory cannot be shared
  std::string machine_;
  std::vector<std::vector<int>> machines_;
  std::string unshared_;
  std::unique_ptr<LocalPlane> plane_;
  std::unique_ptr<Coordinator> coordinator_;  // on rank 0
  RequestWriter requests_;
  ReplyReader replies_;
  // Replies so far, and what was run of the present one: all ranks number alike what they run together.
  uint64_t reply_ = 0, turn_ = 0;
  Timeline timeline_;
  Clock::time_point answered_;  // when the reply under way came
  std::vector<Span> spans_;     // of the entries under way, while there is a timeline
  char* pack_ = nullptr;
  size_t pack_bytes_ = 0;
  std::vector<char> private_pack_;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Operation>> queue_;
  std::deque<Turn> turns_;
  std::unordered_map<std::string, std::shared_ptr<Operation>> inflight_;
  std::map<std::pair<int, Kind>, uint64_t> unnamed_;
  // What runs keeps the set it runs in, whatever other threads do with it.
  std::map<int, std::shared_ptr<const ProcessSet>> sets_;
  std::string broken_;
  bool closing_ = false;
  uint64_t finished_ = 0;

  std::atomic<bool> aborted_{false};
  std::atomic<bool> asleep_{false};
  std::mutex close_mutex_;
  std::thread thread_;
};

}  // namespace elastic
