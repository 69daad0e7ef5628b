// HMAC-SHA256 (RFC 2104, FIPS 180-4), for the few hundred bytes with which ranks authenticate each other: a
// cryptographic library would be another dependency to link and to bundle.
#pragma once

#include <string>
#include <string_view>

namespace elastic {

constexpr size_t kDigestBytes = 32;

std::string sha256(std::string_view bytes);
std::string hmac_sha256(std::string_view key, std::string_view bytes);

// Returns whether both are equal. The time that it takes does not depend on where they differ.
bool same_secret(std::string_view one, std::string_view other);

// Throws CollectiveError if the system has no random bytes.
std::string random_bytes(size_t count);

}  // namespace elastic
