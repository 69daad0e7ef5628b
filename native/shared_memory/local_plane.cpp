#include "shared_memory/local_plane.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <ctime>
#include <limits>
#include <numeric>
#include <utility>

#include "errors.h"

namespace elastic {
namespace {

// Fits into the second-level cache, together with the data that it is combined with.
constexpr size_t kTile = 128 * 1024;
// How often a wait checks whether to continue.
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

// The beginnings of consecutive parts of these sizes, and the end of the last one.
std::vector<size_t> bounds_of(const std::vector<size_t>& sizes, size_t width = 1) {
  std::vector<size_t> bounds{0};
  for (const size_t size : sizes) bounds.push_back(bounds.back() + size * width);
  return bounds;
}

// The bytes of a part of `size` bytes that are within the `share` bytes beginning at `at`.
size_t within(size_t size, size_t at, size_t share) { return size <= at ? 0 : std::min(share, size - at); }

// Alternates between the mailboxes, within a reply and from reply to reply.
int mailbox_for(uint64_t number) { return static_cast<int>(((number >> Numbering::kStepBits) + number) % kMailboxes); }

// The first element of piece `index` of `pieces`; at the beginning of a cache line.
size_t piece_begin(size_t count, size_t width, int pieces, int index) {
  const size_t line = std::max<size_t>(1, 64 / width);
  const size_t lines = (count + line - 1) / line;
  return std::min(count, (lines * static_cast<size_t>(index) / static_cast<size_t>(pieces)) * line);
}

}  // namespace

// One operation of this worker: its phases, and its mailbox.
class LocalPlane::Exchange {
 public:
  static constexpr uint64_t kDone = (1 << kPhaseBits) - 1;

  Exchange(LocalPlane& plane, const Party& party, uint64_t number)
      : plane_(plane), party_(party), base_(number << kPhaseBits), mailbox_(mailbox_for(number)) {
    // The members of its previous use may still be reading this mailbox.
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
  // The last phase, in which this worker no longer needs its peers' memory.
  void done() { publish(kDone); }
  // Checks, after reads of a member's operation memory, that the member had not given up: then it may have reused that
  // memory, and the data may be wrong.
  void done_with(int member) {
    // A load could be reordered before the reads that it confirms. An addition of 0 cannot, and TSan supports no
    // fences.
    if (peer(member).words().gave_up.fetch_add(0) != 0) {
      throw CollectiveError("rank " + std::to_string(peer(member).rank()) + " gave up while its memory was read");
    }
  }
  // Ends an operation, or a slice of one, in which all members read from all. After the last slice, waits until all
  // have read it: until then the data shown to them must not change.
  void done_with_all(bool last) {
    each_other([&](int member) { done_with(member); });
    done();
    if (last) wait_all(kDone);
  }

  // Returns a member's memory, or a copy of it in the scratch buffer.
  const char* look_at(int member, Address address, size_t offset, size_t bytes) {
    const char* const theirs = peer(member).mapped(address, offset);
    if (theirs != nullptr) return theirs;
    read(member, address, offset, plane_.scratch_.get(), bytes);
    return plane_.scratch_.get();
  }
  // Copies from a member's memory.
  void read(int member, Address address, size_t offset, void* to, size_t bytes) {
    const PeerSegment& from = peer(member);
    plane_.interruption_.in_pieces(
        bytes, [&](size_t at, size_t size) { from.read(address, offset + at, static_cast<char*>(to) + at, size); });
  }

  void show(const void* input, const void* output, bool sliced = false) {
    plane_.own_->words().published[mailbox_] = {plane_.own_->address_of(input), plane_.own_->address_of(output),
                                                sliced};
  }
  // Shows the peers a slice of the input: `share` bytes of each part (between two bounds), from offset `at` in it. If
  // peers can read the input directly, shows all of it. Part `but` is not read by any peer.
  void show_slice(const void* input, const std::vector<size_t>& bounds, size_t at, size_t share, int but = -1) {
    if (plane_.direct_ || plane_.own_->contains(input)) {
      show(input, nullptr);
      return;
    }
    const size_t parts = bounds.size() - 1;
    char* const room = staging(parts * share);
    for (size_t part = 0; part < parts; ++part) {
      const size_t size = within(bounds[part + 1] - bounds[part], at, share);
      if (static_cast<int>(part) == but || size == 0) continue;
      plane_.copy(room + part * share, static_cast<const char*>(input) + bounds[part] + at, size);
    }
    show(room, nullptr, true);
  }
  // The offset of a part of the slice in a member's shown data; the part begins at `begin` in its input.
  size_t offset_of_part(int member, size_t begin, size_t part, size_t at, size_t share) {
    return shown(member).sliced ? part * share : begin + at;
  }
  // Room in the segment, until the operation after the next one begins, which waits until no member reads it.
  char* staging(size_t bytes) { return plane_.own_->staging(mailbox_, bytes); }
  const Words::Buffers& shown(int member) { return peer(member).words().published[mailbox_]; }

  char* own_mailbox() { return plane_.own_->mailbox(mailbox_); }
  const char* mailbox_of(int member) { return member == party_.index ? own_mailbox() : peer(member).mailbox(mailbox_); }
  PeerSegment& peer(int member) { return plane_.peer(party_.ranks[static_cast<size_t>(member)]); }

  // Visits the other members, beginning with the next one, so that not all read from the same member at once.
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
                       Interruption interruption, std::function<void()> look, size_t slice_bytes)
    : own_(std::move(own)),
      direct_(direct),
      slice_bytes_(direct ? std::numeric_limits<size_t>::max() : slice_bytes),
      interruption_(std::move(interruption)),
      look_(std::move(look)),
      // Spinning helps only if the peers can run meanwhile.
      spins_(static_cast<int>(peers.size()) + 1 <= available_cores() ? 2000 : 0),
      scratch_(new char[kTile]) {
  for (auto& one : peers) {
    const auto rank = static_cast<size_t>(one->rank());
    if (peers_by_rank_.size() <= rank) peers_by_rank_.resize(rank + 1);
    peers_by_rank_[rank] = std::move(one);
  }
}

LocalPlane::~LocalPlane() { own_->release_staging(); }

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
    // Checks the progress again after incrementing `waiters`: either it has changed, or its owner notices the waiter.
    const bool slept_through =
        words.progress.load() < value && futex(words.event, FUTEX_WAIT, event, &limit) != 0 && errno == ETIMEDOUT;
    words.waiters.fetch_sub(1);
    if (slept_through) look_();
  }
}

