// A 32-bit mix of a number with a key let in twice: lowbias32 (C. Wellons 2018), as the reference's.

#pragma once

#include <cstdint>

namespace laconic {

inline uint32_t mixed(uint32_t v, uint32_t key0, uint32_t key1) {
  v ^= key0;
  v ^= v >> 16;
  v *= 0x7feb352du;
  v ^= key1;
  v ^= v >> 15;
  v *= 0x846ca68bu;
  return v ^ v >> 16;
}

}  // namespace laconic
