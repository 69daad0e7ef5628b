// The trace of an operation in the timeline.
#pragma once

#include <vector>

#include "engine/operation.h"
#include "engine/timeline.h"

namespace elastic {

// A time span, with its name in the timeline.
struct Span {
  const char* name;
  Timeline::Clock::time_point begin, end;
};

// Adds an operation to the timeline: rank 0's answer arrived at `answered`, the operation ran from `begin` to `end`,
// and `parts` are the spans in between.
void trace(Timeline& timeline, const Operation& operation, Timeline::Clock::time_point answered,
           Timeline::Clock::time_point begin, Timeline::Clock::time_point end, const std::vector<Span>& parts);

}  // namespace elastic
