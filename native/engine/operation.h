// An operation of this rank, from Engine::submit() until its last reference is dropped.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/plan.h"

namespace elastic {

// The memory of a tensor, and of its result. The submitter keeps it valid until the operation is over.
struct Memory {
  const void* input;
  void* output;
};

// Owned by the submitting thread until it is queued, then by the engine's thread, or by the thread that takes it as a
// Turn. Any thread may read it once Engine::wait() has returned true.
struct Operation {
  enum class State { kPending, kDone, kMismatch, kFailed, kOutOfMemory };
  // A tensor whose size is known only when the operation runs. Users that need it longer than the operation share it.
  struct Output {
    std::shared_ptr<char[]> memory;
    size_t bytes = 0;
    int64_t rows = 0;
    std::vector<int64_t> received;  // alltoall: rows from each member
  };

  std::string name;  // "" for an unnamed one
  Plan plan;
  std::vector<Memory> memory;  // for each of the plan's tensors
  // The owner of that memory; may be null. Released when the operation is over.
  std::shared_ptr<void> owner;
  std::vector<int64_t> sizes;  // see Plan::sized()
  int removes = -1;            // the process set to remove when this, a barrier, is done
  // Matches it with other ranks' operations; see named_key(), unnamed_key().
  std::string key;
  std::chrono::steady_clock::time_point submitted;

  std::vector<Output> outputs;
  int last_joined = -1;

  // Guarded by the engine's mutex.
  bool answered = false;  // by rank 0: it is running, or has run
  bool taken = false;     // as a Turn: its memory is in use until the turn is concluded
  State state = State::kPending;
  std::string error;
};

}  // namespace elastic
