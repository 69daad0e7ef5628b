#include "net/hmac.h"

#include <sys/random.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "errors.h"

namespace elastic {
namespace {

constexpr size_t kBlockBytes = 64;

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::array<uint32_t, 64> kConstants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t rotated(uint32_t word, int bits) { return word >> bits | word << (32 - bits); }

void mix(std::array<uint32_t, 8>& state, const unsigned char* block) {
  std::array<uint32_t, 64> words;
  for (size_t i = 0; i < 16; ++i) {
    words[i] = uint32_t{block[4 * i]} << 24 | uint32_t{block[4 * i + 1]} << 16 | uint32_t{block[4 * i + 2]} << 8 |
               uint32_t{block[4 * i + 3]};
  }
  for (size_t i = 16; i < 64; ++i) {
    const uint32_t far = words[i - 15], near = words[i - 2];
    words[i] = words[i - 16] + (rotated(far, 7) ^ rotated(far, 18) ^ far >> 3) + words[i - 7] +
               (rotated(near, 17) ^ rotated(near, 19) ^ near >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t one =
        h + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) + ((e & f) ^ (~e & g)) + kConstants[i] + words[i];
    const uint32_t two = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + one;
    d = c;
    c = b;
    b = a;
    a = one + two;
  }
  const std::array<uint32_t, 8> after = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) state[i] += after[i];
}

}  // namespace

std::string sha256(std::string_view bytes) {
  // The first 32 bits of the fractional parts of the square roots of the first 8 primes.
  std::array<uint32_t, 8> state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  // A one bit, zeros, and the length in bits, up to a whole block.
  std::string padded(bytes);
  padded.push_back(static_cast<char>(0x80));
  while (padded.size() % kBlockBytes != kBlockBytes - 8) padded.push_back(0);
  const uint64_t bits = uint64_t{bytes.size()} * 8;
  for (int shift = 56; shift >= 0; shift -= 8) padded.push_back(static_cast<char>(bits >> shift));
  for (size_t at = 0; at < padded.size(); at += kBlockBytes) {
    mix(state, reinterpret_cast<const unsigned char*>(padded.data() + at));
  }
  std::string digest;
  for (const uint32_t word : state) {
    for (int shift = 24; shift >= 0; shift -= 8) digest.push_back(static_cast<char>(word >> shift));
  }
  return digest;
}

std::string hmac_sha256(std::string_view key, std::string_view bytes) {
  std::string block = key.size() > kBlockBytes ? sha256(key) : std::string(key);
  block.resize(kBlockBytes, 0);
  std::string inner = block, outer = block;
  for (char& byte : inner) byte = static_cast<char>(byte ^ 0x36);
  for (char& byte : outer) byte = static_cast<char>(byte ^ 0x5c);
  return sha256(outer + sha256(inner.append(bytes)));
}

bool same_secret(std::string_view one, std::string_view other) {
  if (one.size() != other.size()) return false;
  volatile unsigned char difference = 0;
  for (size_t i = 0; i < one.size(); ++i) {
    difference = static_cast<unsigned char>(difference | (one[i] ^ other[i]));
  }
  return difference == 0;
}

std::string random_bytes(size_t count) {
  std::string bytes(count, 0);
  // getrandom returns up to 256 bytes completely.
  if (getrandom(bytes.data(), count, 0) != static_cast<ssize_t>(count)) {
    throw CollectiveError(std::string("cannot get random bytes: ") + std::strerror(errno));
  }
  return bytes;
}

}  // namespace elastic
