// The bytes that workers exchange to find each other: for each group, where each of this worker's pairs listens.
//
// Gloo's own form is 136 bytes a pair. All pairs of a worker listen at one address and differ in the port, so a blob
// holds the address once and two bytes a pair. Where that does not hold (a Gloo that works otherwise), it holds Gloo's
// bytes as they are.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace elastic {

using Bytes = std::vector<char>;

// What a blob can hold.
constexpr size_t kMostGroups = 16;
constexpr size_t kLongestName = 256;

// Gloo's bytes are a sockaddr_storage, of which it fills as much as the family needs, and a sequence number. The rest
// is whatever was in memory: it is cleared, so that addresses can be compared and nothing of this process leaks.
Bytes clean_address(Bytes address);

struct GroupAddresses {
  std::string name;
  // Clean addresses, for each other member in the group's order.
  std::vector<Bytes> pairs;
};

std::string pack_addresses(const std::vector<GroupAddresses>& groups);

// Throws CollectiveError when the bytes are not such a blob.
std::vector<GroupAddresses> unpack_addresses(const std::string& blob);

// The same cut up, so that each peer can be given what is for it and nothing else: two bytes for each group shared with
// it, and what is common to all.
struct CutAddresses {
  std::string common;
  std::vector<std::string> parts;  // by global rank; "" for ranks that share no group
};

// `peers`: for each group, the global ranks of the other members, as the pairs are. All are below `size`.
CutAddresses cut_addresses(const std::vector<GroupAddresses>& groups, const std::vector<std::vector<int>>& peers,
                           size_t size);

// What a peer's common bytes and its part for this worker say: its address for this worker, by the group's name. Throws
// CollectiveError when the bytes are no such thing.
std::map<std::string, Bytes> join_addresses(const std::string& common, const std::string& part);

}  // namespace elastic
