// One function of Gloo's, replaced. libgloo calls it by its symbol, and the dynamic linker looks for that in this
// extension before it looks in libgloo.
//
// Gloo's loop thread asks for the peer's name of each connection that it has just accepted or made. A peer that has
// gone by then leaves a socket without one, on which Gloo throws, in a thread where nothing catches: the process ends.
// So any worker that is killed, or gives up, while others connect to it would take them along; a port scanner would,
// too. Here such a socket gets an empty name instead. Gloo finds out about it at its next read, and fails the pair as
// it fails any other.
#include <gloo/transport/tcp/address.h>

namespace gloo::transport::tcp {

__attribute__((visibility("default"))) Address Address::fromPeerName(int fd) {
  sockaddr_storage name{};
  socklen_t length = sizeof(name);
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&name), &length) != 0) name = {};
  return Address(name);
}

}  // namespace gloo::transport::tcp
