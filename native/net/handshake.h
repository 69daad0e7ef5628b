// Connections between ranks. Both ends authenticate each other before they send anything else.
//
// The ranks of a job share a key. The dialing end sends a fresh nonce, the listening end answers with a nonce of its
// own, and then each end sends a MAC over both nonces, the purpose, both ranks and their roles, and the addresses of
// both ends as it sees them itself. So the key is never sent, a MAC cannot be replayed elsewhere, and the MACs that a
// man in the middle relays are invalid, since there are two connections with different ends.
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
  std::string key;      // the same on all ranks of the job, and secret
  std::string purpose;  // the purpose of the connections, and the round; the same on all ranks
};

// A connection to establish. Both ends want it: one dials, the other listens.
struct Wanted {
  int rank;          // of the peer
  std::string name;  // distinguishes connections to the same peer; the same at both ends
  bool dials;        // whether this end dials
  Place place;       // where the peer listens, if this end dials
};

using Clock = std::chrono::steady_clock;
// Called every few milliseconds while an operation blocks; throws to end it.
using Check = std::function<void()>;

// Establishes all connections, and returns their non-blocking sockets in the order of `wanted`. The listener is needed
// if this end listens for any of them. Connections of strangers are closed, and the number of unauthenticated ones is
// limited. Throws UnreachableError if a dialed host is silent for the limit of `reach`, CollectiveTimeout, which names
// the missing ranks, CollectiveError if a peer is gone, and what `check` throws.
std::vector<Descriptor> shake_hands(const Identity& self, int listener, const std::vector<Wanted>& wanted,
                                    Clock::time_point deadline, const Check& check, const Reach& reach = {});

// "rank 3", "ranks 3, 5".
std::string named(const std::vector<int>& ranks);

}  // namespace elastic
