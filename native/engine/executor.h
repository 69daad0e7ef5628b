// Runs what the ranks have agreed on: inside this machine over LocalPlane, between machines over ContextGroup.
//
// Owns this rank's view of its neighbours' memory, the buffer for small tensors that run together, and the numbers
// under which neighbours meet. Knows nothing of queues, threads and states of operations. Used by the engine's thread
// alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/coordinator.h"
#include "engine/operation.h"
#include "engine/process_sets.h"
#include "engine/timeline.h"
#include "engine/trace.h"
#include "interruption.h"
#include "shared_memory/local_plane.h"
#include "shared_memory/shared_segment.h"

namespace elastic {

// Memory for small tensors that run together: in the segment, where peers read it without copies, if that has room.
class PackBuffer {
 public:
  // `segment`: none where memory is not shared.
  explicit PackBuffer(std::shared_ptr<SharedSegment> segment) : segment_(std::move(segment)) {}
  ~PackBuffer();
  PackBuffer(const PackBuffer&) = delete;
  PackBuffer& operator=(const PackBuffer&) = delete;

  // So many bytes, until the next call.
  char* get(size_t bytes);

 private:
  const std::shared_ptr<SharedSegment> segment_;
  char* shared_ = nullptr;
  size_t shared_bytes_ = 0;
  std::vector<char> private_;
};

class Executor {
 public:
  // `plane` and `segment`: none where this rank shares memory with nobody. `limit`: of a collective between machines.
  // `interruption` ends what runs: this touches nobody's memory any more then.
  Executor(int rank, Seconds limit, Timeline& timeline, Interruption interruption, std::unique_ptr<LocalPlane> plane,
           std::shared_ptr<SharedSegment> segment);

  // Rank 0's next reply: ranks number alike what they run of one.
  void begin_reply();
  // Runs entries that go together, in a set that this rank is a member of. `operations` are its own of them, none where
  // others run what this rank, which has joined, has not submitted. Returns what took which time, while there is a
  // timeline. Throws CollectiveError, also for what rank 0 may not ask for.
  std::vector<Span> run(const ProcessSet& set, const std::vector<Entry>& entries,
                        const std::vector<std::shared_ptr<Operation>>& operations);

 private:
  // A tensor that is reduced.
  struct Piece {
    const void* in;
    void* out;
    size_t count;
    DType type;
    bool neutral = false;  // of a rank that has joined: changes nobody's values, and is not scaled

    size_t bytes() const { return count * element_size(type); }
  };
  // What is done to the elements besides their combination.
  struct Scaling {
    Reduction reduction;
    double prescale, postscale;
  };

  void run_allreduces(const ProcessSet& set, const std::vector<Entry>& entries,
                      const std::vector<std::shared_ptr<Operation>>& operations);
  void allreduce_all(const ProcessSet& set, std::vector<Piece> pieces, const Scaling& scaling);
  // Of 8-bit integers, the sums of which do not fit into them.
  void average_small(const ProcessSet& set, const std::vector<Piece>& pieces, const Scaling& scaling);
  void run_allgather(const ProcessSet& set, const Entry& entry, Operation& operation);
  void run_broadcast(const ProcessSet& set, const Entry& entry, Operation& operation);
  void run_alltoall(const ProcessSet& set, const Entry& entry, Operation& operation);
  void run_reducescatter(const ProcessSet& set, const Entry& entry, Operation& operation);
  void run_barrier(const ProcessSet& set);

  void allreduce_packed(const ProcessSet& set, const std::vector<Piece>& batch, const Scaling& scaling);
  void allreduce(const ProcessSet& set, const Piece& piece, const Scaling& scaling);
  void reduce_adasum(const ProcessSet& set, const Piece& piece, const Scaling& scaling);
  void allgather(const ProcessSet& set, const void* in, void* out, const std::vector<size_t>& sizes);

  // Runs `work`, which is what the timeline calls it.
  template <typename Work>
  void timed(const char* name, Work work);
  void copy(void* to, const void* from, size_t bytes) const { interruption_.copy(to, from, bytes); }
  void scale_all(void* data, size_t count, DType type, double factor) const;
  void conclude(void* data, size_t count, DType type, Reduction reduction, size_t members, double postscale) const;

  const int rank_;
  const Seconds limit_;
  Timeline& timeline_;
  const Interruption interruption_;
  const std::unique_ptr<LocalPlane> plane_;
  PackBuffer pack_;
  Numbering numbers_;
  std::vector<Span> spans_;  // of the entries under way, while there is a timeline
};

}  // namespace elastic
