// Integers on a shared grid: norms, stochastic rounding and packing in one pass, unpacking and scaling in one pass.
//
// Everything is float32 and integer arithmetic in the order of the reference, so that every machine gives the same bits.
// Lane l of word j is entry l * num_words + j: a block of words is filled lane by lane from runs of contiguous entries.

#include <algorithm>
#include <type_traits>

#include "lanes.h"
#include "mixing.h"
#include "parallel.h"

using namespace laconic;

namespace {

constexpr int64_t kWords = 1024;  // filled together: their sums stay in the first-level cache
constexpr uint32_t kInfinityBits = 0x7F800000;
constexpr float kDrawUnit = 1.0f / (1 << 24);

// 24 uniform bits that belong to position i in the stream of a key.
inline uint32_t draw(uint32_t i, uint32_t key0, uint32_t key1) { return mixed(i, key0, key1) >> 8; }

// Calls work(first, count, scale) for the runs of [begin, end) that share a scale; one scale may serve all.
template <class Work>
inline void over_scales(int64_t begin, int64_t end, int64_t group, const float* scales, int64_t num_scales,
                        const Work& work) {
  if (num_scales <= 1) return work(begin, end - begin, scales[0]);
  for (int64_t at = begin; at < end;) {
    const int64_t number = at / group;
    const int64_t stop = std::min(end, (number + 1) * group);
    work(at, stop - at, scales[number]);
    at = stop;
  }
}

template <class Word>
void quantize_pack(const float* x, int64_t n, const float* inverse, int64_t num_scales, int64_t group, int32_t levels,
                   int lane_bits, uint32_t key0, uint32_t key1, int threads, Word* words, int64_t num_words) {
  parallel_over(num_words, useful_threads(n, threads), [&](int, int64_t from, int64_t to) {
    for (int64_t block = from; block < to; block += kWords) {
      const int64_t count = std::min(kWords, to - block);
      Word sums[kWords] = {};
      for (int lane = 0; lane * num_words + block < n; ++lane) {
        const int64_t start = lane * num_words + block;
        const int shift = lane * lane_bits;
        over_scales(start, std::min(start + count, n), group, inverse, num_scales,
                    [&](int64_t first, int64_t run, float scale) {
          Word* sum = sums + (first - start);
          for (int64_t i = 0; i < run; ++i) {
            const float value = x[first + i];
            const float y = from_bits(magnitude_bits(value)) * scale;
            const auto low = static_cast<int32_t>(y);  // y >= 0: truncation is floor
            const auto drawn = static_cast<int32_t>(draw(static_cast<uint32_t>(first + i), key0, key1));
            const bool up = static_cast<float>(drawn) * kDrawUnit < y - static_cast<float>(low);
            const int32_t code = std::min(low + up, levels);  // y may be an ulp over the number of levels
            sum[i] += static_cast<Word>(value < 0 ? -code : code) << shift;
          }
        });
      }
      std::copy_n(sums, count, words + block);
    }
  });
}

// The digit of one lane: a shift that rounds to nearest takes the lower lanes away.
template <class Word>
inline int32_t digit(Word word, int shift, int lane_bits) {
  using Signed = std::make_signed_t<Word>;
  const auto wide = static_cast<Signed>(word);
  const Word half = Word{1} << (lane_bits - 1);
  const Signed shifted = (wide >> shift) + (shift != 0 ? wide >> (shift - 1) & 1 : 0);
  return static_cast<int32_t>(((static_cast<Word>(shifted) + half) & (2 * half - 1)) - half);  // modulo 2^n: any words
}

template <class Word>
void unpack_scale(const Word* words, int64_t num_words, int64_t n, int lane_bits, const float* steps,
                  int64_t num_scales, int64_t group, int threads, float* x) {
  parallel_over(num_words, useful_threads(n, threads), [&](int, int64_t from, int64_t to) {
    for (int64_t block = from; block < to; block += kWords) {
      const int64_t count = std::min(kWords, to - block);
      for (int lane = 0; lane * num_words + block < n; ++lane) {
        const int64_t start = lane * num_words + block;
        const int shift = lane * lane_bits;
        over_scales(start, std::min(start + count, n), group, steps, num_scales,
                    [&](int64_t first, int64_t run, float step) {
          const Word* word = words + block + (first - start);
          for (int64_t i = 0; i < run; ++i) {
            x[first + i] = static_cast<float>(digit(word[i], shift, lane_bits)) * step;
          }
        });
      }
    }
  });
}

template <class Word>
void average_words(const Word* words, int64_t num_rows, int64_t num_words, int lane_bits, uint32_t key0, uint32_t key1,
                   int threads, Word* means) {
  const int lanes = static_cast<int>(8 * sizeof(Word)) / lane_bits;
  parallel_over(num_words, useful_threads(num_words * num_rows * lanes, threads), [&](int, int64_t from, int64_t to) {
    for (int64_t j = from; j < to; ++j) {
      Word mean = 0;
      for (int lane = 0; lane < lanes; ++lane) {
        int64_t total = 0;
        for (int64_t row = 0; row < num_rows; ++row) total += digit(words[row * num_words + j], lane * lane_bits, lane_bits);
        const uint64_t drawn = draw(static_cast<uint32_t>(lane * num_words + j), key0, key1);
        total += static_cast<int64_t>(drawn * static_cast<uint64_t>(num_rows) >> 24);
        const int64_t floored = total >= 0 ? total / num_rows : -((num_rows - 1 - total) / num_rows);
        mean += static_cast<Word>(floored) << lane * lane_bits;
      }
      means[j] = mean;
    }
  });
}

}  // namespace

