#include "sockets.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "errors.h"

namespace elastic {
namespace {

// For what the program opens meanwhile.
constexpr size_t kSpareDescriptors = 64;

using NameCall = int (*)(int, sockaddr*, socklen_t*);

std::string endpoint_of(int fd, NameCall call) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  return call(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 ? endpoint(address) : "";
}

bool listens(int fd) {
  int value = 0;
  socklen_t length = sizeof(value);
  return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &value, &length) == 0 && value != 0;
}

bool is_connecting(int fd) {
  tcp_info info{};
  socklen_t length = sizeof(info);
  return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) == 0 && info.tcpi_state == TCP_SYN_SENT;
}

// The peers of sockets that wait for an answer to their SYN, by inode. getpeername() does not know them yet; the
// kernel's table does.
class ConnectingPeers {
 public:
  std::string find(ino_t inode) {
    if (!read_) {
      read("/proc/self/net/tcp");
      read("/proc/self/net/tcp6");
      read_ = true;
    }
    const auto found = peers_.find(inode);
    return found == peers_.end() ? "" : found->second;
  }

 private:
  void read(const char* path) {
    const std::unique_ptr<FILE, int (*)(FILE*)> table(std::fopen(path, "re"), std::fclose);
    if (!table) return;
    char line[512];
    while (std::fgets(line, sizeof(line), table.get()) != nullptr) {
      char hex[33];
      unsigned port = 0, state = 0;
      unsigned long inode = 0;
      if (std::sscanf(line, "%*u: %*[0-9A-Fa-f]:%*x %32[0-9A-Fa-f]:%x %x %*s %*s %*s %*s %*s %lu", hex, &port, &state,
                      &inode) == 4 &&
          state == TCP_SYN_SENT) {
        peers_[inode] = endpoint(parse(hex, port));
      }
    }
  }

  // The table prints each 32 bits of the address as the machine reads them from memory.
  static sockaddr_storage parse(const char* hex, unsigned port) {
    uint32_t words[4] = {};
    const size_t count = std::strlen(hex) / 8;
    for (size_t i = 0; i < count; ++i) {
      words[i] = static_cast<uint32_t>(std::strtoul(std::string(hex + 8 * i, 8).c_str(), nullptr, 16));
    }
    sockaddr_storage address{};
    if (count == 1) {
      auto& v4 = reinterpret_cast<sockaddr_in&>(address);
      v4.sin_family = AF_INET;
      v4.sin_port = htons(static_cast<uint16_t>(port));
      std::memcpy(&v4.sin_addr, words, sizeof(v4.sin_addr));
    } else {
      auto& v6 = reinterpret_cast<sockaddr_in6&>(address);
      v6.sin6_family = AF_INET6;
      v6.sin6_port = htons(static_cast<uint16_t>(port));
      std::memcpy(&v6.sin6_addr, words, sizeof(v6.sin6_addr));
    }
    return address;
  }

  bool read_ = false;
  std::map<ino_t, std::string> peers_;
};

bool is_socket(int descriptor) {
  constexpr char kPrefix[] = "socket:";
  char target[sizeof(kPrefix)] = "";
  const ssize_t length = readlink(("/proc/self/fd/" + std::to_string(descriptor)).c_str(), target, sizeof(target));
  return length >= static_cast<ssize_t>(sizeof(kPrefix) - 1) && std::memcmp(target, kPrefix, sizeof(kPrefix) - 1) == 0;
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

// Calls visit(descriptor, own name, peer's name) for every open socket that bears one of the names.
template <typename Visit>
void for_each_socket(const SocketNames& names, Visit visit) {
  ConnectingPeers connecting;
  for (const int descriptor : open_descriptors()) {
    // Not so much as duplicated if it is a file: closing the duplicate would end the process's locks on that file.
    if (!is_socket(descriptor)) continue;
    // Looked at through a duplicate: Gloo's thread may close the descriptor at any moment, and its number may by then
    // be somebody else's socket.
    const int fd = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) continue;
    const std::string own = endpoint_of(fd, getsockname);
    if (!own.empty()) {
      std::string peer = endpoint_of(fd, getpeername);
      struct stat status {};
      if (peer.empty() && is_connecting(fd) && fstat(fd, &status) == 0) peer = connecting.find(status.st_ino);
      if (names.own.count(own) != 0 || names.peers.count(peer) != 0) visit(fd, own, peer);
    }
    close(fd);
  }
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

int shutdown_sockets(const SocketNames& names, Which which) {
  int found = 0;
  for_each_socket(names, [&](int fd, const std::string&, const std::string&) {
    if (which == Which::kUnconnected && !listens(fd) && !is_connecting(fd)) return;
    ::shutdown(fd, SHUT_RDWR);
    ++found;
  });
  return found;
}

void require_descriptors(size_t more, const std::string& what) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const size_t open = open_descriptors().size();
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

SocketNames names_in_use(const SocketNames& names) {
  SocketNames used;
  for_each_socket(names, [&](int, const std::string& own, const std::string& peer) {
    if (names.own.count(own) != 0) used.own.insert(own);
    if (names.peers.count(peer) != 0) used.peers.insert(peer);
  });
  return used;
}

}  // namespace elastic
