#include "vitals/page.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace elastic::vitals {

struct State {
  std::atomic<Page*> page{nullptr};
  std::mutex opening;  // held by open() and close()
  std::thread thread;
  std::mutex ending;  // guards the following
  std::condition_variable ended;
  bool ends = false;
  std::mutex waiting;  // guards the following, the page's waits_since, and its steps
  int waiters = 0;
  uint64_t stepped_at = 0, waited_then = 0;  // the end of the last step; 0 if a round has begun since
  std::mutex telling;                        // guards the following
  std::function<std::optional<std::string>()>* source = nullptr;
};

namespace {

constexpr std::chrono::milliseconds kBeat{250};

// Never freed: threads use it until the process ends. A forked child has another one, since no thread there unlocks the
// mutexes that were locked.
std::atomic<State*> current{nullptr};

void make_in_child() { current.store(new State); }

State& state() {
  static const bool made = [] {
    current.store(new State);
    return pthread_atfork(nullptr, nullptr, make_in_child) == 0;
  }();
  static_cast<void>(made);
  return *current.load(std::memory_order_acquire);
}

Page* page() { return state().page.load(std::memory_order_acquire); }

uint64_t now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(time.tv_nsec);
}

// The pid of this process in the namespace of /proc, through which the page's file is opened; 0 if it has none there.
uint64_t own_number() {
  char link[32] = {};
  if (readlink("/proc/self", link, sizeof(link) - 1) <= 0) return 0;
  return std::strtoull(link, nullptr, 10);
}

bool is_alive(uint64_t pid) { return kill(static_cast<pid_t>(pid), 0) == 0 || errno == EPERM; }

void write_text(Page& page, const std::string& text) {
  const size_t bytes = std::min(text.size(), sizeof(page.text));
  const uint64_t sequence = page.sequence.load(std::memory_order_relaxed) | 1;
  // An exchange, not a store: the following writes must not be reordered before it.
  page.sequence.exchange(sequence, std::memory_order_acq_rel);
  std::memcpy(page.text, text.data(), bytes);
  page.text_bytes.store(bytes, std::memory_order_relaxed);
  page.sequence.store(sequence + 1, std::memory_order_release);
}

void beat(State& own, Page& page, uint64_t pid) {
  std::string last;
  std::unique_lock<std::mutex> lock(own.ending);
  while (!own.ends && page.pid.load() == pid) {
    lock.unlock();
    page.pulse.store(now(), std::memory_order_relaxed);
    std::optional<std::string> text;
    {
      const std::lock_guard<std::mutex> telling(own.telling);
      text = own.source == nullptr ? std::optional<std::string>("") : (*own.source)();
    }
    if (text && *text != last) {
      write_text(page, *text);
      last = std::move(*text);
    }
    lock.lock();
    own.ended.wait_for(lock, kBeat, [&] { return own.ends; });
  }
}

Page* map(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (descriptor < 0) return nullptr;
  struct stat facts{};
  void* memory = MAP_FAILED;
  if (fstat(descriptor, &facts) == 0 && S_ISREG(facts.st_mode) && facts.st_size >= static_cast<off_t>(kPageBytes)) {
    memory = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  }
  ::close(descriptor);
  if (memory == MAP_FAILED) return nullptr;
  auto* const found = static_cast<Page*>(memory);
  // In another pid namespace, this path may name any other file, which is left unchanged.
  if (found->magic == kMagic && found->version == kVersion && found->bytes == kPageBytes) return found;
  munmap(memory, kPageBytes);
  return nullptr;
}

void stop(State& own) {
  if (!own.thread.joinable()) return;
  own.page.store(nullptr);  // stays mapped: other threads may be writing
  {
    const std::lock_guard<std::mutex> lock(own.ending);
    own.ends = true;
  }
  own.ended.notify_all();
  own.thread.join();
  own.ends = false;
}

}  // namespace

bool open(const std::string& path) {
  State& own = state();
  const std::lock_guard<std::mutex> opening(own.opening);
  const uint64_t pid = own_number();
  Page* const former = own.page.load();
  if (former != nullptr && former->pid.load() == pid) return true;
  Page* const found = map(path);
  if (found == nullptr || pid == 0) return false;
  uint64_t other = found->pid.load();
  if ((other != 0 && other != pid && is_alive(other)) || !found->pid.compare_exchange_strong(other, pid)) {
    munmap(found, kPageBytes);
    return false;
  }
  stop(own);
  // The old contents are a dead process's, or this one's from before its exec.
  for (auto* field : {&found->round, &found->steps, &found->submitted, &found->finished, &found->waits_since,
                      &found->waited, &found->commits, &found->committed_at, &found->dumps, &found->stepping}) {
    field->store(0);
  }
  found->rank.store(-1);
  for (auto& each : found->own_us) each.store(0);
  for (Traffic& traffic : found->traffic) {
    traffic.operations.store(0);
    traffic.payload_bytes.store(0);
  }
  {
    const std::lock_guard<std::mutex> lock(own.waiting);
    own.stepped_at = own.waited_then = 0;
  }
  write_text(*found, "");
  found->pulse.store(now());
  // The thread must not handle signals: those are for threads that run Python.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    own.thread = std::thread([&own, found, pid] {
      pthread_setname_np(pthread_self(), "elastic-pulse");
      beat(own, *found, pid);
    });
  } catch (const std::system_error&) {  // no thread can be started
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    found->pid.store(0);
    munmap(found, kPageBytes);
    return false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  own.page.store(found, std::memory_order_release);
  return true;
}