size_t LocalPlane::share_of_slice(size_t parts, size_t largest) const {
  return std::min((largest + 63) / 64 * 64, slice_bytes_ / parts / 64 * 64);
}

void LocalPlane::small_allreduce(const Party& party, uint64_t number, const void* in, void* out, size_t count,
                                 Kernel kernel, size_t width) {
  Exchange exchange(*this, party, number);
  copy(exchange.own_mailbox(), in, count * width);
  exchange.publish(1);
  // In the members' order, so that all members compute the same bits.
  exchange.wait_all(1);
  kernel(out, exchange.mailbox_of(0), exchange.mailbox_of(1), count);
  for (int member = 2; member < party.size(); ++member) kernel(out, out, exchange.mailbox_of(member), count);
  exchange.done();
}

void LocalPlane::allreduce(const Party& party, Numbering& numbers, const void* in, void* out, size_t count, DType dtype,
                           ReduceOp op, const Finish& finish, int spread) {
  const size_t width = element_size(dtype), bytes = count * width;
  const Kernel kernel = reduce_kernel(dtype, op);
  if (party.size() == 1) {
    copy(out, in, bytes);
    finish(out, count);
    return;
  }
  if (spread == 0 && bytes <= kMailboxBytes) {
    small_allreduce(party, numbers.next(), in, out, count, kernel, width);
    finish(out, count);
    return;
  }
  if (spread != 0 && bytes > slice_bytes_) {
    // Other machines, which may not slice, expect one piece of each member.
    std::vector<size_t> bounds, sizes(static_cast<size_t>(party.size()));
    for (int piece = 0; piece <= spread; ++piece) bounds.push_back(piece_begin(count, width, spread, piece) * width);
    for (size_t piece = 0; piece + 1 < bounds.size(); ++piece) sizes[piece] = bounds[piece + 1] - bounds[piece];
    auto* own = static_cast<char*>(out);
    const auto nothing = [](void*, size_t) {};
    if (party.index < spread) own += bounds[static_cast<size_t>(party.index)];
    reduce_parts(party, numbers, in, own, bounds, width, kernel, nothing);
    if (party.index < spread) finish(own, sizes[static_cast<size_t>(party.index)] / width);
    gather(party, numbers, own, static_cast<char*>(out), sizes);
    return;
  }
  // Up to some size, two copies are faster than a system call for each piece (benchmarks/allreduce.py).
  const bool stage = (!direct_ || bytes < kStagedBytes) && !(own_->contains(in) && own_->contains(out));
  const int pieces = spread == 0 ? party.size() : spread;
  for (size_t done = 0, size; done < bytes; done += size) {
    size = std::min(slice_bytes_, bytes - done);
    Exchange exchange(*this, party, numbers.next());
    const char* source = static_cast<const char*>(in) + done;
    char* const result = static_cast<char*>(out) + done;
    char* target = result;
    if (stage) {
      target = exchange.staging(size);
      copy(target, source, size);
      source = target;
    }
    const auto begin = [&](int piece) { return piece_begin(size / width, width, pieces, piece) * width; };
    exchange.show(source, target);
    exchange.publish(1);
    if (party.index < pieces) {
      exchange.wait_all(1);
      const size_t first = begin(party.index), last = begin(party.index + 1);
      for (size_t at = first; at < last; at += kTile) {
        interruption_.check();
        const size_t tile = std::min(kTile, last - at);
        copy(target + at, source + at, tile);
        exchange.each_other([&](int member) {
          const char* const theirs = exchange.look_at(member, exchange.shown(member).input, at, tile);
          kernel(target + at, target + at, theirs, tile / width);
        });
        if (spread == 0) finish(target + at, tile / width);
      }
      if (spread != 0) finish(target + first, (last - first) / width);
      exchange.publish(2);
    }
    for (int i = 0; i < pieces; ++i) {
      const int piece = (party.index + i) % pieces;
      if (piece == party.index) continue;
      const size_t first = begin(piece), last = begin(piece + 1);
      exchange.wait(piece, 2);
      // In place: only its owner reads this piece of the input, and has done so before it is overwritten.
      exchange.read(piece, exchange.shown(piece).output, first, result + first, last - first);
    }
    if (party.index < pieces) {
      const size_t first = begin(party.index);
      copy(result + first, target + first, begin(party.index + 1) - first);
    }
    exchange.done_with_all(done + size == bytes);
  }
}

