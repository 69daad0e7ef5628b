#include "control_link.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <set>
#include <utility>

#include "errors.h"
#include "sockets.h"
#include "wire.h"

namespace elastic {
namespace {

constexpr size_t kMostBytes = size_t{256} << 20;
constexpr int kSliceMs = 5;
// A stranger on the port that says nothing for so long is sent away.
constexpr std::chrono::seconds kHelloTime{5};
constexpr uint32_t kGreeting = 0xe1a57001;

std::string reason() { return std::strerror(errno); }

struct Found {
  sockaddr_storage address{};
  socklen_t length = 0;
};

Found resolve(const std::string& host, const std::string& port, bool passive) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = passive ? AI_PASSIVE : 0;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &list);
  if (error != 0) throw CollectiveError("cannot resolve " + host + ": " + gai_strerror(error));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(list, freeaddrinfo);
  Found found;
  found.length = list->ai_addrlen;
  std::memcpy(&found.address, list->ai_addr, list->ai_addrlen);
  return found;
}

struct Descriptor {
  int fd = -1;
  Descriptor() = default;
  explicit Descriptor(int descriptor) : fd(descriptor) {}
  Descriptor(Descriptor&& other) noexcept : fd(other.release()) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
  int release() { return std::exchange(fd, -1); }
};

int milliseconds_to(ControlLink::Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - ControlLink::Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, kSliceMs));
}

// "rank 3", "ranks 3, 5".
std::string named(const std::vector<int>& ranks) {
  constexpr size_t kMostNamed = 20;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < std::min(ranks.size(), kMostNamed); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  if (ranks.size() > kMostNamed) text += " and " + std::to_string(ranks.size() - kMostNamed) + " more";
  return text;
}

// Who dials says: greeting, secret, rank.
constexpr size_t kSecretBytes = 16;
constexpr size_t kHelloBytes = sizeof(kGreeting) + kSecretBytes + sizeof(int32_t);

}  // namespace

ControlLink::ControlLink(int rank, int size) : rank_(rank), size_(size), by_rank_(static_cast<size_t>(size), SIZE_MAX) {
  event_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  if (event_ < 0 || epoll_ < 0) {
    const std::string why = reason();
    if (event_ >= 0) ::close(event_);
    throw CollectiveError("cannot make the engine's descriptors: " + why);
  }
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = UINT64_MAX;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, event_, &event);
}

ControlLink::~ControlLink() {
  close();
  ::close(event_);
}

void ControlLink::close() {
  for (const Peer& peer : peers_) ::close(peer.socket);
  peers_.clear();
  for (int* const fd : {&listener_, &epoll_}) {
    if (*fd >= 0) ::close(std::exchange(*fd, -1));
  }
}

std::string ControlLink::listen(const std::string& host) {
  if (rank_ != 0 || size_ == 1) return "";
  require_descriptors(static_cast<size_t>(size_), "connections to " + std::to_string(size_ - 1) + " other workers");
  secret_.resize(kSecretBytes);
  if (getrandom(secret_.data(), kSecretBytes, 0) != static_cast<ssize_t>(kSecretBytes)) {
    throw CollectiveError("cannot get random bytes: " + reason());
  }
  Found own = resolve(host, "0", true);
  listener_ = socket(own.address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (listener_ < 0 || bind(listener_, reinterpret_cast<sockaddr*>(&own.address), own.length) != 0 ||
      ::listen(listener_, SOMAXCONN) != 0 ||
      getsockname(listener_, reinterpret_cast<sockaddr*>(&own.address), &(own.length = sizeof(own.address))) != 0) {
    throw CollectiveError("cannot listen on " + host + ": " + reason());
  }
  const in_port_t port = own.address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(own.address).sin6_port
                                                           : reinterpret_cast<sockaddr_in&>(own.address).sin_port;
  Writer writer;
  writer.text(host);
  writer.number(ntohs(port));
  writer.raw(secret_);
  return writer.take();
}

void ControlLink::connect(const std::string& where, Clock::time_point deadline, const Check& check) {
  if (size_ == 1) return;
  if (rank_ == 0) {
    accept_all(deadline, check);
    ::close(listener_);
    listener_ = -1;
  } else {
    dial(where, deadline, check);
  }
}

void ControlLink::add(int rank, int socket) {
  const int yes = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = peers_.size();
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, socket, &event) != 0) {
    ::close(socket);
    throw CollectiveError("cannot watch a connection: " + reason());
  }
  by_rank_[static_cast<size_t>(rank)] = peers_.size();
  peers_.push_back({rank, socket, {}});
}

