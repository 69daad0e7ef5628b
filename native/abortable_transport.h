// A Gloo transport context whose waits can be ended from another thread.
//
// Gloo's algorithms wait on unbound buffers and ignore it when a wait was aborted; and a pair that fails tells the
// operations in its queues, but not the buffer whose message is half received. So this wraps the real transport
// context: every unbound buffer that an algorithm makes is known here, abort() ends the waits on all of them, and a
// wait that did not complete throws.
#pragma once

#include <gloo/transport/context.h>
#include <gloo/transport/unbound_buffer.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>

namespace elastic {

class AbortableBuffer;

// Whether a group of contexts is aborted, and who is to be woken then. Shared by all its contexts.
class AbortSwitch {
 public:
  // The first reason stays. Any thread, any time.
  void abort(const std::string& reason);
  bool aborted() const;
  std::string reason() const;
  // Throws AbortedError when aborted.
  void check() const;

 private:
  friend class AbortableBuffer;
  void add(AbortableBuffer* buffer);
  void remove(AbortableBuffer* buffer);

  mutable std::mutex mutex_;
  bool aborted_ = false;
  std::string reason_;
  std::unordered_set<AbortableBuffer*> buffers_;
};

class AbortableTransport : public gloo::transport::Context {
 public:
  AbortableTransport(std::shared_ptr<gloo::transport::Context> inner, std::shared_ptr<AbortSwitch> abort_switch);

  std::unique_ptr<gloo::transport::Pair>& getPair(int member) override;
  std::unique_ptr<gloo::transport::Pair>& createPair(int member) override;
  std::unique_ptr<gloo::transport::UnboundBuffer> createUnboundBuffer(void* ptr, size_t bytes) override;

  // When the collective that the calling thread is about to begin must be over. Gloo's own limit is for each wait, of
  // which a collective has many.
  void set_deadline(std::chrono::steady_clock::time_point deadline) { deadline_ = deadline; }

 private:
  const std::shared_ptr<gloo::transport::Context> inner_;
  const std::shared_ptr<AbortSwitch> switch_;
  std::chrono::steady_clock::time_point deadline_ = std::chrono::steady_clock::time_point::max();
};

}  // namespace elastic