// out = finish(op over the members' in), for this worker's part. `bounds` are the parts' bounds in bytes; there are at
// most as many parts as members. Calls finish for one piece after the other.
void LocalPlane::reduce_parts(const Party& party, Numbering& numbers, const void* in, char* out,
                              const std::vector<size_t>& bounds, size_t width, Kernel kernel, const Finish& finish) {
  const size_t parts = bounds.size() - 1, me = static_cast<size_t>(party.index);
  size_t largest = 0;
  for (size_t part = 0; part < parts; ++part) largest = std::max(largest, bounds[part + 1] - bounds[part]);
  const size_t share = share_of_slice(parts, largest);
  for (size_t at = 0, size; at < largest; at += size) {
    size = within(largest, at, share);
    Exchange exchange(*this, party, numbers.next());
    exchange.show_slice(in, bounds, at, share, party.index);
    exchange.publish(1);
    const size_t mine = me < parts ? within(bounds[me + 1] - bounds[me], at, size) : 0;
    if (mine != 0) exchange.wait_all(1);
    for (size_t done = 0; done < mine; done += kTile) {
      interruption_.check();
      const size_t tile = std::min(kTile, mine - done);
      char* const target = out + at + done;
      copy(target, static_cast<const char*>(in) + bounds[me] + at + done, tile);
      exchange.each_other([&](int member) {
        const size_t offset = exchange.offset_of_part(member, bounds[me], me, at, share) + done;
        kernel(target, target, exchange.look_at(member, exchange.shown(member).input, offset, tile), tile / width);
      });
      finish(target, tile / width);
    }
    exchange.done_with_all(at + size == largest);
  }
}

void LocalPlane::reducescatter(const Party& party, Numbering& numbers, const void* in, void* out,
                               const std::vector<size_t>& counts, DType dtype, ReduceOp op, const Finish& finish) {
  const size_t width = element_size(dtype);
  reduce_parts(party, numbers, in, static_cast<char*>(out), bounds_of(counts, width), width, reduce_kernel(dtype, op),
               finish);
}

void LocalPlane::allgather(const Party& party, Numbering& numbers, const void* in, void* out,
                           const std::vector<size_t>& sizes) {
  const auto me = static_cast<size_t>(party.index);
  auto* const result = static_cast<char*>(out);
  const std::vector<size_t> bounds = bounds_of(sizes);
  copy(result + bounds[me], in, sizes[me]);
  if (*std::max_element(sizes.begin(), sizes.end()) > kMailboxBytes) {
    gather(party, numbers, in, result, sizes);
    return;
  }
  Exchange exchange(*this, party, numbers.next());
  copy(exchange.own_mailbox(), in, sizes[me]);
  exchange.publish(1);
  exchange.each_other([&](int member) {
    exchange.wait(member, 1);
    copy(result + bounds[static_cast<size_t>(member)], exchange.mailbox_of(member), sizes[static_cast<size_t>(member)]);
  });
  exchange.done();
}

