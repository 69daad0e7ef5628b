#include "address_blob.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "errors.h"

namespace elastic {
namespace {

constexpr char kMagic[4] = {'E', 'D', 'G', '1'};
constexpr size_t kPortOffset = 2;  // of sin_port and sin6_port alike
static_assert(offsetof(sockaddr_in, sin_port) == kPortOffset && offsetof(sockaddr_in6, sin6_port) == kPortOffset);
constexpr uint32_t kMostPairs = 1u << 20;

class Writer {
 public:
  void bytes(const void* data, size_t size) { out.append(static_cast<const char*>(data), size); }
  void number(uint32_t value) {
    for (int shift = 0; shift < 32; shift += 8) out.push_back(static_cast<char>(value >> shift));
  }
  std::string out;
};

class Reader {
 public:
  explicit Reader(const std::string& data) : data_(data) {}
  const char* bytes(size_t size) {
    if (size > data_.size() - at_) throw CollectiveError("cannot read a peer's addresses: cut short");
    const char* here = data_.data() + at_;
    at_ += size;
    return here;
  }
  uint32_t number(uint32_t most) {
    const auto* raw = reinterpret_cast<const unsigned char*>(bytes(4));
    uint32_t value = 0;
    for (int i = 3; i >= 0; --i) value = value << 8 | raw[i];
    if (value > most) throw CollectiveError("cannot read a peer's addresses: a number is out of range");
    return value;
  }
  void end() const {
    if (at_ != data_.size()) throw CollectiveError("cannot read a peer's addresses: bytes left over");
  }

 private:
  const std::string& data_;
  size_t at_ = 0;
};

// Gloo's bytes are a sockaddr_storage, of which it fills as much as the family needs, and a sequence number. The rest
// is whatever was in memory: it is cleared, so that addresses can be compared and nothing of this process leaks.
Bytes cleaned(Bytes address) {
  if (address.size() < sizeof(sockaddr_storage)) return address;
  sa_family_t family;
  std::memcpy(&family, address.data(), sizeof(family));
  const size_t used = family == AF_INET    ? offsetof(sockaddr_in, sin_zero)
                      : family == AF_INET6 ? sizeof(sockaddr_in6)
                                           : sizeof(sockaddr_storage);
  std::fill(address.begin() + used, address.begin() + sizeof(sockaddr_storage), 0);
  return address;
}

Bytes without_port(Bytes address) {
  address[kPortOffset] = address[kPortOffset + 1] = 0;
  return address;
}

bool differ_in_port_only(const std::vector<Bytes>& pairs) {
  if (pairs.empty() || pairs[0].size() < sizeof(sockaddr_in6)) return false;
  const Bytes first = without_port(pairs[0]);
  for (const Bytes& pair : pairs) {
    if (pair.size() != first.size() || without_port(pair) != first) return false;
  }
  return true;
}

}  // namespace

std::string pack_addresses(std::vector<GroupAddresses> groups) {
  for (GroupAddresses& group : groups) {
    for (Bytes& pair : group.pairs) pair = cleaned(std::move(pair));
  }
  Writer writer;
  writer.bytes(kMagic, sizeof(kMagic));
  writer.number(static_cast<uint32_t>(groups.size()));
  for (const GroupAddresses& group : groups) {
    writer.number(static_cast<uint32_t>(group.name.size()));
    writer.bytes(group.name.data(), group.name.size());
    writer.number(static_cast<uint32_t>(group.pairs.size()));
    const bool compact = differ_in_port_only(group.pairs);
    writer.number(compact ? 1 : 0);
    if (compact) {
      const Bytes common = without_port(group.pairs[0]);
      writer.number(static_cast<uint32_t>(common.size()));
      writer.bytes(common.data(), common.size());
      for (const Bytes& pair : group.pairs) writer.bytes(pair.data() + kPortOffset, 2);
    } else {
      for (const Bytes& pair : group.pairs) {
        writer.number(static_cast<uint32_t>(pair.size()));
        writer.bytes(pair.data(), pair.size());
      }
    }
  }
  return writer.out;
}

std::vector<GroupAddresses> unpack_addresses(const std::string& blob) {
  Reader reader(blob);
  if (std::memcmp(reader.bytes(sizeof(kMagic)), kMagic, sizeof(kMagic)) != 0) {
    throw CollectiveError("cannot read a peer's addresses: they are not of this version of the extension");
  }
  std::vector<GroupAddresses> groups(reader.number(kMostGroups));
  for (GroupAddresses& group : groups) {
    const uint32_t length = reader.number(kLongestName);
    group.name.assign(reader.bytes(length), length);
    const uint32_t count = reader.number(kMostPairs);
    if (reader.number(1) == 1) {
      const uint32_t size = reader.number(1024);
      const char* common = reader.bytes(size);
      if (size < kPortOffset + 2) throw CollectiveError("cannot read a peer's addresses: an address is too short");
      const char* ports = reader.bytes(size_t{2} * count);
      for (uint32_t i = 0; i < count; ++i) {
        Bytes pair(common, common + size);
        std::memcpy(pair.data() + kPortOffset, ports + size_t{2} * i, 2);
        group.pairs.push_back(std::move(pair));
      }
    } else {
      for (uint32_t i = 0; i < count; ++i) {
        const uint32_t size = reader.number(1024);
        const char* raw = reader.bytes(size);
        group.pairs.emplace_back(raw, raw + size);
      }
    }
  }
  reader.end();
  return groups;
}

}  // namespace elastic
