// Sockets of this process, and its limit of open files.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace elastic {

// A file descriptor that is closed with its owner.
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

// The address at which a process listens.
struct Place {
  std::string host;
  uint16_t port = 0;
};

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// Throws CollectiveError if the host cannot be resolved.
SocketAddress resolve(const Place& place);

// The range of ports at which this process may listen: those that a firewall permits.
struct PortRange {
  uint16_t low = 0;  // 0: any
  uint16_t high = 0;

  bool any() const { return low == 0; }
};

// Throws std::invalid_argument for invalid ports, or if they are in the wrong order. 0 and 0: any.
PortRange port_range(int low, int high);

// Returns a listening socket at a local address, and its port. From a range it uses the first free port, counted from
// the offset `start`, so that processes with different offsets try different ports first. Throws CollectiveError.
std::pair<Descriptor, uint16_t> listen_on(const std::string& host, PortRange ports = {}, int start = 0);

// "address:port" of this end and of the peer's end of a connection; "" if there is none.
std::string own_end(int socket);
std::string far_end(int socket);
// The addresses alone.
std::string own_host(int socket);
std::string far_host(int socket);

// Raises the limit of open files, as far as needed and allowed, so that this process can open so many more. Throws
// CollectiveError if that is too few; `what` they are for.
void require_descriptors(size_t more, const std::string& what);

}  // namespace elastic
