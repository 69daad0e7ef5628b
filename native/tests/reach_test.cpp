// The measured silence of connections, with checks at various times: of peers that are silent, that do not read, and
// that respond again.
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "errors.h"
#include "net/reach.h"
#include "net/sockets.h"
#include "tests/tests.h"

namespace {

using elastic::Descriptor;
using elastic::Look;
using elastic::Reach;
using elastic::Silence;
using Clock = Silence::Clock;
using std::chrono::milliseconds;

std::pair<Descriptor, Descriptor> connection() {
  auto [listener, port] = elastic::listen_on("127.0.0.1");
  const elastic::SocketAddress place = elastic::resolve({"127.0.0.1", port});
  Descriptor one(socket(AF_INET, SOCK_STREAM, 0));
  CHECK(connect(one.get(), place.get(), place.length) == 0);
  pollfd ready{listener.get(), POLLIN, 0};
  CHECK(poll(&ready, 1, 10'000) == 1);
  return {std::move(one), Descriptor(accept(listener.get(), nullptr, nullptr))};
}

Reach within(double seconds) {
  Reach reach;
  reach.limit = std::chrono::duration<double>(seconds);
  return reach;
}

// The error that judge() throws for a silence; "" for none.
std::string verdict(const Reach& reach, int socket, Silence& silence, Clock::time_point now) {
  Look look(reach, 1, now);
  look.at(3, socket, silence);
  try {
    look.judge();
    return "";
  } catch (const elastic::UnreachableError& error) {
    return error.what();
  }
}

void test_who_says_nothing() {
  const Reach reach = within(2);
  auto [one, other] = connection();
  Silence silence;
  auto now = Clock::now();
  // The silence begins with the first check; each later check counts a second at most, since it may be late.
  for (const int passed : {100'000, 500, 499}) {
    CHECK(verdict(reach, one.get(), silence, now).empty());
    now += milliseconds(passed);
  }
  CHECK(verdict(reach, one.get(), silence, now).empty());
  CHECK(reach.found->ranks().empty());
  now += milliseconds(500);
  const std::string text = verdict(reach, one.get(), silence, now);
  CHECK(text == "rank 3 (127.0.0.1) has acknowledged nothing to rank 1 (127.0.0.1) for 2.5 s");
  CHECK(reach.found->ranks() == std::vector<int>{3});
}

void test_who_is_heard_again() {
  const Reach reach = within(2);
  auto [one, other] = connection();
  Silence silence;
  auto now = Clock::now();
  const auto be_silent = [&] {
    for (int i = 0; i < 4; ++i) {
      now += milliseconds(500);
      silence.look(one.get(), reach, now);
    }
  };
  silence.look(one.get(), reach, now);
  be_silent();
  CHECK(silence.look(one.get(), reach, now) == milliseconds(2000));
  // By data, and by an acknowledgement alone.
  CHECK(send(other.get(), "!", 1, 0) == 1);
  char byte;
  CHECK(recv(one.get(), &byte, 1, 0) == 1);
  now += milliseconds(500);
  CHECK(silence.look(one.get(), reach, now) <= milliseconds(500));
  be_silent();
  CHECK(send(one.get(), "!", 1, 0) == 1);
  now += milliseconds(500);
  CHECK(silence.look(one.get(), reach, now) <= milliseconds(500));
}

void test_who_is_held_up() {
  const Reach reach = within(2);
  auto [one, other] = connection();
  const std::vector<char> bytes(1 << 16);
  // Until both buffers are full, and all packets in flight have arrived.
  for (int idle = 0; idle < 20;) {
    if (send(one.get(), bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) {
      idle = 0;
    } else {
      ++idle;
      poll(nullptr, 0, 10);
    }
  }
  Silence silence;
  auto now = Clock::now();
  for (int i = 0; i < 20; ++i, now += milliseconds(500)) {
    CHECK(silence.look(one.get(), reach, now) == Clock::duration{});
  }
  // The other end, seen from its own side, gets answers.
  Silence far;
  far.look(other.get(), reach, now);
  CHECK(far.look(other.get(), reach, now + milliseconds(500)) <= milliseconds(500));
}

void test_suspects() {
  const Reach reach = within(5);
  Look look(reach, 0, Clock::now());
  look.add(1, milliseconds(3400), "a", "b");
  look.suspect();
  CHECK(reach.found->ranks().empty());
  look.add(2, milliseconds(3600), "a", "b");
  look.add(4, milliseconds(5000), "a", "b");
  look.judge();
  CHECK(reach.found->ranks().empty());
  look.suspect();
  CHECK((reach.found->ranks() == std::vector<int>{2, 4}));
  for (const int silence : {4000, 5100}) look.add(3, milliseconds(silence), "c", "b");
  try {
    look.judge();
    CHECK(false);
  } catch (const elastic::UnreachableError& error) {
    CHECK(error.what() ==
          std::string("rank 2 (a), rank 4 (a), rank 3 (c) have acknowledged nothing to rank 0 (b) for 5.1 s"));
  }
  CHECK((reach.found->ranks() == std::vector<int>{2, 3, 4}));
}

void test_without_a_limit() {
  const Reach reach;
  auto [one, other] = connection();
  Silence silence;
  silence.begin(one.get(), reach);
  int on = 1;
  socklen_t length = sizeof(on);
  CHECK(getsockopt(one.get(), SOL_SOCKET, SO_KEEPALIVE, &on, &length) == 0 && on == 0);
  silence.begin(one.get(), within(2));
  CHECK(getsockopt(one.get(), SOL_SOCKET, SO_KEEPALIVE, &on, &length) == 0 && on == 1);
}

}  // namespace

void test_reach() {
  test_who_says_nothing();
  test_who_is_heard_again();
  test_who_is_held_up();
  test_suspects();
  test_without_a_limit();
  CHECK(elastic::says_unreachable(EHOSTUNREACH) && elastic::says_unreachable(ETIMEDOUT));
  CHECK(!elastic::says_unreachable(0) && !elastic::says_unreachable(ECONNREFUSED));
  CHECK(!elastic::says_unreachable(ECONNRESET) && !elastic::says_unreachable(EPIPE));
}
