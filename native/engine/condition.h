// A condition variable that may be abandoned in a forked child.
//
// The C library's destructor waits for all waiting threads. In a child, the parent's threads never return from the
// wait.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <memory>

namespace elastic {

class Condition {
 public:
  Condition() = default;
  ~Condition() {
    if (getpid() != owner_) static_cast<void>(held_.release());
  }
  Condition(const Condition&) = delete;
  Condition& operator=(const Condition&) = delete;

  std::condition_variable* operator->() const { return held_.get(); }

 private:
  const pid_t owner_ = getpid();
  std::unique_ptr<std::condition_variable> held_ = std::make_unique<std::condition_variable>();
};

}  // namespace elastic
