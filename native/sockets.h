// Finding and shutting down the sockets of Gloo's pairs, which Gloo does not give out.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <set>
#include <string>

namespace elastic {

// "family/address/port" of a socket address; "" for one that is neither IPv4 nor IPv6.
std::string endpoint(const sockaddr_storage& address);

// The endpoints by which sockets are known: those bound to one of `own` (a listener of ours, or a connection it
// accepted), and those connected, or on the way of connecting, to one of `peers`.
struct SocketNames {
  std::set<std::string> own;
  std::set<std::string> peers;
};

enum class Which {
  kAll,
  kUnconnected,  // listeners, and sockets that wait for an answer to their SYN
};

// Shuts down, both ways, every such TCP socket of this process. A wait on it ends at once. Nothing is closed: the
// descriptors stay their owner's. Returns how many there were.
int shutdown_sockets(const SocketNames& names, Which which);

// Sees to it that this process may open so many more files: raises its limit as far as is needed and allowed. Throws
// CollectiveError where that is too little; `what` they are for.
void require_descriptors(size_t more, const std::string& what);

// Those of `names` that some open socket bears. The rest may by now be given to sockets that are not ours.
SocketNames names_in_use(const SocketNames& names);

}  // namespace elastic
