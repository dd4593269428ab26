// Bits in 32-bit words: bit vectors, lanes end to end, Elias-Fano, check sums. All are little-endian from bit 0 up.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "bits.h"

using namespace laconic;

// How many of the positions are not under num_bits; for those no bit is set.
extern "C" int64_t laconic_set_bits(const int32_t* positions, int64_t count, uint32_t* words, int64_t num_bits) {
  std::memset(words, 0, 4 * words_of(num_bits));
  int64_t outside = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = positions[i];
    if (at < 0 || at >= num_bits) {
      ++outside;
    } else {
      words[at >> 5] |= 1u << (at & 31);
    }
  }
  return outside;
}

// Positions of the ones, ascending; at most `room` are written, all are counted.
extern "C" int64_t laconic_unpack_bits(const uint32_t* words, int64_t num_words, int32_t* positions, int64_t room) {
  int64_t count = 0;
  for (int64_t w = 0; w < num_words; ++w) {
    for (uint32_t left = words[w]; left != 0; left &= left - 1, ++count) {
      if (count < room) positions[count] = static_cast<int32_t>(32 * w + __builtin_ctz(left));
    }
  }
  return count;
}

extern "C" void laconic_pack_lanes(const int32_t* values, int64_t count, int width, uint32_t* words) {
  LaneWriter lanes(words, width);
  for (int64_t i = 0; i < count; ++i) lanes.put(static_cast<uint32_t>(values[i]));
  lanes.finish();
}

extern "C" void laconic_unpack_lanes(const uint32_t* words, int64_t count, int width, int32_t* values) {
  LaneReader lanes(words, width);
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<int32_t>(lanes.get());
}

// Low `width` bits of each position as lanes, then ones at (position >> width) + i in a vector of num_high_bits.
extern "C" void laconic_encode_elias_fano(const int32_t* positions, int64_t k, int width, int64_t num_high_bits,
                                          uint32_t* words) {
  uint32_t* high = words + words_of(k * width);
  std::memset(high, 0, 4 * words_of(num_high_bits));
  LaneWriter low(words, width);
  const uint32_t mask = (1u << width) - 1;
  for (int64_t i = 0; i < k; ++i) {
    const auto position = static_cast<uint32_t>(positions[i]);
    const int64_t one = (position >> width) + i;
    high[one >> 5] |= 1u << (one & 31);
    if (width > 0) low.put(position & mask);
  }
  low.finish();
}

// The k positions again, or how far it came: k only if there are exactly k, strictly ascending and under n.
extern "C" int64_t laconic_decode_elias_fano(const uint32_t* words, int64_t num_words, int64_t n, int64_t k, int width,
                                             int32_t* positions) {
  const uint32_t* high = words + words_of(k * width);
  const int64_t num_high_words = num_words - words_of(k * width);
  LaneReader low(words, width);
  int64_t count = 0;
  int64_t last = -1;
  for (int64_t w = 0; w < num_high_words; ++w) {
    for (uint32_t left = high[w]; left != 0; left &= left - 1, ++count) {
      if (count == k) return k + 1;
      const int64_t rest = 32 * w + __builtin_ctz(left) - count;
      const int64_t position = rest << width | (width > 0 ? low.get() : 0);
      if (position <= last || position >= n) return count;
      positions[count] = static_cast<int32_t>(position);
      last = position;
    }
  }
  return count;
}

namespace {

// SplitMix64's finalizer of the pair of words at place i, little-endian like all that is sent.
inline uint64_t mixed(uint64_t pair, int64_t i) {
  uint64_t z = pair + static_cast<uint64_t>(i + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

}  // namespace

// The sum over all pairs modulo 2^64, as a signed number; a last word alone is a pair with zero.
extern "C" int64_t laconic_check_sum(const uint32_t* words, int64_t num_words) {
  const int64_t num_pairs = num_words / 2;
  uint32_t last = 0;  // copied, as pairs are: a frame may begin at any byte
  if (num_words % 2) std::memcpy(&last, words + num_words - 1, 4);
  uint64_t sum = num_words % 2 == 0 ? 0 : mixed(last, num_pairs);
  for (int64_t i = 0; i < num_pairs; ++i) {
    uint64_t pair;
    std::memcpy(&pair, words + 2 * i, 8);
    sum += mixed(pair, i);
  }
  return static_cast<int64_t>(sum);
}
