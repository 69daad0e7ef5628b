// The process sets of a round as one of its ranks sees them: who is in them, and over what their members meet.
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
  int place = -1;          // this rank's; -1: not a member
  Party party;             // the members on this machine
  bool one_machine = true;
  int cross_groups = 0;  // with several machines: members that all machines have at least
  std::shared_ptr<ContextGroup> contexts;

  // The set of these ranks, on `machines` (ranks by machine), as rank `self` sees it. Throws std::invalid_argument.
  ProcessSet(std::vector<int> members, std::shared_ptr<ContextGroup> connections, int self,
             const std::vector<std::vector<int>>& machines);
};

// By number. Any thread, any time.
class ProcessSets {
 public:
  void put(int number, std::shared_ptr<const ProcessSet> set);
  // nullptr when there is none. Whoever runs something in a set keeps it, whatever becomes of it here.
  std::shared_ptr<const ProcessSet> find(int number) const;
  void remove(int number);

  // Aborts the contexts of all sets, and of those that are yet to come.
  void abort(const std::string& reason);

 private:
  mutable std::mutex mutex_;  // guards what follows
  std::map<int, std::shared_ptr<const ProcessSet>> sets_;
  bool aborted_ = false;
  std::string reason_;
};

}  // namespace elastic
