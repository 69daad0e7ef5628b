// Connections between rank 0, which coordinates, and the other ranks, for the engine's small messages.
//
// One thread sends and receives; wake() may come from any other.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "net/handshake.h"

namespace elastic {

class ControlLink {
 public:
  struct Frame {
    int rank;
    std::string bytes;
  };

  // `self`: of this rank; see net/handshake.h. Both ends of each connection have proven themselves when connect() is
  // done. `reach`: what blocks here, for a peer of which nothing is heard for its limit, throws UnreachableError.
  ControlLink(Identity self, int size, Reach reach = {});
  ~ControlLink() = default;
  ControlLink(const ControlLink&) = delete;
  ControlLink& operator=(const ControlLink&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Rank 0: listens, at one of the ports, and returns how the others find it. The others: "".
  std::string listen(const std::string& host, PortRange ports = {});
  // Connects to rank 0, or awaits all others; `where` is what rank 0's listen() returned. Throws CollectiveTimeout,
  // naming who is missing, and CollectiveError.
  void connect(const std::string& where, Clock::time_point deadline, const Check& check);

  // To rank 0, or from rank 0. Blocks while the peer's buffers are full, and keeps what all peers send meanwhile for
  // receive(): two that send to each other would else wait for each other. Throws CollectiveError when it is gone, or
  // the message is longer than peers accept.
  void send(int rank, std::string_view bytes, const Check& check);
  // Likewise, and never blocks, nor fails when the peer is gone: what the peer's buffers do not take now is sent during
  // receive(). It is kept as long as that takes, and is about as much as the submitter's own names.
  void post(int rank, std::string_view bytes);
  // What has come, after a message, a wake() or the timeout. Throws CollectiveError when a peer is gone.
  std::vector<Frame> receive(int timeout_ms);
  void wake();
  // On rank 0, one message of each other rank, by rank; on the others, one of rank 0. Throws CollectiveTimeout, naming
  // who is missing, and CollectiveError.
  std::map<int, std::string> receive_all(Clock::time_point deadline, const Check& check);
  // Closes all connections; wake() may still be called.
  void close();
  // Lets the peers see the end of their connections. Notes of whom nothing was heard lately.
  void disconnect();
  // Throws CollectiveError when a peer has closed its connection.
  void check_peers();
  // Whether it is time to look whether the peers are still there. Never where there is no limit.
  bool look_is_due(Clock::time_point now) const { return now >= next_look_; }
  // Looks. With `judge`, as something is awaited of them, throws UnreachableError.
  void look(Clock::time_point now, bool judge);

 private:
  struct Peer {
    int rank;
    Descriptor socket;
    std::string received;  // and not given out yet; a message and what is behind it
    Silence silence;
    std::string outgoing;  // posted, and not all of it sent yet
    size_t sent = 0;       // of it
    bool watched = false;  // whether the epoll says when more of it can be sent
    bool gone = false;
    int error = 0;  // that it is gone with; 0: it was closed
  };

  void add(int rank, Descriptor socket);
  // Takes what is there from its socket.
  void take(Peer& peer);
  // Sends of what is kept for it as much as it accepts.
  void flush(Peer& peer);
  // Blocks until this one accepts bytes, any has sent some, or a moment has passed.
  void wait_to_send(const Peer& to);
  [[noreturn]] void lost(const Peer& peer) const;

  const Identity self_;
  const int rank_;
  const int size_;
  const Reach reach_;
  Clock::time_point next_look_;
  Descriptor listener_;
  Descriptor event_;
  Descriptor epoll_;
  std::vector<Peer> peers_;      // connected
  std::vector<size_t> by_rank_;  // place in peers_
};

}  // namespace elastic
