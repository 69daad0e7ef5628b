// Connections between rank 0, the coordinator, and the other ranks, for the engine's small messages.
//
// One thread sends and receives; any other thread may call wake().
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

  // `self`: this rank's identity; see net/handshake.h. connect() authenticates both ends of each connection. `reach`:
  // blocking calls throw UnreachableError if an awaited peer is silent for its limit.
  ControlLink(Identity self, int size, Reach reach = {});
  ~ControlLink() = default;
  ControlLink(const ControlLink&) = delete;
  ControlLink& operator=(const ControlLink&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // On rank 0: listens, at one of the ports, and returns its address for the other ranks. On the others: returns "".
  std::string listen(const std::string& host, PortRange ports = {});
  // Connects to rank 0, or on rank 0 awaits all others; `where` is the result of rank 0's listen(). Throws
  // CollectiveTimeout, which names the missing ranks, and CollectiveError.
  void connect(const std::string& where, Clock::time_point deadline, const Check& check);

  // Sends a message to rank 0, or from rank 0. Blocks while the peer's buffers are full, and stores the messages of all
  // peers meanwhile for receive(): otherwise two ranks that send to each other would wait for each other. Throws
  // CollectiveError if the peer is gone, or the message is longer than peers accept.
  void send(int rank, std::string_view bytes, const Check& check);
  // Likewise, but never blocks, and does not fail if the peer is gone: bytes for which the peer's buffers have no room
  // are kept, and sent during receive(). Their size is about that of the names that this rank submits.
  void post(int rank, std::string_view bytes);
  // Returns the messages that have arrived, after a message, a wake() or the timeout. Throws CollectiveError if a peer
  // is gone.
  std::vector<Frame> receive(int timeout_ms);
  void wake();
  // Returns, on rank 0, one message of each other rank, by rank; on the others, one of rank 0. Throws
  // CollectiveTimeout, which names the missing ranks, and CollectiveError.
  std::map<int, std::string> receive_all(Clock::time_point deadline, const Check& check);
  // Closes all connections; wake() may still be called.
  void close();
  // Shuts down the connections, so that the peers notice. Notes ranks that have been silent lately.
  void disconnect();
  // Throws CollectiveError if a peer has closed its connection.
  void check_peers();
  // Whether it is time to check that the peers can still be reached. Never without a limit.
  bool look_is_due(Clock::time_point now) const { return now >= next_look_; }
  // Checks the peers. With `judge`, if a message of theirs is awaited, throws UnreachableError.
  void look(Clock::time_point now, bool judge);

 private:
  struct Peer {
    int rank;
    Descriptor socket;
    std::string received;  // and not returned yet; may end with a partial message
    Silence silence;
    std::string outgoing;  // posted, and not completely sent
    size_t sent = 0;       // bytes of it
    bool watched = false;  // whether the epoll reports when more of it can be sent
    bool gone = false;
    int error = 0;  // the connection's error; 0: it was closed
  };

  void add(int rank, Descriptor socket);
  // Reads the available bytes from a peer's socket.
  void take(Peer& peer);
  // Sends as many of a peer's outgoing bytes as its buffers accept.
  void flush(Peer& peer);
  // Blocks until this peer accepts bytes, any peer has sent some, or a short time has passed.
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
  std::vector<size_t> by_rank_;  // rank -> index in peers_
};

}  // namespace elastic
