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
constexpr uint32_t kLongestAddress = 1024;

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
  bool empty() const { return at_ == data_.size(); }
  void end() const {
    if (at_ != data_.size()) throw CollectiveError("cannot read a peer's addresses: bytes left over");
  }

 private:
  const std::string& data_;
  size_t at_ = 0;
};

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

Bytes clean_address(Bytes address) {
  if (address.size() < sizeof(sockaddr_storage)) return address;
  sa_family_t family;
  std::memcpy(&family, address.data(), sizeof(family));
  const size_t used = family == AF_INET    ? offsetof(sockaddr_in, sin_zero)
                      : family == AF_INET6 ? sizeof(sockaddr_in6)
                                           : sizeof(sockaddr_storage);
  std::fill(address.begin() + used, address.begin() + sizeof(sockaddr_storage), 0);
  return address;
}

std::string pack_addresses(const std::vector<GroupAddresses>& groups) {
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
      const uint32_t size = reader.number(kLongestAddress);
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
        const uint32_t size = reader.number(kLongestAddress);
        const char* raw = reader.bytes(size);
        group.pairs.emplace_back(raw, raw + size);
      }
    }
  }
  reader.end();
  return groups;
}

CutAddresses cut_addresses(const std::vector<GroupAddresses>& groups, const std::vector<std::vector<int>>& peers,
                           size_t size) {
  std::vector<Bytes> all;
  for (const GroupAddresses& group : groups) all.insert(all.end(), group.pairs.begin(), group.pairs.end());
  const bool compact = differ_in_port_only(all);
  Writer common;
  common.number(static_cast<uint32_t>(groups.size()));
  for (const GroupAddresses& group : groups) {
    common.number(static_cast<uint32_t>(group.name.size()));
    common.bytes(group.name.data(), group.name.size());
  }
  common.number(compact ? 1 : 0);
  if (compact) {
    // Of the address proper only what the family needs; the rest of it is zero.
    const Bytes base = without_port(all[0]);
    const size_t address = std::min(base.size(), sizeof(sockaddr_storage));
    size_t used = address;
    while (used > kPortOffset + 2 && base[used - 1] == 0) --used;
    common.number(static_cast<uint32_t>(base.size()));
    common.number(static_cast<uint32_t>(used));
    common.bytes(base.data(), used);
    common.bytes(base.data() + address, base.size() - address);
  }
  CutAddresses cut{common.out, std::vector<std::string>(size)};
  for (size_t group = 0; group < groups.size(); ++group) {
    for (size_t i = 0; i < groups[group].pairs.size(); ++i) {
      const Bytes& pair = groups[group].pairs[i];
      Writer part;
      part.out.push_back(static_cast<char>(group));
      if (compact) {
        part.bytes(pair.data() + kPortOffset, 2);
      } else {
        part.number(static_cast<uint32_t>(pair.size()));
        part.bytes(pair.data(), pair.size());
      }
      cut.parts[static_cast<size_t>(peers[group][i])] += part.out;
    }
  }
  return cut;
}

std::map<std::string, Bytes> join_addresses(const std::string& common, const std::string& part) {
  Reader reader(common);
  std::vector<std::string> names(reader.number(kMostGroups));
  for (std::string& name : names) {
    const uint32_t length = reader.number(kLongestName);
    name.assign(reader.bytes(length), length);
  }
  const bool compact = reader.number(1) == 1;
  Bytes base;
  if (compact) {
    base.resize(reader.number(kLongestAddress));
    const size_t address = std::min(base.size(), sizeof(sockaddr_storage));
    const uint32_t used = reader.number(static_cast<uint32_t>(address));
    if (used < kPortOffset + 2) throw CollectiveError("cannot read a peer's addresses: an address is too short");
    std::memcpy(base.data(), reader.bytes(used), used);
    if (base.size() > address) std::memcpy(base.data() + address, reader.bytes(base.size() - address), base.size() - address);
  }
  reader.end();
  std::map<std::string, Bytes> found;
  Reader parts(part);
  while (!parts.empty()) {
    const auto group = static_cast<unsigned char>(*parts.bytes(1));
    if (group >= names.size()) throw CollectiveError("cannot read a peer's addresses: there is no such group");
    Bytes pair = base;
    if (compact) {
      std::memcpy(pair.data() + kPortOffset, parts.bytes(2), 2);
    } else {
      const uint32_t size = parts.number(kLongestAddress);
      const char* raw = parts.bytes(size);
      pair.assign(raw, raw + size);
    }
    found[names[group]] = std::move(pair);
  }
  return found;
}

}  // namespace elastic
