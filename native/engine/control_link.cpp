#include "engine/control_link.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "errors.h"
#include "net/sockets.h"
#include "net/wire.h"

namespace elastic {
namespace {

constexpr size_t kMostBytes = size_t{256} << 20;
constexpr int kSliceMs = 5;

}  // namespace

ControlLink::ControlLink(Identity self, int size, Reach reach)
    : self_(std::move(self)),
      rank_(self_.rank),
      size_(size),
      reach_(std::move(reach)),
      next_look_(reach_.limited() ? Clock::time_point::min() : Clock::time_point::max()),
      event_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      by_rank_(static_cast<size_t>(size), SIZE_MAX) {
  if (!event_.open() || !epoll_.open()) throw CollectiveError("cannot make the engine's descriptors: " + errno_text());
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = UINT64_MAX;
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, event_.get(), &event);
}

void ControlLink::close() {
  peers_.clear();
  listener_ = Descriptor();
  epoll_ = Descriptor();
}

std::string ControlLink::listen(const std::string& host, PortRange ports) {
  if (rank_ != 0 || size_ == 1) return "";
  require_descriptors(static_cast<size_t>(size_), "connections to " + std::to_string(size_ - 1) + " other workers");
  auto [listener, port] = listen_on(host, ports);
  listener_ = std::move(listener);
  Writer writer;
  writer.text(host);
  writer.number(port);
  return writer.take();
}

void ControlLink::connect(const std::string& where, Clock::time_point deadline, const Check& check) {
  if (size_ == 1) return;
  std::vector<Wanted> wanted;
  if (rank_ == 0) {
    for (int other = 1; other < size_; ++other) wanted.push_back({other, "", false, {}});
  } else {
    Reader reader(where);
    const std::string host(reader.text());
    wanted.push_back({0, "", true, {host, static_cast<uint16_t>(reader.number())}});
  }
  std::vector<Descriptor> sockets = shake_hands(self_, listener_.get(), wanted, deadline, check, reach_);
  listener_ = Descriptor();
  for (size_t i = 0; i < wanted.size(); ++i) add(wanted[i].rank, std::move(sockets[i]));
}

void ControlLink::add(int rank, Descriptor socket) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = peers_.size();
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket.get(), &event) != 0) {
    throw CollectiveError("cannot watch a connection: " + errno_text());
  }
  by_rank_[static_cast<size_t>(rank)] = peers_.size();
  peers_.push_back({rank, std::move(socket), {}, {}, {}});
  peers_.back().silence.begin(peers_.back().socket.get(), reach_);
}

void ControlLink::lost(const Peer& peer) const {
  const std::string who = "rank " + std::to_string(peer.rank);
  if (says_unreachable(peer.error)) {
    give_up(reach_, peer.rank, who + " cannot be reached any more: " + std::strerror(peer.error));
  }
  throw CollectiveError(who + " has closed its connection");
}

void ControlLink::post(int rank, std::string_view bytes) {
  Peer& peer = peers_[by_rank_[static_cast<size_t>(rank)]];
  if (bytes.size() > kMostBytes) {
    throw CollectiveError("cannot send rank " + std::to_string(rank) + " a message of " + std::to_string(bytes.size()) +
                          " bytes: submit fewer operations at a time, or shorter names");
  }
  const auto size = static_cast<uint32_t>(bytes.size());
  peer.outgoing.append(reinterpret_cast<const char*>(&size), sizeof(size));
  peer.outgoing.append(bytes);
  flush(peer);
}

void ControlLink::send(int rank, std::string_view bytes, const Check& check) {
  Peer& peer = peers_[by_rank_[static_cast<size_t>(rank)]];
  post(rank, bytes);
  while (!peer.outgoing.empty()) {
    if (peer.gone && peer.error != 0) lost(peer);
    check();
    const auto time = Clock::now();
    if (look_is_due(time)) look(time, true);
    wait_to_send(peer);
    flush(peer);
  }
}

void ControlLink::flush(Peer& peer) {
  while (peer.sent < peer.outgoing.size()) {
    const ssize_t now =
        ::send(peer.socket.get(), peer.outgoing.data() + peer.sent, peer.outgoing.size() - peer.sent, MSG_NOSIGNAL);
    if (now > 0) {
      peer.sent += static_cast<size_t>(now);
      continue;
    }
    if (errno == EINTR) continue;
    if (errno == EAGAIN) break;
    peer.gone = true;
    peer.error = errno;
    return;
  }
  if (peer.sent == peer.outgoing.size()) {
    peer.outgoing = std::string();
    peer.sent = 0;
  }
  const bool watch = !peer.outgoing.empty();
  if (watch == peer.watched) return;
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  if (watch) event.events |= EPOLLOUT;
  event.data.u64 = by_rank_[static_cast<size_t>(peer.rank)];
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, peer.socket.get(), &event) != 0) {
    throw CollectiveError("cannot watch a connection: " + errno_text());
  }
  peer.watched = watch;
}

