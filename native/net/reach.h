// Whether the machines at the other ends of connections are still heard.
//
// What counts is what the other end's kernel sends, as that goes on while a process is stopped: keep-alives have it
// answer each second. So a peer that is slow, or stopped, is never taken for one that cannot be reached. A cable that
// is cut, or a machine that is gone, closes no connection: silence is all there is to see of it.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace elastic {

// How often connections are looked at, about.
constexpr std::chrono::milliseconds kLookInterval{500};

// The ranks that were found unreachable. Any thread.
class Unreachable {
 public:
  void add(const std::vector<int>& ranks);
  // In order.
  std::vector<int> ranks() const;

 private:
  mutable std::mutex mutex_;
  std::set<int> ranks_;
};

// What a rank goes by.
struct Reach {
  // For how long a peer may be silent of which something is awaited; 0: for ever. At least 2 s: whoever is there is
  // heard each second.
  std::chrono::duration<double> limit{0};
  std::shared_ptr<Unreachable> found = std::make_shared<Unreachable>();

  bool limited() const { return limit.count() > 0; }
};

// For how long nothing has been heard on one connection. Only time at whose end somebody has looked counts: a process
// that was stopped, or got no processor, begins anew.
class Silence {
 public:
  using Clock = std::chrono::steady_clock;

  // Has the kernel ask the other end for a sign of life whenever nothing was heard of it for a second.
  void begin(int socket, const Reach& reach);
  // A look.
  Clock::duration look(int socket, const Reach& reach, Clock::time_point now);

 private:
  bool begun_ = false;
  uint32_t segments_ = 0;  // received so far
  Clock::time_point looked_{};
  Clock::duration length_{};
};

// Whether, by what the kernel has noted, nothing was heard on a connection for almost the limit, though it was asked
// for. For when something else has ended what was waited for: the other end of the same cut may have been quicker, and
// all that is seen of that here is connections that others have closed.
bool is_suspicious(int socket, const Reach& reach);

// What of the time since the last look counts.
std::chrono::steady_clock::duration counted(std::chrono::steady_clock::duration since_last_look);

// One look at several connections.
class Look {
 public:
  using Clock = Silence::Clock;

  // `rank`: of this process.
  Look(const Reach& reach, int rank, Clock::time_point now) : reach_(reach), rank_(rank), now_(now) {}

  // At a connection on which something is awaited of a rank.
  void at(int rank, int socket, Silence& silence);
  // Of a rank of which silence was found in another way. `where` it is, and this process.
  void add(int rank, Clock::duration silence, std::string where, std::string here);

  // Throws UnreachableError when a rank was silent for too long.
  void judge() const;
  // Notes those of whom that would have been found in a moment; see is_suspicious().
  void suspect() const;

 private:
  struct Seen {
    int rank;
    Clock::duration silence;
    std::string where, here;
  };

  const Reach& reach_;
  const int rank_;
  const Clock::time_point now_;
  std::vector<Seen> seen_;  // only who is silent for long
};

// Whether an error of a connection says that no packets come through, and not that somebody answers.
bool says_unreachable(int error);

// Notes that a rank cannot be reached because of such an error, and throws UnreachableError.
[[noreturn]] void give_up(const Reach& reach, int rank, const std::string& text);

}  // namespace elastic
