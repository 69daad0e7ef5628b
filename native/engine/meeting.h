// The exchange of data between the ranks of a round: through rank 0, over the control link, before the engine's thread
// starts.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/control_link.h"
#include "net/handshake.h"
#include "shared_memory/shared_segment.h"

namespace elastic {

// A rank's memory that its neighbors can map.
struct SharedMemory {
  std::string machine;                     // ranks with the same value share memory; "" shares none
  std::shared_ptr<SharedSegment> segment;  // null without shared memory
  bool direct_reads = true;                // whether to read peers' private memory if permitted
  std::string missing;                     // why there is no segment, if one was wanted
};
// Creates that of this process. `machine` distinguishes ranks that the system considers to be on one machine.
SharedMemory shared_memory(const std::string& machine, bool direct_reads);

// A rank's knowledge of the other ranks.
struct Acquaintance {
  // The ranks by machine, in the order of their first ranks; the same on all ranks. Ranks that cannot share memory are
  // on machines of their own.
  std::vector<std::vector<int>> machines;
  // Why ranks of one machine do not share memory; "" if they do.
  std::string unshared;
  // The other ranks of this machine. Empty if memory is not shared.
  std::vector<std::unique_ptr<PeerSegment>> neighbors;
  bool direct_reads = false;  // whether all read each other's private memory
};

// An exchange between all ranks, which must all make the same calls. The calls block until the deadline at most, call
// `check` meanwhile, and throw what it throws, CollectiveTimeout, which names the missing ranks, and CollectiveError.
class Meeting {
 public:
  // `link` must be connected, and outlive this.
  Meeting(ControlLink& link, Clock::time_point deadline, Check check);

  Acquaintance introduce(const SharedMemory& own);

  // Returns the texts that the ranks have given, by rank. The last `own` bytes of a text are specific to its rank; the
  // rest is usually the same for several ranks.
  std::vector<std::string> gather(const std::string& given, size_t own);

 private:
  // Returns rank 0's answer to a rank.
  using Answers = std::function<std::string(int rank)>;
  // Sends this rank's words to rank 0, where `decide` turns all ranks' words into answers. Returns this rank's answer.
  std::string consult(std::string words, const std::function<Answers(const std::map<int, std::string>&)>& decide);
  std::map<int, SegmentName> find_neighbors(const SharedMemory& own, Acquaintance& known);
  void agree_on_memory(const SharedMemory& own, const std::map<int, SegmentName>& names, Acquaintance& known);

  ControlLink& link_;
  const int rank_, size_;
  const Clock::time_point deadline_;
  const Check check_;
};

}  // namespace elastic
