// Signs in one bit each (one is negative), and the majority of several voters' signs.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "lanes.h"
#include "parallel.h"

using namespace laconic;

namespace {

constexpr int64_t kStrip = 64;  // words that are voted on together: 256 bytes of each plane
constexpr int kPlanes = 17;     // binary digits of a count: up to 65,535 voters

// Adds a binary digit to each bit's digit; the carries are left in `carry`.
inline void add_digit(uint32_t* digit, uint32_t* carry) {
  for (int64_t i = 0; i < kStrip; ++i) {
    const uint32_t both = digit[i] & carry[i];
    digit[i] ^= carry[i];
    carry[i] = both;
  }
}

}  // namespace

extern "C" void laconic_pack_signs(const float* x, int64_t n, int threads, uint32_t* words) {
  parallel_over(n, useful_threads(n, threads), [&](int, int64_t begin, int64_t end) {  // cut at multiples of 32
    for (int64_t first = begin; first < end; first += 32) {
      uint32_t word = 0;
      const int64_t stop = std::min<int64_t>(32, end - first);
      int64_t i = 0;
      for (; i + kLanes <= stop; i += kLanes) word |= Sixteen::load(x + first + i).negative() << i;
      for (; i < stop; ++i) word |= static_cast<uint32_t>(std::signbit(x[first + i])) << i;
      words[first / 32] = word;
    }
  });
}

// x = +-scale, by the sign bits.
extern "C" void laconic_unpack_signs(const uint32_t* words, int64_t n, float scale, int threads, float* x) {
  uint32_t positive;
  std::memcpy(&positive, &scale, 4);
  parallel_over(n, useful_threads(n, threads), [&](int, int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += 32) {
      const uint32_t word = words[first / 32];
      const int64_t stop = std::min<int64_t>(32, end - first);
      const auto entry = [=](int i) { return from_bits(positive ^ (word >> i & 1) << 31); };
      if (stop == 32) {  // a number of turns that is known: no loop is left
        for (int i = 0; i < 32; ++i) x[first + i] = entry(i);
      } else {
        for (int i = 0; i < stop; ++i) x[first + i] = entry(i);
      }
    }
  });
}

// Per bit: negative where more than half of the voters have a one, tie where exactly half have.
extern "C" void laconic_vote(const uint32_t* const* ballots, int64_t num_voters, int64_t num_words, int threads,
                             uint32_t* negative, uint32_t* tie) {
  int planes = 1;
  while (num_voters >> planes != 0) ++planes;
  parallel_over(num_words, useful_threads(num_words * num_voters, threads), [&](int, int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += kStrip) {
      const int64_t strip = std::min(kStrip, end - first);
      uint32_t count[kPlanes][kStrip] = {};  // binary digits of how many ones, bit by bit
      for (int64_t voter = 0; voter < num_voters; ++voter) {
        uint32_t carry[kStrip] = {};
        std::memcpy(carry, ballots[voter] + first, 4 * strip);
        for (int plane = 0; plane == 0 || voter >> (plane - 1) != 0; ++plane) add_digit(count[plane], carry);
      }
      const int64_t half = num_voters / 2;
      uint32_t above[kStrip] = {}, equal[kStrip];  // the count against half, from the highest digit down
      std::memset(equal, 0xFF, sizeof equal);
      for (int plane = planes - 1; plane >= 0; --plane) {
        const uint32_t digit = half >> plane & 1 ? ~0u : 0u;
        for (int64_t i = 0; i < kStrip; ++i) {
          above[i] |= equal[i] & count[plane][i] & ~digit;
          equal[i] &= ~(count[plane][i] ^ digit);
        }
      }
      if (num_voters % 2 != 0) std::memset(equal, 0, sizeof equal);
      std::memcpy(negative + first, above, 4 * strip);
      std::memcpy(tie + first, equal, 4 * strip);
    }
  });
}
