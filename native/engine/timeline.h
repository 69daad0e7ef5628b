// A trace of what a rank's operations did when, for chrome://tracing and Perfetto.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#include "engine/condition.h"

namespace elastic {

// Events are written by a thread of its own, so that a slow disk does not slow the operations, every kWriteMs. The file
// is complete JSON after each write, whatever becomes of the process.
class Timeline {
 public:
  using Clock = std::chrono::steady_clock;

  ~Timeline();

  // Throws std::system_error when the file cannot be written. Ends a trace under way. `mark_cycles`: whether cycle()
  // leaves marks.
  void start(const std::string& path, int rank, bool mark_cycles);
  // All events until now are in the file then.
  void stop();
  bool on() const { return on_; }
  // A stretch of time of one operation. Does nothing when off, like cycle().
  void span(const std::string& operation, const std::string& what, Clock::time_point begin, Clock::time_point end);
  // The engine's thread begins a cycle.
  void cycle();

 private:
  void serve();
  bool put(const std::string& events);
  void append(const std::string& event);
  double since_start_us(Clock::time_point when) const;

  std::mutex control_;  // one start() or stop() at a time
  std::thread writer_;
  std::atomic<pid_t> owner_{0};  // the process that has the thread
  // The writer's, while it runs.
  int file_ = -1;
  off_t end_ = 0;  // of the last event

  std::mutex mutex_;  // guards what follows
  Condition stopping_changed_;
  bool stopping_ = false;
  std::string pending_;  // events, each with a comma before it
  int rank_ = 0;
  Clock::time_point zero_;
  std::unordered_map<std::string, int> rows_;  // a row of the trace for each operation

  std::atomic<bool> on_{false}, mark_cycles_{false};
};

}  // namespace elastic
