#include "engine/timeline.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>
#include <utility>

#include "engine/notices.h"

namespace elastic {
namespace {

// An operation is in the file 0.1 s after its end.
constexpr std::chrono::milliseconds kWriteMs{50};
// The limit of memory: if a disk hangs, events are dropped.
constexpr size_t kMostPending = size_t{16} << 20;
// The end of the file, which the next events overwrite.
constexpr const char* kTail = "\n]\n";

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", static_cast<unsigned>(c));
      out += escaped;
    } else {
      out += c;
    }
  }
  return out + '"';
}

}  // namespace

Timeline::~Timeline() { stop(); }

void Timeline::start(const std::string& path, int rank, bool mark_cycles) {
  stop();
  const std::lock_guard<std::mutex> controlling(control_);
  file_ = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file_ < 0) throw std::system_error(errno, std::generic_category(), path);
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const std::string epoch_us = std::to_string(std::chrono::duration_cast<std::chrono::microseconds>(now).count());
  const std::string number = std::to_string(rank);
  end_ = 0;
  if (!put("[\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":" + number + ",\"args\":{\"name\":\"rank " + number +
           "\",\"start_time_since_epoch_in_micros\":" + epoch_us + "}}")) {
    const int error = errno;
    close(std::exchange(file_, -1));
    throw std::system_error(error, std::generic_category(), path);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    rank_ = rank;
    zero_ = Clock::now();
    rows_.clear();
    pending_.clear();
    stopping_ = false;
  }
  owner_ = getpid();
  writer_ = std::thread([this] { serve(); });
  mark_cycles_ = mark_cycles;
  on_ = true;
}

void Timeline::stop() {
  if (owner_ != 0 && getpid() != owner_) {
    // In a forked child there is no writer, its mutex may be locked for ever, and the file is the parent's.
    on_ = false;
    if (writer_.joinable()) writer_.detach();
    return;
  }
  const std::lock_guard<std::mutex> controlling(control_);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    on_ = false;
    stopping_ = true;
  }
  stopping_changed_->notify_all();
  if (writer_.joinable()) writer_.join();
  if (file_ >= 0) close(std::exchange(file_, -1));
}

void Timeline::span(const std::string& operation, const std::string& what, Clock::time_point begin,
                    Clock::time_point end) {
  if (!on_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto [row, added] = rows_.try_emplace(operation, static_cast<int>(rows_.size()) + 1);
  const std::string place = ",\"pid\":" + std::to_string(rank_) + ",\"tid\":" + std::to_string(row->second);
  if (added) {
    append("{\"name\":\"thread_name\",\"ph\":\"M\"" + place + ",\"args\":{\"name\":" + quoted(operation) + "}}");
  }
  char times[96];
  std::snprintf(times, sizeof(times), ",\"ts\":%.1f,\"dur\":%.1f}", since_start_us(begin),
                std::chrono::duration<double, std::micro>(end - begin).count());
  append("{\"name\":" + quoted(what) + ",\"ph\":\"X\"" + place + times);
}

void Timeline::cycle() {
  if (!on_ || !mark_cycles_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  char time[64];
  std::snprintf(time, sizeof(time), ",\"ts\":%.1f,\"s\":\"g\"}", since_start_us(Clock::now()));
  append("{\"name\":\"CYCLE_START\",\"ph\":\"i\",\"pid\":" + std::to_string(rank_) + ",\"tid\":0" + time);
}

double Timeline::since_start_us(Clock::time_point when) const {
  return when < zero_ ? 0 : std::chrono::duration<double, std::micro>(when - zero_).count();
}

// Called with the mutex.
void Timeline::append(const std::string& event) {
  if (!on_ || pending_.size() > kMostPending) return;
  pending_ += ",\n";
  pending_ += event;
}

void Timeline::serve() {
  pthread_setname_np(pthread_self(), "elastic-trace");
  bool last = false;
  while (!last) {
    std::string events;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      last = stopping_changed_->wait_for(lock, kWriteMs, [this] { return stopping_; });
      events.swap(pending_);
    }
    if (events.empty() || put(events)) continue;
    Notices notices;  // must not block: stop() waits for this thread
    notices.add(std::string("elastic_driver: cannot continue the timeline: ") + std::strerror(errno));
    on_ = false;
    notices.flush();
    return;
  }
}

// Writes events after the last one, and then the file's end. Returns false, with errno, on failure.
bool Timeline::put(const std::string& events) {
  const std::string text = events + kTail;
  for (size_t done = 0; done < text.size();) {
    const ssize_t written = pwrite(file_, text.data() + done, text.size() - done, end_ + static_cast<off_t>(done));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    done += static_cast<size_t>(written);
  }
  end_ += static_cast<off_t>(events.size());
  return true;
}

}  // namespace elastic
