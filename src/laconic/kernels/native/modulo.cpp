// Modulo codes of values that another worker holds nearly alike, and the differences that the codes of two workers tell.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "lanes.h"
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

// Fields of `kWidth` ones, one every `kApart` bits, the first in the lowest.
template <int kWidth, int kApart>
constexpr uint64_t fields() {
  uint64_t mask = 0;
  for (int at = 0; at < 64; at += kApart) mask |= (~0ull >> (64 - kWidth)) << at;
  return mask;
}

// Eight codes in `kBits` bytes, the first in the lowest bits: neighbours of eight bytes are moved together, then pairs,
// then fours, which takes a fifth of the time of eight shifts.
template <int kBits>
void pack(const uint8_t* codes, int64_t count, uint8_t* out) {
  constexpr uint64_t kOne = fields<kBits, 16>(), kTwo = fields<2 * kBits, 32>(), kFour = fields<4 * kBits, 64>();
  for (int64_t i = 0; i < count; i += 8, out += kBits) {
    uint64_t word;
    std::memcpy(&word, codes + i, 8);
    word = (word & kOne) | (word >> (8 - kBits) & kOne << kBits);
    word = (word & kTwo) | (word >> (16 - 2 * kBits) & kTwo << 2 * kBits);
    word = (word & kFour) | (word >> (32 - 4 * kBits) & kFour << 4 * kBits);
    std::memcpy(out, &word, kBits);
  }
}

template <int kBits>
void unpack(const uint8_t* in, int64_t count, uint8_t* codes) {
  constexpr uint64_t kOne = fields<kBits, 16>(), kTwo = fields<2 * kBits, 32>(), kFour = fields<4 * kBits, 64>();
  for (int64_t i = 0; i < count; i += 8, in += kBits) {
    uint64_t word = 0;
    for (int byte = 0; byte < kBits; ++byte) word |= static_cast<uint64_t>(in[byte]) << (8 * byte);
    word = (word & kFour) | (word & kFour << 4 * kBits) << (32 - 4 * kBits);
    word = (word & kTwo) | (word & kTwo << 2 * kBits) << (16 - 2 * kBits);
    word = (word & kOne) | (word & kOne << kBits) << (8 - kBits);
    std::memcpy(codes + i, &word, 8);
  }
}

using Lanes = void (*)(const uint8_t*, int64_t, uint8_t*);
constexpr Lanes kPack[] = {pack<2>, pack<3>, pack<4>, pack<5>, pack<6>, pack<7>, pack<8>};
constexpr Lanes kUnpack[] = {unpack<2>, unpack<3>, unpack<4>, unpack<5>, unpack<6>, unpack<7>, unpack<8>};

}  // namespace

extern "C" void laconic_largest_changes(const float* x, const float* last, int64_t n, int threads, float* changes,
                                        float* sizes) {
  parallel_over(n, useful_threads(n, threads), [&](int, int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += kShared) {
      uint32_t change = 0, size = 0;
      for (int64_t i = first; i < std::min(first + kShared, end); ++i) {
        change = std::max(change, magnitude_bits(x[i] - last[i]));
        size = std::max(size, magnitude_bits(x[i]));
      }
      changes[first / kShared] = from_bits(change);
      sizes[first / kShared] = from_bits(size);
    }
  });
}

// Blocks are independent, and each begins at a whole number of bytes.
extern "C" void laconic_encode_modulo(const float* x, int64_t n, const float* steps, float offset, int bits,
                                        int threads, uint8_t* codes, int32_t* sums) {
  parallel_over(n, useful_threads(n, threads), [&](int, int64_t begin, int64_t end) {
    int32_t q[kShared];
    uint8_t lanes[kShared];
    for (int64_t first = begin; first < end; first += kShared) {
      const int64_t count = std::min(kShared, end - first), block = first / kShared;
      sums[block] = static_cast<int32_t>(quotients(x + first, count, steps[block], offset, q));
      for (int64_t i = 0; i < kShared; ++i) lanes[i] = static_cast<uint8_t>(q[i]);
      kPack[bits - 2](lanes, count, codes + code_bytes(first, bits));
    }
  });
}

extern "C" void laconic_compare_modulo(const float* x, int64_t n, const uint8_t* codes, const int32_t* sums,
                                         const float* steps, float offset, int bits, int threads, float* moves,
                                         uint8_t* differences, int8_t* peaks) {
  const uint32_t mask = (1u << bits) - 1;
  const int32_t half = 1 << (bits - 1), most = half / 2 - 1;
  parallel_over(n, useful_threads(n, threads), [&](int, int64_t begin, int64_t end) {
    int32_t q[kShared], away[kShared];
    uint8_t lanes[kShared];
    for (int64_t first = begin; first < end; first += kShared) {
      const int64_t count = std::min(kShared, end - first), block = first / kShared;
      uint32_t expected = quotients(x + first, count, steps[block], offset, q);
      kUnpack[bits - 2](codes + code_bytes(first, bits), count, lanes);
      std::fill(lanes + count, lanes + kShared, 0);
      int32_t peak = 0;
      for (int64_t i = 0; i < kShared; ++i) {  // after the last entry both are zero, and no distance apart
        const uint32_t apart = static_cast<uint32_t>(lanes[i]) - static_cast<uint32_t>(q[i]);
        away[i] = static_cast<int32_t>((apart + half) & mask) - half;
        peak = std::max(peak, std::abs(away[i]));
        expected += weight(i) * static_cast<uint32_t>(away[i]);
      }
      const bool alike = static_cast<uint32_t>(sums[block]) == expected && peak < half;
      const int32_t limit = alike ? most : 0;
      const float move = steps[block] * 0.5f;
      for (int64_t i = 0; i < kShared; ++i) {
        away[i] = std::min(limit, std::max(-limit, away[i]));
        lanes[i] = static_cast<uint8_t>(away[i]);
      }
      for (int64_t i = 0; i < count; ++i) moves[first + i] = static_cast<float>(away[i]) * move;
      kPack[bits - 3](lanes, count, differences + code_bytes(first, bits - 1));
      peaks[block] = static_cast<int8_t>(alike ? peak : -1);
    }
  });
}

extern "C" void laconic_decode_differences(const uint8_t* codes, int64_t n, const float* steps, int bits, int threads,
                                           float* moves) {
  const int32_t half = 1 << (bits - 1);
  parallel_over(n, useful_threads(n, threads), [&](int, int64_t begin, int64_t end) {
    uint8_t lanes[kShared];
    for (int64_t first = begin; first < end; first += kShared) {
      const int64_t count = std::min(kShared, end - first), block = first / kShared;
      kUnpack[bits - 2](codes + code_bytes(first, bits), count, lanes);
      const float move = steps[block] * -0.5f;
      for (int64_t i = 0; i < count; ++i) moves[first + i] = static_cast<float>((lanes[i] ^ half) - half) * move;
    }
  });
}
