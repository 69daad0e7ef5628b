#include "engine/engine.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <utility>

#include "errors.h"

namespace elastic {
namespace {

// Shorter waits are not reported.
constexpr std::chrono::seconds kWorthTelling{1};

// The longest sleep of the thread, which regularly checks for operations that have waited long.
constexpr int kSleepMs = kLookInterval.count();

// How long threads that run operations on devices may take to conclude them when the round is over, which they notice
// within milliseconds.
constexpr std::chrono::seconds kTurnsEnd{2};

bool is_absent(const Entry& entry, int rank) {
  return std::find(entry.absent.begin(), entry.absent.end(), rank) != entry.absent.end();
}

void tell_over(const Operation& operation, bool well) {
  vitals::finished(static_cast<int>(operation.plan.kind), payload_bytes(operation.plan, operation.sizes), well);
}

// Sets a flag for its own lifetime.
class Flag {
 public:
  explicit Flag(std::atomic<bool>& flag) : flag_(flag) { flag_ = true; }
  ~Flag() { flag_ = false; }
  Flag(const Flag&) = delete;
  Flag& operator=(const Flag&) = delete;

 private:
  std::atomic<bool>& flag_;
};

}  // namespace

Engine::Engine(int rank, int size, EngineOptions options)
    : rank_(rank),
      size_(size),
      options_(options),
      owner_(getpid()),
      link_({rank, options_.key, options_.purpose}, size, options_.reach) {
  if (rank < 0 || rank >= size) throw std::invalid_argument("the rank is not below the size");
  if (options_.shared_memory) memory_ = shared_memory(options_.machine, options_.direct_reads);
  if (rank == 0) coordinator_ = std::make_unique<Coordinator>(size, options_.fusion_bytes, options_.patience);
}

Engine::~Engine() {
  if (getpid() != owner_) {
    // In a forked child the thread does not exist, and its mutex may be locked for ever.
    if (thread_.joinable()) thread_.detach();
    return;
  }
  close();
}

std::string Engine::prepare(const std::string& host, PortRange ports) { return link_.listen(host, ports); }

// On failure, a rank shuts down its connections, so that the others notice, and do not wait until they time out.
template <typename Talk>
void Engine::meet(Seconds timeout, Talk talk) {
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
  const auto check = [this] { throw_if_aborted(); };
  try {
    throw_if_aborted();
    talk(deadline, check);
  } catch (...) {
    link_.disconnect();
    throw;
  }
}

void Engine::connect(const std::string& where, Seconds timeout) {
  meet(timeout, [&](Clock::time_point deadline, const Check& check) {
    link_.connect(where, deadline, check);
    Acquaintance known = Meeting(link_, deadline, check).introduce(memory_);
    machines_ = std::move(known.machines);
    unshared_ = std::move(known.unshared);
    const Interruption interruption(aborted_, [this] { throw_if_aborted(); });
    std::unique_ptr<LocalPlane> plane;
    if (!known.neighbors.empty()) {
      plane = std::make_unique<LocalPlane>(memory_.segment, std::move(known.neighbors), known.direct_reads,
                                           interruption, [this] { look(); });
    }
    const auto segment = plane ? memory_.segment : nullptr;
    executor_ = std::make_unique<Executor>(rank_, options_.collective_timeout, timeline_, interruption,
                                           std::move(plane), segment);
  });
}

std::vector<std::string> Engine::gather(const std::string& given, size_t own, Seconds timeout) {
  std::vector<std::string> all;
  meet(timeout, [&](Clock::time_point deadline, const Check& check) {
    all = Meeting(link_, deadline, check).gather(given, own);
  });
  return all;
}

void Engine::start() {
  throw_if_aborted();
  if (!executor_) throw CollectiveError("connect() was not called");
  if (coordinator_) source_ = std::make_unique<vitals::Source>([this] { return what_lacks_ranks(); });
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    running_ = true;
  }
  try {
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    const std::lock_guard<std::mutex> lock(mutex_);
    running_ = false;
    throw;
  }
}

