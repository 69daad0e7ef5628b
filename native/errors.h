// What the native part throws. The binding turns each into the Python class of the same name.
#pragma once

#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace elastic {

// What the system says of the last call that failed.
inline std::string errno_text() { return std::strerror(errno); }

// A collective, or the building of a context, did not succeed.
struct CollectiveError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// It was ended by abort().
struct AbortedError : CollectiveError {
  using CollectiveError::CollectiveError;
};

// A peer cannot be reached, or nothing is heard of its machine any more.
struct UnreachableError : CollectiveError {
  using CollectiveError::CollectiveError;
};

// It did not end in the time allowed.
struct CollectiveTimeout : CollectiveError {
  using CollectiveError::CollectiveError;
};

// There is no memory for what an operation needs: a fault of the program, which another round would not mend. It comes
// out as Python's MemoryError.
class OutOfMemoryError : public std::bad_alloc {
 public:
  explicit OutOfMemoryError(std::string text) : text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

}  // namespace elastic
