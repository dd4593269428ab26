// Remainders of values that another worker holds nearly alike, and the differences that two workers' remainders tell.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "parallel.h"

using namespace laconic;

namespace {

constexpr int64_t kShared = 256;  // entries that share a step; divides kBlock
constexpr float kLimit = 0x2AAAAA80;
constexpr uint32_t kWeight = 2654435767u;  // of an entry in the sum of its block: its place times this, made odd

inline uint32_t weight(int64_t place) { return (static_cast<uint32_t>(place) * kWeight) | 1; }

// floor(x/step + offset) of up to a block of entries, zeros after them; returns their weighted sum.
inline uint32_t quotients(const float* x, int64_t count, float step, float offset, int32_t* q) {
  const float inverse = 1.0f / step;
  for (int64_t i = 0; i < count; ++i) {
    const float at = x[i] * inverse + offset;
    const float within = at < -kLimit ? -kLimit : (at > kLimit ? kLimit : at);
    q[i] = static_cast<int32_t>(std::floor(within));
  }
  std::fill(q + count, q + kShared, 0);
  uint32_t sum = 0;
  for (int64_t i = 0; i < kShared; ++i) sum += weight(i) * static_cast<uint32_t>(q[i]);
  return sum;
}

inline int64_t code_bytes(int64_t entries, int bits) { return (entries + 7) / 8 * bits; }

// Eight codes in `kBits` bytes, the first in the lowest bits; the width is known to the compiler, which unrolls the lanes.
template <int kBits>
void pack(const int32_t* q, int64_t count, uint8_t* out) {
  constexpr uint64_t kMask = (1u << kBits) - 1;
  for (int64_t i = 0; i < count; i += 8, out += kBits) {
    uint64_t word = 0;
    for (int lane = 0; lane < 8; ++lane) word |= (static_cast<uint64_t>(q[i + lane]) & kMask) << (kBits * lane);
    std::memcpy(out, &word, kBits);
  }
}

template <int kBits>
void unpack(const uint8_t* in, int64_t count, int32_t* q) {
  constexpr uint64_t kMask = (1u << kBits) - 1;
  for (int64_t i = 0; i < count; i += 8, in += kBits) {
    uint64_t word = 0;
    std::memcpy(&word, in, kBits);
    for (int lane = 0; lane < 8; ++lane) q[i + lane] = static_cast<int32_t>(word >> (kBits * lane) & kMask);
  }
}

using Pack = void (*)(const int32_t*, int64_t, uint8_t*);
using Unpack = void (*)(const uint8_t*, int64_t, int32_t*);
constexpr Pack kPack[] = {pack<2>, pack<3>, pack<4>, pack<5>, pack<6>, pack<7>, pack<8>};
constexpr Unpack kUnpack[] = {unpack<2>, unpack<3>, unpack<4>, unpack<5>, unpack<6>, unpack<7>, unpack<8>};

}  // namespace

// Blocks are independent, and each begins at a whole number of bytes.
extern "C" void laconic_encode_residues(const float* x, int64_t n, const float* steps, float offset, int bits,
                                        int threads, uint8_t* codes, int32_t* sums) {
  parallel_over(n, useful_threads(n, threads), [&](int, int64_t begin, int64_t end) {
    int32_t q[kShared];
    for (int64_t first = begin; first < end; first += kShared) {
      const int64_t count = std::min(kShared, end - first), block = first / kShared;
      sums[block] = static_cast<int32_t>(quotients(x + first, count, steps[block], offset, q));
      kPack[bits - 2](q, count, codes + code_bytes(first, bits));
    }
  });
}

extern "C" void laconic_decode_residues(const float* x, int64_t n, const uint8_t* codes, const int32_t* sums,
                                        const float* steps, float offset, int bits, int threads, float* moves,
                                        int32_t* peaks) {
  const uint32_t mask = (1u << bits) - 1;
  const int32_t half = 1 << (bits - 1);
  parallel_over(n, useful_threads(n, threads), [&](int, int64_t begin, int64_t end) {
    int32_t q[kShared], away[kShared];
    for (int64_t first = begin; first < end; first += kShared) {
      const int64_t count = std::min(kShared, end - first), block = first / kShared;
      uint32_t expected = quotients(x + first, count, steps[block], offset, q);
      kUnpack[bits - 2](codes + code_bytes(first, bits), count, away);
      int32_t peak = 0;
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t apart = static_cast<uint32_t>(away[i]) - static_cast<uint32_t>(q[i]);
        away[i] = static_cast<int32_t>((apart + half) & mask) - half;
        peak = std::max(peak, std::abs(away[i]));
      }
      for (int64_t i = 0; i < count; ++i) expected += weight(i) * static_cast<uint32_t>(away[i]);
      const bool alike = static_cast<uint32_t>(sums[block]) == expected && peak < half;
      const float move = alike ? steps[block] * 0.5f : 0.0f;
      for (int64_t i = 0; i < count; ++i) moves[first + i] = static_cast<float>(away[i]) * move;
      peaks[block] = alike ? peak : -1;
    }
  });
}
