#include "engine/trace.h"

#include <cctype>
#include <string>

#include "engine/coordinator.h"

namespace elastic {
namespace {

// The name of an operation in the timeline: ALLREDUCE; with Adasum, ADASUM.
std::string activity(const Plan& plan) {
  const bool adasum = plan.kind == Kind::kAllreduce && plan.reduction == Reduction::kAdasum;
  std::string text = adasum ? reduction_name(plan.reduction) : kind_name(plan.kind);
  for (char& c : text) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return text;
}

// Its row in the timeline: allreduce.NAME.
std::string row(const Plan& plan, const std::string& key) {
  const std::string name = key_name(key), prefix = std::string(kind_name(plan.kind)) + ".";
  return name.compare(0, prefix.size(), prefix) == 0 ? name : prefix + name;
}

}  // namespace

void trace(Timeline& timeline, const Operation& operation, Timeline::Clock::time_point answered,
           Timeline::Clock::time_point begin, Timeline::Clock::time_point end, const std::vector<Span>& parts) {
  const std::string name = row(operation.plan, operation.key), whole = activity(operation.plan);
  timeline.span(name, "NEGOTIATE_" + whole, operation.submitted, answered);
  timeline.span(name, "QUEUE", answered, begin);
  timeline.span(name, whole, begin, end);
  for (const Span& part : parts) timeline.span(name, part.name, part.begin, part.end);
}

}  // namespace elastic
