// Collectives in shared memory, among the workers of one machine.
//
// Each operation has a number, which grows and is the same on all its members; each member runs its operations in the
// order of these numbers. A worker's progress is one word in its segment: the number of its operation and the phase in
// it. So one comparison says whether a worker has got that far, with whichever other workers it works meanwhile. A
// waiting worker sleeps in a futex in the awaited worker's segment.
//
// Small messages go through a mailbox in the segment: each member writes its own and reads the others', with a single
// wait. Large messages are read in place: in a segment if they are in one, else in the other worker's private memory
// (process_vm_readv). If that is not permitted, all members cut them into slices, each of which is an operation with
// its own number, and data outside the segments is copied there slice by slice: a slice is filled while the peers still
// read the previous one.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "arithmetic/reduce.h"
#include "interruption.h"
#include "shared_memory/shared_segment.h"

namespace elastic {

// The workers of one operation on this machine, in the same order on all of them.
struct Party {
  std::vector<int> ranks;
  int index;  // this worker's place

  int size() const { return static_cast<int>(ranks.size()); }
};

// Numbers operations. All members of an operation use the same amount of numbers for it.
class Numbering {
 public:
  // Begins rank 0's next reply. From there on the ranks' numbers agree, also if they were in different operations
  // before.
  void begin_reply() {
    ++reply_;
    step_ = 0;
  }
  uint64_t next() { return (reply_ << kStepBits) | step_++; }

  // Enough for the slices of 32 TB in one reply, and for the replies of years.
  static constexpr int kStepBits = 22;

 private:
  uint64_t reply_ = 0, step_ = 0;
};

class LocalPlane {
 public:
  // `peers`: the other ranks of this machine. `look` is called every few milliseconds during a wait, and throws to end
  // it; `interruption` is checked during work. `direct`: whether all ranks of the job read their peers' private memory;
  // otherwise they slice.
  LocalPlane(std::shared_ptr<SharedSegment> own, std::vector<std::unique_ptr<PeerSegment>> peers, bool direct,
             Interruption interruption, std::function<void()> look, size_t slice_bytes = kSliceBytes);
  ~LocalPlane();

  // Called with the reduced elements, once for each element; `data` is their place in the output.
  using Finish = std::function<void(void* data, size_t count)>;

  // out = finish(op over the members' in). `in` may be `out`. With `spread`, the elements are cut into that many
  // pieces, the first members reduce one piece each, and finish may wait for other machines.
  void allreduce(const Party& party, Numbering& numbers, const void* in, void* out, size_t count, DType dtype,
                 ReduceOp op, const Finish& finish, int spread = 0);
  // out = finish(op over the members' in), for this worker's piece; `counts` are the pieces' numbers of elements.
  void reducescatter(const Party& party, Numbering& numbers, const void* in, void* out,
                     const std::vector<size_t>& counts, DType dtype, ReduceOp op, const Finish& finish);
  // `sizes` are the members' sizes in bytes; their parts follow each other in `out`.
  void allgather(const Party& party, Numbering& numbers, const void* in, void* out, const std::vector<size_t>& sizes);
  // `root` is a place in the party. `out` gets the root's `in`; also on the root, if it is other memory.
  void broadcast(const Party& party, Numbering& numbers, const void* in, void* out, size_t bytes, int root);
  // sizes[i][j]: bytes from member i to member j. In `in` and `out`, the parts follow each other in the members' order.
  void alltoall(const Party& party, Numbering& numbers, const void* in, void* out,
                const std::vector<std::vector<size_t>>& sizes);
  void barrier(const Party& party, Numbering& numbers);

 private:
  class Exchange;
  friend class Exchange;

  PeerSegment& peer(int rank) { return *peers_by_rank_[static_cast<size_t>(rank)]; }
  void publish(uint64_t value);
  void wait(Words& words, uint64_t value);
  void small_allreduce(const Party& party, uint64_t number, const void* in, void* out, size_t count, Kernel kernel,
                       size_t width);
  void reduce_parts(const Party& party, Numbering& numbers, const void* in, char* out,
                    const std::vector<size_t>& bounds, size_t width, Kernel kernel, const Finish& finish);
  void gather(const Party& party, Numbering& numbers, const void* in, char* out, const std::vector<size_t>& sizes);
  // The bytes of each of so many parts in a slice; the largest part has `largest` bytes in all.
  size_t share_of_slice(size_t parts, size_t largest) const;
  void copy(void* to, const void* from, size_t bytes) const { interruption_.copy(to, from, bytes); }

  const std::shared_ptr<SharedSegment> own_;
  std::vector<std::unique_ptr<PeerSegment>> peers_by_rank_;
  const bool direct_;
  const size_t slice_bytes_;  // no limit with direct reads
  const Interruption interruption_;
  const std::function<void()> look_;
  const int spins_;
  struct Guard {
    std::vector<int> ranks;
    uint64_t value = 0;
  };
  Guard guards_[kMailboxes];
  std::unique_ptr<char[]> scratch_;
};

}  // namespace elastic
