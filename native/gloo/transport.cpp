#include "gloo/transport.h"

#include <gloo/transport/pair.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace elastic {
namespace {

using Clock = std::chrono::steady_clock;

// Gloo's algorithms check that there is a pair, and do not use it otherwise.
class NoPair final : public gloo::transport::Pair {
 public:
  const gloo::transport::Address& address() const override { none(); }
  void connect(const std::vector<char>&) override { none(); }
  void close() override {}
  void setSync(bool, bool) override { none(); }
  std::unique_ptr<gloo::transport::Buffer> createSendBuffer(int, void*, size_t) override { none(); }
  std::unique_ptr<gloo::transport::Buffer> createRecvBuffer(int, void*, size_t) override { none(); }
  void send(gloo::transport::UnboundBuffer*, uint64_t, size_t, size_t) override { none(); }
  void recv(gloo::transport::UnboundBuffer*, uint64_t, size_t, size_t) override { none(); }

 private:
  [[noreturn]] static void none() { throw std::logic_error("this transport has no pairs"); }
};

bool would_block() { return errno == EAGAIN || errno == EINTR; }

}  // namespace

AbortSwitch::AbortSwitch() : event_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!event_.open()) throw CollectiveError(std::string("cannot make a descriptor: ") + std::strerror(errno));
}

void AbortSwitch::abort(const std::string& reason) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (aborted_) return;
  reason_ = reason.empty() ? "aborted" : reason;
  aborted_ = true;
  if (!event_.open()) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(event_.get(), &one, sizeof(one));
}

void AbortSwitch::retire() {
  const std::lock_guard<std::mutex> lock(mutex_);
  event_ = Descriptor();
}

