#include "shared_memory/shared_segment.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <vector>

#include "errors.h"

namespace elastic {
namespace {

// The segments of this process. Locked during each fork: no segment is mapped or unmapped meanwhile, and the child can
// unlock the mutex.
struct Registry {
  std::mutex mutex;
  std::vector<const SharedSegment*> segments;
};

Registry& registry() {
  static Registry* const made = [] {
    auto* const fresh = new Registry;
    // Workers forked from a warmed process skip these handlers (it clones without the C library), but before there are
    // segments.
    pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                   [] {
                     SharedSegment::enter_child();
                     registry().mutex.unlock();
                   });
    return fresh;
  }();
  return *made;
}

char* map_segment(int descriptor) {
  void* const base =
      mmap(nullptr, SharedSegment::kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  if (base == MAP_FAILED) throw CollectiveError("cannot map shared memory: " + errno_text());
  // Otherwise a core dump could be as large as all workers' memory.
  madvise(base, SharedSegment::kBytes, MADV_DONTDUMP);
  return static_cast<char*>(base);
}

std::string namespace_of(const char* which) {
  char target[64];
  const ssize_t length = readlink((std::string("/proc/self/ns/") + which).c_str(), target, sizeof(target));
  return length > 0 ? std::string(target, static_cast<size_t>(length)) : "";
}

size_t rounded(size_t bytes) { return (bytes + 4095) & ~size_t{4095}; }

}  // namespace

std::string this_machine() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  const std::string pids = namespace_of("pid"), net = namespace_of("net");
  if (boot.empty() || pids.empty() || net.empty()) return "";
  return boot + " " + pids + " " + net + " " + std::to_string(geteuid());
}

SharedSegment::SharedSegment() : owner_(getpid()) {
  descriptor_ = memfd_create("elastic_driver", MFD_CLOEXEC);
  if (descriptor_ < 0) throw CollectiveError("cannot make shared memory: " + errno_text());
  try {
    if (ftruncate(descriptor_, static_cast<off_t>(kBytes)) != 0) {
      throw CollectiveError("cannot make shared memory: " + errno_text());
    }
    {
      Registry& all = registry();
      const std::lock_guard<std::mutex> lock(all.mutex);
      all.segments.reserve(all.segments.size() + 1);
      base_ = map_segment(descriptor_);
      all.segments.push_back(this);
    }
    Words* const words = new (base_) Words{};
    if (getrandom(&words->nonce, sizeof(words->nonce), 0) != sizeof(words->nonce)) {
      throw CollectiveError("cannot get random bytes: " + errno_text());
    }
    // Mailboxes are written in the middle of a collective: better an error now than a SIGBUS then.
    if (fallocate(descriptor_, 0, 0, static_cast<off_t>(kStagingOffset)) != 0) {
      throw CollectiveError("cannot make shared memory: " + errno_text());
    }
  } catch (...) {
    unmap();
    ::close(descriptor_);
    throw;
  }
}

void SharedSegment::unmap() {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.segments.erase(std::remove(all.segments.begin(), all.segments.end(), this), all.segments.end());
  if (base_ != nullptr) munmap(base_, kBytes);
}

// Runs in the child at the end of fork(): only system calls are safe here.
void SharedSegment::enter_child() {
  for (const SharedSegment* segment : registry().segments) segment->make_private();
  registry().segments.clear();  // a child of the child copies these copies anyway
}

void SharedSegment::make_private() const {
  // Only the used part: with vm.overcommit_memory=2, the segment's whole address space would count as memory.
  const size_t end = end_.load();
  const void* const used =
      mmap(base_, end, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, descriptor_, 0);
  const void* const rest =
      mmap(base_ + end, kBytes - end, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (used == MAP_FAILED || rest == MAP_FAILED) {
    constexpr char kWhy[] =
        "elastic_driver: cannot copy the parent's shared memory for a forked process, which ends here: no memory\n";
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, kWhy, sizeof(kWhy) - 1);
    abort();
  }
  madvise(base_, kBytes, MADV_DONTDUMP);
}

SharedSegment::~SharedSegment() {
  // A forked child has the mapping, too, and unmaps its own copy.
  unmap();
  if (getpid() == owner_) ::close(descriptor_);
}

SegmentName SharedSegment::name() const {
  const auto* const words = reinterpret_cast<const Words*>(base_);
  return {this_machine(), owner_, descriptor_, words->nonce, reinterpret_cast<uint64_t>(words)};
}