void Engine::add_process_set(int number, std::vector<int> ranks, std::shared_ptr<ContextGroup> contexts) {
  auto set = std::make_shared<const ProcessSet>(std::move(ranks), std::move(contexts), rank_, machines_);
  if (coordinator_) {
    const std::lock_guard<std::mutex> lock(mutex_);
    coordinator_->add_process_set(number, set->ranks);
  }
  sets_.put(number, std::move(set));
}

std::shared_ptr<Operation> Engine::remove_process_set(int number) {
  auto operation = std::make_shared<Operation>();
  operation->name = "elastic_driver.process_set." + std::to_string(number) + ".removal";
  operation->plan.kind = Kind::kBarrier;
  operation->plan.own = true;
  operation->removes = number;
  return enter(std::move(operation));
}

std::shared_ptr<Operation> Engine::submit(const std::string& name, Plan plan, std::vector<Memory> memory,
                                          std::vector<int64_t> sizes, std::shared_ptr<void> owner) {
  auto operation = std::make_shared<Operation>();
  operation->owner = std::move(owner);
  operation->name = name;
  operation->plan = std::move(plan);
  operation->memory = std::move(memory);
  operation->sizes = std::move(sizes);
  return enter(std::move(operation));
}

std::shared_ptr<Operation> Engine::leave(int step) {
  auto operation = std::make_shared<Operation>();
  operation->plan.kind = Kind::kLeave;
  operation->plan.root = step;
  return enter(std::move(operation));
}

std::shared_ptr<Operation> Engine::enter(std::shared_ptr<Operation> operation) {
  operation->submitted = Clock::now();
  const Plan& plan = operation->plan;
  const std::string& name = operation->name;
  if (getpid() != owner_) throw AbortedError("the engine belongs to the process that forked this one");
  throw_if_aborted();
  const std::shared_ptr<const ProcessSet> set = sets_.find(plan.process_set);
  if (!set) throw std::invalid_argument("there is no process set number " + std::to_string(plan.process_set));
  if (set->place < 0) {
    throw std::invalid_argument("rank " + std::to_string(rank_) + " is not in process set " +
                                std::to_string(plan.process_set));
  }
  if (plan.kind == Kind::kBroadcast && std::find(set->ranks.begin(), set->ranks.end(), plan.root) == set->ranks.end()) {
    throw std::invalid_argument("root rank " + std::to_string(plan.root) + " is not in process set " +
                                std::to_string(plan.process_set));
  }
  plan.check();
  if (operation->memory.size() != plan.tensors.size()) throw std::invalid_argument("each tensor needs its memory");
  if (plan.kind == Kind::kJoin && (plan.process_set != 0 || plan.device != 0 || !plan.tensors.empty())) {
    throw std::invalid_argument("only all ranks together can join, and with nothing else");
  }
  if (plan.kind == Kind::kAlltoall && operation->sizes.size() != plan.tensors.size() * set->ranks.size()) {
    throw std::invalid_argument("the splits must be one for each of the " + std::to_string(set->ranks.size()) +
                                " members of the process set");
  }
  if (!sizes_fit(plan, operation->sizes, 1, set->ranks.size())) {
    throw std::invalid_argument("its tensors have negative sizes, or more bytes than memory has addresses");
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!broken_.empty()) throw_broken();
    if (plan.kind == Kind::kLeave) {
      if (const auto& begun = leaving_[plan.root == 0 ? 0 : 1]) return begun;
    } else if (leaving_[0]) {
      throw AbortedError("this rank has left the round");
    }
    uint64_t* number = nullptr;
    if (plan.kind == Kind::kLeave) {
      operation->key = unnamed_key(0, plan.kind, 0, static_cast<uint64_t>(plan.root));
    } else if (plan.kind == Kind::kJoin) {
      operation->key = join_key();
    } else if (name.empty()) {
      number = &unnamed_[{plan.process_set, plan.kind}];
      operation->key = unnamed_key(plan.process_set, plan.kind, joins_, *number);
    } else {
      operation->key = named_key(plan.process_set, name, plan.own);
    }
    if (inflight_.count(operation->key) != 0) {
      throw DuplicateNameError("cannot " + std::string(kind_name(plan.kind)) + " '" + key_name(operation->key) +
                               "': an operation of this name is under way");
    }
    // Both or neither, also without memory: an operation that is not queued would never end.
    queue_.push_back(operation);
    try {
      inflight_.emplace(operation->key, operation);
    } catch (...) {
      queue_.pop_back();
      throw;
    }
    if (number != nullptr) ++*number;
    if (plan.kind == Kind::kLeave) leaving_[plan.root == 0 ? 0 : 1] = operation;
    // At a join, ranks have submitted different numbers of unnamed operations. They are counted in the order in which
    // rank 0 receives them, so that both counts agree, whatever other threads submit meanwhile.
    if (plan.kind == Kind::kJoin) {
      ++joins_;
      unnamed_.clear();
    }
  }
  vitals::submitted();
  if (asleep_) link_.wake();
  return operation;
}

