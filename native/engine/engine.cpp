#include "engine/engine.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <utility>

#include "arithmetic/adasum.h"
#include "errors.h"
#include "net/wire.h"

namespace elastic {
namespace {

// Smaller tensors that run together are copied into one buffer; larger ones gain nothing from that.
constexpr size_t kPackedTensorBytes = 256 * 1024;
// What is packed at a time: it stays in the cache.
constexpr size_t kPackBytes = size_t{4} << 20;
// The thread looks up from its sleep now and then, for peers that have waited long.
constexpr int kSleepMs = 1000;
// What the timeline calls the transports. It has Horovod's names for what Horovod has, too.
constexpr const char* kShared = "SHARED_MEMORY";
constexpr const char* kNetworkAllreduce = "GLOO_ALLREDUCE";
constexpr const char* kNetworkAllgather = "GLOO_ALLGATHER";

std::unique_ptr<char[]> uninitialized(size_t bytes) { return std::unique_ptr<char[]>(new char[std::max<size_t>(bytes, 1)]); }

// Rows of each member's part: as even as can be, the first ones have one more.
std::vector<size_t> even_rows(size_t rows, size_t members) {
  std::vector<size_t> parts(members, rows / members);
  for (size_t i = 0; i < rows % members; ++i) ++parts[i];
  return parts;
}

bool same_memory_or_copied(const void* in, void* out, size_t bytes) {
  if (bytes != 0 && in != out) std::memcpy(out, in, bytes);
  return true;
}

// What the timeline calls an operation: ALLREDUCE; with Adasum, ADASUM.
std::string activity(const Plan& plan) {
  std::string text = plan.kind == Kind::kAllreduce && plan.reduction == Reduction::kAdasum ? reduction_name(plan.reduction)
                                                                                           : kind_name(plan.kind);
  for (char& c : text) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return text;
}

// Its row there: allreduce.NAME.
std::string row(const Plan& plan, const std::string& key) {
  const std::string name = key_name(key), prefix = std::string(kind_name(plan.kind)) + ".";
  return name.compare(0, prefix.size(), prefix) == 0 ? name : prefix + name;
}

}  // namespace

Engine::Engine(int rank, int size, EngineOptions options)
    : rank_(rank), size_(size), options_(options), owner_(getpid()), link_({rank, options_.key, options_.purpose}, size) {
  if (rank < 0 || rank >= size) throw std::invalid_argument("the rank is not below the size");
  if (options_.shared_memory) {
    try {
      machine_ = this_machine();
      if (!machine_.empty()) machine_ += " " + options_.machine;
      if (!machine_.empty()) segment_ = std::make_shared<SharedSegment>();
    } catch (const CollectiveError& error) {
      machine_.clear();
      unshared_ = error.what();
    }
  }
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

std::string Engine::prepare(const std::string& host) { return link_.listen(host); }

// Who fails lets the others see the end of its connections, so that nobody waits for a time limit.
template <typename Talk>
void Engine::connecting(Talk talk) {
  try {
    throw_if_aborted();
    talk();
  } catch (...) {
    link_.disconnect();
    throw;
  }
}

void Engine::connect(const std::string& where, Seconds timeout) {
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
  const auto check = [this] { throw_if_aborted(); };
  connecting([&] {
    link_.connect(where, deadline, check);
    agree_on_memory(introduce(deadline, check), deadline, check);
  });
}

namespace {

void write_name(Writer& writer, const SegmentName& name) {
  writer.number(static_cast<uint64_t>(name.pid));
  writer.number(static_cast<uint64_t>(name.descriptor));
  writer.number(name.nonce);
  writer.number(name.words_address);
}

SegmentName read_name(Reader& reader, const std::string& machine) {
  SegmentName name;
  name.machine = machine;
  name.pid = static_cast<pid_t>(reader.number());
  name.descriptor = reader.small_number();
  name.nonce = reader.number();
  name.words_address = reader.number();
  return name;
}

}  // namespace

// Rank 0 learns each rank's machine and segment. It tells each which ranks are together, as runs over the ranks, and the
// segments of its neighbours. Sets machines_, for now as if all could share memory.
std::map<int, SegmentName> Engine::introduce(Clock::time_point deadline, const Check& check) {
  Writer mine;
  mine.text(segment_ ? machine_ : "");
  if (segment_) write_name(mine, segment_->name());
  std::string told;  // by rank 0
  if (rank_ != 0) {
    link_.send(0, mine.bytes(), check);
    told = link_.receive_all(deadline, check)[0];
  } else {
    std::map<int, std::string> said = link_.receive_all(deadline, check);
    said[0] = mine.take();
    std::map<std::string, size_t> numbers;
    std::vector<std::pair<size_t, size_t>> runs;  // number of a machine, how many ranks in a row
    std::vector<std::string> segments;            // of each machine: its ranks and their segments
    std::vector<size_t> counts, machine_of;
    for (const auto& [rank, bytes] : said) {
      Reader reader(bytes);
      const std::string machine(reader.text());
      const std::string key = machine.empty() ? "rank " + std::to_string(rank) : machine;
      const size_t number = numbers.emplace(key, numbers.size()).first->second;
      if (number == segments.size()) {
        segments.emplace_back();
        counts.push_back(0);
      }
      if (runs.empty() || runs.back().first != number) runs.emplace_back(number, 0);
      ++runs.back().second;
      machine_of.push_back(number);
      if (machine.empty()) continue;
      Writer one;
      one.number(static_cast<uint64_t>(rank));
      write_name(one, read_name(reader, machine));
      segments[number] += one.bytes();
      ++counts[number];
    }
    Writer all;
    all.number(runs.size());
    for (const auto& [number, count] : runs) {
      all.number(number);
      all.number(count);
    }
    for (int rank = 0; rank < size_; ++rank) {
      const size_t number = machine_of[static_cast<size_t>(rank)];
      Writer one;
      one.number(counts[number]);
      one.raw(segments[number]);
      const std::string message = all.bytes() + one.bytes();
      if (rank == 0) {
        told = message;
      } else {
        link_.send(rank, message, check);
      }
    }
  }
  Reader reader(told);
  std::map<size_t, std::vector<int>> machines;
  int next = 0;
  for (uint64_t runs = reader.number(); runs > 0; --runs) {
    const uint64_t number = reader.number(), count = reader.number();
    if (count > static_cast<uint64_t>(size_ - next)) throw CollectiveError("rank 0 knows more ranks than there are");
    for (uint64_t i = 0; i < count; ++i) machines[number].push_back(next++);
  }
  if (next != size_) throw CollectiveError("rank 0 does not know all ranks");
  for (auto& [number, ranks] : machines) machines_.push_back(std::move(ranks));
  std::sort(machines_.begin(), machines_.end());
  std::map<int, SegmentName> neighbours;
  for (uint64_t left = reader.number(); left > 0; --left) {
    const int rank = reader.small_number();
    const SegmentName name = read_name(reader, machine_);
    if (rank != rank_) neighbours[rank] = name;
  }
  return neighbours;
}

void Engine::agree_on_memory(const std::map<int, SegmentName>& neighbours, Clock::time_point deadline,
                             const Check& check) {
  std::vector<std::unique_ptr<PeerSegment>> peers;
  bool mapped = true, direct = options_.direct_reads;
  try {
    for (const auto& [rank, name] : neighbours) {
      peers.push_back(std::make_unique<PeerSegment>(rank, name));
      direct = direct && peers.back()->can_read_private();
    }
  } catch (const CollectiveError& error) {
    mapped = false;
    unshared_ = error.what();
  }
  // All share memory, or none: whoever does it alone would wait for ever.
  const auto verdict_on = [&] {
    Writer writer;
    writer.number(mapped);
    writer.number(direct);
    writer.text(unshared_);
    return writer.take();
  };
  std::string verdict;
  if (rank_ == 0) {
    for (const auto& [rank, bytes] : link_.receive_all(deadline, check)) {
      Reader reader(bytes);
      mapped = reader.number() != 0 && mapped;
      direct = reader.number() != 0 && direct;
      const std::string_view why = reader.text();
      if (unshared_.empty()) unshared_ = why;
    }
    verdict = verdict_on();
    for (int rank = 1; rank < size_; ++rank) link_.send(rank, verdict, check);
  } else {
    link_.send(0, verdict_on(), check);
    verdict = link_.receive_all(deadline, check)[0];
  }
  Reader reader(verdict);
  mapped = reader.number() != 0;
  direct = reader.number() != 0;
  unshared_ = reader.text();

  if (!mapped) {
    machines_.clear();
    for (int rank = 0; rank < size_; ++rank) machines_.push_back({rank});
  }
  if (mapped && segment_ && !peers.empty()) {
    plane_ = std::make_unique<LocalPlane>(segment_, std::move(peers), direct, [this] { look(); });
  }
}

std::vector<std::string> Engine::gather(const std::string& given, size_t own, Seconds timeout) {
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
  const auto check = [this] { throw_if_aborted(); };
  std::vector<std::string> all;
  connecting([&] {
    std::string told;
    if (rank_ != 0) {
      link_.send(0, given, check);
      told = link_.receive_all(deadline, check)[0];
    } else {
      std::map<int, std::string> said = link_.receive_all(deadline, check);
      said[0] = given;
      // Ranks of one machine mostly have the same in common: it is told once.
      std::map<std::string_view, size_t> numbers;
      Writer table, rows;
      for (const auto& [rank, bytes] : said) {
        const size_t shared = bytes.size() - std::min(own, bytes.size());
        const std::string_view common = std::string_view(bytes).substr(0, shared);
        const auto [found, is_new] = numbers.emplace(common, numbers.size());
        if (is_new) table.text(common);
        rows.number(found->second);
        rows.text(std::string_view(bytes).substr(shared));
      }
      Writer message;
      message.number(numbers.size());
      message.raw(table.bytes());
      message.raw(rows.bytes());
      told = message.take();
      for (int rank = 1; rank < size_; ++rank) link_.send(rank, told, check);
    }
    Reader reader(told);
    std::vector<std::string_view> table;
    for (uint64_t left = reader.number(); left > 0; --left) table.push_back(reader.text());
    for (int rank = 0; rank < size_; ++rank) {
      const uint64_t number = reader.number();
      if (number >= table.size()) throw CollectiveError("cannot read what rank 0 tells of the others");
      all.push_back(std::string(table[number]).append(reader.text()));
    }
  });
  return all;
}

void Engine::start() {
  throw_if_aborted();
  thread_ = std::thread([this] { run(); });
}

void Engine::add_process_set(int number, std::vector<int> ranks, std::shared_ptr<ContextGroup> contexts) {
  auto set = std::make_shared<ProcessSet>();
  set->contexts = std::move(contexts);
  const std::set<int> distinct(ranks.begin(), ranks.end());
  if (ranks.empty() || distinct.size() != ranks.size() || *distinct.begin() < 0 || *distinct.rbegin() >= size_) {
    throw std::invalid_argument("the members of a process set must be distinct ranks of the job");
  }
  set->lanes = size_;
  for (const std::vector<int>& machine : machines_) {
    std::vector<int> here;
    for (const int rank : ranks) {
      if (std::find(machine.begin(), machine.end(), rank) != machine.end()) here.push_back(rank);
    }
    if (here.empty()) continue;
    set->lanes = std::min(set->lanes, static_cast<int>(here.size()));
    const auto mine = std::find(here.begin(), here.end(), rank_);
    if (mine != here.end()) {
      set->party.index = static_cast<int>(mine - here.begin());
      set->party.ranks = here;
    }
    set->one_machine = set->one_machine && here.size() == ranks.size();
  }
  const auto place = std::find(ranks.begin(), ranks.end(), rank_);
  if (place != ranks.end()) set->place = static_cast<int>(place - ranks.begin());
  set->ranks = std::move(ranks);
  if (set->place >= 0 && !set->one_machine && !set->contexts) {
    throw std::invalid_argument("a process set on several machines needs contexts");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (coordinator_) coordinator_->add_process_set(number, set->ranks);
  sets_[number] = std::move(set);
}

std::shared_ptr<Operation> Engine::remove_process_set(int number) {
  auto operation = std::make_shared<Operation>();
  operation->name_ = "elastic_driver.process_set." + std::to_string(number) + ".removal";
  operation->plan_.kind = Kind::kBarrier;
  operation->removes_ = number;
  return enter(std::move(operation));
}

std::shared_ptr<Operation> Engine::submit(const std::string& name, Plan plan, std::vector<Memory> memory,
                                          std::vector<int64_t> sizes) {
  auto operation = std::make_shared<Operation>();
  operation->name_ = name;
  operation->plan_ = std::move(plan);
  operation->memory_ = std::move(memory);
  operation->sizes_ = std::move(sizes);
  return enter(std::move(operation));
}

std::shared_ptr<Operation> Engine::enter(std::shared_ptr<Operation> operation) {
  operation->submitted_ = Clock::now();
  const Plan& what = operation->plan_;
  const std::string& name = operation->name_;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (getpid() != owner_) throw AbortedError("the engine belongs to the process that forked this one");
    if (!broken_.empty()) throw AbortedError(broken_);
    const auto set = sets_.find(what.process_set);
    if (set == sets_.end()) {
      throw std::invalid_argument("there is no process set number " + std::to_string(what.process_set));
    }
    const ProcessSet& members = *set->second;
    if (members.place < 0) {
      throw std::invalid_argument("rank " + std::to_string(rank_) + " is not in process set " +
                                  std::to_string(what.process_set));
    }
    if (what.kind == Kind::kBroadcast &&
        std::find(members.ranks.begin(), members.ranks.end(), what.root) == members.ranks.end()) {
      throw std::invalid_argument("root rank " + std::to_string(what.root) + " is not in process set " +
                                  std::to_string(what.process_set));
    }
    if (what.kind == Kind::kAlltoall && operation->sizes_.size() != what.tensors.size() * members.ranks.size()) {
      throw std::invalid_argument("the splits must be one for each of the " + std::to_string(members.ranks.size()) +
                                  " members of the process set");
    }
    if (what.kind == Kind::kJoin) {
      operation->key_ = named_key(0, "join");
    } else if (name.empty()) {
      operation->key_ = unnamed_key(what.process_set, what.kind, unnamed_[{what.process_set, what.kind}]++);
    } else {
      operation->key_ = named_key(what.process_set, name);
    }
    if (!inflight_.emplace(operation->key_, operation).second) {
      throw DuplicateNameError("cannot " + std::string(kind_name(what.kind)) + " '" + key_name(operation->key_) +
                               "': an operation of this name is under way");
    }
    queue_.push_back(operation);
  }
  if (asleep_) link_.wake();
  return operation;
}

bool Engine::wait(const std::shared_ptr<Operation>& operation, std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, limit, [&] { return operation->state_ != Operation::State::kPending; });
}

void Engine::check(const std::shared_ptr<Operation>& operation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  switch (operation->state_) {
    case Operation::State::kDone:
      return;
    case Operation::State::kMismatch:
      throw MismatchError(operation->error_);
    case Operation::State::kFailed:
      throw AbortedError(operation->error_);
    case Operation::State::kPending:
      throw CollectiveError("the operation is still under way");
  }
}

void* Engine::allocate(size_t bytes, std::shared_ptr<SharedSegment>& keeper) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!segment_ || machines_.size() == static_cast<size_t>(size_)) return nullptr;
    keeper = segment_;
  }
  return keeper->allocate(bytes);
}

