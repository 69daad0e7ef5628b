#include "abortable_transport.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "errors.h"

namespace elastic {

// Known to the switch from its making to its end. Gloo keeps an abort that comes before the wait until that wait.
class AbortableBuffer : public gloo::transport::UnboundBuffer {
 public:
  using Clock = std::chrono::steady_clock;

  AbortableBuffer(std::unique_ptr<gloo::transport::UnboundBuffer> inner, std::shared_ptr<AbortSwitch> abort_switch,
                  Clock::time_point deadline)
      : UnboundBuffer(inner->ptr, inner->size),
        inner_(std::move(inner)),
        switch_(std::move(abort_switch)),
        deadline_(deadline) {
    switch_->add(this);
  }

  ~AbortableBuffer() override { switch_->remove(this); }

  using UnboundBuffer::waitRecv;
  using UnboundBuffer::waitSend;

  bool waitRecv(int* rank, std::chrono::milliseconds timeout) override {
    switch_->check();
    return completed(inner_->waitRecv(rank, left(timeout)));
  }

  bool waitSend(int* rank, std::chrono::milliseconds timeout) override {
    switch_->check();
    return completed(inner_->waitSend(rank, left(timeout)));
  }

  void abortWaitRecv() override { inner_->abortWaitRecv(); }
  void abortWaitSend() override { inner_->abortWaitSend(); }

  void send(int rank, uint64_t slot, size_t offset, size_t nbytes) override {
    switch_->check();
    inner_->send(rank, slot, offset, nbytes);
  }

  void recv(int rank, uint64_t slot, size_t offset, size_t nbytes) override {
    switch_->check();
    inner_->recv(rank, slot, offset, nbytes);
  }

  void recv(std::vector<int> ranks, uint64_t slot, size_t offset, size_t nbytes) override {
    switch_->check();
    inner_->recv(std::move(ranks), slot, offset, nbytes);
  }

 private:
  std::chrono::milliseconds left(std::chrono::milliseconds timeout) const {
    if (deadline_ == Clock::time_point::max()) return timeout;
    const auto rest = std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - Clock::now());
    // Above zero: Gloo takes zero for no limit at all.
    return std::max(std::min(timeout, rest), std::chrono::milliseconds(1));
  }

  bool completed(bool done) const {
    if (!done) {
      switch_->check();
      throw CollectiveError("a wait was ended");
    }
    return true;
  }

  const std::unique_ptr<gloo::transport::UnboundBuffer> inner_;
  const std::shared_ptr<AbortSwitch> switch_;
  const Clock::time_point deadline_;
};

void AbortSwitch::abort(const std::string& reason) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!aborted_) {
    aborted_ = true;
    reason_ = reason.empty() ? "aborted" : reason;
  }
  for (AbortableBuffer* buffer : buffers_) {
    buffer->abortWaitRecv();
    buffer->abortWaitSend();
  }
}

bool AbortSwitch::aborted() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return aborted_;
}

std::string AbortSwitch::reason() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return reason_;
}

void AbortSwitch::check() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (aborted_) throw AbortedError(reason_);
}

void AbortSwitch::add(AbortableBuffer* buffer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (aborted_) throw AbortedError(reason_);
  buffers_.insert(buffer);
}

void AbortSwitch::remove(AbortableBuffer* buffer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  buffers_.erase(buffer);
}

AbortableTransport::AbortableTransport(std::shared_ptr<gloo::transport::Context> inner,
                                       std::shared_ptr<AbortSwitch> abort_switch)
    : Context(inner->rank, inner->size), inner_(std::move(inner)), switch_(std::move(abort_switch)) {
  setTimeout(inner_->getTimeout());
}

std::unique_ptr<gloo::transport::Pair>& AbortableTransport::getPair(int member) { return inner_->getPair(member); }

std::unique_ptr<gloo::transport::Pair>& AbortableTransport::createPair(int member) {
  return inner_->createPair(member);
}

std::unique_ptr<gloo::transport::UnboundBuffer> AbortableTransport::createUnboundBuffer(void* ptr, size_t bytes) {
  return std::make_unique<AbortableBuffer>(inner_->createUnboundBuffer(ptr, bytes), switch_, deadline_);
}

}  // namespace elastic
