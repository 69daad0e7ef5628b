// What Gloo's algorithms send and receive with: connections that were made, and proven, elsewhere.
//
// Gloo's own transport makes its connections itself and takes whoever comes. It also has a thread for each device, and
// waits that nobody can end. This one has no thread: who waits moves the bytes of all that is under way. So one thread
// at a time uses it; interrupt() may come from any.
#pragma once

#include <gloo/transport/context.h>
#include <gloo/transport/unbound_buffer.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "errors.h"
#include "interruption.h"
#include "net/reach.h"
#include "net/sockets.h"

namespace elastic {

// Whether a group of transports is aborted; a descriptor tells who waits. Shared by all of them.
class AbortSwitch {
 public:
  // Throws CollectiveError when the system has no descriptor left.
  AbortSwitch();

  // The first reason stays. Any thread, any time.
  void abort(const std::string& reason);
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  // Throws AbortedError when aborted. Costs a load else.
  void check() const;
  // For long work between waits. This outlives it.
  Interruption interruption() const {
    return {aborted_, [this] { check(); }};
  }
  // Readable from the abort on.
  int descriptor() const { return event_.get(); }
  // Gives the descriptor back, when nobody waits any more, nor will.
  void retire();

 private:
  Descriptor event_;
  mutable std::mutex mutex_;
  std::atomic<bool> aborted_{false};
  std::string reason_;
};

class Transport : public gloo::transport::Context {
 public:
  // `ranks` of the members, for errors; `sockets` by member, do not block; this one's own place has none. Waits for a
  // member of which nothing is heard for the limit of `reach` throw UnreachableError.
  Transport(int index, std::vector<int> ranks, std::vector<Descriptor> sockets,
            std::shared_ptr<AbortSwitch> abort_switch, Reach reach);

  std::unique_ptr<gloo::transport::UnboundBuffer> createUnboundBuffer(void* ptr, size_t bytes) override;
  // Throws: there are none.
  std::unique_ptr<gloo::transport::Pair>& createPair(int member) override;

  // When the collective that the calling thread is about to begin must be over. Waits end then with CollectiveTimeout.
  void set_deadline(std::chrono::steady_clock::time_point deadline) { deadline_ = deadline; }
  // Throws CollectiveError when what went before was not finished: the connections are of no use then.
  void check() const;
  // Moves what can be moved without waiting. For those who compute while messages are under way. Throws AbortedError.
  void move_some();
  // Lets the peers see the end of their connections. Notes of whom nothing was heard lately. Any thread, any time.
  void disconnect();

 private:
  class Buffer;

  // Messages of one buffer in one direction. A wait is for one of them, as an algorithm has several under way.
  struct Count {
    int under_way = 0;
    int done = 0;  // and not waited for yet

    void finish() {
      --under_way;
      ++done;
    }
  };
  // Before each message.
  struct Head {
    uint64_t tag;  // what Gloo calls a slot
    uint64_t bytes;
  };
  struct Outgoing {
    Buffer* buffer;
    Head head;
    const char* data;
    size_t sent;  // of head and data
  };
  struct Incoming {
    Buffer* buffer;
    uint64_t tag;
    char* data;
    size_t bytes;
  };
  struct Early {  // came before it was asked for
    uint64_t tag;
    std::unique_ptr<char[]> data;
    size_t bytes;
  };
  struct Link {
    Descriptor socket;
    std::deque<Outgoing> outgoing;
    std::deque<Incoming> incoming;  // asked for
    std::deque<Early> early;
    // The message that is being received: its head, and where it goes.
    Head head{};
    size_t head_bytes = 0;  // there are of it
    char* into = nullptr;
    size_t into_bytes = 0;
    Buffer* into_buffer = nullptr;  // none: it is early
    Silence silence;

    bool busy() const { return !outgoing.empty() || !incoming.empty(); }
  };

  Link& link(int member) { return links_[static_cast<size_t>(member)]; }
  void post_send(Buffer* buffer, int member, uint64_t tag, const char* data, size_t bytes);
  void post_receive(Buffer* buffer, int member, uint64_t tag, char* data, size_t bytes);
  void forget(Buffer* buffer);
  void push(int member);
  void pull(int member);
  void place_message(int member);
  // Until one of these is done, which it takes.
  void wait(Count& messages);
  bool move(int wait_ms);
  // `error`: that its connection has come to; 0: it was closed.
  [[noreturn]] void lost(int member, int error);
  // Looks whether those of whom something is awaited are still there.
  void look(std::chrono::steady_clock::time_point now);
  void activate(int member);

  const std::vector<int> ranks_;
  const std::shared_ptr<AbortSwitch> switch_;
  std::vector<Link> links_;
  std::vector<int> active_;  // members whose links are, or lately were, busy
  std::vector<char> is_active_;
  std::string broken_;
  std::chrono::steady_clock::time_point deadline_ = std::chrono::steady_clock::time_point::max();
  const Reach reach_;
  std::chrono::steady_clock::time_point next_look_;
};

}  // namespace elastic
