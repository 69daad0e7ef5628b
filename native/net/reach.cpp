#include "net/reach.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "errors.h"
#include "net/sockets.h"

namespace elastic {
namespace {

using Clock = Silence::Clock;

// The kernel's maximum. It would close the connection after so many unanswered keep-alives.
constexpr int kMostKeepAlives = 127;

// The offsets of fields in Linux's TCP_INFO: the system's headers may be older than its kernel.
constexpr size_t kInfoBytes = 232;
constexpr size_t kRetransmissionsAt = 2, kProbesAt = 3;  // one byte each; count unanswered packets
constexpr size_t kSegmentBytesAt = 16, kUnacknowledgedAt = 24, kLastDataAt = 52, kLastAcknowledgementAt = 56;
constexpr size_t kSegmentsInAt = 140, kUnsentAt = 144, kWindowAt = 228;

class Info {
 public:
  explicit Info(int socket) {
    socklen_t length = sizeof(bytes_);
    if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, bytes_, &length) == 0) length_ = length;
  }

  bool has(size_t at) const { return at + sizeof(uint32_t) <= length_; }
  uint32_t get(size_t at) const {
    uint32_t value;
    std::memcpy(&value, bytes_ + at, sizeof(value));
    return value;
  }
  unsigned byte(size_t at) const { return static_cast<unsigned char>(bytes_[at]); }
  // The time since the last packet other than a keep-alive.
  Clock::duration heard_ago() const {
    return std::chrono::milliseconds(std::min(get(kLastDataAt), get(kLastAcknowledgementAt)));
  }
  // Whether everything sent is acknowledged, and the peer's receive window has no room for the rest: its process does
  // not read, and may be stopped. The kernel probes the window at growing intervals, so some seconds without an answer
  // mean nothing. It sends no keep-alives meanwhile; the peer's own would be noticed.
  bool is_held_up() const {
    if (get(kUnacknowledgedAt) != 0 || get(kUnsentAt) == 0) return false;
    return !has(kWindowAt) || get(kWindowAt) < std::min(get(kUnsentAt), get(kSegmentBytesAt));
  }

 private:
  char bytes_[kInfoBytes] = {};
  size_t length_ = 0;
};

// The length of silence that is noted after another failure. The last packets that the two ends of a network cut have
// received are at most a second apart, and their checks half a second.
Clock::duration suspicious(const Reach& reach) {
  const double limit = reach.limit.count();
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(std::max(limit - 1.5, (limit + 1) / 2)));
}

std::string seconds(Clock::duration length) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", std::chrono::duration<double>(length).count());
  return text;
}

}  // namespace

void Unreachable::add(const std::vector<int>& ranks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ranks_.insert(ranks.begin(), ranks.end());
}

std::vector<int> Unreachable::ranks() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {ranks_.begin(), ranks_.end()};
}

void Silence::begin(int socket, const Reach& reach) {
  if (begun_ || !reach.limited()) return;
  begun_ = true;
  const int on = 1, count = kMostKeepAlives;
  // With a long limit, the interval is so long that the kernel does not close the connection first.
  const int interval = std::max(1, static_cast<int>(reach.limit.count() / (kMostKeepAlives / 2)));
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &interval, sizeof(interval));
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof(interval));
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof(count));
  setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
}

Clock::duration Silence::look(int socket, const Reach& reach, Clock::time_point now) {
  begin(socket, reach);
  const Info info(socket);
  // Without the kernel's count of received segments, silence cannot be measured.
  if (!info.has(kUnsentAt) || info.get(kSegmentsInAt) == 0) return {};
  const uint32_t before = std::exchange(segments_, info.get(kSegmentsInAt));
  const auto passed = now - std::exchange(looked_, now);
  if (before == 0 || info.is_held_up()) {
    length_ = {};
  } else if (before != segments_) {
    length_ = std::min<Clock::duration>(info.heard_ago(), counted(passed));
  } else {
    length_ += counted(passed);
  }
  return length_;
}

bool is_suspicious(int socket, const Reach& reach) {
  if (!reach.limited()) return false;
  const Info info(socket);
  const unsigned in_vain = std::max(info.byte(kRetransmissionsAt), info.byte(kProbesAt));
  return info.has(kUnsentAt) && in_vain >= 2 && !info.is_held_up() && info.heard_ago() >= suspicious(reach);
}

Clock::duration counted(Clock::duration since_last_look) {
  return std::min<Clock::duration>(since_last_look, 2 * kLookInterval);
}

void Look::at(int rank, int socket, Silence& silence) {
  const Clock::duration length = silence.look(socket, reach_, now_);
  if (length >= suspicious(reach_)) add(rank, length, far_host(socket), own_host(socket));
}

void Look::add(int rank, Clock::duration silence, std::string where, std::string here) {
  if (silence < suspicious(reach_)) return;
  const auto same = std::find_if(seen_.begin(), seen_.end(), [&](const Seen& one) { return one.rank == rank; });
  if (same == seen_.end()) {
    seen_.push_back({rank, silence, std::move(where), std::move(here)});
  } else {
    same->silence = std::max(same->silence, silence);
  }
}

void Look::judge() const {
  const auto longest =
      std::max_element(seen_.begin(), seen_.end(), [](const Seen& a, const Seen& b) { return a.silence < b.silence; });
  if (longest == seen_.end() || longest->silence <= reach_.limit) return;
  std::string text;
  for (const Seen& one : seen_) {
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(one.rank) + " (" + one.where + ")";
  }
  text += (seen_.size() == 1 ? " has" : " have") + std::string(" acknowledged nothing to rank ") +
          std::to_string(rank_) + " (" + longest->here + ") for " + seconds(longest->silence);
  suspect();
  throw UnreachableError(text);
}

void Look::suspect() const {
  std::vector<int> ranks;
  for (const Seen& one : seen_) ranks.push_back(one.rank);
  reach_.found->add(ranks);
}

bool says_unreachable(int error) {
  switch (error) {
    case EHOSTUNREACH:
    case ENETUNREACH:
    case EHOSTDOWN:
    case ENETDOWN:
    case ETIMEDOUT:
    // A route or a packet filter of this host blocks the packets.
    case EACCES:
    case EPERM:
    case EINVAL:
      return true;
    default:
      return false;
  }
}

void give_up(const Reach& reach, int rank, const std::string& text) {
  reach.found->add({rank});
  throw UnreachableError(text);
}

}  // namespace elastic