std::pair<uint64_t, bool> Engine::progress() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {finished_, !inflight_.empty() || !turns_.empty()};
}

std::optional<Engine::Turn> Engine::next_turn(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, limit, [&] { return !turns_.empty() || !broken_.empty(); });
  if (!broken_.empty()) throw AbortedError(broken_);
  if (turns_.empty()) return std::nullopt;
  Turn turn = std::move(turns_.front());
  turns_.pop_front();
  turn.taken = Clock::now();
  return turn;
}

void Engine::conclude(const Turn& turn, const std::string& error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++finished_;
  }
  if (turn.operation) {
    if (timeline_.on()) {
      trace(*turn.operation, *turn.plan, turn.answered, {activity(*turn.plan), turn.taken, Clock::now()}, {});
    }
    finish(turn.operation, error.empty() ? Operation::State::kDone : Operation::State::kFailed, error);
  }
  if (!error.empty()) abort(error);
}

void Engine::abort(const std::string& reason) {
  if (getpid() != owner_) return;
  std::vector<std::shared_ptr<ContextGroup>> contexts;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (broken_.empty()) broken_ = reason.empty() ? "aborted" : reason;
    changed_.notify_all();
    for (const auto& [number, set] : sets_) {
      if (set->contexts) contexts.push_back(set->contexts);
    }
  }
  aborted_ = true;
  for (const auto& one : contexts) one->abort(reason);
  link_.wake();
}

