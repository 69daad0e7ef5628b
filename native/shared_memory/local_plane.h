// Collectives in shared memory, among workers of one machine.
//
// Every operation has a number that only grows, the same on all who take part; all run their operations in its order. A
// worker's progress is one word in its segment: the number of the operation and its phase in it, so that "has that
// worker come so far" is one comparison, whatever others it works with meanwhile. Who must wait sleeps in a futex on
// that worker's segment.
//
// Small messages go through a mailbox of the segment: each writes its own and reads the others', one wait in all. Large
// ones are read where they lie: in the segments if they are there, else from the other's private memory
// (process_vm_readv). Where that is not allowed, all cut them into slices, each an operation with a number of its own,
// and what is not in a segment is copied there slice by slice: one is filled while peers still read the one before.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "arithmetic/reduce.h"
#include "interruption.h"
#include "shared_memory/shared_segment.h"

namespace elastic {

// The workers of one operation on this machine, in an order that all agree on.
struct Party {
  std::vector<int> ranks;
  int index;  // this worker's place

  int size() const { return static_cast<int>(ranks.size()); }
};

// Numbers operations. All who take part in one take as many numbers as the others.
class Numbering {
 public:
  // Rank 0's next reply: from there on ranks count alike, whatever they had no part in before.
  void begin_reply() {
    ++reply_;
    step_ = 0;
  }
  uint64_t next() { return (reply_ << kStepBits) | step_++; }

  // Enough for slices of 32 TB in one reply, and for replies of years.
  static constexpr int kStepBits = 22;

 private:
  uint64_t reply_ = 0, step_ = 0;
};

class LocalPlane {
 public:
  // `peers` by rank, for all ranks of this machine but this one. `look` is called while waiting, each few milliseconds;
  // it throws when there is nothing to wait for any more. `interruption` is looked at while there is work to do.
  // `direct`: whether all ranks of the job read their peers' private memory; else they slice.
  LocalPlane(std::shared_ptr<SharedSegment> own, std::vector<std::unique_ptr<PeerSegment>> peers, bool direct,
             Interruption interruption, std::function<void()> look, size_t slice_bytes = kSliceBytes);
  ~LocalPlane();

  // Called on reduced elements, once for each of them: `data` is where they are, in the output.
  using Finish = std::function<void(void* data, size_t count)>;

  // out = finish(op over the members' in). `in` may be `out`. With `spread`, the elements are cut into that many
  // pieces, the first members reduce one each, and finish may wait for other machines.
  void allreduce(const Party& party, Numbering& numbers, const void* in, void* out, size_t count, DType dtype,
                 ReduceOp op, const Finish& finish, int spread = 0);
  // out = finish(op over the members' in), of the piece that is this worker's; `counts` are the pieces' elements.
  void reducescatter(const Party& party, Numbering& numbers, const void* in, void* out,
                     const std::vector<size_t>& counts, DType dtype, ReduceOp op, const Finish& finish);
  // `sizes` are the members' bytes; out has them end to end.
  void allgather(const Party& party, Numbering& numbers, const void* in, void* out, const std::vector<size_t>& sizes);
  // `root` is a place in the party. out gets the root's in; on the root too, if it is not the same memory.
  void broadcast(const Party& party, Numbering& numbers, const void* in, void* out, size_t bytes, int root);
  // sizes[i][j]: bytes from member i to member j; in and out are end to end, in the members' order.
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
  // Bytes that each of so many parts has in a slice, the largest of which has `largest` in all.
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
