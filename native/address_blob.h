// The bytes that workers exchange to find each other: for each group, where each of this worker's pairs listens.
//
// Gloo's own form is 136 bytes a pair. All pairs of a worker listen at one address and differ in the port, so a blob
// holds the address once and two bytes a pair. Where that does not hold (a Gloo that works otherwise), it holds Gloo's
// bytes as they are.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace elastic {

using Bytes = std::vector<char>;

// What a blob can hold.
constexpr size_t kMostGroups = 16;
constexpr size_t kLongestName = 256;

struct GroupAddresses {
  std::string name;
  // Gloo's bytes, for each other member in the group's order.
  std::vector<Bytes> pairs;
};

std::string pack_addresses(std::vector<GroupAddresses> groups);

// Throws CollectiveError when the bytes are not such a blob.
std::vector<GroupAddresses> unpack_addresses(const std::string& blob);

}  // namespace elastic
