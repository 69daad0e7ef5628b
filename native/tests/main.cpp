// The native part without Python, for the sanitizers: threads as ranks, in one process. Run by scripts/sanitize.
#include <csignal>
#include <cstdio>
#include <ctime>

#include "tests/tests.h"

struct Test {
  const char* name;
  void (*run)();
  bool has_one_thread;
};

int main() {
  // As in every Python process.
  std::signal(SIGPIPE, SIG_IGN);
#ifdef __SANITIZE_THREAD__
  constexpr bool kOnlyThreads = true;
#else
  constexpr bool kOnlyThreads = false;
#endif
  constexpr bool kOneThread = true, kThreads = false;
  const Test tests[] = {
      {"SHA-256 and HMAC", test_hmac, kOneThread},
      {"handshakes", test_handshakes, kThreads},
      {"silent peers", test_reach, kOneThread},
      {"collectives", test_collectives, kThreads},
      {"abort while blocked", test_abort_while_blocked, kThreads},
      {"abort while connecting", test_abort_while_connecting, kThreads},
      {"rubbish for addresses", test_rubbish_for_addresses, kThreads},
      {"engine's operations", test_engine_operations, kThreads},
      {"engine's aborts", test_engine_aborts, kThreads},
      {"engine's messages", test_engine_messages, kOneThread},
      {"a rank 0 that is wrong", test_engine_checks_rank_0, kThreads},
      {"large messages both ways", test_control_link_both_ways, kThreads},
      {"joins beside other threads", test_engine_joins, kThreads},
      {"process sets that go while they are used", test_engine_process_sets, kThreads},
      {"engines that nobody closes", test_engine_ends_without_close, kThreads},
      {"memory in slices", test_local_plane_slices, kThreads},
      {"members that give up while they are read", test_local_plane_member_gives_up, kThreads},
      {"whom Yama lets in", test_tracers, kOneThread},
      {"process sets by machine", test_process_sets_by_machine, kOneThread},
      {"process sets after an abort", test_process_sets_after_an_abort, kOneThread},
      {"vitals", test_vitals, kThreads},
  };
  open_vitals();
  for (const auto& [name, test, has_one_thread] : tests) {
    if (kOnlyThreads && has_one_thread) continue;  // it cannot have races
    const std::clock_t began = std::clock();
    test();
    const double spent = static_cast<double>(std::clock() - began) / CLOCKS_PER_SEC;
    std::printf("  %s: passed, %.1f s of a processor\n", name, spent);
    std::fflush(stdout);
  }
  return 0;
}
