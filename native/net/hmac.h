// HMAC-SHA256 (RFC 2104, FIPS 180-4), for the few hundred bytes with which ranks prove themselves to each other: a
// cryptographic library would be one more thing to link, and one more to bundle.
#pragma once

#include <string>
#include <string_view>

namespace elastic {

constexpr size_t kDigestBytes = 32;

std::string sha256(std::string_view bytes);
std::string hmac_sha256(std::string_view key, std::string_view bytes);

// Whether both are the same, in a time that tells nothing of where they differ.
bool same_secret(std::string_view one, std::string_view other);

// Throws CollectiveError where the system has none.
std::string random_bytes(size_t count);

}  // namespace elastic
