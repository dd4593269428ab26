// Frames of bf16 values behind Rice's code: how one is written and read. Every frame has this head:
//
// words 0 and 1 a check sum of all that follows, 5 the number of positions; then the code of these, then the values.

#pragma once

#include <cstdint>
#include <cstring>

extern "C" {
int64_t laconic_check_sum(const uint32_t* words, int64_t num_words);
int64_t laconic_encode_rice(const int32_t* positions, int64_t k, uint32_t* words);
int64_t laconic_decode_rice(const uint32_t* words, int64_t num_words, int64_t n, int64_t k, int32_t* positions);
}

namespace laconic {

constexpr int64_t kHeadWords = 10;
constexpr int64_t kCountAt = 5;

// To the nearest, ties to even, and never beyond the largest; values are finite.
inline uint16_t as_bf16(float value) {
  constexpr uint32_t kTop = 0x7f7f0000;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t size = bits & 0x7fffffff;
  const uint32_t held = size > kTop ? kTop : size;
  return static_cast<uint16_t>(((bits & 0x80000000) | (held + 0x7fff + ((held >> 16) & 1))) >> 16);
}

inline float from_bf16(uint16_t code) {
  const uint32_t bits = static_cast<uint32_t>(code) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// A frame that is written value by value after its positions; the head is there, but for the sum and the count.
class FrameWriter {
 public:
  FrameWriter(uint32_t* words, const int32_t* positions, int64_t k) : words_(words) {
    words[kCountAt] = static_cast<uint32_t>(k);
    const int64_t length = laconic_encode_rice(positions, k, words + kHeadWords);
    ascends = length >= 0;
    next_ = first_ = reinterpret_cast<uint16_t*>(words + kHeadWords + (ascends ? length : 0));
  }

  // Writes values, and what it says of them.
  void put(const float* values, int64_t count, float* said) {
    for (int64_t i = 0; i < count; ++i) next_[i] = as_bf16(values[i]);
    for (int64_t i = 0; i < count; ++i) said[i] = from_bf16(next_[i]);
    next_ += count;
  }

  // The frame's length in words.
  int64_t finish() {
    if ((next_ - first_) % 2 == 1) *next_++ = 0;
    const int64_t num_words = reinterpret_cast<uint32_t*>(next_) - words_;
    const int64_t sum = laconic_check_sum(words_ + 2, num_words - 2);
    std::memcpy(words_, &sum, 8);
    return num_words;
  }

  bool ascends;

 private:
  uint32_t* words_;
  uint16_t *first_, *next_;
};

// A frame that came: how many words in all and of its index, k positions under n, and values, the last k there.
struct Heard {
  const uint32_t* words;
  int64_t num_words, num_index_words, n, k, num_values;
};

// What it says, and whether its sum, its positions and its values are as they should be.
inline bool read_frame(const Heard& frame, int32_t* positions, float* values) {
  int64_t stated;
  std::memcpy(&stated, frame.words, 8);
  if (laconic_check_sum(frame.words + 2, frame.num_words - 2) != stated) return false;
  const uint32_t* const index = frame.words + kHeadWords;
  if (laconic_decode_rice(index, frame.num_index_words, frame.n, frame.k, positions) != frame.k) return false;
  const auto* const codes = reinterpret_cast<const uint16_t*>(index + frame.num_index_words);
  uint16_t largest = 0;
  for (int64_t i = 0; i < frame.num_values; ++i) {
    const auto size = static_cast<uint16_t>(codes[i] & 0x7fff);
    largest = largest > size ? largest : size;
    values[i] = from_bf16(codes[i]);
  }
  return largest < 0x7f80;
}

}  // namespace laconic