void AbortSwitch::check() const {
  if (!aborted()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  throw AbortedError(reason_);
}

class Transport::Buffer final : public gloo::transport::UnboundBuffer {
 public:
  Buffer(Transport& transport, void* memory, size_t bytes) : UnboundBuffer(memory, bytes), transport_(transport) {}
  ~Buffer() override { transport_.forget(this); }

  using UnboundBuffer::waitRecv;
  using UnboundBuffer::waitSend;

  bool waitRecv(int* rank, std::chrono::milliseconds) override {
    transport_.wait(receives);
    if (rank != nullptr) *rank = last_source;
    return true;
  }
  bool waitSend(int* rank, std::chrono::milliseconds) override {
    transport_.wait(sends);
    if (rank != nullptr) *rank = last_target_;
    return true;
  }
  // The abort switch ends waits instead.
  void abortWaitRecv() override {}
  void abortWaitSend() override {}

  void send(int member, uint64_t tag, size_t offset, size_t bytes) override {
    last_target_ = member;
    transport_.post_send(this, member, tag, static_cast<const char*>(ptr) + offset, counted(offset, bytes));
  }
  void recv(int member, uint64_t tag, size_t offset, size_t bytes) override {
    transport_.post_receive(this, member, tag, static_cast<char*>(ptr) + offset, counted(offset, bytes));
  }
  void recv(std::vector<int> members, uint64_t tag, size_t offset, size_t bytes) override {
    if (members.size() != 1) throw std::logic_error("no algorithm in use receives from any of several members");
    recv(members[0], tag, offset, bytes);
  }

  Count sends, receives;
  int last_source = -1;

 private:
  size_t counted(size_t offset, size_t bytes) const {
    if (offset > size || (bytes != kUnspecifiedByteCount && bytes > size - offset)) {
      throw std::logic_error("a message reaches beyond its buffer");
    }
    return bytes == kUnspecifiedByteCount ? size - offset : bytes;
  }

  Transport& transport_;
  int last_target_ = -1;
};

Transport::Transport(int index, std::vector<int> ranks, std::vector<Descriptor> sockets,
                     std::shared_ptr<AbortSwitch> abort_switch, Reach reach)
    : Context(index, static_cast<int>(ranks.size())),
      ranks_(std::move(ranks)),
      switch_(std::move(abort_switch)),
      links_(sockets.size()),
      is_active_(sockets.size(), 0),
      reach_(std::move(reach)),
      next_look_(reach_.limited() ? Clock::time_point::min() : Clock::time_point::max()) {
  for (size_t i = 0; i < sockets.size(); ++i) {
    if (sockets[i].open()) pairs_[i] = std::make_unique<NoPair>();
    links_[i].socket = std::move(sockets[i]);
  }
}

std::unique_ptr<gloo::transport::UnboundBuffer> Transport::createUnboundBuffer(void* memory, size_t bytes) {
  return std::make_unique<Buffer>(*this, memory, bytes);
}

std::unique_ptr<gloo::transport::Pair>& Transport::createPair(int) {
  throw std::logic_error("this transport has no pairs");
}

void Transport::check() const {
  switch_->check();
  if (!broken_.empty()) throw CollectiveError(broken_);
}

void Transport::disconnect() {
  for (size_t member = 0; member < links_.size(); ++member) {
    const int socket = links_[member].socket.get();
    if (socket < 0) continue;
    if (is_suspicious(socket, reach_)) reach_.found->add({ranks_[member]});
    shutdown(socket, SHUT_RDWR);
  }
}

void Transport::lost(int member, int error) {
  const int other = ranks_[static_cast<size_t>(member)];
  const bool unreachable = says_unreachable(error);
  broken_ = "rank " + std::to_string(other) +
            (unreachable ? std::string(" cannot be reached any more: ") + std::strerror(error)
                         : " has closed its connection");
  switch_->check();  // unless this end was aborted
  if (unreachable) give_up(reach_, other, broken_);
  throw CollectiveError(broken_);
}

void Transport::look(Clock::time_point now) {
  next_look_ = now + kLookInterval;
  Look look(reach_, ranks_[static_cast<size_t>(rank)], now);
  for (const int member : active_) {
    Link& one = link(member);
    if (!one.busy()) continue;
    look.at(ranks_[static_cast<size_t>(member)], one.socket.get(), one.silence);
  }
  try {
    look.judge();
  } catch (const UnreachableError& error) {
    broken_ = error.what();
    throw;
  }
}

void Transport::activate(int member) {
  char& active = is_active_[static_cast<size_t>(member)];
  if (active == 0) active_.push_back(member);
  active = 1;
  link(member).silence.begin(link(member).socket.get(), reach_);
}

void Transport::post_send(Buffer* buffer, int member, uint64_t tag, const char* data, size_t bytes) {
  check();
  link(member).outgoing.push_back({buffer, {tag, bytes}, data, 0});
  ++buffer->sends.under_way;
  activate(member);
  if (link(member).outgoing.size() == 1) push(member);
}

void Transport::post_receive(Buffer* buffer, int member, uint64_t tag, char* data, size_t bytes) {
  check();
  Link& from = link(member);
  ++buffer->receives.under_way;
  from.incoming.push_back({buffer, tag, data, bytes});
  activate(member);
  const auto early =
      std::find_if(from.early.begin(), from.early.end(), [&](const Early& one) { return one.tag == tag; });
  // Messages with the same tag match the receives in the order in which these were posted.
  if (early == from.early.end()) return;
  if (early->bytes != bytes) {
    broken_ = "rank " + std::to_string(ranks_[static_cast<size_t>(member)]) + " sent a message of another size";
    throw CollectiveError(broken_);
  }
  const bool arriving = from.head_bytes == sizeof(Head) && from.into_buffer == nullptr &&
                        &*early == &from.early.back() && from.into_bytes > 0;
  const size_t there = arriving ? bytes - from.into_bytes : bytes;
  if (there != 0) std::memcpy(data, early->data.get(), there);
  from.early.erase(early);
  if (arriving) {
    from.into = data + there;
    from.into_buffer = buffer;
    std::rotate(from.incoming.begin(), from.incoming.end() - 1, from.incoming.end());
    return;
  }
  from.incoming.pop_back();
  buffer->receives.finish();
  buffer->last_source = member;
}

// If a buffer is destroyed before its messages are transferred, the state of the connections is undefined.
void Transport::forget(Buffer* buffer) {
  if (buffer->sends.under_way == 0 && buffer->receives.under_way == 0) return;
  if (broken_.empty()) broken_ = "a collective before this one was not finished";
  for (Link& one : links_) {
    const auto is_its = [&](const auto& message) { return message.buffer == buffer; };
    one.outgoing.erase(std::remove_if(one.outgoing.begin(), one.outgoing.end(), is_its), one.outgoing.end());
    one.incoming.erase(std::remove_if(one.incoming.begin(), one.incoming.end(), is_its), one.incoming.end());
  }
}

void Transport::push(int member) {
  Link& to = link(member);
  while (!to.outgoing.empty()) {
    switch_->check();
    Outgoing& message = to.outgoing.front();
    iovec parts[2];
    int count = 0;
    if (message.sent < sizeof(Head)) {
      parts[count++] = {reinterpret_cast<char*>(&message.head) + message.sent, sizeof(Head) - message.sent};
    }
    const size_t done = message.sent > sizeof(Head) ? message.sent - sizeof(Head) : 0;
    if (done < message.head.bytes) {
      parts[count++] = {const_cast<char*>(message.data) + done,
                        std::min(kUninterruptedBytes, message.head.bytes - done)};
    }
    msghdr all{};
    all.msg_iov = parts;
    all.msg_iovlen = static_cast<size_t>(count);
    const ssize_t sent = sendmsg(to.socket.get(), &all, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (would_block()) return;
      lost(member, errno);
    }
    message.sent += static_cast<size_t>(sent);
    if (message.sent < sizeof(Head) + message.head.bytes) continue;
    message.buffer->sends.finish();
    to.outgoing.pop_front();
  }
}

// Finds the destination of a message whose header has arrived.
void Transport::place_message(int member) {
  Link& from = link(member);
  const auto asked = std::find_if(from.incoming.begin(), from.incoming.end(),
                                  [&](const Incoming& one) { return one.tag == from.head.tag; });
  if (asked == from.incoming.end()) {
    from.early.push_back(
        {from.head.tag, std::unique_ptr<char[]>(new char[std::max<uint64_t>(from.head.bytes, 1)]), from.head.bytes});
    from.into = from.early.back().data.get();
    from.into_buffer = nullptr;
  } else {
    if (asked->bytes != from.head.bytes) {
      broken_ = "rank " + std::to_string(ranks_[static_cast<size_t>(member)]) + " sent a message of another size";
      throw CollectiveError(broken_);
    }
    from.into = asked->data;
    from.into_buffer = asked->buffer;
    // It stays first in the queue until it is received.
    std::rotate(from.incoming.begin(), asked, asked + 1);
  }
  from.into_bytes = from.head.bytes;
}

// Receives while there are posted receives. Other messages stay in the kernel's buffers, which blocks their sender.
void Transport::pull(int member) {
  Link& from = link(member);
  while (!from.incoming.empty()) {
    if (from.head_bytes < sizeof(Head)) {
      const ssize_t got = recv(from.socket.get(), reinterpret_cast<char*>(&from.head) + from.head_bytes,
                               sizeof(Head) - from.head_bytes, MSG_DONTWAIT);
      if (got < 0 && would_block()) return;
      if (got <= 0) lost(member, got == 0 ? 0 : errno);
      from.head_bytes += static_cast<size_t>(got);
      if (from.head_bytes < sizeof(Head)) continue;
      place_message(member);
    }
    while (from.into_bytes > 0) {
      // While a peer keeps sending, this never waits.
      switch_->check();
      const ssize_t got =
          recv(from.socket.get(), from.into, std::min(kUninterruptedBytes, from.into_bytes), MSG_DONTWAIT);
      if (got < 0 && would_block()) return;
      if (got <= 0) lost(member, got == 0 ? 0 : errno);
      from.into += got;
      from.into_bytes -= static_cast<size_t>(got);
    }
    from.head_bytes = 0;
    if (from.into_buffer != nullptr) {
      from.into_buffer->receives.finish();
      from.into_buffer->last_source = member;
      from.incoming.pop_front();
    }
  }
}

void Transport::wait(Count& messages) {
  check();
  if (messages.done == 0 && messages.under_way == 0) throw std::logic_error("a wait for a message that nobody began");
  while (messages.done == 0) {
    const auto now = Clock::now();
    if (now >= next_look_) look(now);
    int wait_ms = -1;
    const auto until = std::min(deadline_, next_look_);
    if (until != Clock::time_point::max()) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - now).count();
      wait_ms = static_cast<int>(std::clamp<int64_t>(left + 1, 0, 3'600'000));
    }
    if (!move(wait_ms) && Clock::now() >= deadline_) throw CollectiveTimeout("");
  }
  --messages.done;
}

