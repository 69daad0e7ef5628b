// Shared by the native tests.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)

// Returns whether all values are equal to this one, in one call: a loop in a test would be slow under the sanitizers.
template <typename T>
bool all_are(const std::vector<T>& values, T value) {
  if (values.empty()) return true;
  return values[0] == value && std::memcmp(&values[0], &values[0] + 1, (values.size() - 1) * sizeof(T)) == 0;
}

void test_hmac();
void test_handshakes();
void test_reach();
void test_collectives();
void test_abort_while_blocked();
void test_abort_while_connecting();
void test_rubbish_for_addresses();
void test_engine_operations();
void test_engine_aborts();
void test_engine_messages();
void test_engine_checks_rank_0();
void test_control_link_both_ways();
void test_engine_joins();
void test_engine_process_sets();
void test_engine_ends_without_close();
void test_local_plane_slices();
void test_local_plane_member_gives_up();
void test_tracers();
void test_process_sets_by_machine();
void test_process_sets_after_an_abort();
// Opens a page, as in a job, for all other tests.
void open_vitals();
void test_vitals();