// max |x| of each group; a NaN counts as Inf.
extern "C" void laconic_largest_magnitudes(const float* x, int64_t n, int64_t group, int threads, float* largest) {
  over_groups(n, group, threads, [&](int64_t number, int64_t first, int64_t count) {
    uint32_t most = 0;
    for (int64_t i = first; i < first + count; ++i) most = std::max(most, magnitude_bits(x[i]));
    largest[number] = from_bits(std::min(most, kInfinityBits));
  });
}

extern "C" void laconic_quantize_pack(const float* x, int64_t n, const float* inverse, int64_t num_scales, int64_t group,
                                      int32_t levels, int lane_bits, uint32_t key0, uint32_t key1, int threads,
                                      void* words, int64_t num_words, int word_bytes) {
  if (word_bytes == 4) {
    quantize_pack(x, n, inverse, num_scales, group, levels, lane_bits, key0, key1, threads,
                  static_cast<uint32_t*>(words), num_words);
  } else {
    quantize_pack(x, n, inverse, num_scales, group, levels, lane_bits, key0, key1, threads,
                  static_cast<uint64_t*>(words), num_words);
  }
}

extern "C" void laconic_unpack_scale(const void* words, int64_t num_words, int word_bytes, int64_t n, int lane_bits,
                                     const float* steps, int64_t num_scales, int64_t group, int threads, float* x) {
  if (word_bytes == 4) {
    unpack_scale(static_cast<const uint32_t*>(words), num_words, n, lane_bits, steps, num_scales, group, threads, x);
  } else {
    unpack_scale(static_cast<const uint64_t*>(words), num_words, n, lane_bits, steps, num_scales, group, threads, x);
  }
}

extern "C" void laconic_average_words(const void* words, int64_t num_rows, int64_t num_words, int word_bytes,
                                      int lane_bits, uint32_t key0, uint32_t key1, int threads, void* means) {
  if (word_bytes == 4) {
    average_words(static_cast<const uint32_t*>(words), num_rows, num_words, lane_bits, key0, key1, threads,
                  static_cast<uint32_t*>(means));
  } else {
    average_words(static_cast<const uint64_t*>(words), num_rows, num_words, lane_bits, key0, key1, threads,
                  static_cast<uint64_t*>(means));
  }
}
