// Connections between ranks, each proven at both ends before anything else is said on it.
//
// Ranks of a job share a key. Who dials sends a number that nobody has used before, who listens answers with one of
// its own, and then each shows the other a MAC over both, over what they meet for, over who is who, and over both
// ends' addresses as it sees them itself. The key never travels, what one end has shown is of no use to show
// elsewhere, and who sits between the two sees two connections with different ends: what he passes on proves nothing.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "net/reach.h"
#include "net/sockets.h"

namespace elastic {

struct Identity {
  int rank = 0;
  std::string key;      // the same on all ranks of the job, and known to nobody else
  std::string purpose;  // what they meet for, in which round; the same on all
};

// A connection to be made. Both ends want it: one dials, the other is dialled.
struct Wanted {
  int rank;          // of the peer
  std::string name;  // tells it from others with the same peer; the same at both ends
  bool dials;        // whether this end does
  Place place;       // where the peer listens, if so
};

using Clock = std::chrono::steady_clock;
// Called while something blocks, each few milliseconds; throws when it is to end.
using Check = std::function<void()>;

// Connects all, and returns their sockets, in the order of `wanted`, which do not block. The listener is needed where
// this end is dialled. Strangers that come are sent away: of those who have proven nothing yet only so many are kept.
// Throws UnreachableError when nothing is heard from where this end dials for the limit of `reach`, CollectiveTimeout,
// naming who is missing, CollectiveError when a peer is gone, and what `check` throws.
std::vector<Descriptor> shake_hands(const Identity& self, int listener, const std::vector<Wanted>& wanted,
                                    Clock::time_point deadline, const Check& check, const Reach& reach = {});

// "rank 3", "ranks 3, 5".
std::string named(const std::vector<int>& ranks);

}  // namespace elastic
