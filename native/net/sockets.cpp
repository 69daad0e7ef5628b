#include "net/sockets.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "errors.h"

namespace elastic {
namespace {

// Spare descriptors for files that the program opens meanwhile.
constexpr size_t kSpareDescriptors = 64;

using NameCall = int (*)(int, sockaddr*, socklen_t*);

std::string end_of(int socket, NameCall call) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (call(socket, reinterpret_cast<sockaddr*>(&address), &length) != 0) return "";
  char text[INET6_ADDRSTRLEN] = "";
  int port = 0;
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    inet_ntop(AF_INET, &v4.sin_addr, text, sizeof(text));
    port = ntohs(v4.sin_port);
  } else if (address.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof(text));
    port = ntohs(v6.sin6_port);
  }
  return std::string(text) + ":" + std::to_string(port);
}

std::string without_port(const std::string& end) { return end.substr(0, end.rfind(':')); }

size_t open_descriptors() {
  size_t count = 0;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/proc/self/fd"), closedir);
  if (!folder) return count;
  while (const dirent* entry = readdir(folder.get())) count += entry->d_name[0] != '.' ? 1 : 0;
  return count;
}

}  // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = other.release();
  }
  return *this;
}

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

SocketAddress resolve(const Place& place) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(place.host.c_str(), std::to_string(place.port).c_str(), &hints, &list);
  if (error != 0) throw CollectiveError("cannot resolve " + place.host + ": " + gai_strerror(error));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(list, freeaddrinfo);
  SocketAddress found;
  found.length = list->ai_addrlen;
  std::memcpy(&found.storage, list->ai_addr, list->ai_addrlen);
  return found;
}

PortRange port_range(int low, int high) {
  if ((low != 0 || high != 0) && (low < 1 || high > UINT16_MAX || low > high)) {
    throw std::invalid_argument(std::to_string(low) + " to " + std::to_string(high) + " is no range of ports");
  }
  return {static_cast<uint16_t>(low), static_cast<uint16_t>(high)};
}

std::pair<Descriptor, uint16_t> listen_on(const std::string& host, PortRange ports, int start) {
  SocketAddress own = resolve({host, 0});
  const bool v6 = own.storage.ss_family == AF_INET6;
  in_port_t& port = v6 ? reinterpret_cast<sockaddr_in6&>(own.storage).sin6_port
                       : reinterpret_cast<sockaddr_in&>(own.storage).sin_port;
  const unsigned count = ports.high - ports.low + 1U;
  for (unsigned i = 0; i < count; ++i) {
    Descriptor listener(socket(own.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    port = htons(static_cast<uint16_t>(ports.low + (static_cast<unsigned>(start) + i) % count));
    // Connections of earlier rounds still use the ports at which they were accepted, but do not conflict.
    const int on = 1;
    if (!ports.any()) setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    socklen_t length = sizeof(own.storage);
    // Two processes may have bound the same port, of which only one can listen.
    if (listener.open() && bind(listener.get(), own.get(), own.length) == 0 && listen(listener.get(), SOMAXCONN) == 0 &&
        getsockname(listener.get(), reinterpret_cast<sockaddr*>(&own.storage), &length) == 0) {
      return {std::move(listener), ntohs(port)};
    }
    if (ports.any() || errno != EADDRINUSE) {
      throw CollectiveError("cannot listen on " + host + ": " + std::strerror(errno));
    }
  }
  throw CollectiveError("cannot listen on " + host + ": all ports from " + std::to_string(ports.low) + " to " +
                        std::to_string(ports.high) + " (--port-range) are in use");
}

std::string own_end(int socket) { return end_of(socket, getsockname); }

std::string far_end(int socket) { return end_of(socket, getpeername); }

std::string own_host(int socket) { return without_port(own_end(socket)); }

std::string far_host(int socket) { return without_port(far_end(socket)); }

void require_descriptors(size_t more, const std::string& what) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const size_t open = open_descriptors();
  const rlim_t needed = open + more + kSpareDescriptors;
  if (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= needed) return;
  rlimit raised = limit;
  raised.rlim_cur = limit.rlim_max == RLIM_INFINITY ? needed : std::min(needed, limit.rlim_max);
  if (raised.rlim_cur > limit.rlim_cur && setrlimit(RLIMIT_NOFILE, &raised) == 0) limit = raised;
  if (limit.rlim_cur >= open + more) return;
  throw CollectiveError("cannot open " + what + ": " + std::to_string(open) + " files are open, and " +
                        std::to_string(limit.rlim_cur) + " are allowed; raise the hard limit (ulimit -Hn) to " +
                        std::to_string(needed) + " at least");
}

}  // namespace elastic