char* SharedSegment::staging(int which, size_t bytes) {
  size_t& staged = staged_[which];
  const size_t offset = kStagingOffset + static_cast<size_t>(which) * kSliceBytes;
  if (staged < bytes) {
    const size_t wanted = std::min(kSliceBytes, std::max(rounded(bytes), 2 * staged));
    if (fallocate(descriptor_, 0, static_cast<off_t>(offset), static_cast<off_t>(wanted)) != 0) {
      throw CollectiveError("cannot get " + std::to_string(wanted) + " bytes of shared memory: " + errno_text());
    }
    staged = wanted;
  }
  return base_ + offset;
}

void SharedSegment::release_staging() {
  if (getpid() != owner_) return;
  fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(kStagingOffset),
            static_cast<off_t>(kHeapOffset - kStagingOffset));
  for (size_t& staged : staged_) staged = 0;
}

void* SharedSegment::allocate(size_t bytes) {
  const size_t size = rounded(bytes == 0 ? 1 : bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  size_t at = kHeapOffset;
  for (const auto& [offset, used] : used_) {
    if (offset - at >= size) break;
    at = offset + used;
  }
  if (at > kBytes || kBytes - at < size) return nullptr;
  if (fallocate(descriptor_, 0, static_cast<off_t>(at), static_cast<off_t>(size)) != 0) return nullptr;
  used_[at] = size;
  end_ = std::max(end_.load(), at + size);
  return base_ + at;
}

void SharedSegment::release(void* memory) {
  // A forked child must not free anything, and there the mutex may be locked for ever.
  if (getpid() != owner_) return;
  const auto at = static_cast<size_t>(static_cast<char*>(memory) - base_);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = used_.find(at);
  if (found == used_.end()) return;
  fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(at),
            static_cast<off_t>(found->second));
  used_.erase(found);
}

PeerSegment::PeerSegment(int rank, const SegmentName& name) : rank_(rank), name_(name), owner_(getpid()) {
  const std::string path = "/proc/" + std::to_string(name.pid) + "/fd/" + std::to_string(name.descriptor);
  const int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) {
    throw CollectiveError("cannot open the shared memory of rank " + std::to_string(rank) + ": " + errno_text());
  }
  struct stat status{};
  const bool whole = fstat(descriptor, &status) == 0 && static_cast<size_t>(status.st_size) == SharedSegment::kBytes;
  try {
    if (whole) base_ = map_segment(descriptor);
  } catch (...) {
    ::close(descriptor);
    throw;
  }
  ::close(descriptor);
  if (!whole || words().nonce != name.nonce) {
    if (base_ != nullptr) munmap(base_, SharedSegment::kBytes);
    throw CollectiveError("the shared memory of rank " + std::to_string(rank) + " is another's by now");
  }
  // A child could write to it, and keep its memory allocated after the peer's end.
  madvise(base_, SharedSegment::kBytes, MADV_DONTFORK);
}

PeerSegment::~PeerSegment() {
  // In a forked child, another mapping may be there by now.
  if (getpid() == owner_) munmap(base_, SharedSegment::kBytes);
}

bool PeerSegment::can_read_private() const {
  uint64_t nonce = 0;
  try {
    read({name_.words_address, false}, offsetof(Words, nonce), &nonce, sizeof(nonce));
  } catch (const CollectiveError&) {
    return false;
  }
  return nonce == name_.nonce;
}

void PeerSegment::read(Address address, size_t offset, void* to, size_t bytes) const {
  if (address.shared) {
    std::memcpy(to, base_ + address.value + offset, bytes);
    return;
  }
  auto* into = static_cast<char*>(to);
  uint64_t from = address.value + offset;
  while (bytes > 0) {
    iovec local{into, bytes};
    iovec remote{reinterpret_cast<void*>(from), bytes};
    const ssize_t got = process_vm_readv(name_.pid, &local, 1, &remote, 1, 0);
    if (got <= 0) {
      if (got < 0 && errno == EINTR) continue;
      throw CollectiveError("cannot read the memory of rank " + std::to_string(rank_) + ": " +
                            (got < 0 ? errno_text() : "it is gone"));
    }
    into += got;
    from += static_cast<uint64_t>(got);
    bytes -= static_cast<size_t>(got);
  }
}

}  // namespace elastic
