// Two bits a value: its sign, and which of its group's two sizes it is nearer to.
//
// Sizes are whole numbers of 2^-40 of the largest |v|: their sums are exact in any order, as integers or as doubles.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "lanes.h"
#include "parallel.h"

using namespace laconic;

namespace {

constexpr int kPerWord = 16;
constexpr int kMostInGroup = 4096;
constexpr int kRounds = 3;
constexpr double kUnits = 1099511627776.0;    // 2^40
constexpr double kWhole = 4503599627370496.0;  // 2^52: what is added to it is rounded to a whole number, ties to even
constexpr int kShareBits = 4;
constexpr int kShares = 1 << kShareBits;
constexpr int kDroppedBits = 20;
constexpr int32_t kOne = 127 << (23 - kDroppedBits);
constexpr int32_t kNoSize = 255;

struct Sizes {
  float low, high;
};

inline Sizes sizes_of(int32_t lane) {
  const int32_t size = lane >> kShareBits;
  const float high = size == kNoSize ? 0.0f : from_bits(static_cast<uint32_t>(kOne - size) << kDroppedBits);
  return {static_cast<float>(lane & (kShares - 1)) * high * (1.0f / kShares), high};
}

inline int32_t lane_of(double low, double high) {
  const auto size_of_one = static_cast<float>(high / kUnits);
  int32_t bits;
  std::memcpy(&bits, &size_of_one, 4);
  const int32_t size = kOne - ((bits + (1 << (kDroppedBits - 1))) >> kDroppedBits);
  const auto share = static_cast<int32_t>(std::nearbyint(low / std::max(high, 1.0) * kShares));
  return std::clamp(size, 0, kNoSize) << kShareBits | std::min(share, kShares - 1);
}

// Whole numbers of units of up to a group of entries; returns their sum.
inline int64_t to_units(const float* x, int64_t count, double scale, int64_t* units) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double whole = static_cast<double>(from_bits(magnitude_bits(x[i]))) * scale + kWhole;
    int64_t bits;
    std::memcpy(&bits, &whole, 8);
    units[i] = bits & ((int64_t{1} << 52) - 1);
    total += units[i];
  }
  return total;
}

// The code of the two means of the smaller and of the larger.
inline int32_t two_means(const int64_t* units, int64_t count, int64_t total) {
  double low = static_cast<double>(total) / static_cast<double>(count), high = low;
  for (int round = 0; round < kRounds; ++round) {
    const auto cut = static_cast<int64_t>(std::floor((low + high) / 2));
    int64_t larger = 0, num_larger = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t above = -static_cast<int64_t>(units[i] > cut);
      larger += units[i] & above;
      num_larger -= above;
    }
    low = static_cast<double>(total - larger) / static_cast<double>(count - num_larger);
    high = std::max(low, static_cast<double>(larger) / static_cast<double>(std::max<int64_t>(num_larger, 1)));
  }
  return lane_of(low, high);
}

}  // namespace

extern "C" void laconic_encode_lloyd(const float* x, int64_t n, float top, int64_t group, int threads, int32_t* lanes,
                                     uint32_t* words) {
  const double scale = kUnits / static_cast<double>(top);
  over_groups(n, group, threads, [&](int64_t number, int64_t first, int64_t count) {
    int64_t units[kMostInGroup];
    const int64_t total = to_units(x + first, count, scale, units);
    const int32_t lane = lanes[number] = two_means(units, count, total);
    const Sizes sizes = sizes_of(lane);
    const double middle = (static_cast<double>(sizes.low) * kUnits + static_cast<double>(sizes.high) * kUnits) / 2;
    const auto cut = static_cast<int64_t>(std::floor(middle));
    for (int64_t at = 0; at < count; at += kPerWord) {
      uint32_t codes[kPerWord] = {};
      const int64_t stop = std::min<int64_t>(kPerWord, count - at);
      for (int64_t i = 0; i < stop; ++i) {
        codes[i] = static_cast<uint32_t>(x[first + at + i] < 0) | static_cast<uint32_t>(units[at + i] > cut) << 1;
      }
      uint32_t word = 0;
      for (int i = 0; i < kPerWord; ++i) word |= codes[i] << 2 * i;
      words[(first + at) / kPerWord] = word;
    }
  });
}

// x has sixteen entries for each word.
extern "C" void laconic_decode_lloyd(const int32_t* lanes, const uint32_t* words, int64_t num_words, float top,
                                     int64_t group, int threads, float* x) {
  over_groups(num_words * kPerWord, group, threads, [&](int64_t number, int64_t first, int64_t count) {
    const Sizes sizes = sizes_of(lanes[number]);
    uint32_t low, high;
    const float scaled_low = sizes.low * top, scaled_high = sizes.high * top;
    std::memcpy(&low, &scaled_low, 4);
    std::memcpy(&high, &scaled_high, 4);
    for (int64_t at = first; at < first + count; at += kPerWord) {
      const uint32_t word = words[at / kPerWord];
      for (int i = 0; i < kPerWord; ++i) {
        const uint32_t code = word >> 2 * i;
        x[at + i] = from_bits((code & 2 ? high : low) ^ code << 31);
      }
    }
  });
}
