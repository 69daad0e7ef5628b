// Checks whether the hosts at the other ends of connections can still be reached.
//
// Packets of the peer's kernel count, which sends them also while its process is stopped: it answers a keep-alive each
// second. So a slow or stopped peer is never considered unreachable. A cut cable or a dead host closes no connection:
// silence is its only symptom.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace elastic {

// How often connections are checked, approximately.
constexpr std::chrono::milliseconds kLookInterval{500};

// The ranks that were found unreachable. Thread-safe.
class Unreachable {
 public:
  void add(const std::vector<int>& ranks);
  // In ascending order.
  std::vector<int> ranks() const;

 private:
  mutable std::mutex mutex_;
  std::set<int> ranks_;
};

// The limit of silence, and the ranks that have exceeded it.
struct Reach {
  // How long an awaited peer may be silent; 0: for ever. At least 2 s: a reachable host sends a packet each second.
  std::chrono::duration<double> limit{0};
  std::shared_ptr<Unreachable> found = std::make_shared<Unreachable>();

  bool limited() const { return limit.count() > 0; }
};

// How long a connection has been silent. Only time between regular checks counts, so the time during which this process
// was stopped or got no CPU does not.
class Silence {
 public:
  using Clock = std::chrono::steady_clock;

  // Lets the kernel send a keep-alive after each second of silence.
  void begin(int socket, const Reach& reach);
  // Checks the connection. Returns the length of its silence.
  Clock::duration look(int socket, const Reach& reach, Clock::time_point now);

 private:
  bool begun_ = false;
  uint32_t segments_ = 0;  // received so far
  Clock::time_point looked_{};
  Clock::duration length_{};
};

// Returns whether, by the kernel's records, a connection has been silent for almost the limit in spite of requests. For
// waits that have ended for another reason: the peer on the other side of a network cut may have been quicker, and then
// only the connections that other ranks have closed are visible here.
bool is_suspicious(int socket, const Reach& reach);

// Returns the part of the time since the last check that counts as silence.
std::chrono::steady_clock::duration counted(std::chrono::steady_clock::duration since_last_look);

// One check of several connections.
class Look {
 public:
  using Clock = Silence::Clock;

  // `rank`: of this process.
  Look(const Reach& reach, int rank, Clock::time_point now) : reach_(reach), rank_(rank), now_(now) {}

  // Checks a connection on which a message of a rank is awaited.
  void at(int rank, int socket, Silence& silence);
  // Adds the silence of a rank, found in another way. `where` and `here`: the addresses of the rank and this process.
  void add(int rank, Clock::duration silence, std::string where, std::string here);

  // Throws UnreachableError if a rank was silent for too long.
  void judge() const;
  // Notes the ranks that would soon have been found unreachable; see is_suspicious().
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
  std::vector<Seen> seen_;  // only ranks with a long silence
};

// Returns whether an error of a connection means that packets do not get through, rather than a refusal by the peer.
bool says_unreachable(int error);

// Notes that a rank cannot be reached because of such an error, and throws UnreachableError.
[[noreturn]] void give_up(const Reach& reach, int rank, const std::string& text);

}  // namespace elastic