void Engine::close() {
  if (getpid() != owner_) return;
  const std::lock_guard<std::mutex> closing(close_mutex_);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    if (broken_.empty()) broken_ = "the engine is closed";
    changed_.notify_all();
  }
  aborted_ = true;
  link_.wake();
  if (thread_.joinable()) thread_.join();
  timeline_.stop();
  plane_.reset();
  link_.close();
  if (pack_ != nullptr) segment_->release(std::exchange(pack_, nullptr));
  // Memory that allocate() gave out keeps it.
  const std::lock_guard<std::mutex> lock(mutex_);
  segment_.reset();
}

void Engine::throw_if_aborted() const {
  if (!aborted_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  throw AbortedError(broken_);
}

void Engine::look() {
  throw_if_aborted();
  link_.check_peers();
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
      for (const auto& frame : frames) {
        if (coordinator_) {
          const std::lock_guard<std::mutex> lock(mutex_);
          coordinator_->handle(frame.rank, frame.bytes, Clock::now());
        } else {
          take(replies_.read(frame.bytes));
        }
      }
    }
  } catch (const std::exception& error) {
    reason = error.what();
  }
  if (segment_) segment_->words().gave_up = 1;
  abort(reason);
  link_.disconnect();
  std::vector<std::shared_ptr<Operation>> left;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.clear();
    for (auto& [key, operation] : inflight_) left.push_back(operation);
    inflight_.clear();
    for (Turn& turn : turns_) {
      if (turn.operation) left.push_back(std::move(turn.operation));
    }
    turns_.clear();
    reason = broken_;
  }
  for (const auto& operation : left) finish(operation, Operation::State::kFailed, reason);
}

