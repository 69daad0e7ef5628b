// How a thread ends another thread's long work: the work checks a flag between its pieces.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <functional>
#include <utility>

namespace elastic {

// The size of a piece between two checks: a fraction of a millisecond of work, and a multiple of every element's size.
constexpr size_t kUninterruptedBytes = size_t{1} << 20;

class Interruption {
 public:
  // `flag` must outlive this. `raise` throws; it is called by a check once the flag is set.
  Interruption(const std::atomic<bool>& flag, std::function<void()> raise) : flag_(flag), raise_(std::move(raise)) {}

  // Costs one load, so it may be called for every tile.
  void check() const {
    if (flag_.load(std::memory_order_acquire)) raise_();
  }

  // Calls work(offset, size) for each piece of so many bytes, with a check before each call.
  template <typename Work>
  void in_pieces(size_t bytes, Work work) const {
    for (size_t at = 0; at < bytes; at += kUninterruptedBytes) {
      check();
      work(at, std::min(kUninterruptedBytes, bytes - at));
    }
  }

  // Copies, unless both are the same memory. Otherwise they must not overlap.
  void copy(void* to, const void* from, size_t bytes) const {
    if (to == from) return;
    in_pieces(bytes, [&](size_t at, size_t size) {
      std::memcpy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, size);
    });
  }

 private:
  const std::atomic<bool>& flag_;
  const std::function<void()> raise_;
};

}  // namespace elastic
