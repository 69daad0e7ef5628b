// Memory of one worker that the other workers of its machine map: words to wait on, mailboxes for small messages, room
// for slices of large ones, and a heap.
//
// It is a memfd: it has no name, is not limited by the size of /dev/shm, and the kernel frees it with the last process
// that has it mapped, however the processes end. Peers open it as /proc/PID/fd/N, which requires the same user and pid
// namespace.
//
// A forked child has a copy of it, as of all memory: gradients are in it, and a data loader's writes to its copy must
// not change the parent's. A page is copied when the child writes to it; in a page that it has not written, it sees the
// parent's writes after the fork. Peers' segments are not mapped in the child.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace elastic {

constexpr size_t kMailboxBytes = 32 * 1024;
constexpr int kMailboxes = 2;
// The size of a slice that is staged for peers that cannot read the memory: limits a collective's use of shared memory.
constexpr size_t kSliceBytes = size_t{8} << 20;

// The location of an operation's memory: in its owner's segment, or elsewhere in its owner's address space.
struct Address {
  uint64_t value;
  bool shared;
};

// The words at the beginning of a segment. Peers write only `waiters`.
struct Words {
  uint64_t nonce;
  // The owner's progress, which never decreases. See LocalPlane.
  alignas(64) std::atomic<uint64_t> progress;
  std::atomic<uint32_t> event;  // the futex: counts the changes of `progress`
  std::atomic<uint32_t> waiters;
  // Not 0: the owner has given up, and may have reused its private memory.
  std::atomic<uint32_t> gave_up;
  struct Buffers {
    Address input, output;
    // `input` is a slice of the operation's input: see LocalPlane.
    bool sliced;
  };
  alignas(64) Buffers published[kMailboxes];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// The data with which a peer finds a segment.
struct SegmentName {
  std::string machine;  // equal if segments can be shared
  pid_t pid;
  int descriptor;
  uint64_t nonce;
  uint64_t words_address;  // in the owner's address space
};

// Identifies the machine for sharing memory: its boot, and this process's pid and network namespaces and user. Workers
// in different network namespaces count as different machines. "" if /proc lacks the information.
std::string this_machine();

class SharedSegment {
 public:
  // Gives a forked child its own copies of the segments; called by fork(). Ends the child if that fails.
  static void enter_child();
  // Throws CollectiveError if memory cannot be shared.
  SharedSegment();
  ~SharedSegment();
  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;

  SegmentName name() const;
  Words& words() { return *reinterpret_cast<Words*>(base_); }
  char* mailbox(int which) { return base_ + kMailboxesOffset + static_cast<size_t>(which) * kMailboxBytes; }

  // Room for a slice of up to kSliceBytes, one for each mailbox. Throws CollectiveError if there is no memory.
  char* staging(int which, size_t bytes);
  // Returns this memory to the system.
  void release_staging();

  // Zeroed memory of the heap, aligned to pages; nullptr if the heap is full.
  void* allocate(size_t bytes);
  // Frees it, and returns its pages to the system.
  void release(void* memory);

  bool contains(const void* memory) const { return memory >= base_ && memory < base_ + kBytes; }
  Address address_of(const void* memory) const {
    if (contains(memory)) return {static_cast<uint64_t>(static_cast<const char*>(memory) - base_), true};
    return {reinterpret_cast<uint64_t>(memory), false};
  }

  static constexpr size_t kMailboxesOffset = 4096;
  static constexpr size_t kStagingOffset = size_t{1} << 20;
  static constexpr size_t kHeapOffset = kStagingOffset + kMailboxes * kSliceBytes;
  // Address space, not memory: pages are allocated when they are written.
  static constexpr size_t kBytes = size_t{1} << 34;

 private:
  void make_private() const;
  void unmap();

  const pid_t owner_;
  int descriptor_ = -1;
  char* base_ = nullptr;
  std::atomic<size_t> end_{kHeapOffset};  // end of the part that was ever used
  size_t staged_[kMailboxes] = {};        // allocated bytes of each room
  std::mutex mutex_;
  std::map<size_t, size_t> used_;  // offset -> size of allocations
};

// A peer's segment, mapped into this process.
class PeerSegment {
 public:
  // Throws CollectiveError if it cannot be mapped, or is another segment.
  PeerSegment(int rank, const SegmentName& name);
  ~PeerSegment();
  PeerSegment(const PeerSegment&) = delete;
  PeerSegment& operator=(const PeerSegment&) = delete;

  Words& words() { return *reinterpret_cast<Words*>(base_); }
  const char* mailbox(int which) const {
    return base_ + SharedSegment::kMailboxesOffset + static_cast<size_t>(which) * kMailboxBytes;
  }

  // Whether this process may read the peer's private memory.
  bool can_read_private() const;
  // The peer's memory, if it is mapped; nullptr for private memory.
  const char* mapped(Address address, size_t offset) const {
    return address.shared ? base_ + address.value + offset : nullptr;
  }
  // Copies from the peer's memory, mapped or private. Throws CollectiveError if the peer has ended.
  void read(Address address, size_t offset, void* to, size_t bytes) const;

  int rank() const { return rank_; }

 private:
  const int rank_;
  const SegmentName name_;
  const pid_t owner_;
  char* base_ = nullptr;
};

}  // namespace elastic
