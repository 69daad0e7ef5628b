// The exceptions of the native part. The bindings convert them to the Python classes of the same names.
#pragma once

#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace elastic {

// The system's message for the last failed call.
inline std::string errno_text() { return std::strerror(errno); }

// A collective, or the creation of a context, has failed.
struct CollectiveError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The operation was ended by abort().
struct AbortedError : CollectiveError {
  using CollectiveError::CollectiveError;
};

// A peer cannot be reached, or its host has become silent.
struct UnreachableError : CollectiveError {
  using CollectiveError::CollectiveError;
};

// The operation did not finish in time.
struct CollectiveTimeout : CollectiveError {
  using CollectiveError::CollectiveError;
};

// There is no memory for an operation: a fault of the program, which would recur in another round. Python gets a
// MemoryError.
class OutOfMemoryError : public std::bad_alloc {
 public:
  explicit OutOfMemoryError(std::string text) : text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

}  // namespace elastic
