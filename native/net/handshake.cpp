#include "net/handshake.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "errors.h"
#include "net/hmac.h"
#include "net/wire.h"

namespace elastic {
namespace {

constexpr int kLookMs = 5;
// A handshake is dropped after so long a silence. A real peer then dials again.
constexpr std::chrono::seconds kPatience{5};
// The pause before a peer that has closed the connection is dialed again, and before a failed accept is retried.
constexpr std::chrono::milliseconds kPause{20};
// The pause before a peer is dialed again that the kernel reports as unreachable, and the number of such tries.
constexpr std::chrono::milliseconds kUnreachablePause{200};
constexpr int kUnreachableTries = 3;
// The number of guests (unauthenticated connections) that are kept in addition to the awaited ones.
constexpr size_t kSpareGuests = 64;
// The number of guests accepted at a time, so that a flood of them does not delay the present ones.
constexpr int kTurn = 256;

constexpr uint32_t kGreeting = 0xe1a57002;
constexpr size_t kNonceBytes = 16;
constexpr size_t kNameBytes = 8;  // of the name's digest
// The dialing end: greeting, rank, name's digest, nonce. The listening end: nonce, MAC. Then MAC, and then welcome.
constexpr size_t kHelloBytes = 2 * sizeof(uint32_t) + kNameBytes + kNonceBytes;
constexpr size_t kAnswerBytes = kNonceBytes + kDigestBytes;
constexpr size_t kProofBytes = kDigestBytes;
constexpr size_t kWelcomeBytes = 1;

std::string digest_of(const std::string& name) { return sha256(name).substr(0, kNameBytes); }

class Handshakes {
 public:
  Handshakes(const Identity& self, int listener, const std::vector<Wanted>& wanted, const Reach& reach)
      : self_(self),
        listener_(listener),
        wanted_(wanted),
        reach_(reach),
        met_(wanted.size()),
        calls_(wanted.size()),
        left_(wanted.size()) {
    epoll_ = Descriptor(epoll_create1(EPOLL_CLOEXEC));
    if (!epoll_.open()) throw CollectiveError(std::string("cannot make a descriptor: ") + std::strerror(errno));
    for (size_t i = 0; i < wanted_.size(); ++i) {
      if (!wanted_[i].dials) awaited_[{wanted_[i].rank, digest_of(wanted_[i].name)}] = i;
    }
    if (!awaited_.empty()) watch(EPOLL_CTL_ADD, listener_, kListener, EPOLLIN);
    for (size_t i = 0; i < wanted_.size(); ++i) {
      if (wanted_[i].dials) dial(i);
    }
  }

  std::vector<Descriptor> run(Clock::time_point deadline, const Check& check) {
    auto next_look = Clock::now();
    while (left_ > 0) {
      check();
      const auto now = Clock::now();
      if (now >= deadline) throw CollectiveTimeout(too_late());
      if (now >= next_look) {
        look_after(now);
        next_look = now + std::chrono::milliseconds(kLookMs);
      }
      if (reach_.limited() && now >= heard_looked_ + kLookInterval) listen_for_signs(now).judge();
      epoll_event events[64];
      const int count = epoll_wait(epoll_.get(), events, 64, kLookMs);
      for (int i = 0; i < count && left_ > 0; ++i) {
        if (events[i].data.u64 == kListener) {
          welcome_guests();
        } else {
          const auto talk = talks_.find(events[i].data.u64);
          if (talk != talks_.end() && !go_on(talk->second)) end(talk);
        }
      }
    }
    return std::move(met_);
  }

  // Notes silent peers after another failure has ended the handshakes.
  void suspect() {
    if (reach_.limited()) listen_for_signs(Clock::now()).suspect();
  }