// Tells rank 0 what was submitted here.
void Engine::tell() {
  std::deque<std::shared_ptr<Operation>> fresh;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    fresh.swap(queue_);
  }
  if (fresh.empty()) return;
  for (const auto& operation : fresh) requests_.add(operation->name_, operation->plan_, operation->sizes_);
  const std::string message = requests_.message();
  if (coordinator_) {
    const std::lock_guard<std::mutex> lock(mutex_);
    coordinator_->handle(0, message, Clock::now());
  } else {
    link_.send(0, message, [this] { throw_if_aborted(); });
  }
}

// On rank 0: tells all what runs, and runs it.
void Engine::answer() {
  if (!coordinator_) return;
  std::string message;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const std::string& warning : coordinator_->look(Clock::now())) {
      const std::string line = "elastic_driver: " + warning + "\n";
      [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
    }
    message = coordinator_->flush();
  }
  if (message.empty()) return;
  for (int rank = 1; rank < size_; ++rank) link_.send(rank, message, [this] { throw_if_aborted(); });
  take(replies_.read(message));
}

template <typename Work>
void Engine::timed(const char* what, Work work) {
  if (!timeline_.on()) {
    work();
    return;
  }
  const auto begin = Clock::now();
  work();
  spans_.push_back({what, begin, Clock::now()});
}

