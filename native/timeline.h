// A trace of what a rank's operations did when, for chrome://tracing and Perfetto.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <string>
#include <unordered_map>

namespace elastic {

class Timeline {
 public:
  using Clock = std::chrono::steady_clock;

  ~Timeline();

  // Throws std::system_error when the file cannot be written. Ends a trace under way.
  void start(const std::string& path, int rank);
  // The file is complete then.
  void stop();
  bool on() const { return on_; }
  // A stretch of time of one operation. Does nothing when off.
  void span(const std::string& operation, const char* what, Clock::time_point begin, Clock::time_point end);

 private:
  void write(const std::string& event);

  std::mutex mutex_;
  std::atomic<bool> on_{false};
  std::FILE* file_ = nullptr;
  int rank_ = 0;
  bool first_ = true;
  Clock::time_point zero_;
  std::unordered_map<std::string, int> lanes_;  // a row of the trace for each operation
};

}  // namespace elastic
