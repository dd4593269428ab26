// Lanes of a few bits, end to end in 32-bit words, little-endian from bit 0 up.

#pragma once

#include <cstdint>

namespace laconic {

inline int64_t words_of(int64_t bits) { return (bits + 31) / 32; }

// Writes lanes of `width` bits, 1 <= width <= 31, one after the other.
class LaneWriter {
 public:
  LaneWriter(uint32_t* words, int width) : words_(words), width_(width) {}

  void put(uint32_t lane) {
    pending_ |= static_cast<uint64_t>(lane) << filled_;
    filled_ += width_;
    if (filled_ >= 32) {
      *words_++ = static_cast<uint32_t>(pending_);
      pending_ >>= 32;
      filled_ -= 32;
    }
  }

  void finish() {
    if (filled_ > 0) *words_ = static_cast<uint32_t>(pending_);
  }

 private:
  uint32_t* words_;
  int width_;
  uint64_t pending_ = 0;
  int filled_ = 0;
};

// Reads them again; never looks at a word that holds none of them.
class LaneReader {
 public:
  LaneReader(const uint32_t* words, int width) : words_(words), width_(width), mask_((1u << width) - 1) {}

  uint32_t get() {
    if (left_ < width_) {
      pending_ |= static_cast<uint64_t>(*words_++) << left_;
      left_ += 32;
    }
    const auto lane = static_cast<uint32_t>(pending_) & mask_;
    pending_ >>= width_;
    left_ -= width_;
    return lane;
  }

 private:
  const uint32_t* words_;
  int width_;
  uint32_t mask_;
  uint64_t pending_ = 0;
  int left_ = 0;
};

}  // namespace laconic
