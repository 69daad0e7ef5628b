// The vectors of FIPS 180-4 and RFC 4231, and handshakes with a stranger, a relay, and a member of another round.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "errors.h"
#include "net/handshake.h"
#include "net/hmac.h"
#include "net/sockets.h"
#include "tests/tests.h"

namespace {

using elastic::Clock;
using elastic::Descriptor;
using elastic::Identity;
using elastic::Place;
using elastic::Wanted;

std::string hex(const std::string& bytes) {
  std::string text;
  for (const char byte : bytes) {
    text += "0123456789abcdef"[static_cast<unsigned char>(byte) >> 4];
    text += "0123456789abcdef"[static_cast<unsigned char>(byte) & 15];
  }
  return text;
}

// The results at both ends of a connection: "" or the error.
std::pair<std::string, std::string> meet(const Identity& dialler, const Identity& dialled,
                                         const std::function<Place(Place)>& route, double limit_s,
                                         const std::string& dialler_name = "", const std::string& dialled_name = "") {
  auto [listener, port] = elastic::listen_on("127.0.0.1");
  const Place place = route({"127.0.0.1", port});
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(limit_s));
  std::atomic<bool> over{false};
  const auto check = [&] {
    if (over) throw elastic::CollectiveError("the other end has failed");
  };
  const auto attempt = [&](const Identity& self, int fd, Wanted wanted) -> std::string {
    try {
      const auto sockets = elastic::shake_hands(self, fd, {std::move(wanted)}, end, check);
      CHECK(sockets.size() == 1 && sockets[0].open());
      return "";
    } catch (const elastic::CollectiveError& error) {
      over = true;
      return error.what();
    }
  };
  std::string first, second;
  std::thread other([&] { second = attempt(dialled, listener.get(), {dialler.rank, dialled_name, false, {}}); });
  first = attempt(dialler, -1, {dialled.rank, dialler_name, true, place});
  other.join();
  return {first, second};
}

Place direct(Place place) { return place; }

// Relays all bytes, both ways, between a connection to it and a place.
struct Relay {
  explicit Relay(Place target) : target_(std::move(target)) {
    std::tie(listener_, port) = elastic::listen_on("127.0.0.1");
    thread_ = std::thread([this] { run(); });
  }
  ~Relay() {
    over_ = true;
    thread_.join();
  }

  void run() {
    Descriptor near, far;
    while (!over_) {
      pollfd polled[3] = {{listener_.get(), POLLIN, 0}, {near.get(), POLLIN, 0}, {far.get(), POLLIN, 0}};
      poll(polled, 3, 5);
      if ((polled[0].revents & POLLIN) != 0) {
        near = Descriptor(accept(listener_.get(), nullptr, nullptr));
        const elastic::SocketAddress address = elastic::resolve(target_);
        far = Descriptor(socket(address.storage.ss_family, SOCK_STREAM, 0));
        CHECK(connect(far.get(), address.get(), address.length) == 0);
        continue;
      }
      for (int i = 1; i <= 2; ++i) {
        if (polled[i].revents == 0) continue;
        char bytes[1000];
        const ssize_t got = recv(polled[i].fd, bytes, sizeof(bytes), 0);
        if (got <= 0) {
          near = Descriptor();
          far = Descriptor();
          break;
        }
        passed += static_cast<size_t>(got);
        send(i == 1 ? far.get() : near.get(), bytes, static_cast<size_t>(got), MSG_NOSIGNAL);
      }
    }
  }

  uint16_t port = 0;
  std::atomic<size_t> passed{0};

 private:
  const Place target_;
  Descriptor listener_;
  std::atomic<bool> over_{false};
  std::thread thread_;
};

}  // namespace

void test_hmac() {
  CHECK(hex(elastic::sha256("")) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(hex(elastic::sha256("abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(hex(elastic::sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")) ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(hex(elastic::sha256(std::string(1'000'000, 'a'))) ==
        "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  // Around the length from which another block is needed.
  CHECK(hex(elastic::sha256(std::string(55, 'a'))) ==
        "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
  CHECK(hex(elastic::sha256(std::string(56, 'a'))) ==
        "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a");
  CHECK(hex(elastic::hmac_sha256(std::string(20, '\x0b'), "Hi There")) ==
        "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK(hex(elastic::hmac_sha256("Jefe", "what do ya want for nothing?")) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(hex(elastic::hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")) ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK(elastic::same_secret("abc", "abc") && !elastic::same_secret("abc", "abd") &&
        !elastic::same_secret("abc", "ab"));
}

void test_handshakes() {
  const auto [first, second] = meet({3, "key", "round 1"}, {0, "key", "round 1"}, direct, 20);
  CHECK(first.empty() && second.empty());
  // Another job, another round, another connection of the same two ranks: the listening end rejects each of them.
  const std::pair<Identity, Identity> strangers[] = {
      {{3, "key", "round 1"}, {0, "kez", "round 1"}},
      {{3, "key", "round 1"}, {0, "key", "round 2"}},
      {{3, "", "round 1"}, {0, "key", "round 1"}},
  };
  for (const auto& [dialler, dialled] : strangers) {
    const auto [why, unused] = meet(dialler, dialled, direct, 20);
    CHECK(why.find("does not prove") != std::string::npos);
    CHECK(!unused.empty());
  }
  const auto [late, also] = meet({3, "key", "round 1"}, {0, "key", "round 1"}, direct, 0.3, "cross", "global");
  CHECK(!late.empty() && !also.empty());
  // A relay passes on valid bytes, but the ends are not those of one connection.
  std::unique_ptr<Relay> relay;
  const auto [refused, left] = meet(
      {3, "key", "round 1"}, {0, "key", "round 1"},
      [&](Place place) {
        relay = std::make_unique<Relay>(place);
        return Place{"127.0.0.1", relay->port};
      },
      20);
  CHECK(refused.find("does not prove") != std::string::npos);
  CHECK(!left.empty());
  CHECK(relay->passed > 50);
}