 private:
  enum class Step { kConnecting, kHello, kAnswer, kProof, kWelcome };
  // A connection whose handshake is not finished.
  struct Talk {
    uint64_t id;
    Descriptor socket;
    Step step;
    size_t wanted;  // if this end listens: known after the hello
    Clock::time_point until;
    std::string heard;  // the received part of the step's message
    std::string nonce;  // this end's, if it dials
    std::string transcript;
    Silence silence;
  };
  // The attempts to dial a peer so far.
  struct Call {
    int failed = 0;            // tries that failed because the peer is unreachable
    Clock::duration silent{};  // how long the peer's host has been silent
  };
  using Talks = std::map<uint64_t, Talk>;  // in the order of their beginning

  static constexpr uint64_t kListener = 0;

  void watch(int how, int fd, uint64_t id, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = id;
    if (epoll_ctl(epoll_.get(), how, fd, &event) != 0) {
      throw CollectiveError(std::string("cannot watch a connection: ") + std::strerror(errno));
    }
  }

  std::string too_late() const {
    std::vector<int> missing;
    for (size_t i = 0; i < wanted_.size(); ++i) {
      if (!met_[i].open()) missing.push_back(wanted_[i].rank);
    }
    std::sort(missing.begin(), missing.end());
    missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
    std::string text = "cannot connect in time to " + named(missing);
    if (strangers_ != 0) {
      text += "; " + std::to_string(strangers_) + " other connections were closed meanwhile";
    }
    return text;
  }

  // --- dialing ---

  std::string peer_of(size_t wanted) const {
    const Wanted& peer = wanted_[wanted];
    return "rank " + std::to_string(peer.rank) + " at " + peer.place.host + ":" + std::to_string(peer.place.port);
  }

