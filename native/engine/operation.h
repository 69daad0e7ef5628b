// An operation of this rank, from Engine::submit() until nobody holds it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/plan.h"

namespace elastic {

// Where a tensor is, and where its result goes. The memory is the submitter's, until the operation is over.
struct Memory {
  const void* input;
  void* output;
};

// Its parts have owners in turn: the submitting thread until it is queued, then the engine's thread, or who takes it as
// a Turn; and everybody may read it once Engine::wait() says that it is over.
struct Operation {
  enum class State { kPending, kDone, kMismatch, kFailed, kOutOfMemory };
  // A tensor of a size that is known only when the operation runs. Whoever wants it beyond the operation shares it.
  struct Output {
    std::shared_ptr<char[]> memory;
    size_t bytes = 0;
    int64_t rows = 0;
    std::vector<int64_t> received;  // alltoall: rows from each member
  };

  std::string name;  // "" for an unnamed one
  Plan plan;
  std::vector<Memory> memory;  // of each of the plan's tensors
  // What owns that memory, if anything does that can be named. Let go of when the operation is over.
  std::shared_ptr<void> owner;
  std::vector<int64_t> sizes;  // see Plan::sized()
  int removes = -1;            // a process set that goes when this, a barrier, is done
  // What it is paired by with those of other ranks; see named_key(), unnamed_key().
  std::string key;
  std::chrono::steady_clock::time_point submitted;

  std::vector<Output> outputs;
  int last_joined = -1;

  // Guarded by the engine's mutex.
  bool answered = false;  // by rank 0: it runs, or has run
  bool taken = false;     // as a Turn: its memory is in use until that is concluded
  State state = State::kPending;
  std::string error;
};

}  // namespace elastic