// Gathers the other members' parts, one after the other; this worker's own is in place already.
void LocalPlane::gather(const Party& party, Numbering& numbers, const void* in, char* out,
                        const std::vector<size_t>& sizes) {
  const size_t largest = *std::max_element(sizes.begin(), sizes.end());
  const size_t share = share_of_slice(1, largest), mine = sizes[static_cast<size_t>(party.index)];
  const std::vector<size_t> bounds = bounds_of(sizes);
  for (size_t at = 0, size; at < largest; at += size) {
    size = within(largest, at, share);
    Exchange exchange(*this, party, numbers.next());
    exchange.show_slice(in, {0, mine}, at, share);
    exchange.publish(1);
    exchange.each_other([&](int member) {
      const auto place = static_cast<size_t>(member);
      exchange.wait(member, 1);
      exchange.read(member, exchange.shown(member).input, exchange.offset_of_part(member, 0, 0, at, share),
                    out + bounds[place] + at, within(sizes[place], at, size));
    });
    exchange.done_with_all(at + size == largest);
  }
}

void LocalPlane::broadcast(const Party& party, Numbering& numbers, const void* in, void* out, size_t bytes, int root) {
  const bool small = bytes <= kMailboxBytes;
  const size_t share = small ? bytes : share_of_slice(1, bytes);
  for (size_t at = 0, size; at < bytes; at += size) {
    size = within(bytes, at, share);
    Exchange exchange(*this, party, numbers.next());
    char* const to = static_cast<char*>(out) + at;
    if (party.index == root) {
      if (small) {
        copy(exchange.own_mailbox(), in, bytes);
      } else {
        exchange.show_slice(in, {0, bytes}, at, share);
      }
      exchange.publish(1);
      copy(to, static_cast<const char*>(in) + at, size);
      exchange.done();
      if (!small && at + size == bytes) exchange.wait_all(Exchange::kDone);
      continue;
    }
    exchange.wait(root, 1);
    if (small) {
      copy(to, exchange.mailbox_of(root), size);
    } else {
      exchange.read(root, exchange.shown(root).input, exchange.offset_of_part(root, 0, 0, at, share), to, size);
      exchange.done_with(root);
    }
    exchange.done();
  }
}

void LocalPlane::alltoall(const Party& party, Numbering& numbers, const void* in, void* out,
                          const std::vector<std::vector<size_t>>& sizes) {
  const size_t members = sizes.size(), me = static_cast<size_t>(party.index);
  auto* const result = static_cast<char*>(out);
  std::vector<std::vector<size_t>> bounds;  // of the parts that each member sends
  std::vector<size_t> received;
  size_t largest = 0;
  for (size_t from = 0; from < members; ++from) {
    bounds.push_back(bounds_of(sizes[from]));
    received.push_back(sizes[from][me]);
    for (size_t to = 0; to < members; ++to) {
      if (to != from) largest = std::max(largest, sizes[from][to]);
    }
  }
  const size_t share = share_of_slice(members, largest);
  const std::vector<size_t> places = bounds_of(received);
  copy(result + places[me], static_cast<const char*>(in) + bounds[me][me], received[me]);
  for (size_t at = 0, size; at < largest; at += size) {
    size = within(largest, at, share);
    Exchange exchange(*this, party, numbers.next());
    exchange.show_slice(in, bounds[me], at, share, party.index);
    exchange.publish(1);
    exchange.each_other([&](int member) {
      const auto from = static_cast<size_t>(member);
      const size_t part = within(received[from], at, size);
      if (part == 0) return;
      exchange.wait(member, 1);
      exchange.read(member, exchange.shown(member).input,
                    exchange.offset_of_part(member, bounds[from][me], me, at, share), result + places[from] + at, part);
    });
    exchange.done_with_all(at + size == largest);
  }
}

void LocalPlane::barrier(const Party& party, Numbering& numbers) {
  Exchange exchange(*this, party, numbers.next());
  exchange.publish(1);
  exchange.wait_all(1);
  exchange.done();
}

}  // namespace elastic
