// What the timeline shows of an operation.
#pragma once

#include <vector>

#include "engine/operation.h"
#include "engine/timeline.h"

namespace elastic {

// A stretch of time, by the name that the timeline gives it.
struct Span {
  const char* name;
  Timeline::Clock::time_point begin, end;
};

// Puts an operation that was run into the timeline: rank 0's answer came at `answered`, it ran from `begin` to `end`,
// and what it did meanwhile is in `parts`.
void trace(Timeline& timeline, const Operation& operation, Timeline::Clock::time_point answered,
           Timeline::Clock::time_point begin, Timeline::Clock::time_point end, const std::vector<Span>& parts);

}  // namespace elastic