void close() {
  State& own = state();
  const std::lock_guard<std::mutex> opening(own.opening);
  stop(own);
}

void enter_round(uint64_t round, int64_t rank) {
  State& own = state();
  Page* const to = own.page.load(std::memory_order_acquire);
  if (to == nullptr) return;
  const std::lock_guard<std::mutex> lock(own.waiting);
  own.stepped_at = 0;  // the current step has no time in this round
  to->rank.store(rank, std::memory_order_relaxed);
  to->round.store(round, std::memory_order_relaxed);
}

void step() {
  State& own = state();
  Page* const to = own.page.load(std::memory_order_acquire);
  if (to == nullptr) return;
  const std::lock_guard<std::mutex> lock(own.waiting);
  const uint64_t at = now(), since = to->waits_since.load(std::memory_order_relaxed);
  const uint64_t sequence = to->stepping.load(std::memory_order_relaxed) | 1;
  // An exchange, not a store: the following writes must not be reordered before it.
  to->stepping.exchange(sequence, std::memory_order_acq_rel);
  const uint64_t number = to->steps.fetch_add(1, std::memory_order_relaxed);
  const uint64_t before = std::exchange(own.stepped_at, at);
  // If another thread is waiting during the step, its wait so far counts.
  const uint64_t waited = to->waited.load(std::memory_order_relaxed) + (since == 0 ? 0 : at - since);
  const uint64_t waited_in = waited - std::exchange(own.waited_then, waited);
  uint64_t took = 0;
  if (before != 0) took = std::max<uint64_t>(1, (at - before - std::min(at - before, waited_in)) / 1000);
  to->own_us[number % kStepsKept].store(static_cast<uint32_t>(std::min<uint64_t>(took, UINT32_MAX)),
                                        std::memory_order_relaxed);
  to->stepping.store(sequence + 1, std::memory_order_release);
}

void commit(uint64_t commits) {
  if (Page* const to = page()) {
    to->commits.store(commits, std::memory_order_relaxed);
    to->committed_at.store(now(), std::memory_order_relaxed);
  }
}

void dumps_at(int signal) {
  if (Page* const to = page()) to->dumps.store(static_cast<uint64_t>(signal), std::memory_order_relaxed);
}

void submitted() {
  if (Page* const to = page()) to->submitted.fetch_add(1, std::memory_order_relaxed);
}

void finished(int kind, size_t payload_bytes, bool well) {
  Page* const to = page();
  if (to == nullptr) return;
  to->finished.fetch_add(1, std::memory_order_relaxed);
  if (well && kind >= 0 && kind < kMostKinds) {
    to->traffic[kind].operations.fetch_add(1, std::memory_order_relaxed);
    to->traffic[kind].payload_bytes.fetch_add(payload_bytes, std::memory_order_relaxed);
  }
}

Waits::Waits() : state_(&state()), page_(page()) {
  if (page_ == nullptr) return;
  const std::lock_guard<std::mutex> lock(state_->waiting);
  if (state_->waiters++ == 0) page_->waits_since.store(now(), std::memory_order_relaxed);
}

Waits::~Waits() {
  // With another state, this is the child of a fork in a signal handler.
  if (page_ == nullptr || state_ != current.load()) return;
  const std::lock_guard<std::mutex> lock(state_->waiting);
  if (--state_->waiters > 0) return;
  const uint64_t since = page_->waits_since.exchange(0, std::memory_order_relaxed);
  // Without a start, the page was opened again meanwhile.
  if (since != 0) page_->waited.fetch_add(now() - since, std::memory_order_relaxed);
}

Source::Source(std::function<std::optional<std::string>()> text) : state_(&state()), text_(std::move(text)) {
  const std::lock_guard<std::mutex> lock(state_->telling);
  state_->source = &text_;
}

Source::~Source() {
  if (state_ != current.load()) return;
  const std::lock_guard<std::mutex> lock(state_->telling);
  if (state_->source == &text_) state_->source = nullptr;
}

}  // namespace elastic::vitals