bool Engine::wait(const std::shared_ptr<Operation>& operation, std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_->wait_for(lock, limit, [&] {
    if (operation->state == Operation::State::kPending) return false;
    return operation != leaving_[0] || !broken_.empty() || !busy(std::nullopt);
  });
}

bool Engine::busy(std::optional<int> process_set) const {
  const auto counts = [&](int number) { return !process_set || number == *process_set; };
  return std::any_of(turns_taken_.begin(), turns_taken_.end(), counts) ||
         std::any_of(turns_.begin(), turns_.end(), [&](const Turn& turn) { return counts(turn.plan->process_set); }) ||
         std::any_of(inflight_.begin(), inflight_.end(), [&](const auto& one) {
           const Plan& plan = one.second->plan;
           return plan.kind != Kind::kLeave && counts(plan.process_set);
         });
}

bool Engine::carries_out() const {
  if (executes_) return true;
  const std::lock_guard<std::mutex> lock(mutex_);
  return !turns_.empty() || !turns_taken_.empty();
}

uint64_t Engine::own_finished() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return own_finished_;
}

bool Engine::settled(int process_set, std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_->wait_for(lock, limit, [&] { return !broken_.empty() || !busy(process_set); });
}

bool Engine::quiesce(std::chrono::milliseconds limit) {
  if (getpid() != owner_) return true;
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_->wait_for(lock, limit, [&] { return !running_; });
}

void Engine::check(const std::shared_ptr<Operation>& operation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  switch (operation->state) {
    case Operation::State::kDone:
      // The step is done, but this rank's operations in flight may have failed since.
      if (operation == leaving_[0] && !broken_.empty()) throw AbortedError(broken_);
      return;
    case Operation::State::kMismatch:
      throw MismatchError(operation->error);
    case Operation::State::kFailed:
      throw AbortedError(operation->error);
    case Operation::State::kOutOfMemory:
      throw OutOfMemoryError(operation->error);
    case Operation::State::kPending:
      throw CollectiveError("the operation is still under way");
  }
}

void* Engine::allocate(size_t bytes, std::shared_ptr<SharedSegment>& keeper) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!memory_.segment || machines_.size() == static_cast<size_t>(size_)) return nullptr;
    keeper = memory_.segment;
  }
  return keeper->allocate(bytes);
}

std::pair<uint64_t, bool> Engine::progress() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {finished_, !inflight_.empty() || !turns_.empty()};
}