void Engine::take(const std::vector<Reply>& replies) {
  answered_ = Clock::now();
  for (const Reply& reply : replies) {
    ++reply_;
    turn_ = 0;
    switch (reply.type) {
      case Reply::Type::kRun:
        run_entries(reply.entries);
        break;
      case Reply::Type::kMismatch:
        for (const Entry& entry : reply.entries) {
          const auto operation = take_inflight(entry.key);
          if (operation) finish(operation, Operation::State::kMismatch, reply.text);
        }
        break;
      case Reply::Type::kAbort:
        throw CollectiveError(reply.text);
    }
  }
}

std::shared_ptr<Operation> Engine::take_inflight(const std::string& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = inflight_.find(key);
  if (found == inflight_.end()) return nullptr;
  auto operation = std::move(found->second);
  inflight_.erase(found);
  return operation;
}

void Engine::finish(const std::shared_ptr<Operation>& operation, Operation::State state, const std::string& error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    operation->state_ = state;
    operation->error_ = error;
  }
  changed_.notify_all();
}

std::shared_ptr<const Engine::ProcessSet> Engine::find_set(int number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = sets_.find(number);
  return found == sets_.end() ? nullptr : found->second;
}

void Engine::drop_set(int number) {
  std::shared_ptr<const ProcessSet> last;  // freed without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  if (coordinator_) coordinator_->remove_process_set(number);
  const auto found = sets_.find(number);
  if (found == sets_.end()) return;
  last = std::move(found->second);
  sets_.erase(found);
}

void Engine::run_entries(const std::vector<Entry>& entries) {
  const Plan& plan = *entries[0].plan;
  const std::shared_ptr<const ProcessSet> set = find_set(plan.process_set);
  if (!set) {
    // Agreed on before its set went, which was at the same point on all ranks: nobody runs it.
    for (const Entry& entry : entries) {
      const auto operation = take_inflight(entry.key);
      if (!operation) continue;
      finish(operation, Operation::State::kMismatch,
             "cannot " + std::string(kind_name(plan.kind)) + " '" + key_name(entry.key) +
                 "': its process set was removed before it could run");
    }
    return;
  }
  if (set->place < 0) return;
  // None for an operation that others run while this rank has joined.
  std::vector<std::shared_ptr<Operation>> operations;
  for (const Entry& entry : entries) operations.push_back(take_inflight(entry.key));
  if (plan.device != 0 && plan.kind != Kind::kJoin) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < entries.size(); ++i) {
      turns_.push_back({std::move(operations[i]), entries[i].plan, entries[i].sizes, answered_, {}});
    }
    changed_.notify_all();
    return;
  }
  const auto begin = Clock::now();
  try {
    Operation* const first = operations[0].get();
    if (first == nullptr && plan.kind != Kind::kAllreduce && plan.kind != Kind::kJoin) {
      throw CollectiveError("rank 0 runs what this rank has not submitted");
    }
    switch (plan.kind) {
      case Kind::kAllreduce:
        run_allreduces(*set, entries, operations);
        break;
      case Kind::kAllgather:
        run_allgather(*set, entries[0], first);
        break;
      case Kind::kBroadcast:
        run_broadcast(*set, entries[0], first);
        break;
      case Kind::kAlltoall:
        run_alltoall(*set, entries[0], first);
        break;
      case Kind::kReducescatter:
        run_reducescatter(*set, entries[0], first);
        break;
      case Kind::kBarrier:
        if (set->one_machine) {
          if (set->ranks.size() > 1) plane_->barrier(set->party, next_number());
        } else {
          set->contexts->barrier("global", options_.collective_timeout);
        }
        if (first != nullptr && first->removes_ >= 0) drop_set(first->removes_);
        break;
      case Kind::kJoin: {
        // Ranks have submitted different numbers of them by now; all begin anew, as the coordinator does.
        const std::lock_guard<std::mutex> lock(mutex_);
        unnamed_.clear();
        if (first != nullptr) first->last_joined_ = static_cast<int>(entries[0].sizes.at(0));
        break;
      }
    }
  } catch (...) {
    // They are failed with all others; but their memory is in use no more only after this.
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& operation : operations) {
      if (operation) inflight_.emplace(operation->key_, std::move(operation));
    }
    throw;
  }
  const auto end = Clock::now();
  const std::vector<Span> spans = std::exchange(spans_, {});
  // Before anybody knows that they are done: who then stops the timeline is to find them in it.
  if (timeline_.on()) {
    for (const auto& operation : operations) {
      if (operation) trace(*operation, plan, answered_, {activity(plan), begin, end}, spans);
    }
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& operation : operations) {
      if (operation) operation->state_ = Operation::State::kDone;
    }
    ++finished_;
  }
  changed_.notify_all();
}

