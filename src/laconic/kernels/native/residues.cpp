// Remainders of values that another worker holds nearly alike, and the differences that two workers' remainders tell.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "parallel.h"

using namespace laconic;

namespace {

constexpr int64_t kShared = 256;  // entries that share a step; divides kBlock
constexpr float kLimit = (1 << 30) - 64;
constexpr uint32_t kWeight = 2654435761u;  // of an entry in the sum of its block: its place times this, made odd

inline uint32_t weight(int64_t place) { return (static_cast<uint32_t>(place) * kWeight) | 1; }

// floor(x/step + offset) of up to a block of entries, zeros after them; returns their weighted sum.
inline uint32_t quotients(const float* x, int64_t count, float step, float offset, int32_t* q) {
  const float inverse = 1.0f / step;
  for (int64_t i = 0; i < count; ++i) {
    const float at = x[i] * inverse + offset;
    q[i] = static_cast<int32_t>(std::floor(std::min(std::max(at, -kLimit), kLimit)));
  }
  std::fill(q + count, q + kShared, 0);
  uint32_t sum = 0;
  for (int64_t i = 0; i < kShared; ++i) sum += weight(i) * static_cast<uint32_t>(q[i]);
  return sum;
}

inline int64_t code_bytes(int64_t entries, int bits) { return (entries + 7) / 8 * bits; }

}  // namespace

// Blocks are independent, and each begins at a whole number of bytes.
extern "C" void laconic_encode_residues(const float* x, int64_t n, const float* steps, float offset, int bits,
                                        int threads, uint8_t* codes, int32_t* sums) {
  const uint32_t mask = (1u << bits) - 1;
  parallel_over(n, useful_threads(n, threads), [&](int, int64_t begin, int64_t end) {
    int32_t q[kShared];
    for (int64_t first = begin; first < end; first += kShared) {
      const int64_t count = std::min(kShared, end - first), block = first / kShared;
      sums[block] = static_cast<int32_t>(quotients(x + first, count, steps[block], offset, q));
      uint8_t* out = codes + code_bytes(first, bits);
      for (int64_t i = 0; i < count; i += 8, out += bits) {
        uint64_t word = 0;
        for (int lane = 0; lane < 8; ++lane) {
          word |= static_cast<uint64_t>(static_cast<uint32_t>(q[i + lane]) & mask) << (bits * lane);
        }
        std::memcpy(out, &word, bits);
      }
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
      const uint8_t* in = codes + code_bytes(first, bits);
      for (int64_t i = 0; i < count; i += 8, in += bits) {
        uint64_t word = 0;
        std::memcpy(&word, in, bits);
        for (int lane = 0; lane < 8; ++lane) away[i + lane] = static_cast<int32_t>(word >> (bits * lane) & mask);
      }
      int32_t peak = 0;
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t apart = static_cast<uint32_t>(away[i]) - static_cast<uint32_t>(q[i]);
        away[i] = static_cast<int32_t>((apart + half) & mask) - half;
        peak = std::max(peak, std::abs(away[i]));
        expected += weight(i) * static_cast<uint32_t>(away[i]);
      }
      const bool alike = static_cast<uint32_t>(sums[block]) == expected && peak < half;
      const float move = alike ? steps[block] * 0.5f : 0.0f;
      for (int64_t i = 0; i < count; ++i) moves[first + i] = static_cast<float>(away[i]) * move;
      peaks[block] = alike ? peak : -1;
    }
  });
}
