// The transport of Gloo's algorithms, over connections that were established and authenticated elsewhere.
//
// Gloo's own transport connects by itself and accepts any peer. It also has a thread per device, and waits that cannot
// be ended. This one has no thread: a waiting call sends and receives for all operations in flight. So only one thread
// at a time uses it, except where noted.
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

// Aborts a group of transports, which share it. Waits watch its descriptor.
class AbortSwitch {
 public:
  // Throws CollectiveError if no descriptor is available.
  AbortSwitch();

  // The first reason is kept. Any thread, any time.
  void abort(const std::string& reason);
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  // Throws AbortedError if it is aborted. Otherwise it costs one load.
  void check() const;
  // For long work between waits. This must outlive it.
  Interruption interruption() const {
    return {aborted_, [this] { check(); }};
  }
  // Becomes readable at the abort.
  int descriptor() const { return event_.get(); }
  // Closes the descriptor, once there are no more waits.
  void retire();

 private:
  Descriptor event_;
  mutable std::mutex mutex_;
  std::atomic<bool> aborted_{false};
  std::string reason_;
};

class Transport : public gloo::transport::Context {
 public:
  // `ranks` are the members', for errors; `sockets` are non-blocking, by member, without one for this member. A wait
  // for a member that is silent for the limit of `reach` throws UnreachableError.
  Transport(int index, std::vector<int> ranks, std::vector<Descriptor> sockets,
            std::shared_ptr<AbortSwitch> abort_switch, Reach reach);

  std::unique_ptr<gloo::transport::UnboundBuffer> createUnboundBuffer(void* ptr, size_t bytes) override;
  // Throws: there are no pairs.
  std::unique_ptr<gloo::transport::Pair>& createPair(int member) override;

  // Sets the deadline of the next collective, at which its waits throw CollectiveTimeout.
  void set_deadline(std::chrono::steady_clock::time_point deadline) { deadline_ = deadline; }
  // Throws CollectiveError if an earlier collective was not finished, which makes the connections unusable.
  void check() const;
  // Sends and receives without waiting, for computations while messages are in flight. Throws AbortedError.
  void move_some();
  // Shuts down the connections, so that the peers notice. Notes ranks that have been silent lately. Any thread, any
  // time.
  void disconnect();

 private:
  class Buffer;

  // The messages of one buffer in one direction. A wait is for one of them: algorithms have several in flight.
  struct Count {
    int under_way = 0;
    int done = 0;  // without those for which a wait has returned

    void finish() {
      --under_way;
      ++done;
    }
  };
  // The header of each message.
  struct Head {
    uint64_t tag;  // Gloo's slot
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
  struct Early {  // arrived before its receive was posted
    uint64_t tag;
    std::unique_ptr<char[]> data;
    size_t bytes;
  };
  struct Link {
    Descriptor socket;
    std::deque<Outgoing> outgoing;
    std::deque<Incoming> incoming;  // posted receives
    std::deque<Early> early;
    // The message that is being received: its header, and its destination.
    Head head{};
    size_t head_bytes = 0;  // received so far
    char* into = nullptr;
    size_t into_bytes = 0;
    Buffer* into_buffer = nullptr;  // null if it is early
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
  // Waits until one of these messages is done, and takes it.
  void wait(Count& messages);
  bool move(int wait_ms);
  // `error`: its connection's error; 0: the connection was closed.
  [[noreturn]] void lost(int member, int error);
  // Checks that the awaited members can still be reached.
  void look(std::chrono::steady_clock::time_point now);
  void activate(int member);

  const std::vector<int> ranks_;
  const std::shared_ptr<AbortSwitch> switch_;
  std::vector<Link> links_;
  std::vector<int> active_;  // members whose links are, or recently were, busy
  std::vector<char> is_active_;
  std::string broken_;
  std::chrono::steady_clock::time_point deadline_ = std::chrono::steady_clock::time_point::max();
  const Reach reach_;
  std::chrono::steady_clock::time_point next_look_;
};

}  // namespace elastic