void Engine::trace(const Operation& operation, const Plan& plan, Clock::time_point answered, const Span& whole,
                   const std::vector<Span>& parts) {
  const std::string name = row(plan, operation.key_);
  timeline_.span(name, "NEGOTIATE_" + whole.what, operation.submitted_, answered);
  timeline_.span(name, "QUEUE", answered, whole.begin);
  timeline_.span(name, whole.what, whole.begin, whole.end);
  for (const Span& part : parts) timeline_.span(name, part.what, part.begin, part.end);
}

char* Engine::pack_buffer(size_t bytes) {
  if (plane_) {
    if (pack_bytes_ < bytes) {
      if (pack_ != nullptr) segment_->release(pack_);
      pack_bytes_ = 0;
      pack_ = static_cast<char*>(segment_->allocate(bytes));
      if (pack_ != nullptr) pack_bytes_ = bytes;
    }
    if (pack_ != nullptr) return pack_;
  }
  if (private_pack_.size() < bytes) private_pack_.resize(bytes);
  return private_pack_.data();
}

void Engine::run_allreduces(const ProcessSet& set, const std::vector<Entry>& entries,
                            const std::vector<std::shared_ptr<Operation>>& operations) {
  const Plan& first = *entries[0].plan;
  std::vector<std::unique_ptr<char[]>> zeros;
  std::vector<Piece> pieces;
  for (size_t i = 0; i < entries.size(); ++i) {
    const Plan& plan = *entries[i].plan;
    for (size_t tensor = 0; tensor < plan.tensors.size(); ++tensor) {
      Piece piece{nullptr, nullptr, plan.elements(tensor), static_cast<DType>(plan.tensors[tensor].type)};
      if (operations[i]) {
        piece.in = operations[i]->memory_[tensor].input;
        piece.out = operations[i]->memory_[tensor].output;
      } else {
        zeros.push_back(uninitialized(plan.bytes(tensor)));
        std::memset(zeros.back().get(), 0, plan.bytes(tensor));
        piece.in = piece.out = zeros.back().get();
      }
      if (piece.count != 0) pieces.push_back(piece);
    }
  }
  if (first.reduction == Reduction::kAdasum) {
    for (const Piece& piece : pieces) reduce_adasum(set, piece, first.prescale, first.postscale);
    return;
  }
  const auto bytes_of = [](const Piece& piece) { return piece.count * element_size(piece.type); };
  size_t next = 0;
  std::vector<Piece> batch;
  const auto flush = [&] {
    if (batch.empty()) return;
    if (batch.size() == 1) {
      allreduce(set, batch[0], first.reduction, first.prescale, first.postscale);
      batch.clear();
      return;
    }
    size_t count = 0, bytes = 0;
    for (const Piece& piece : batch) {
      count += piece.count;
      bytes += bytes_of(piece);
    }
    char* const packed = pack_buffer(bytes);
    timed("MEMCPY_IN_FUSION_BUFFER", [&] {
      size_t at = 0;
      for (const Piece& piece : batch) {
        std::memcpy(packed + at, piece.in, bytes_of(piece));
        at += bytes_of(piece);
      }
    });
    allreduce(set, {packed, packed, count, batch[0].type}, first.reduction, first.prescale, first.postscale);
    timed("MEMCPY_OUT_FUSION_BUFFER", [&] {
      size_t at = 0;
      for (const Piece& piece : batch) {
        std::memcpy(piece.out, packed + at, bytes_of(piece));
        at += bytes_of(piece);
      }
    });
    batch.clear();
  };
  // In the order of the entries, which is the same on all ranks; a batch has one type.
  std::stable_sort(pieces.begin(), pieces.end(), [&](const Piece& a, const Piece& b) {
    const bool big_a = bytes_of(a) >= kPackedTensorBytes, big_b = bytes_of(b) >= kPackedTensorBytes;
    return big_a != big_b ? big_b : a.type < b.type;
  });
  size_t batched = 0;
  for (; next < pieces.size() && bytes_of(pieces[next]) < kPackedTensorBytes; ++next) {
    const Piece& piece = pieces[next];
    if (!batch.empty() && (batch[0].type != piece.type || batched + bytes_of(piece) > kPackBytes)) flush();
    if (batch.empty()) batched = 0;
    batch.push_back(piece);
    batched += bytes_of(piece);
  }
  flush();
  for (; next < pieces.size(); ++next) allreduce(set, pieces[next], first.reduction, first.prescale, first.postscale);
}