void Transport::move_some() {
  switch_->check();
  if (!active_.empty()) move(0);
}

// Sends and receives bytes of the messages in flight, waiting at most `wait_ms`. Returns whether there were any.
bool Transport::move(int wait_ms) {
  std::vector<pollfd> polled{{switch_->descriptor(), POLLIN, 0}};
  std::vector<int> members;
  size_t kept = 0;
  for (const int member : active_) {
    const Link& one = link(member);
    if (!one.busy()) {
      is_active_[static_cast<size_t>(member)] = 0;
      continue;
    }
    active_[kept++] = member;
    const int events = (one.outgoing.empty() ? 0 : POLLOUT) | (one.incoming.empty() ? 0 : POLLIN);
    polled.push_back({one.socket.get(), static_cast<short>(events), 0});
    members.push_back(member);
  }
  active_.resize(kept);
  if (poll(polled.data(), polled.size(), wait_ms) <= 0) return false;
  if (polled[0].revents != 0) switch_->check();
  for (size_t i = 0; i < members.size(); ++i) {
    const short events = polled[i + 1].revents;
    if (events == 0) continue;
    if ((events & ~POLLIN) != 0 && !link(members[i]).outgoing.empty()) push(members[i]);
    if ((events & ~POLLOUT) != 0) pull(members[i]);
  }
  return true;
}

}  // namespace elastic