std::optional<Engine::Turn> Engine::next_turn(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_->wait_for(lock, limit, [&] { return !turns_.empty() || !broken_.empty(); });
  if (!broken_.empty()) throw_broken();
  if (turns_.empty()) return std::nullopt;
  Turn turn = std::move(turns_.front());
  turns_.pop_front();
  if (turn.operation) turn.owner = turn.operation->owner;
  turns_taken_.insert(turn.plan->process_set);
  if (turn.operation) turn.operation->taken = true;
  turn.taken = Clock::now();
  return turn;
}

void Engine::conclude(const Turn& turn, const std::string& error) {
  if (turn.operation) {
    if (timeline_.on()) {
      trace(timeline_, *turn.operation, turn.answered, turn.taken, Clock::now(), {});
    }
    finish(turn.operation, error.empty() ? Operation::State::kDone : Operation::State::kFailed, error);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++finished_;
    turns_taken_.erase(turns_taken_.find(turn.plan->process_set));
    changed_->notify_all();
  }
  if (!error.empty()) abort(error);
}

void Engine::abort(const std::string& reason) {
  if (getpid() != owner_) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (broken_.empty()) broken_ = reason.empty() ? "aborted" : reason;
    changed_->notify_all();
  }
  aborted_ = true;
  sets_.abort(reason);
  link_.wake();
}

void Engine::close() {
  if (getpid() != owner_) return;
  const std::lock_guard<std::mutex> closing(close_mutex_);
  // The thread may be in a collective between machines, which only an abort ends before its time limit.
  abort("the engine is closed");
  source_.reset();
  if (thread_.joinable()) thread_.join();
  fail_left(true);
  timeline_.stop();
  executor_.reset();
  link_.close();
  // Memory from allocate() keeps the segment alive.
  const std::lock_guard<std::mutex> lock(mutex_);
  memory_.segment.reset();
}

void Engine::throw_if_aborted() const {
  if (!aborted_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  throw_broken();
}

void Engine::throw_broken() const {
  if (out_of_memory_) throw OutOfMemoryError(broken_);
  throw AbortedError(broken_);
}

void Engine::look() {
  throw_if_aborted();
  link_.check_peers();
}

std::optional<std::string> Engine::what_lacks_ranks() const {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock) return std::nullopt;
  return coordinator_->lacking(Clock::now() - kWorthTelling);
}

bool Engine::awaits() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !inflight_.empty() || !turns_.empty() || !turns_taken_.empty() || (coordinator_ && coordinator_->awaits());
}

// --- the engine's thread ------------------------------------------------------------------------------------------

void Engine::run() {
  pthread_setname_np(pthread_self(), "elastic-engine");
  std::string reason;
  try {
    while (true) {
      throw_if_aborted();
      timeline_.cycle();
      tell();
      answer();
      asleep_ = true;
      bool idle;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        idle = queue_.empty() && !aborted_;
      }
      const std::vector<ControlLink::Frame> frames = link_.receive(idle ? kSleepMs : 0);
      asleep_ = false;
      // Also while no message is awaited: so a rank that is silent already is known at once when one is.
      const auto now = Clock::now();
      if (link_.look_is_due(now)) link_.look(now, awaits());
      for (const auto& frame : frames) {
        if (coordinator_) {
          const std::lock_guard<std::mutex> lock(mutex_);
          coordinator_->receive(frame.rank, frame.bytes, Clock::now());
        } else {
          take(replies_.read(frame.bytes));
        }
      }
    }
  } catch (const std::bad_alloc& error) {
    // The peers notice that this rank leaves; here, all operations in flight fail.
    reason = error.what();
    const std::lock_guard<std::mutex> lock(mutex_);
    out_of_memory_ = broken_.empty();
  } catch (const std::exception& error) {
    reason = error.what();
  } catch (...) {
    reason = "the engine's thread failed";
  }
  if (memory_.segment) memory_.segment->words().gave_up = 1;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    running_ = false;
    changed_->notify_all();
  }
  try {
    abort(reason);
    link_.disconnect();
  } catch (...) {  // after any exception, no thread may be left waiting
  }
  fail_left(false);
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_->wait_for(lock, kTurnsEnd, [this] { return turns_taken_.empty(); });
  }
  fail_left(true);
}