void ControlLink::accept_all(Clock::time_point deadline, const Check& check) {
  struct Guest {
    Descriptor socket;
    std::string said;
    Clock::time_point until;
  };
  std::vector<Guest> guests;
  while (peers_.size() + 1 < static_cast<size_t>(size_)) {
    check();
    if (Clock::now() >= deadline) {
      std::vector<int> missing;
      for (int other = 1; other < size_; ++other) {
        if (by_rank_[static_cast<size_t>(other)] == SIZE_MAX) missing.push_back(other);
      }
      throw CollectiveTimeout("cannot connect in time to " + named(missing));
    }
    std::vector<pollfd> polled{{listener_, POLLIN, 0}};
    for (const Guest& guest : guests) polled.push_back({guest.socket.fd, POLLIN, 0});
    poll(polled.data(), polled.size(), milliseconds_to(deadline));
    while (true) {
      const int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (fd < 0) break;
      guests.push_back({Descriptor(fd), {}, Clock::now() + kHelloTime});
    }
    std::vector<Guest> waiting;
    for (Guest& guest : guests) {
      char bytes[kHelloBytes];
      const ssize_t got = recv(guest.socket.fd, bytes, kHelloBytes - guest.said.size(), 0);
      if (got > 0) guest.said.append(bytes, static_cast<size_t>(got));
      const bool over = got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR) || Clock::now() > guest.until;
      if (guest.said.size() == kHelloBytes) {
        int32_t rank;
        std::memcpy(&rank, guest.said.data() + sizeof(kGreeting) + kSecretBytes, sizeof(rank));
        const bool known = std::memcmp(guest.said.data(), &kGreeting, sizeof(kGreeting)) == 0 &&
                           guest.said.compare(sizeof(kGreeting), kSecretBytes, secret_) == 0;
        if (known && rank > 0 && rank < size_ && by_rank_[static_cast<size_t>(rank)] == SIZE_MAX) {
          add(rank, guest.socket.release());
        }
      } else if (!over) {
        waiting.push_back(std::move(guest));
      }
    }
    guests.clear();
    for (Guest& guest : waiting) guests.push_back(std::move(guest));
  }
}

