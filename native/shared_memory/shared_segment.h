// Memory of one worker that the other workers of its machine map: words to wait on, mailboxes for small messages, room
// for slices of large ones, a heap.
//
// It is a memfd: it has no name, /dev/shm's size is no limit to it, and the kernel frees it with the last process that
// has it mapped, however they end. Peers open it as /proc/PID/fd/N, which takes the same user and pid namespace.
//
// A forked child has a copy of it, as of all memory: gradients live in it, and what a data loader does to its own must
// not reach the parent's. The copy is made page by page, where the child writes; in a page that it has not written yet,
// it sees what the parent writes after the fork. Peers' segments do not exist in the child.
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
// What is staged at a time, of memory that peers cannot read: it bounds what a collective takes of shared memory.
constexpr size_t kSliceBytes = size_t{8} << 20;

// Where an operation's memory is: in its owner's segment, or in the rest of its owner's address space.
struct Address {
  uint64_t value;
  bool shared;
};

// The words at the start of a segment. Only `waiters` is ever written by a peer.
struct Words {
  uint64_t nonce;
  // How far the owner is. Never falls. See LocalPlane.
  alignas(64) std::atomic<uint64_t> progress;
  std::atomic<uint32_t> event;  // the futex: counts the changes of `progress`
  std::atomic<uint32_t> waiters;
  // Not 0: the owner has given up, and its private memory may be anything by now.
  std::atomic<uint32_t> gave_up;
  struct Buffers {
    Address input, output;
    // `input` is a slice of the operation's input: see LocalPlane.
    bool sliced;
  };
  alignas(64) Buffers published[kMailboxes];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// How a peer finds a segment.
struct SegmentName {
  std::string machine;  // equal where segments can be shared
  pid_t pid;
  int descriptor;
  uint64_t nonce;
  uint64_t words_address;  // in the owner's address space
};

// The machine, as far as sharing memory goes: this boot, this pid and network namespace, this user. Workers in
// different network namespaces are taken for different machines. "" where /proc says too little.
std::string this_machine();

class SharedSegment {
 public:
  // What a child has of its parent's segments: called by fork(). Ends the child when that cannot be its own.
  static void enter_child();
  // Throws CollectiveError where memory cannot be shared.
  SharedSegment();
  ~SharedSegment();
  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;

  SegmentName name() const;
  Words& words() { return *reinterpret_cast<Words*>(base_); }
  char* mailbox(int which) { return base_ + kMailboxesOffset + static_cast<size_t>(which) * kMailboxBytes; }

  // Room for a slice of up to kSliceBytes, one for each mailbox. Throws CollectiveError when there is no memory.
  char* staging(int which, size_t bytes);
  // Gives it back to the system.
  void release_staging();

  // Zeroed memory of the heap, aligned to pages; nullptr when the heap is full.
  void* allocate(size_t bytes);
  // Gives it back, to the system too.
  void release(void* memory);

  bool contains(const void* memory) const { return memory >= base_ && memory < base_ + kBytes; }
  Address address_of(const void* memory) const {
    if (contains(memory)) return {static_cast<uint64_t>(static_cast<const char*>(memory) - base_), true};
    return {reinterpret_cast<uint64_t>(memory), false};
  }

  static constexpr size_t kMailboxesOffset = 4096;
  static constexpr size_t kStagingOffset = size_t{1} << 20;
  static constexpr size_t kHeapOffset = kStagingOffset + kMailboxes * kSliceBytes;
  // Address space, not memory: pages come when they are written.
  static constexpr size_t kBytes = size_t{1} << 34;

 private:
  void make_private() const;
  void unmap();

  const pid_t owner_;
  int descriptor_ = -1;
  char* base_ = nullptr;
  std::atomic<size_t> end_{kHeapOffset};  // of what was ever in use
  size_t staged_[kMailboxes] = {};        // bytes of each room that there is memory for
  std::mutex mutex_;
  std::map<size_t, size_t> used_;  // offset and size of what is allocated
};

// A peer's segment as this process sees it.
class PeerSegment {
 public:
  // Throws CollectiveError when it cannot be mapped, or is not the one meant.
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
  // Memory that can be read at once; nullptr for private memory.
  const char* mapped(Address address, size_t offset) const {
    return address.shared ? base_ + address.value + offset : nullptr;
  }
  // Copies from the peer's memory, mapped or private. Throws CollectiveError when the peer is gone.
  void read(Address address, size_t offset, void* to, size_t bytes) const;

  int rank() const { return rank_; }

 private:
  const int rank_;
  const SegmentName name_;
  const pid_t owner_;
  char* base_ = nullptr;
};

}  // namespace elastic
