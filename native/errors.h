// What the native part throws. The binding turns each into the Python class of the same name.
#pragma once

#include <stdexcept>
#include <string>

namespace elastic {

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

}  // namespace elastic
