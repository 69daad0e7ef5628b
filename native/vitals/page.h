// Vitals: a page of memory on which this process reports its liveness and training progress, and which its agent reads.
//
// The page is a file in the agent's memory, named by ELASTIC_DRIVER_VITALS. A thread of this module, which does not
// need the GIL, writes a pulse to it; the engine writes its counters. Without a page, all functions here do nothing.
//
// Owns the page and that thread. Knows nothing of operations: a Source provides the text about them. A forked child has
// neither a page nor the thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace elastic::vitals {

// elastic_driver/launch/agent/vitals_page.py has the same layout: a change below requires a new version.
constexpr uint64_t kMagic = 0x534c415449564c45;  // "ELVITALS" in memory
constexpr uint32_t kVersion = 2;
constexpr size_t kPageBytes = 8192;
constexpr int kMostKinds = 8;
constexpr int kStepsKept = 32;

struct Traffic {
  std::atomic<uint64_t> operations, payload_bytes;
};

// Times are of CLOCK_MONOTONIC, in nanoseconds; 0 for never. Little-endian, as all supported machines are.
struct Page {
  uint64_t magic;  // written by the agent
  uint32_t version, bytes;
  std::atomic<uint64_t> pid;
  std::atomic<uint64_t> pulse;
  std::atomic<uint64_t> round;
  std::atomic<int64_t> rank;
  std::atomic<uint64_t> steps;
  std::atomic<uint64_t> submitted, finished;
  std::atomic<uint64_t> waits_since, waited;
  std::atomic<uint64_t> commits, committed_at;
  std::atomic<uint64_t> dumps;  // the signal at which stacks are written to the file after the page; 0: none
  uint64_t spare[2];
  Traffic traffic[kMostKinds];
  // Odd while the text is being written.
  std::atomic<uint64_t> sequence, text_bytes;
  // Odd while a step is being written. The last steps' own times, without waits, in microseconds: step N, counted from
  // 1, is at index (N - 1) % kStepsKept. 0 for a step in which a round began.
  std::atomic<uint64_t> stepping;
  uint64_t more;
  std::atomic<uint32_t> own_us[kStepsKept];
  char text[kPageBytes - 416];
};
static_assert(sizeof(Page) == kPageBytes && offsetof(Page, traffic) == 128 && offsetof(Page, own_us) == 288 &&
              offsetof(Page, text) == 416);

// Opens the file as the page of this process, and starts the thread. Returns false if the file is not a page, or
// belongs to another living process.
bool open(const std::string& path);
// Ends the thread. Nothing is written afterwards.
void close();

void enter_round(uint64_t round, int64_t rank);
void step();
void commit(uint64_t commits);
void dumps_at(int signal);

void submitted();
// Reports the end of an operation of this kind; `well`: whether it has succeeded.
void finished(int kind, size_t payload_bytes, bool well);

struct State;

// Reports that this process waits for other ranks, for the object's lifetime.
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

// Provides the page's text, for the object's lifetime: lines of "SINCE\tRANKS\tNAME\n". The thread calls the function
// at each pulse. It must not block, and returns nothing if the text is not available at the moment.
class Source {
 public:
  explicit Source(std::function<std::optional<std::string>()> text);
  // Blocks while the function is running.
  ~Source();
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

 private:
  State* const state_;
  std::function<std::optional<std::string>()> text_;
};

}  // namespace elastic::vitals
