#include "engine/process_sets.h"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <utility>

namespace elastic {

ProcessSet::ProcessSet(std::vector<int> members, std::shared_ptr<ContextGroup> connections, int self,
                       const std::vector<std::vector<int>>& machines)
    : ranks(std::move(members)), contexts(std::move(connections)) {
  size_t size = 0;
  for (const std::vector<int>& machine : machines) size += machine.size();
  const std::set<int> distinct(ranks.begin(), ranks.end());
  if (ranks.empty() || distinct.size() != ranks.size() || *distinct.begin() < 0 ||
      static_cast<size_t>(*distinct.rbegin()) >= size) {
    throw std::invalid_argument("the members of a process set must be distinct ranks of the job");
  }
  cross_groups = static_cast<int>(size);
  for (const std::vector<int>& machine : machines) {
    std::vector<int> here;
    for (const int rank : ranks) {
      if (std::find(machine.begin(), machine.end(), rank) != machine.end()) here.push_back(rank);
    }
    if (here.empty()) continue;
    cross_groups = std::min(cross_groups, static_cast<int>(here.size()));
    one_machine = one_machine && here.size() == ranks.size();
    const auto mine = std::find(here.begin(), here.end(), self);
    if (mine != here.end()) {
      party.index = static_cast<int>(mine - here.begin());
      party.ranks = std::move(here);
    }
  }
  const auto own = std::find(ranks.begin(), ranks.end(), self);
  if (own != ranks.end()) place = static_cast<int>(own - ranks.begin());
  if (place >= 0 && !one_machine && !contexts) {
    throw std::invalid_argument("a process set on several machines needs contexts");
  }
}

void ProcessSets::put(int number, std::shared_ptr<const ProcessSet> set) {
  std::shared_ptr<const ProcessSet> former = std::move(set);  // freed without the lock
  std::shared_ptr<ContextGroup> late;
  std::string reason;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (aborted_) late = former->contexts;
    reason = reason_;
    sets_[number].swap(former);
  }
  if (late) late->abort(reason);
}

std::shared_ptr<const ProcessSet> ProcessSets::find(int number) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = sets_.find(number);
  return found == sets_.end() ? nullptr : found->second;
}

void ProcessSets::remove(int number) {
  std::shared_ptr<const ProcessSet> last;  // freed without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = sets_.find(number);
  if (found == sets_.end()) return;
  last = std::move(found->second);
  sets_.erase(found);
}

void ProcessSets::abort(const std::string& reason) {
  std::vector<std::shared_ptr<ContextGroup>> contexts;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!aborted_) reason_ = reason;
    aborted_ = true;
    for (const auto& [number, set] : sets_) {
      if (set->contexts) contexts.push_back(set->contexts);
    }
  }
  for (const auto& group : contexts) group->abort(reason);
}

}  // namespace elastic
