// A trace of a rank's operations over time, for chrome://tracing and Perfetto.
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

// A thread of its own writes the events, every kWriteMs, so that a slow disk does not slow down operations. The file is
// complete JSON after each write, however the process ends.
class Timeline {
 public:
  using Clock = std::chrono::steady_clock;

  ~Timeline();

  // Throws std::system_error if the file cannot be written. Ends a running trace. `mark_cycles`: whether cycle() adds
  // marks.
  void start(const std::string& path, int rank, bool mark_cycles);
  // Ends the trace. When this returns, the file has all events so far.
  void stop();
  bool on() const { return on_; }
  // Adds a time span of an operation. Does nothing without a trace, like cycle().
  void span(const std::string& operation, const std::string& what, Clock::time_point begin, Clock::time_point end);
  // Marks the beginning of a cycle of the engine's thread.
  void cycle();

 private:
  void serve();
  bool put(const std::string& events);
  void append(const std::string& event);
  double since_start_us(Clock::time_point when) const;

  std::mutex control_;  // one start() or stop() at a time
  std::thread writer_;
  std::atomic<pid_t> owner_{0};  // the process that has the thread
  // Used only by the writer, while it runs.
  int file_ = -1;
  off_t end_ = 0;  // of the last event

  std::mutex mutex_;  // guards the following, up to rows_
  Condition stopping_changed_;
  bool stopping_ = false;
  std::string pending_;  // events, each with a comma before it
  int rank_ = 0;
  Clock::time_point zero_;
  std::unordered_map<std::string, int> rows_;  // a row of the trace for each operation

  std::atomic<bool> on_{false}, mark_cycles_{false};
};

}  // namespace elastic
