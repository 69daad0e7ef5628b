#include "shared_memory/local_plane.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <ctime>
#include <numeric>
#include <utility>

#include "errors.h"

namespace elastic {
namespace {

// Fits the second-level cache next to what it is combined with.
constexpr size_t kTile = 128 * 1024;
// How long a wait may go on before somebody looks whether there is still something to wait for.
constexpr long kLookNs = 4'000'000;
constexpr int kPhaseBits = 8;
constexpr size_t kStagedBytes = size_t{1} << 20;

int available_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return 1;
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

long futex(std::atomic<uint32_t>& word, int what, uint32_t value, const timespec* limit) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), what, value, limit, nullptr, 0);
}

size_t offset_of(const std::vector<size_t>& sizes, int index) {
  return std::accumulate(sizes.begin(), sizes.begin() + index, size_t{0});
}

// One after the other, within a reply and from reply to reply.
int mailbox_for(uint64_t number) { return static_cast<int>(((number >> kStepBits) + number) % kMailboxes); }

// The elements that piece `index` of `pieces` begins with; on a cache line's border.
size_t piece_begin(size_t count, size_t width, int pieces, int index) {
  const size_t line = std::max<size_t>(1, 64 / width);
  const size_t lines = (count + line - 1) / line;
  return std::min(count, (lines * static_cast<size_t>(index) / static_cast<size_t>(pieces)) * line);
}

}  // namespace

// One operation of this worker: its phases, and the mailbox it may use.
class LocalPlane::Exchange {
 public:
  static constexpr uint64_t kDone = (1 << kPhaseBits) - 1;

  Exchange(LocalPlane& plane, const Party& party, uint64_t number)
      : plane_(plane), party_(party), base_(number << kPhaseBits), mailbox_(mailbox_for(number)) {
    // Whoever used this mailbox last may still be reading it.
    Guard& guard = plane_.guards_[mailbox_];
    for (const int rank : guard.ranks) plane_.wait(plane_.peer(rank).words(), guard.value);
    guard.value = base_ + kDone;
    guard.ranks.clear();
    for (int i = 0; i < party.size(); ++i) {
      if (i != party.index) guard.ranks.push_back(party.ranks[static_cast<size_t>(i)]);
    }
  }

  void publish(uint64_t phase) { plane_.publish(base_ + phase); }
  void wait(int member, uint64_t phase) { plane_.wait(peer(member).words(), base_ + phase); }
  void wait_all(uint64_t phase) {
    each_other([&](int member) { wait(member, phase); });
  }
  // The last phase, in which this worker needs nobody's memory any more.
  void done() { publish(kDone); }
  // Likewise, after reads where the member keeps its operation's memory. A member that has given up while it waited for
  // others uses its memory for something else, and what was read of it may be that.
  void done_with(int member) {
    std::atomic_thread_fence(std::memory_order_acquire);
    if (peer(member).words().gave_up.load() != 0) {
      throw CollectiveError("rank " + std::to_string(peer(member).rank()) + " gave up while its memory was read");
    }
  }
  // Ends an operation in which all read from all, where their memory is: until all have read, it must stay as it is.
  void done_by_all() {
    each_other([&](int member) { done_with(member); });
    done();
    wait_all(kDone);
  }

  // Copies of the memory of a member.
  void read(int member, Address address, size_t offset, void* to, size_t bytes) {
    const PeerSegment& from = peer(member);
    plane_.interruption_.in_pieces(
        bytes, [&](size_t at, size_t size) { from.read(address, offset + at, static_cast<char*>(to) + at, size); });
  }

  void show(const void* input, const void* output) {
    plane_.own_->words().published[mailbox_] = {plane_.own_->address_of(input), plane_.own_->address_of(output)};
  }
  const Words::Buffers& shown(int member) { return peer(member).words().published[mailbox_]; }

  char* own_mailbox() { return plane_.own_->mailbox(mailbox_); }
  const char* mailbox_of(int member) { return member == party_.index ? own_mailbox() : peer(member).mailbox(mailbox_); }
  PeerSegment& peer(int member) { return plane_.peer(party_.ranks[static_cast<size_t>(member)]); }

  // Beginning with the next one, so that not all read from the same at once.
  template <typename Visit>
  void each_other(Visit visit) {
    for (int i = 1; i < party_.size(); ++i) visit((party_.index + i) % party_.size());
  }

 private:
  LocalPlane& plane_;
  const Party& party_;
  const uint64_t base_;
  const int mailbox_;
};

LocalPlane::LocalPlane(std::shared_ptr<SharedSegment> own, std::vector<std::unique_ptr<PeerSegment>> peers, bool direct,
                       Interruption interruption, std::function<void()> look)
    : own_(std::move(own)),
      direct_(direct),
      interruption_(std::move(interruption)),
      look_(std::move(look)),
      // Spinning helps only where the peers run meanwhile.
      spins_(static_cast<int>(peers.size()) + 1 <= available_cores() ? 2000 : 0),
      scratch_(new char[kTile]) {
  for (auto& one : peers) {
    const auto rank = static_cast<size_t>(one->rank());
    if (peers_by_rank_.size() <= rank) peers_by_rank_.resize(rank + 1);
    peers_by_rank_[rank] = std::move(one);
  }
}

