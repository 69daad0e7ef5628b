// Finding and shutting down the sockets of Gloo's pairs, which Gloo does not give out.
#pragma once

#include <sys/socket.h>

#include <set>
#include <string>

namespace elastic {

// "family/address/port" of a socket address; "" for one that is neither IPv4 nor IPv6.
std::string endpoint(const sockaddr_storage& address);

// Shuts down, both ways, every TCP socket of this process that is bound to one of `own` (a listener of ours, or a connection
// it accepted) or connected to one of `peers`. A wait on such a socket ends at once. Nothing is closed: the descriptors stay
// their owner's. Returns how many there were.
int shutdown_sockets(const std::set<std::string>& own, const std::set<std::string>& peers);

// The same for the listeners among those bound to one of `own`.
int shutdown_listeners(const std::set<std::string>& own);

}  // namespace elastic
