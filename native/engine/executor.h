// Runs the operations that the ranks have agreed on: within this machine over LocalPlane, between machines over
// ContextGroup.
//
// Owns this rank's view of its neighbors' memory, the buffer for small tensors that run together, and the numbers of
// operations among neighbors. Knows nothing of queues, threads and states of operations. Used only by the engine's
// thread.
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

// Memory for small tensors that run together: in the segment, where peers read it without copies, if it has room.
class PackBuffer {
 public:
  // `segment`: null if memory is not shared.
  explicit PackBuffer(std::shared_ptr<SharedSegment> segment) : segment_(std::move(segment)) {}
  ~PackBuffer();
  PackBuffer(const PackBuffer&) = delete;
  PackBuffer& operator=(const PackBuffer&) = delete;

  // Returns so many bytes, valid until the next call.
  char* get(size_t bytes);

 private:
  const std::shared_ptr<SharedSegment> segment_;
  char* shared_ = nullptr;
  size_t shared_bytes_ = 0;
  std::vector<char> private_;
};

class Executor {
 public:
  // `plane` and `segment`: null if this rank shares no memory. `limit`: of a collective between machines.
  // `interruption` ends a running operation, whose memory is no longer accessed then.
  Executor(int rank, Seconds limit, Timeline& timeline, Interruption interruption, std::unique_ptr<LocalPlane> plane,
           std::shared_ptr<SharedSegment> segment);

  // Begins rank 0's next reply: within a reply, the ranks number operations alike.
  void begin_reply();
  // Runs entries that run together, in a set of which this rank is a member. `operations` are this rank's own; null for
  // those that this rank, which has joined, has not submitted. Returns the time spans of its parts, while there is a
  // timeline. Throws CollectiveError, also for entries that rank 0 may not request.
  std::vector<Span> run(const ProcessSet& set, const std::vector<Entry>& entries,
                        const std::vector<std::shared_ptr<Operation>>& operations);

 private:
  // A tensor to reduce.
  struct Piece {
    const void* in;
    void* out;
    size_t count;
    DType type;
    bool neutral = false;  // of a rank that has joined: has the neutral element, and is not scaled

    size_t bytes() const { return count * element_size(type); }
  };
  // The processing of elements before and after the reduction.
  struct Scaling {
    Reduction reduction;
    double prescale, postscale;
  };

  void run_allreduces(const ProcessSet& set, const std::vector<Entry>& entries,
                      const std::vector<std::shared_ptr<Operation>>& operations);
  void allreduce_all(const ProcessSet& set, std::vector<Piece> pieces, const Scaling& scaling);
  // For 8-bit integers, which cannot hold the sums.
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

  // Runs `work`, and records its time under this name.
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
  std::vector<Span> spans_;  // of the running entries, while there is a timeline
};

}  // namespace elastic