void ControlLink::dial(const std::string& where, Clock::time_point deadline, const Check& check) {
  Reader reader(where);
  const std::string host(reader.text());
  const std::string port = std::to_string(reader.number());
  secret_ = reader.raw(kSecretBytes);
  const Found peer = resolve(host, port, false);
  Descriptor fd(socket(peer.address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const std::string what = "cannot connect to rank 0 at " + host + ":" + port + ": ";
  if (fd.fd < 0) throw CollectiveError(what + reason());
  if (::connect(fd.fd, reinterpret_cast<const sockaddr*>(&peer.address), peer.length) != 0) {
    if (errno != EINPROGRESS) throw CollectiveError(what + reason());
    while (true) {
      check();
      if (Clock::now() >= deadline) throw CollectiveTimeout(what + "it did not answer in time");
      pollfd polled{fd.fd, POLLOUT, 0};
      if (poll(&polled, 1, milliseconds_to(deadline)) > 0) break;
    }
    int error = 0;
    socklen_t length = sizeof(error);
    getsockopt(fd.fd, SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) throw CollectiveError(what + std::strerror(error));
  }
  std::string hello(reinterpret_cast<const char*>(&kGreeting), sizeof(kGreeting));
  hello += secret_;
  const auto rank = static_cast<int32_t>(rank_);
  hello.append(reinterpret_cast<const char*>(&rank), sizeof(rank));
  // A new connection has room for these few bytes.
  if (::send(fd.fd, hello.data(), hello.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(hello.size())) {
    throw CollectiveError(what + reason());
  }
  add(0, fd.release());
}

void ControlLink::lost(int rank) const {
  throw CollectiveError("rank " + std::to_string(rank) + " has closed its connection");
}

void ControlLink::send(int rank, std::string_view bytes, const Check& check) {
  const Peer& peer = peers_[by_rank_[static_cast<size_t>(rank)]];
  const auto size = static_cast<uint32_t>(bytes.size());
  std::string frame(reinterpret_cast<const char*>(&size), sizeof(size));
  frame.append(bytes);
  size_t sent = 0;
  while (sent < frame.size()) {
    const ssize_t now = ::send(peer.socket, frame.data() + sent, frame.size() - sent, MSG_NOSIGNAL);
    if (now > 0) {
      sent += static_cast<size_t>(now);
      continue;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN) lost(rank);
    check();
    pollfd polled{peer.socket, POLLOUT, 0};
    poll(&polled, 1, kSliceMs);
  }
}

std::vector<ControlLink::Frame> ControlLink::receive(int timeout_ms) {
  std::vector<Frame> frames;
  epoll_event events[64];
  const int count = epoll_wait(epoll_, events, 64, timeout_ms);
  for (int i = 0; i < count; ++i) {
    if (events[i].data.u64 == UINT64_MAX) {
      uint64_t ignored;
      [[maybe_unused]] const ssize_t got = read(event_, &ignored, sizeof(ignored));
      continue;
    }
    Peer& peer = peers_[events[i].data.u64];
    char bytes[65536];
    while (true) {
      const ssize_t got = recv(peer.socket, bytes, sizeof(bytes), 0);
      if (got > 0) {
        peer.received.append(bytes, static_cast<size_t>(got));
        if (static_cast<size_t>(got) == sizeof(bytes)) continue;
        break;
      }
      if (got < 0 && errno == EINTR) continue;
      if (got == 0 || errno != EAGAIN) peer.gone = true;
      break;
    }
    size_t at = 0;
    uint32_t size;
    while (peer.received.size() - at >= sizeof(size)) {
      std::memcpy(&size, peer.received.data() + at, sizeof(size));
      if (size > kMostBytes) throw CollectiveError("rank " + std::to_string(peer.rank) + " sends rubbish");
      if (peer.received.size() - at - sizeof(size) < size) break;
      frames.push_back({peer.rank, peer.received.substr(at + sizeof(size), size)});
      at += sizeof(size) + size;
    }
    peer.received.erase(0, at);
  }
  // What came before the end is used first.
  if (frames.empty()) {
    for (const Peer& peer : peers_) {
      if (peer.gone) lost(peer.rank);
    }
  }
  return frames;
}

std::map<int, std::string> ControlLink::receive_all(Clock::time_point deadline, const Check& check) {
  std::map<int, std::string> received;
  while (received.size() < peers_.size()) {
    check();
    if (Clock::now() >= deadline) {
      std::vector<int> missing;
      for (const Peer& peer : peers_) {
        if (received.count(peer.rank) == 0) missing.push_back(peer.rank);
      }
      std::sort(missing.begin(), missing.end());
      throw CollectiveTimeout("nothing came in time from " + named(missing));
    }
    for (Frame& frame : receive(kSliceMs)) {
      if (!received.emplace(frame.rank, std::move(frame.bytes)).second) {
        throw CollectiveError("rank " + std::to_string(frame.rank) + " sends rubbish");
      }
    }
  }
  return received;
}

void ControlLink::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(event_, &one, sizeof(one));
}

void ControlLink::disconnect() {
  if (listener_ >= 0) ::close(std::exchange(listener_, -1));  // who was not let in yet sees it too
  for (const Peer& peer : peers_) shutdown(peer.socket, SHUT_RDWR);
}

void ControlLink::check_peers() {
  std::vector<pollfd> polled;
  for (const Peer& peer : peers_) polled.push_back({peer.socket, POLLRDHUP, 0});
  if (poll(polled.data(), polled.size(), 0) <= 0) return;
  for (size_t i = 0; i < polled.size(); ++i) {
    if ((polled[i].revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0) lost(peers_[i].rank);
  }
}

}  // namespace elastic
