#include "timeline.h"

#include <cerrno>
#include <cstring>
#include <system_error>

namespace elastic {
namespace {

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

void Timeline::start(const std::string& path, int rank) {
  stop();
  const std::lock_guard<std::mutex> lock(mutex_);
  file_ = std::fopen(path.c_str(), "we");
  if (file_ == nullptr) throw std::system_error(errno, std::generic_category(), path);
  rank_ = rank;
  first_ = true;
  zero_ = Clock::now();
  lanes_.clear();
  std::fputs("[\n", file_);
  on_ = true;
}

void Timeline::stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  on_ = false;
  if (file_ == nullptr) return;
  std::fputs("\n]\n", file_);
  std::fclose(file_);
  file_ = nullptr;
}

void Timeline::span(const std::string& operation, const char* what, Clock::time_point begin, Clock::time_point end) {
  if (!on_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (file_ == nullptr) return;
  const auto [lane, added] = lanes_.try_emplace(operation, static_cast<int>(lanes_.size()) + 1);
  const std::string place = ",\"pid\":" + std::to_string(rank_) + ",\"tid\":" + std::to_string(lane->second);
  if (added) {
    write("{\"name\":\"thread_name\",\"ph\":\"M\"" + place + ",\"args\":{\"name\":" + quoted(operation) + "}}");
  }
  const auto us = [](Clock::duration time) { return std::chrono::duration<double, std::micro>(time).count(); };
  char times[96];
  std::snprintf(times, sizeof(times), ",\"ts\":%.1f,\"dur\":%.1f}", us(begin < zero_ ? Clock::duration(0) : begin - zero_),
                us(end - begin));
  write("{\"name\":\"" + std::string(what) + "\",\"ph\":\"X\"" + place + times);
}

void Timeline::write(const std::string& event) {
  if (!first_) std::fputs(",\n", file_);
  first_ = false;
  std::fputs(event.c_str(), file_);
}

}  // namespace elastic