void Engine::allreduce(const ProcessSet& set, const Piece& piece, Reduction reduction, double prescale,
                       double postscale) {
  const void* in = piece.in;
  const size_t bytes = piece.count * element_size(piece.type);
  if (prescale != 1) {
    same_memory_or_copied(in, piece.out, bytes);
    scale(piece.out, piece.count, piece.type, prescale);
    in = piece.out;
  }
  const ReduceOp op = kernel_op(reduction);
  const int members = static_cast<int>(set.ranks.size());
  const auto conclude = [&](void* data, size_t count) {
    if (op == ReduceOp::kAverage) divide(data, count, piece.type, members);
    if (postscale != 1) scale(data, count, piece.type, postscale);
  };
  // An average is a sum until it is concluded, once.
  const ReduceOp each = op == ReduceOp::kAverage ? ReduceOp::kSum : op;
  if (set.one_machine) {
    if (members == 1) {
      same_memory_or_copied(in, piece.out, bytes);
      conclude(piece.out, piece.count);
    } else {
      timed(kShared, [&] {
        plane_->allreduce(set.party, next_number(), in, piece.out, piece.count, piece.type, each, conclude);
      });
    }
      return;
  }
  const auto across = [&](void* data, size_t count) {
    if (count != 0) {
      timed(kNetworkAllreduce, [&] {
        set.contexts->allreduce("lane", data, count, piece.type, each, options_.collective_timeout);
      });
    }
    conclude(data, count);
  };
  if (set.party.size() == 1) {
    same_memory_or_copied(in, piece.out, bytes);
    across(piece.out, piece.count);
  } else {
    timed(kShared, [&] {
      plane_->allreduce(set.party, next_number(), in, piece.out, piece.count, piece.type, each, across, set.lanes);
    });
  }
}

void Engine::allgather_bytes(const ProcessSet& set, const void* in, void* out, const std::vector<size_t>& sizes) {
  if (!set.one_machine) {
    timed(kNetworkAllgather, [&] { set.contexts->allgather("global", in, out, sizes, options_.collective_timeout); });
  } else if (set.ranks.size() == 1) {
    same_memory_or_copied(in, out, sizes[0]);
  } else {
    timed(kShared, [&] { plane_->allgather(set.party, next_number(), in, out, sizes); });
  }
}

void Engine::reduce_adasum(const ProcessSet& set, const Piece& piece, double prescale, double postscale) {
  const size_t bytes = piece.count * element_size(piece.type);
  same_memory_or_copied(piece.in, piece.out, bytes);
  if (prescale != 1) scale(piece.out, piece.count, piece.type, prescale);
  const auto all = uninitialized(bytes * set.ranks.size());
  const auto mine = uninitialized(bytes);
  std::memcpy(mine.get(), piece.out, bytes);
  allgather_bytes(set, mine.get(), all.get(), std::vector<size_t>(set.ranks.size(), bytes));
  std::vector<void*> arrays;
  for (size_t i = 0; i < set.ranks.size(); ++i) arrays.push_back(all.get() + i * bytes);
  adasum(arrays, piece.count, piece.type);
  std::memcpy(piece.out, all.get(), bytes);
  if (postscale != 1) scale(piece.out, piece.count, piece.type, postscale);
}

void Engine::run_allgather(const ProcessSet& set, const Entry& entry, Operation* operation) {
  const Plan& plan = *entry.plan;
  const size_t tensors = plan.tensors.size();
  for (size_t tensor = 0; tensor < tensors; ++tensor) {
    const size_t row = plan.bytes(tensor);
    std::vector<size_t> sizes;
    int64_t rows = 0;
    for (size_t member = 0; member < set.ranks.size(); ++member) {
      const int64_t count = entry.sizes.at(member * tensors + tensor);
      rows += count;
      sizes.push_back(static_cast<size_t>(count) * row);
    }
    Operation::Output output;
    output.bytes = std::accumulate(sizes.begin(), sizes.end(), size_t{0});
    output.memory = uninitialized(output.bytes);
    output.rows = rows;
    if (output.bytes != 0) {
      allgather_bytes(set, operation->memory_[tensor].input, output.memory.get(), sizes);
    }
    operation->outputs_.push_back(std::move(output));
  }
}

