#include "abortable_transport.h"

#include <utility>
#include <vector>

#include "errors.h"

namespace elastic {

// Known to the switch from its making to its end. Gloo keeps an abort that comes before the wait until that wait.
class AbortableBuffer : public gloo::transport::UnboundBuffer {
 public:
  AbortableBuffer(std::unique_ptr<gloo::transport::UnboundBuffer> inner, std::shared_ptr<AbortSwitch> abort_switch)
      : UnboundBuffer(inner->ptr, inner->size), inner_(std::move(inner)), switch_(std::move(abort_switch)) {
    switch_->add(this);
  }

  ~AbortableBuffer() override { switch_->remove(this); }

  using UnboundBuffer::waitRecv;
  using UnboundBuffer::waitSend;

  bool waitRecv(int* rank, std::chrono::milliseconds timeout) override {
    switch_->check();
    return completed(inner_->waitRecv(rank, timeout));
  }

  bool waitSend(int* rank, std::chrono::milliseconds timeout) override {
    switch_->check();
    return completed(inner_->waitSend(rank, timeout));
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
  bool completed(bool done) const {
    if (!done) {
      switch_->check();
      throw CollectiveError("a wait was ended");
    }
    return true;
  }

  const std::unique_ptr<gloo::transport::UnboundBuffer> inner_;
  const std::shared_ptr<AbortSwitch> switch_;
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

std::unique_ptr<gloo::transport::Pair>& AbortableTransport::createPair(int member) { return inner_->createPair(member); }

std::unique_ptr<gloo::transport::UnboundBuffer> AbortableTransport::createUnboundBuffer(void* ptr, size_t bytes) {
  return std::make_unique<AbortableBuffer>(inner_->createUnboundBuffer(ptr, bytes), switch_);
}

}  // namespace elastic