LocalPlane::~LocalPlane() {
  if (staging_ != nullptr) own_->release(staging_);
}

void LocalPlane::publish(uint64_t value) {
  Words& words = own_->words();
  words.progress.store(value);
  words.event.fetch_add(1);
  if (words.waiters.load() != 0) futex(words.event, FUTEX_WAKE, INT_MAX, nullptr);
}

void LocalPlane::wait(Words& words, uint64_t value) {
  if (words.progress.load(std::memory_order_acquire) >= value) return;
  for (int i = 0; i < spins_; ++i) {
    relax();
    if (words.progress.load(std::memory_order_acquire) >= value) return;
  }
  const timespec limit{0, kLookNs};
  while (true) {
    const uint32_t event = words.event.load();
    if (words.progress.load() >= value) return;
    words.waiters.fetch_add(1);
    // Progress is looked at again after waiters was raised: either it has changed, or who changes it sees the waiter.
    const bool slept_through =
        words.progress.load() < value && futex(words.event, FUTEX_WAIT, event, &limit) != 0 && errno == ETIMEDOUT;
    words.waiters.fetch_sub(1);
    if (slept_through) look_();
  }
}

char* LocalPlane::staging(size_t bytes) {
  if (staging_bytes_ < bytes) {
    if (staging_ != nullptr) own_->release(staging_);
    staging_bytes_ = 0;
    staging_ = static_cast<char*>(own_->allocate(bytes));
    if (staging_ == nullptr) {
      throw CollectiveError("cannot get " + std::to_string(bytes) + " bytes of shared memory");
    }
    staging_bytes_ = bytes;
  }
  return staging_;
}

void LocalPlane::allreduce(const Party& party, uint64_t number, const void* in, void* out, size_t count, DType dtype,
                           ReduceOp op, const Finish& finish, int spread) {
  const size_t width = element_size(dtype), bytes = count * width;
  const Kernel kernel = reduce_kernel(dtype, op);
  auto* const result = static_cast<char*>(out);
  if (party.size() == 1) {
    copy(out, in, bytes);
    finish(out, count);
    return;
  }
  Exchange exchange(*this, party, number);
  if (spread == 0 && bytes <= kMailboxBytes) {
    copy(exchange.own_mailbox(), in, bytes);
    exchange.publish(1);
    // In the members' order, so that all compute the same bits.
    exchange.wait_all(1);
    kernel(out, exchange.mailbox_of(0), exchange.mailbox_of(1), count);
    for (int member = 2; member < party.size(); ++member) kernel(out, out, exchange.mailbox_of(member), count);
    finish(out, count);
    exchange.done();
    return;
  }
  const char* source = static_cast<const char*>(in);
  char* target = result;
  // Up to some size two copies are quicker than the system call for each piece (benchmarks/allreduce.py).
  const bool stage = bytes < kStagedBytes && !(own_->contains(in) && own_->contains(out));
  if (stage || !reachable(in) || !reachable(out)) {
    target = staging(bytes);
    copy(target, in, bytes);
    source = target;
  }
  const int pieces = spread == 0 ? party.size() : spread;
  const auto begin = [&](int piece) { return piece_begin(count, width, pieces, piece); };
  exchange.show(source, target);
  exchange.publish(1);
  if (party.index < pieces) {
    exchange.wait_all(1);
    const size_t first = begin(party.index) * width, last = begin(party.index + 1) * width;
    for (size_t at = first; at < last; at += kTile) {
      interruption_.check();
      const size_t size = std::min(kTile, last - at);
      copy(target + at, source + at, size);
      exchange.each_other([&](int member) {
        const Address input = exchange.shown(member).input;
        const char* theirs = exchange.peer(member).mapped(input, at);
        if (theirs == nullptr) {
          exchange.read(member, input, at, scratch_.get(), size);
          theirs = scratch_.get();
        }
        kernel(target + at, target + at, theirs, size / width);
      });
      if (spread == 0) finish(target + at, size / width);
    }
    if (spread != 0) finish(target + first, (last - first) / width);
    exchange.publish(2);
  }
  for (int i = 0; i < pieces; ++i) {
    const int piece = (party.index + i) % pieces;
    if (piece == party.index) continue;
    const size_t first = begin(piece) * width, last = begin(piece + 1) * width;
    exchange.wait(piece, 2);
    if (first == last) continue;
    // In place, the others must have read this piece of the input before it is overwritten; only its owner reads it.
    exchange.read(piece, exchange.shown(piece).output, first, result + first, last - first);
  }
  if (target != result && party.index < pieces) {
    const size_t first = begin(party.index) * width;
    copy(result + first, target + first, begin(party.index + 1) * width - first);
  }
  exchange.done_by_all();
}