  void dial(size_t wanted) {
    const std::string what = "cannot connect to " + peer_of(wanted) + ": ";
    const SocketAddress peer = resolve(wanted_[wanted].place);
    Descriptor socket;
    while (true) {
      socket = Descriptor(::socket(peer.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
      if (socket.open()) break;
      if (!drop_a_guest()) throw CollectiveError(what + std::strerror(errno));
    }
    if (connect(socket.get(), peer.get(), peer.length) != 0 && errno != EINPROGRESS) {
      fail(wanted, errno);
      return;
    }
    const uint64_t id = next_id_++;
    watch(EPOLL_CTL_ADD, socket.get(), id, EPOLLOUT);
    talks_.emplace(id,
                   Talk{id, std::move(socket), Step::kConnecting, wanted, Clock::time_point::max(), {}, {}, {}, {}});
  }

  // Handles a failed call: dials again later, or throws if that is useless.
  void fail(size_t wanted, int error) {
    const std::string what = "cannot connect to " + peer_of(wanted) + ": " + std::strerror(error);
    if (!says_unreachable(error)) throw CollectiveError(what);
    if (++calls_[wanted].failed >= kUnreachableTries) give_up(reach_, wanted_[wanted].rank, what);
    again_.emplace(Clock::now() + kUnreachablePause, wanted);
  }

  // Checks that the hosts of dialed peers are up: their kernels answer even while the peers themselves do not.
  Look listen_for_signs(Clock::time_point now) {
    const auto passed = counted(now - std::exchange(heard_looked_, now));
    Look look(reach_, self_.rank, now);
    for (auto& [id, talk] : talks_) {
      if (guests_.count(id) != 0) continue;
      Call& call = calls_[talk.wanted];
      if (talk.step == Step::kConnecting) {
        call.silent += passed;
      } else {
        call.silent = talk.silence.look(talk.socket.get(), reach_, now);
      }
      const Wanted& peer = wanted_[talk.wanted];
      look.add(peer.rank, call.silent, peer.place.host, own_host(talk.socket.get()));
    }
    return look;
  }

  // --- listening ---

  void welcome_guests() {
    for (int i = 0; i < kTurn; ++i) {
      Descriptor socket(accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!socket.open()) {
        if (errno == EAGAIN) return;
        if (errno == EINTR || errno == ECONNABORTED) continue;
        if ((errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) && drop_a_guest()) continue;
        // The listener would be ready again at once, and fail again.
        watch(EPOLL_CTL_MOD, listener_, kListener, 0);
        listens_again_ = Clock::now() + kPause;
        return;
      }
      if (guests_.size() >= awaited_.size() + kSpareGuests) drop_a_guest();
      const uint64_t id = next_id_++;
      watch(EPOLL_CTL_ADD, socket.get(), id, EPOLLIN);
      talks_.emplace(id, Talk{id, std::move(socket), Step::kHello, SIZE_MAX, Clock::now() + kPatience, {}, {}, {}, {}});
      guests_.insert(id);
    }
  }

  // Drops the oldest guest: a real peer needs only a moment, and dials again. Returns whether there was one.
  bool drop_a_guest() {
    if (guests_.empty()) return false;
    end(talks_.find(*guests_.begin()));
    return true;
  }

  // --- both ends ---

  void look_after(Clock::time_point now) {
    if (now >= listens_again_) {
      listens_again_ = Clock::time_point::max();
      watch(EPOLL_CTL_MOD, listener_, kListener, EPOLLIN);
    }
    while (!guests_.empty()) {
      const auto oldest = talks_.find(*guests_.begin());
      if (now < oldest->second.until) break;
      end(oldest);
    }
    while (!again_.empty() && again_.begin()->first <= now) {
      const size_t wanted = again_.begin()->second;
      again_.erase(again_.begin());
      dial(wanted);
    }
  }

  // Ends a failed handshake.
  void end(Talks::iterator talk) {
    if (guests_.erase(talk->first) != 0) {
      ++strangers_;
    } else {
      // The peer has many guests, and dropped this one; or it is ending, and will refuse the next call.
      again_.emplace(Clock::now() + kPause, talk->second.wanted);
    }
    talks_.erase(talk);
  }

  void met(Talk& talk) {
    const int yes = 1;
    setsockopt(talk.socket.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, talk.socket.get(), nullptr);
    met_[talk.wanted] = std::move(talk.socket);
    --left_;
  }

  static bool say(const Talk& talk, const std::string& bytes) {
    // The buffer of a new connection has room for these few bytes.
    return send(talk.socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
  }

  // The authenticated data: both ranks and their roles, the purpose, the nonces and the addresses.
  std::string transcript(const Talk& talk, bool dialled_here, const std::string& dialler_nonce,
                         const std::string& listener_nonce) const {
    const Wanted& peer = wanted_[talk.wanted];
    const std::string own = own_end(talk.socket.get()), far = far_end(talk.socket.get());
    Writer writer;
    writer.text(self_.purpose);
    writer.text(peer.name);
    writer.number(static_cast<uint64_t>(dialled_here ? self_.rank : peer.rank));
    writer.number(static_cast<uint64_t>(dialled_here ? peer.rank : self_.rank));
    writer.text(dialler_nonce);
    writer.text(listener_nonce);
    writer.text(dialled_here ? own : far);
    writer.text(dialled_here ? far : own);
    return writer.take();
  }

  std::string proof(const char* role, const std::string& transcript) const {
    return hmac_sha256(self_.key, "elastic_driver handshake " + std::string(role) + "\n" + transcript);
  }

  // Continues a handshake. Returns false if it has failed.
  bool go_on(Talk& talk) {
    if (talk.step == Step::kConnecting) return begin(talk);
    const size_t wanted_bytes = talk.step == Step::kHello    ? kHelloBytes
                                : talk.step == Step::kAnswer ? kAnswerBytes
                                : talk.step == Step::kProof  ? kProofBytes
                                                             : kWelcomeBytes;
    // Reads no byte beyond the message: the rest is for the user of the connection.
    char bytes[std::max(kHelloBytes, kAnswerBytes)];
    const ssize_t got = recv(talk.socket.get(), bytes, wanted_bytes - talk.heard.size(), 0);
    if (got <= 0) return got < 0 && (errno == EAGAIN || errno == EINTR);
    talk.heard.append(bytes, static_cast<size_t>(got));
    if (talk.heard.size() < wanted_bytes) return true;
    const std::string heard = std::exchange(talk.heard, {});
    switch (talk.step) {
      case Step::kHello:
        return hear_hello(talk, heard);
      case Step::kAnswer:
        return hear_answer(talk, heard);
      case Step::kProof:
        if (!same_secret(heard, proof("dials", talk.transcript))) return false;
        if (met_[talk.wanted].open() || !say(talk, "!")) return false;
        break;
      default:
        break;
    }
    const uint64_t id = talk.id;
    met(talk);
    guests_.erase(id);
    talks_.erase(id);
    return true;
  }

  bool begin(Talk& talk) {
    int error = 0;
    socklen_t length = sizeof(error);
    getsockopt(talk.socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) {
      const size_t wanted = talk.wanted;
      talks_.erase(talk.id);
      fail(wanted, error);
      return true;
    }
    // The peer no longer listens, and the kernel has given its port to this end, which has connected to itself.
    if (own_end(talk.socket.get()) == far_end(talk.socket.get())) return false;
    talk.nonce = random_bytes(kNonceBytes);
    const uint32_t head[2] = {kGreeting, static_cast<uint32_t>(self_.rank)};
    const std::string hello = std::string(reinterpret_cast<const char*>(head), sizeof(head)) +
                              digest_of(wanted_[talk.wanted].name) + talk.nonce;
    if (!say(talk, hello)) return false;
    talk.step = Step::kAnswer;
    watch(EPOLL_CTL_MOD, talk.socket.get(), talk.id, EPOLLIN);
    return true;
  }

  bool hear_hello(Talk& talk, const std::string& hello) {
    uint32_t head[2];
    std::memcpy(head, hello.data(), sizeof(head));
    if (head[0] != kGreeting) return false;
    const auto found = awaited_.find({static_cast<int>(head[1]), hello.substr(sizeof(head), kNameBytes)});
    if (found == awaited_.end()) return false;
    talk.wanted = found->second;
    const std::string mine = random_bytes(kNonceBytes);
    talk.transcript = transcript(talk, false, hello.substr(sizeof(head) + kNameBytes), mine);
    talk.step = Step::kProof;
    return say(talk, mine + proof("listens", talk.transcript));
  }

  bool hear_answer(Talk& talk, const std::string& answer) {
    talk.transcript = transcript(talk, true, talk.nonce, answer.substr(0, kNonceBytes));
    if (!same_secret(answer.substr(kNonceBytes), proof("listens", talk.transcript))) {
      throw CollectiveError("cannot connect to " + peer_of(talk.wanted) +
                            ": whoever answers there does not prove that he is this rank of this job and sees the "
                            "connection as it is seen here");
    }
    talk.step = Step::kWelcome;
    return say(talk, proof("dials", talk.transcript));
  }

  const Identity& self_;
  const int listener_;
  const std::vector<Wanted>& wanted_;
  const Reach& reach_;
  std::vector<Descriptor> met_;
  std::vector<Call> calls_;  // by wanted
  size_t left_;
  std::map<std::pair<int, std::string>, size_t> awaited_;
  Descriptor epoll_;
  Talks talks_;
  std::set<uint64_t> guests_;                       // the talks in which the peer has dialed
  std::multimap<Clock::time_point, size_t> again_;  // to dial again
  Clock::time_point listens_again_ = Clock::time_point::max();
  Clock::time_point heard_looked_ = Clock::now();  // when the hosts were last checked
  uint64_t next_id_ = kListener + 1;
  uint64_t strangers_ = 0;
};

}  // namespace

std::vector<Descriptor> shake_hands(const Identity& self, int listener, const std::vector<Wanted>& wanted,
                                    Clock::time_point deadline, const Check& check, const Reach& reach) {
  Handshakes handshakes(self, listener, wanted, reach);
  try {
    return handshakes.run(deadline, check);
  } catch (const CollectiveError&) {
    handshakes.suspect();
    throw;
  }
}

std::string named(const std::vector<int>& ranks) {
  constexpr size_t kMostNamed = 20;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < std::min(ranks.size(), kMostNamed); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  if (ranks.size() > kMostNamed) text += " and " + std::to_string(ranks.size() - kMostNamed) + " more";
  return text;
}

}  // namespace elastic
