// Sockets of this process, and how many it may have.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace elastic {

// A descriptor and its end.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int descriptor) : fd_(descriptor) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();

  int get() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

// Where somebody listens.
struct Place {
  std::string host;
  uint16_t port = 0;
};

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// Throws CollectiveError when there is no such host.
SocketAddress resolve(const Place& place);

// The ports at which this process may listen, as a firewall lets them through.
struct PortRange {
  uint16_t low = 0;  // 0: any
  uint16_t high = 0;

  bool any() const { return low == 0; }
};

// Throws std::invalid_argument for numbers that are no ports, or in the wrong order. 0 and 0: any.
PortRange port_range(int low, int high);

// A listening socket on a free port of a local address, and that port. Of a range the first that is free is taken,
// from the one on that `start` counts to, so that processes with different ones do not all try the same. Throws
// CollectiveError.
std::pair<Descriptor, uint16_t> listen_on(const std::string& host, PortRange ports = {}, int start = 0);

// "address:port" at this end and at the other end of a connection; "" where there is none.
std::string own_end(int socket);
std::string far_end(int socket);
// The addresses alone.
std::string own_host(int socket);
std::string far_host(int socket);

// Sees to it that this process may open so many more files: raises its limit as far as is needed and allowed. Throws
// CollectiveError where that is too little; `what` they are for.
void require_descriptors(size_t more, const std::string& what);

}  // namespace elastic
