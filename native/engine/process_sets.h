// The process sets of a round from one rank's view: their members, and the members' connections.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gloo/context_group.h"
#include "shared_memory/local_plane.h"

namespace elastic {

struct ProcessSet {
  std::vector<int> ranks;  // in the members' order
  int place = -1;          // this rank's; -1 if it is not a member
  Party party;             // the members on this machine
  bool one_machine = true;
  int cross_groups = 0;  // with several machines: the smallest number of members on one of them
  std::shared_ptr<ContextGroup> contexts;

  // The set of these ranks, on `machines` (ranks by machine), from the view of rank `self`. Throws
  // std::invalid_argument.
  ProcessSet(std::vector<int> members, std::shared_ptr<ContextGroup> connections, int self,
             const std::vector<std::vector<int>>& machines);
};

// The sets by number. Any thread, any time.
class ProcessSets {
 public:
  void put(int number, std::shared_ptr<const ProcessSet> set);
  // Returns nullptr if there is none. A running operation keeps its set, even if it is removed here meanwhile.
  std::shared_ptr<const ProcessSet> find(int number) const;
  void remove(int number);

  // Aborts the contexts of all sets, also of those added later.
  void abort(const std::string& reason);

 private:
  mutable std::mutex mutex_;  // guards the following
  std::map<int, std::shared_ptr<const ProcessSet>> sets_;
  bool aborted_ = false;
  std::string reason_;
};

}  // namespace elastic
