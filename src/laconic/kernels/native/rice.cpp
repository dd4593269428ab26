// Rice's code of the gaps between ascending positions, with a width for every 64 of them.
//
// Words: all widths in 5 bits each; the low `width` bits of each gap, those of narrow blocks first, each width from a
// word of its own on; then the rest of each gap as a run of zeros before a one.

#include <algorithm>
#include <cstring>
#include <vector>

#include "bits.h"

using namespace laconic;

namespace {

constexpr int64_t kBlock = 64;
constexpr int kWidthBits = 5;
constexpr int kWidths = 1 << kWidthBits;

int64_t num_blocks(int64_t k) { return (k + kBlock - 1) / kBlock; }

// floor(log2(mean)) of the gaps of a block, 0 where the mean is less than 2.
int width_of(int64_t sum, int64_t count) {
  const auto mean = static_cast<uint32_t>(sum / count);
  return mean < 2 ? 0 : 31 - __builtin_clz(mean);
}

// The word where the low bits of each width begin, and at the end where the runs do.
std::vector<int64_t> beginnings(const std::vector<uint8_t>& widths, int64_t k) {
  int64_t counts[kWidths] = {};
  for (size_t block = 0; block < widths.size(); ++block) {
    counts[widths[block]] += std::min(kBlock, k - static_cast<int64_t>(block) * kBlock);
  }
  std::vector<int64_t> begins(kWidths + 1);
  int64_t at = words_of(static_cast<int64_t>(widths.size()) * kWidthBits);
  for (int width = 0; width < kWidths; ++width) {
    begins[width] = at;
    at += words_of(counts[width] * width);
  }
  begins[kWidths] = at;
  return begins;
}

}  // namespace

// The most words that k positions take: low bits of at most 31, and runs of at most 3 bits a gap on average.
extern "C" int64_t laconic_most_rice_words(int64_t k) {
  return words_of(num_blocks(k) * kWidthBits) + k + kWidths + words_of(3 * k);
}

// How many words it took, or -1 if the positions do not ascend from zero on; k >= 1.
extern "C" int64_t laconic_encode_rice(const int32_t* positions, int64_t k, uint32_t* words) {
  std::vector<uint8_t> widths(num_blocks(k));
  LaneWriter head(words, kWidthBits);
  for (int64_t start = 0, before = -1; start < k; start += kBlock) {
    const int64_t end = std::min(k, start + kBlock);
    for (int64_t i = start, last = before; i < end; last = positions[i++]) {
      if (positions[i] <= last) return -1;
    }
    const int64_t sum = positions[end - 1] - before - (end - start);
    widths[start / kBlock] = static_cast<uint8_t>(width_of(sum, end - start));
    head.put(widths[start / kBlock]);
    before = positions[end - 1];
  }
  head.finish();
  const std::vector<int64_t> begins = beginnings(widths, k);
  std::vector<LaneWriter> low;
  for (int width = 0; width < kWidths; ++width) low.emplace_back(words + begins[width], width);
  uint32_t* runs = words + begins[kWidths];
  std::memset(runs, 0, 4 * words_of(3 * k));
  int64_t bit = -1, before = -1;
  for (int64_t start = 0; start < k; start += kBlock) {
    const int width = widths[start / kBlock];
    LaneWriter lanes = low[width];  // where it is at hand
    for (int64_t i = start; i < std::min(k, start + kBlock); ++i) {
      const auto gap = static_cast<uint32_t>(positions[i] - before - 1);
      if (width > 0) lanes.put(gap & ((1u << width) - 1));
      bit += (gap >> width) + 1;
      runs[bit >> 5] |= 1u << (bit & 31);
      before = positions[i];
    }
    low[width] = lanes;
  }
  for (LaneWriter& one : low) one.finish();
  return begins[kWidths] + words_of(bit + 1);
}

// The k positions again, k >= 1; returns k only if the words are a code of k positions under n.
extern "C" int64_t laconic_decode_rice(const uint32_t* words, int64_t num_words, int64_t n, int64_t k,
                                       int32_t* positions) {
  std::vector<uint8_t> widths(num_blocks(k));
  if (num_words < words_of(static_cast<int64_t>(widths.size()) * kWidthBits)) return 0;
  LaneReader head(words, kWidthBits);
  for (uint8_t& width : widths) width = static_cast<uint8_t>(head.get());
  const std::vector<int64_t> begins = beginnings(widths, k);
  if (num_words < begins[kWidths]) return 0;
  std::vector<LaneReader> low;
  low.reserve(kWidths);
  for (int width = 0; width < kWidths; ++width) low.emplace_back(words + begins[width], width);
  const uint32_t* const runs = words + begins[kWidths];
  const int64_t num_run_words = num_words - begins[kWidths];
  uint32_t left = 0;  // of the runs in word w
  int64_t w = -1, next = 0, position = -1;
  for (int64_t start = 0; start < k; start += kBlock) {
    const int width = widths[start / kBlock];
    LaneReader lanes = low[width];  // where it is at hand
    for (int64_t i = start; i < std::min(k, start + kBlock); ++i) {
      while (left == 0) {
        if (++w == num_run_words) return i;
        left = runs[w];
      }
      const int64_t bit = 32 * w + __builtin_ctz(left);
      if (bit - next > n) return i;  // before it is shifted out of 64 bits
      position += ((bit - next) << width) + (width > 0 ? lanes.get() : 0) + 1;
      if (position >= n) return i;
      positions[i] = static_cast<int32_t>(position);
      left &= left - 1;
      next = bit + 1;
    }
    low[width] = lanes;
  }
  for (++w; w < num_run_words; ++w) left |= runs[w];
  return left == 0 ? k : k + 1;
}