void ControlLink::wait_to_send(const Peer& to) {
  std::vector<pollfd> polled;
  for (const Peer& peer : peers_) {
    // A peer that has sent a whole message of the greatest length is about to receive.
    const bool has_room = !peer.gone && peer.received.size() < kMostBytes + sizeof(uint32_t);
    const int events = (has_room ? POLLIN : 0) | (&peer == &to ? POLLOUT : 0);
    polled.push_back({events == 0 ? -1 : peer.socket.get(), static_cast<short>(events), 0});
  }
  if (poll(polled.data(), polled.size(), kSliceMs) <= 0) return;
  for (size_t i = 0; i < polled.size(); ++i) {
    if ((polled[i].revents & POLLIN) != 0) take(peers_[i]);
  }
}

void ControlLink::take(Peer& peer) {
  char bytes[65536];
  while (peer.received.size() < kMostBytes + sizeof(uint32_t)) {
    const ssize_t got = recv(peer.socket.get(), bytes, sizeof(bytes), 0);
    if (got > 0) {
      peer.received.append(bytes, static_cast<size_t>(got));
      if (static_cast<size_t>(got) == sizeof(bytes)) continue;
      return;
    }
    if (got < 0 && errno == EINTR) continue;
    if (got == 0 || errno != EAGAIN) {
      peer.gone = true;
      peer.error = got == 0 ? 0 : errno;
    }
    return;
  }
}

std::vector<ControlLink::Frame> ControlLink::receive(int timeout_ms) {
  const auto has_message = [](const Peer& peer) {
    uint32_t size;
    if (peer.received.size() < sizeof(size)) return false;
    std::memcpy(&size, peer.received.data(), sizeof(size));
    return size > kMostBytes || peer.received.size() - sizeof(size) >= size;
  };
  std::vector<Frame> frames;
  epoll_event events[64];
  // Does not wait if messages have arrived while this rank was sending.
  if (std::any_of(peers_.begin(), peers_.end(), has_message)) timeout_ms = 0;
  const int count = epoll_wait(epoll_.get(), events, 64, timeout_ms);
  for (int i = 0; i < count; ++i) {
    if (events[i].data.u64 == UINT64_MAX) {
      uint64_t ignored;
      [[maybe_unused]] const ssize_t got = read(event_.get(), &ignored, sizeof(ignored));
      continue;
    }
    take(peers_[events[i].data.u64]);
  }
  for (Peer& peer : peers_) {
    if (!peer.outgoing.empty() && !peer.gone) flush(peer);
  }
  for (Peer& peer : peers_) {
    size_t at = 0;
    uint32_t size;
    while (peer.received.size() - at >= sizeof(size)) {
      std::memcpy(&size, peer.received.data() + at, sizeof(size));
      if (size > kMostBytes) throw CollectiveError("rank " + std::to_string(peer.rank) + " sent an invalid message");
      if (peer.received.size() - at - sizeof(size) < size) break;
      frames.push_back({peer.rank, peer.received.substr(at + sizeof(size), size)});
      at += sizeof(size) + size;
    }
    peer.received.erase(0, at);
  }
  // Messages that arrived before the end of a connection are returned first.
  if (frames.empty()) {
    for (const Peer& peer : peers_) {
      if (peer.gone) lost(peer);
    }
  }
  return frames;
}

std::map<int, std::string> ControlLink::receive_all(Clock::time_point deadline, const Check& check) {
  std::map<int, std::string> received;
  while (received.size() < peers_.size()) {
    check();
    const auto now = Clock::now();
    if (look_is_due(now)) look(now, true);
    if (now >= deadline) {
      std::vector<int> missing;
      for (const Peer& peer : peers_) {
        if (received.count(peer.rank) == 0) missing.push_back(peer.rank);
      }
      std::sort(missing.begin(), missing.end());
      throw CollectiveTimeout("no message arrived in time from " + named(missing));
    }
    for (Frame& frame : receive(kSliceMs)) {
      if (!received.emplace(frame.rank, std::move(frame.bytes)).second) {
        throw CollectiveError("rank " + std::to_string(frame.rank) + " sent an invalid message");
      }
    }
  }
  return received;
}

void ControlLink::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(event_.get(), &one, sizeof(one));
}

void ControlLink::disconnect() {
  listener_ = Descriptor();  // ranks that were not accepted yet notice it, too
  for (const Peer& peer : peers_) {
    if (is_suspicious(peer.socket.get(), reach_)) reach_.found->add({peer.rank});
    shutdown(peer.socket.get(), SHUT_RDWR);
  }
}

void ControlLink::check_peers() {
  std::vector<pollfd> polled;
  for (const Peer& peer : peers_) polled.push_back({peer.socket.get(), POLLRDHUP, 0});
  if (poll(polled.data(), polled.size(), 0) <= 0) return;
  for (size_t i = 0; i < polled.size(); ++i) {
    if ((polled[i].revents & (POLLRDHUP | POLLHUP | POLLERR)) == 0) continue;
    socklen_t length = sizeof(int);
    getsockopt(peers_[i].socket.get(), SOL_SOCKET, SO_ERROR, &peers_[i].error, &length);
    lost(peers_[i]);
  }
}

void ControlLink::look(Clock::time_point now, bool judge) {
  next_look_ = now + kLookInterval;
  Look look(reach_, rank_, now);
  for (Peer& peer : peers_) look.at(peer.rank, peer.socket.get(), peer.silence);
  if (judge) look.judge();
}

}  // namespace elastic
