// Taking the largest out of a vector.

#pragma once

#include <cstdint>

struct Facts {
  double mean;     // of |balance| after the addition, before anything was taken
  double kth;      // magnitude of the smallest that was taken
  int64_t caught;  // candidates of the first pass
  int64_t passes;
};

// balance += factor * addend; the k largest |balance| (of equals the first) go to index and value, ascending by
// position, and become zero in balance. `guess` is a magnitude where the search starts, negative for a sample's.
// 1 <= k <= n < 2^31.
extern "C" void laconic_withdraw(float* balance, const float* addend, float factor, int64_t n, int64_t k, float guess,
                                 int threads, int32_t* index, float* value, Facts* facts);
