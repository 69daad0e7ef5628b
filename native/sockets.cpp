#include "sockets.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <vector>

namespace elastic {
namespace {

std::string local_endpoint(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  return getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 ? endpoint(address) : "";
}

std::string peer_endpoint(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  return getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 ? endpoint(address) : "";
}

bool listens(int fd) {
  int value = 0;
  socklen_t length = sizeof(value);
  return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &value, &length) == 0 && value != 0;
}

std::vector<int> open_descriptors() {
  std::vector<int> descriptors;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/proc/self/fd"), closedir);
  if (!folder) return descriptors;
  while (const dirent* entry = readdir(folder.get())) {
    if (entry->d_name[0] != '.') descriptors.push_back(std::atoi(entry->d_name));
  }
  return descriptors;
}

template <typename Wanted>
int shutdown_where(Wanted wanted) {
  int found = 0;
  for (const int descriptor : open_descriptors()) {
    // Looked at and shut down through a duplicate: Gloo's thread may close the descriptor at any moment, and its number
    // may by then be somebody else's socket.
    const int fd = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) continue;
    const std::string local = local_endpoint(fd);
    if (!local.empty() && wanted(fd, local)) {
      ::shutdown(fd, SHUT_RDWR);
      ++found;
    }
    close(fd);
  }
  return found;
}

}  // namespace

std::string endpoint(const sockaddr_storage& address) {
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
  } else {
    return "";
  }
  return std::to_string(address.ss_family) + "/" + text + "/" + std::to_string(port);
}

int shutdown_sockets(const std::set<std::string>& own, const std::set<std::string>& peers) {
  return shutdown_where([&](int fd, const std::string& local) {
    return own.count(local) != 0 || peers.count(peer_endpoint(fd)) != 0;
  });
}

int shutdown_listeners(const std::set<std::string>& own) {
  return shutdown_where([&](int fd, const std::string& local) { return own.count(local) != 0 && listens(fd); });
}

}  // namespace elastic