void LocalPlane::reducescatter(const Party& party, uint64_t number, const void* in, void* out,
                               const std::vector<size_t>& counts, DType dtype, ReduceOp op, const Finish& finish) {
  const size_t width = element_size(dtype);
  const size_t total = std::accumulate(counts.begin(), counts.end(), size_t{0});
  const Kernel kernel = reduce_kernel(dtype, op);
  const size_t mine = counts[static_cast<size_t>(party.index)] * width;
  const size_t first = offset_of(counts, party.index) * width;
  auto* const result = static_cast<char*>(out);
  const char* source = static_cast<const char*>(in);
  if (party.size() > 1 && !reachable(in)) {
    char* const staged = staging(total * width);
    copy(staged, in, total * width);
    source = staged;
  }
  Exchange exchange(*this, party, number);
  exchange.show(source, nullptr);
  exchange.publish(1);
  exchange.wait_all(1);
  for (size_t at = 0; at < mine; at += kTile) {
    const size_t size = std::min(kTile, mine - at);
    copy(result + at, source + first + at, size);
    exchange.each_other([&](int member) {
      exchange.read(member, exchange.shown(member).input, first + at, scratch_.get(), size);
      kernel(result + at, result + at, scratch_.get(), size / width);
    });
  }
  finish(result, mine / width);
  exchange.done_by_all();
}

void LocalPlane::allgather(const Party& party, uint64_t number, const void* in, void* out,
                           const std::vector<size_t>& sizes) {
  const size_t mine = sizes[static_cast<size_t>(party.index)];
  auto* const result = static_cast<char*>(out);
  const bool small = *std::max_element(sizes.begin(), sizes.end()) <= kMailboxBytes;
  const void* source = in;
  if (party.size() > 1 && !small && !reachable(in)) {
    char* const staged = staging(mine);
    copy(staged, in, mine);
    source = staged;
  }
  Exchange exchange(*this, party, number);
  if (small) {
    copy(exchange.own_mailbox(), in, mine);
  } else {
    exchange.show(source, nullptr);
  }
  exchange.publish(1);
  copy(result + offset_of(sizes, party.index), in, mine);
  exchange.each_other([&](int member) {
    char* const to = result + offset_of(sizes, member);
    const size_t bytes = sizes[static_cast<size_t>(member)];
    exchange.wait(member, 1);
    if (small) {
      copy(to, exchange.mailbox_of(member), bytes);
    } else if (bytes != 0) {
      exchange.read(member, exchange.shown(member).input, 0, to, bytes);
    }
  });
  if (small) {
    exchange.done();
  } else {
    exchange.done_by_all();
  }
}

void LocalPlane::broadcast(const Party& party, uint64_t number, const void* in, void* out, size_t bytes, int root) {
  const bool small = bytes <= kMailboxBytes;
  const void* source = in;
  if (party.index == root && party.size() > 1 && !small && !reachable(in)) {
    char* const staged = staging(bytes);
    copy(staged, in, bytes);
    source = staged;
  }
  Exchange exchange(*this, party, number);
  if (party.index == root) {
    if (small) {
      copy(exchange.own_mailbox(), in, bytes);
    } else {
      exchange.show(source, nullptr);
    }
    exchange.publish(1);
    copy(out, in, bytes);
    exchange.done();
    if (!small) exchange.wait_all(Exchange::kDone);
    return;
  }
  exchange.wait(root, 1);
  if (small) {
    copy(out, exchange.mailbox_of(root), bytes);
  } else {
    exchange.read(root, exchange.shown(root).input, 0, out, bytes);
    exchange.done_with(root);
  }
  exchange.done();
}

void LocalPlane::alltoall(const Party& party, uint64_t number, const void* in, void* out,
                          const std::vector<std::vector<size_t>>& sizes) {
  const auto me = static_cast<size_t>(party.index);
  const size_t sent = std::accumulate(sizes[me].begin(), sizes[me].end(), size_t{0});
  const void* source = in;
  if (party.size() > 1 && !reachable(in)) {
    char* const staged = staging(sent);
    copy(staged, in, sent);
    source = staged;
  }
  Exchange exchange(*this, party, number);
  exchange.show(source, nullptr);
  exchange.publish(1);
  auto* to = static_cast<char*>(out);
  for (int member = 0; member < party.size(); ++member) {
    const auto& theirs = sizes[static_cast<size_t>(member)];
    const size_t offset = offset_of(theirs, party.index), bytes = theirs[me];
    if (member == party.index) {
      copy(to, static_cast<const char*>(in) + offset, bytes);
    } else if (bytes != 0) {
      exchange.wait(member, 1);
      exchange.read(member, exchange.shown(member).input, offset, to, bytes);
    }
    to += bytes;
  }
  exchange.done_by_all();
}

void LocalPlane::barrier(const Party& party, uint64_t number) {
  Exchange exchange(*this, party, number);
  exchange.publish(1);
  exchange.wait_all(1);
  exchange.done();
}

}  // namespace elastic
