// Process sets without engines: their members' places, and the effect of an abort.
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/process_sets.h"
#include "errors.h"
#include "tests/tests.h"

namespace {

using elastic::ContextGroup;
using elastic::ProcessSet;
using elastic::ProcessSets;
using elastic::Seconds;

const std::vector<std::vector<int>> kMachines{{0, 1, 2}, {3, 4}};

std::shared_ptr<ContextGroup> contexts_of(std::vector<int> ranks) {
  const std::vector<elastic::GroupPlan> plans{{"global", std::move(ranks), 0}};
  return std::make_shared<ContextGroup>(plans, "127.0.0.1", "key", "set");
}

bool is_refused(std::vector<int> ranks) {
  try {
    ProcessSet(std::move(ranks), nullptr, 0, kMachines);
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

}  // namespace

void test_process_sets_by_machine() {
  const ProcessSet all({0, 1, 2, 3, 4}, contexts_of({4, 0}), 4, kMachines);
  CHECK(all.place == 4 && !all.one_machine && all.cross_groups == 2);
  CHECK(all.party.ranks == (std::vector<int>{3, 4}) && all.party.index == 1);
  // In the members' order, which need not be that of the ranks.
  const ProcessSet local({2, 0}, nullptr, 0, kMachines);
  CHECK(local.place == 1 && local.one_machine);
  CHECK(local.party.ranks == (std::vector<int>{2, 0}) && local.party.index == 1);
  const ProcessSet others({1, 3}, nullptr, 0, kMachines);  // without being a member, a rank needs no contexts
  CHECK(others.place == -1 && !others.one_machine && others.cross_groups == 1);
  CHECK(is_refused({}) && is_refused({0, 0}) && is_refused({-1, 0}) && is_refused({0, 5}) && is_refused({0, 3}));
}

void test_process_sets_after_an_abort() {
  ProcessSets sets;
  const auto early = contexts_of({0, 3}), late = contexts_of({0, 4});
  sets.put(1, std::make_shared<const ProcessSet>(std::vector<int>{0, 3}, early, 0, kMachines));
  sets.abort("stop");
  sets.put(2, std::make_shared<const ProcessSet>(std::vector<int>{0, 4}, late, 0, kMachines));
  for (const auto& contexts : {early, late}) {
    std::string reason;
    try {
      contexts->barrier("global", Seconds(3600));
    } catch (const elastic::AbortedError& error) {
      reason = error.what();
    }
    CHECK(reason == "stop");
  }
  const auto kept = sets.find(1);
  sets.remove(1);
  CHECK(!sets.find(1) && sets.find(2) && kept->contexts == early);
}