void Engine::fail_left(bool taken) noexcept {
  while (true) {
    std::shared_ptr<Operation> operation;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.clear();
      turns_.clear();
      const auto found = std::find_if(inflight_.begin(), inflight_.end(),
                                      [&](const auto& each) { return taken || !each.second->taken; });
      if (found == inflight_.end()) return;
      operation = found->second;
    }
    finish(operation, out_of_memory_ ? Operation::State::kOutOfMemory : Operation::State::kFailed, broken_);
  }
}

// Reports this rank's submissions to rank 0.
void Engine::tell() {
  std::deque<std::shared_ptr<Operation>> fresh;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    fresh.swap(queue_);
  }
  if (fresh.empty()) return;
  for (const auto& operation : fresh) requests_.add(operation->name, operation->plan, operation->sizes);
  const std::string message = requests_.message();
  if (coordinator_) {
    const std::lock_guard<std::mutex> lock(mutex_);
    coordinator_->receive(0, message, Clock::now());
  } else {
    // Never blocks: rank 0 may be waiting for this rank in a collective that it has announced.
    link_.post(0, message);
  }
}

// On rank 0: sends all ranks the operations to run, and runs them.
void Engine::answer() {
  if (!coordinator_) return;
  std::string message;
  std::vector<std::string> warnings;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    warnings = coordinator_->look(Clock::now());
    message = coordinator_->flush();
  }
  for (const std::string& warning : warnings) notices_.add("elastic_driver: " + warning);
  notices_.flush();
  if (message.empty()) return;
  // Sends everything before this rank runs operations of which the others must know.
  for (int rank = 1; rank < size_; ++rank) link_.send(rank, message, [this] { throw_if_aborted(); });
  take(replies_.read(message));
}

void Engine::take(const std::vector<Reply>& replies) {
  answered_at_ = Clock::now();
  for (const Reply& reply : replies) {
    executor_->begin_reply();
    switch (reply.type) {
      case Reply::Type::kRun:
        run_entries(reply.entries);
        break;
      case Reply::Type::kMismatch:
        for (const Entry& entry : reply.entries) {
          const auto operation = answered(entry);
          if (operation) finish(operation, Operation::State::kMismatch, reply.text);
        }
        break;
      case Reply::Type::kAbort:
        throw CollectiveError(reply.text);
    }
  }
}

std::shared_ptr<Operation> Engine::answered(const Entry& entry) {
  if (is_absent(entry, rank_)) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = inflight_.find(entry.key);
  if (found == inflight_.end() || std::exchange(found->second->answered, true)) return nullptr;
  return found->second;
}

void Engine::finish(const std::shared_ptr<Operation>& operation, Operation::State state, const std::string& error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (operation->state != Operation::State::kPending) return;
    operation->state = state;
    try {
      operation->error = error;
    } catch (const std::bad_alloc&) {  // it ends without a message
    }
    operation->owner.reset();
    inflight_.erase(operation->key);
    ++own_finished_;
  }
  tell_over(*operation, state == Operation::State::kDone);
  changed_->notify_all();
}

void Engine::drop_set(int number) {
  if (coordinator_) {
    const std::lock_guard<std::mutex> lock(mutex_);
    coordinator_->remove_process_set(number);
  }
  sets_.remove(number);
}

