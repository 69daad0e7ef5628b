// How the ranks of a round learn of each other: through rank 0, over the control link, before the engine's thread
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

// What a rank has to share with its neighbours.
struct SharedMemory {
  std::string machine;                     // ranks of the same share memory; "": with nobody
  std::shared_ptr<SharedSegment> segment;  // none then
  bool direct_reads = true;                // whether private memory of peers is read where that is allowed
  std::string missing;                     // why there is none, if it was wanted
};
// That of this process. `machine` tells apart what the system takes for one machine.
SharedMemory shared_memory(const std::string& machine, bool direct_reads);

// What a rank knows of the others then.
struct Acquaintance {
  // The ranks by machine, in the order of their first ranks; the same on all ranks. Ranks that cannot share memory are
  // on machines of their own.
  std::vector<std::vector<int>> machines;
  // Why ranks of one machine do not share memory; "" when they do.
  std::string unshared;
  // The other ranks of this machine. None where memory is not shared.
  std::vector<std::unique_ptr<PeerSegment>> neighbours;
  bool direct_reads = false;  // whether all read each other's private memory
};

// One time that all ranks come together. All call the same of these. They block until the deadline, call `check`
// meanwhile, and throw what it throws, CollectiveTimeout, naming who is missing, and CollectiveError.
class Meeting {
 public:
  // `link` is connected, and outlives this.
  Meeting(ControlLink& link, Clock::time_point deadline, Check check);

  Acquaintance introduce(const SharedMemory& own);

  // What each rank gives, by rank. The last bytes, `own` of them, are each rank's own, the rest is mostly what others
  // have too.
  std::vector<std::string> gather(const std::string& given, size_t own);

 private:
  // What rank 0 answers each rank.
  using Answers = std::function<std::string(int rank)>;
  // Brings this rank's words to rank 0, where `decide` makes answers of all ranks', and returns the one to this rank.
  std::string consult(std::string words, const std::function<Answers(const std::map<int, std::string>&)>& decide);
  std::map<int, SegmentName> find_neighbours(const SharedMemory& own, Acquaintance& known);
  void agree_on_memory(const SharedMemory& own, const std::map<int, SegmentName>& names, Acquaintance& known);

  ControlLink& link_;
  const int rank_, size_;
  const Clock::time_point deadline_;
  const Check check_;
};

}  // namespace elastic
