// The native part without Python, for the sanitizers: threads as ranks, in one process. Run by scripts/sanitize.
#include <csignal>
#include <cstdio>
#include <utility>

#include "tests/tests.h"

int main() {
  // As in every Python process.
  std::signal(SIGPIPE, SIG_IGN);
  const std::pair<const char*, void (*)()> tests[] = {
      {"SHA-256 and HMAC", test_hmac},
      {"handshakes", test_handshakes},
      {"silent peers", test_reach},
      {"collectives", test_collectives},
      {"abort while blocked", test_abort_while_blocked},
      {"abort while connecting", test_abort_while_connecting},
      {"rubbish for addresses", test_rubbish_for_addresses},
      {"engine's operations", test_engine_operations},
      {"engine's aborts", test_engine_aborts},
      {"engine's messages", test_engine_messages},
      {"a rank 0 that is wrong", test_engine_checks_rank_0},
      {"large messages both ways", test_control_link_both_ways},
      {"joins beside other threads", test_engine_joins},
      {"process sets that go while they are used", test_engine_process_sets},
      {"engines that nobody closes", test_engine_ends_without_close},
      {"memory in slices", test_local_plane_slices},
      {"members that give up while they are read", test_local_plane_member_gives_up},
      {"whom Yama lets in", test_tracers},
      {"process sets by machine", test_process_sets_by_machine},
      {"process sets after an abort", test_process_sets_after_an_abort},
      {"vitals", test_vitals},
  };
  open_vitals();
  for (const auto& [name, test] : tests) {
    test();
    std::printf("  %s: passed\n", name);
    std::fflush(stdout);
  }
  return 0;
}