void Engine::check_entries(const ProcessSet& set, const std::vector<Entry>& entries,
                           const std::vector<std::shared_ptr<Operation>>& operations) const {
  const auto refuse = [](const Entry& entry, const std::string& what) {
    throw CollectiveError("rank 0 runs " + what + ": " + kind_name(entry.plan->kind) + " '" + key_name(entry.key) +
                          "'");
  };
  const Plan& first = *entries[0].plan;
  for (size_t i = 0; i < entries.size(); ++i) {
    const Entry& entry = entries[i];
    const Plan& plan = *entry.plan;
    const Operation* const own = operations[i].get();
    if (entries.size() > 1 && !(can_be_fused(first) && can_be_fused(plan) && fuse_with(first, plan))) {
      refuse(entry, "together what does not go together");
    }
    const bool is_for_absent = plan.kind == Kind::kAllreduce || plan.kind == Kind::kLeave;
    if (own == nullptr && !(is_for_absent && is_absent(entry, rank_))) {
      refuse(entry, "what this rank has not submitted");
    }
    if (own != nullptr && !(own->plan == plan)) refuse(entry, "otherwise what this rank has submitted");
    if (plan.kind == Kind::kJoin) {
      if (entry.sizes.size() != 1 || entry.sizes[0] >= size_) refuse(entry, "what nobody can have done last");
      continue;
    }
    const size_t members = set.ranks.size(), each = own != nullptr ? own->sizes.size() : 0;
    if (!sizes_fit(plan, entry.sizes, members, members) ||
        (own != nullptr &&
         !std::equal(own->sizes.begin(), own->sizes.end(),
                     entry.sizes.begin() + static_cast<ptrdiff_t>(set.place) * static_cast<ptrdiff_t>(each)))) {
      refuse(entry, "with other sizes what this rank has submitted");
    }
    if (plan.kind == Kind::kBroadcast && std::find(set.ranks.begin(), set.ranks.end(), plan.root) == set.ranks.end()) {
      refuse(entry, "from no member what this rank has submitted");
    }
  }
}

void Engine::run_entries(const std::vector<Entry>& entries) {
  const Plan& plan = *entries[0].plan;
  const std::shared_ptr<const ProcessSet> set = sets_.find(plan.process_set);
  if (!set) {
    // Agreed on before its process set was removed, at the same point on all ranks: no rank runs it.
    for (const Entry& entry : entries) {
      const auto operation = answered(entry);
      if (!operation) continue;
      finish(operation, Operation::State::kMismatch,
             "cannot " + std::string(kind_name(plan.kind)) + " '" + key_name(entry.key) +
                 "': its process set was removed before it could run");
    }
    return;
  }
  if (set->place < 0) return;
  // Null for an operation that others run while this rank has joined.
  std::vector<std::shared_ptr<Operation>> operations;
  for (const Entry& entry : entries) operations.push_back(answered(entry));
  check_entries(*set, entries, operations);
  if (plan.device != 0 && plan.kind != Kind::kJoin) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < entries.size(); ++i) {
      turns_.push_back({operations[i], nullptr, entries[i].plan, entries[i].sizes, answered_at_, {}});
    }
    changed_->notify_all();
    return;
  }
  const auto begin = Clock::now();
  const Flag executes(executes_);
  std::vector<Span> spans;
  try {
    spans = executor_->run(*set, entries, operations);
  } catch (const std::bad_alloc&) {
    throw OutOfMemoryError("rank " + std::to_string(rank_) + " cannot " + kind_name(plan.kind) + " '" +
                           key_name(entries[0].key) + "': there is no memory for it");
  }
  if (operations[0] && operations[0]->removes >= 0) drop_set(operations[0]->removes);
  const auto end = Clock::now();
  // Before the operations are reported as done: if the timeline is stopped then, it must contain them.
  if (timeline_.on()) {
    for (const auto& operation : operations) {
      if (operation) trace(timeline_, *operation, answered_at_, begin, end, spans);
    }
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& operation : operations) {
      if (!operation) continue;
      operation->state = Operation::State::kDone;
      operation->owner.reset();
      inflight_.erase(operation->key);
      ++own_finished_;
    }
    ++finished_;
  }
  for (const auto& operation : operations) {
    if (operation) tell_over(*operation, true);
  }
  changed_->notify_all();
}

}  // namespace elastic
