// What this process says of itself on a page of memory that its agent reads: that it lives, and how its training goes.
//
// The page is a file in memory of the agent's, which ELASTIC_DRIVER_VITALS names. A thread of our own beats on it,
// which needs no interpreter's lock; the engine counts on it. Without a page everything here does nothing.
//
// Owns the page and that thread. Knows nothing of operations: who has something to tell of them is a Source. A forked
// child has neither page nor thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace elastic::vitals {

// Known to elastic_driver/launch/agent/vitals_page.py, too: a change of what follows needs another version.
constexpr uint64_t kMagic = 0x534c415449564c45;  // "ELVITALS" in memory
constexpr uint32_t kVersion = 2;
constexpr size_t kPageBytes = 8192;
constexpr int kMostKinds = 8;
constexpr int kStepsKept = 32;

struct Traffic {
  std::atomic<uint64_t> operations, payload_bytes;
};

// Times are of CLOCK_MONOTONIC, in nanoseconds; 0 for never. Little-endian, as all machines are that this runs on.
struct Page {
  uint64_t magic;  // as the agent has written it
  uint32_t version, bytes;
  std::atomic<uint64_t> pid;
  std::atomic<uint64_t> pulse;
  std::atomic<uint64_t> round;
  std::atomic<int64_t> rank;
  std::atomic<uint64_t> steps;
  std::atomic<uint64_t> submitted, finished;
  std::atomic<uint64_t> waits_since, waited;
  std::atomic<uint64_t> commits, committed_at;
  std::atomic<uint64_t> dumps;  // the number of the signal at which stacks are written behind the page; 0: none
  uint64_t spare[2];
  Traffic traffic[kMostKinds];
  // Odd while the text is being written.
  std::atomic<uint64_t> sequence, text_bytes;
  // Odd while a step is being written. The last steps' own times, without what was waited, in microseconds: that of
  // step N, counted from 1, is number (N - 1) % kStepsKept. 0 for one in which a round began.
  std::atomic<uint64_t> stepping;
  uint64_t more;
  std::atomic<uint32_t> own_us[kStepsKept];
  char text[kPageBytes - 416];
};
static_assert(sizeof(Page) == kPageBytes && offsetof(Page, traffic) == 128 && offsetof(Page, own_us) == 288 &&
              offsetof(Page, text) == 416);

// Makes the file the page of this process, and begins to beat. Returns whether it has it: not one that is no page, or
// that another living process has.
bool open(const std::string& path);
// Ends the thread; nothing is written any more.
void close();

void enter_round(uint64_t round, int64_t rank);
void step();
void commit(uint64_t commits);
void dumps_at(int signal);

void submitted();
// An operation of this kind is over; `well`: with a result.
void finished(int kind, size_t payload_bytes, bool well);

struct State;

// While one of these lives, this process waits for other ranks.
class Waits {
 public:
  Waits();
  ~Waits();
  Waits(const Waits&) = delete;
  Waits& operator=(const Waits&) = delete;

 private:
  State* const state_;
  Page* const page_;
};

// Gives the page's text, as long as it lives: lines of "SINCE\tRANKS\tNAME\n". Called by the thread at each beat, which
// it must not hold up; nothing where it does not know at the moment.
class Source {
 public:
  explicit Source(std::function<std::optional<std::string>()> text);
  // Blocks while the text is being made.
  ~Source();
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

 private:
  State* const state_;
  std::function<std::optional<std::string>()> text_;
};

}  // namespace elastic::vitals
