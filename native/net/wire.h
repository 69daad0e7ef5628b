// The encoding of numbers and texts in the engine's messages: integers in 7-bit groups, least significant first.
#pragma once

#include <climits>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "errors.h"

namespace elastic {

class Writer {
 public:
  void number(uint64_t value) {
    while (value >= 0x80) {
      out_.push_back(static_cast<char>(value | 0x80));
      value >>= 7;
    }
    out_.push_back(static_cast<char>(value));
  }
  void real(double value) { out_.append(reinterpret_cast<const char*>(&value), sizeof(value)); }
  void text(std::string_view value) {
    number(value.size());
    out_.append(value);
  }
  void raw(std::string_view value) { out_.append(value); }

  const std::string& bytes() const { return out_; }
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

// Throws CollectiveError for a truncated message: the sender has another version, or is not a worker.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  bool empty() const { return rest_.empty(); }
  uint64_t number() {
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<unsigned char>(raw(1)[0]);
      value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
    throw CollectiveError("cannot read a peer's message: a number has more than 64 bits");
  }
  int small_number() {
    const uint64_t value = number();
    if (value > INT_MAX) throw CollectiveError("cannot read a peer's message: a number is too large");
    return static_cast<int>(value);
  }
  // A size or an extent, which is not negative.
  int64_t size() {
    const uint64_t value = number();
    if (value > INT64_MAX) throw CollectiveError("cannot read a peer's message: a size is negative");
    return static_cast<int64_t>(value);
  }
  double real() {
    double value;
    std::memcpy(&value, raw(sizeof(value)).data(), sizeof(value));
    return value;
  }
  std::string_view text() { return raw(number()); }
  std::string_view raw(size_t size) {
    if (size > rest_.size()) throw CollectiveError("cannot read a peer's message: it is cut off");
    const std::string_view found = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return found;
  }
  // The remaining bytes.
  std::string_view rest() { return raw(rest_.size()); }

 private:
  std::string_view rest_;
};

}  // namespace elastic