void Engine::run_broadcast(const ProcessSet& set, const Entry& entry, Operation* operation) {
  const Plan& plan = *entry.plan;
  const auto place = std::find(set.ranks.begin(), set.ranks.end(), plan.root) - set.ranks.begin();
  for (size_t tensor = 0; tensor < plan.tensors.size(); ++tensor) {
    const size_t bytes = plan.bytes(tensor);
    if (bytes == 0) continue;
    const Memory& memory = operation->memory_[tensor];
    if (!set.one_machine) {
      if (rank_ == plan.root) same_memory_or_copied(memory.input, memory.output, bytes);
      set.contexts->broadcast("global", memory.output, bytes, static_cast<int>(place), options_.collective_timeout);
    } else if (set.ranks.size() == 1) {
      same_memory_or_copied(memory.input, memory.output, bytes);
    } else {
      plane_->broadcast(set.party, next_number(), memory.input, memory.output, bytes, static_cast<int>(place));
    }
    }
}

void Engine::run_alltoall(const ProcessSet& set, const Entry& entry, Operation* operation) {
  const Plan& plan = *entry.plan;
  const size_t members = set.ranks.size(), tensors = plan.tensors.size(), me = static_cast<size_t>(set.place);
  for (size_t tensor = 0; tensor < tensors; ++tensor) {
    const size_t row = plan.bytes(tensor);
    std::vector<std::vector<size_t>> sizes(members, std::vector<size_t>(members));
    Operation::Output output;
    for (size_t from = 0; from < members; ++from) {
      for (size_t to = 0; to < members; ++to) {
        const int64_t rows = entry.sizes.at((from * tensors + tensor) * members + to);
        sizes[from][to] = static_cast<size_t>(rows) * row;
        if (to == me) {
          output.rows += rows;
          output.received.push_back(rows);
        }
      }
    }
    output.bytes = static_cast<size_t>(output.rows) * row;
    output.memory = uninitialized(output.bytes);
    const void* const in = operation->memory_[tensor].input;
    if (!set.one_machine) {
      std::vector<size_t> received;
      for (size_t from = 0; from < members; ++from) received.push_back(sizes[from][me]);
      set.contexts->alltoall("global", in, sizes[me], output.memory.get(), received, options_.collective_timeout);
    } else if (members == 1) {
      same_memory_or_copied(in, output.memory.get(), output.bytes);
    } else {
      plane_->alltoall(set.party, next_number(), in, output.memory.get(), sizes);
    }
      operation->outputs_.push_back(std::move(output));
  }
}

void Engine::run_reducescatter(const ProcessSet& set, const Entry& entry, Operation* operation) {
  const Plan& plan = *entry.plan;
  const size_t members = set.ranks.size(), me = static_cast<size_t>(set.place);
  for (size_t tensor = 0; tensor < plan.tensors.size(); ++tensor) {
    const auto type = static_cast<DType>(plan.tensors[tensor].type);
    const auto rows = static_cast<size_t>(plan.tensors[tensor].shape.at(0));
    const size_t count = plan.elements(tensor), row = rows == 0 ? 0 : count / rows;
    const size_t width = element_size(type);
    const std::vector<size_t> parts = even_rows(rows, members);
    std::vector<size_t> counts;
    for (const size_t part : parts) counts.push_back(part * row);
    Operation::Output output;
    output.rows = static_cast<int64_t>(parts[me]);
    output.bytes = counts[me] * width;
    output.memory = uninitialized(output.bytes);
    const ReduceOp op = kernel_op(plan.reduction);
    const ReduceOp each = op == ReduceOp::kAverage ? ReduceOp::kSum : op;
    const auto conclude = [&](void* data, size_t elements) {
      if (op == ReduceOp::kAverage) divide(data, elements, type, static_cast<int>(members));
      if (plan.postscale != 1) scale(data, elements, type, plan.postscale);
    };
    if (count != 0) {
      const void* in = operation->memory_[tensor].input;
      std::unique_ptr<char[]> own;
      if (plan.prescale != 1 || !set.one_machine) {
        own = uninitialized(count * width);
        std::memcpy(own.get(), in, count * width);
        if (plan.prescale != 1) scale(own.get(), count, type, plan.prescale);
        in = own.get();
      }
      if (!set.one_machine) {
        const size_t first = std::accumulate(counts.begin(), counts.begin() + static_cast<long>(me), size_t{0});
        allreduce(set, {own.get(), own.get(), count, type}, plan.reduction, 1, plan.postscale);
        std::memcpy(output.memory.get(), own.get() + first * width, output.bytes);
      } else if (members == 1) {
        std::memcpy(output.memory.get(), in, output.bytes);
        conclude(output.memory.get(), counts[0]);
      } else {
        plane_->reducescatter(set.party, next_number(), in, output.memory.get(), counts, type, each, conclude);
      }
        }
    operation->outputs_.push_back(std::move(output));
  }
}

}  // namespace elastic
