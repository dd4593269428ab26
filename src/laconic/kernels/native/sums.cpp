// The sum of several sparse frames, added in the order given, so that everyone gets the same bits.

#include <algorithm>

#include "parallel.h"

using namespace laconic;

// total[positions[f][i]] += values[f][i] for each frame f in turn; positions are ascending. Returns how many frames
// reach outside [0, n); if any does, nothing is added.
extern "C" int64_t laconic_add_at(float* total, int64_t n, const int32_t* const* positions, const float* const* values,
                                  const int64_t* counts, int64_t num_frames, int threads) {
  int64_t entries = 0, outside = 0;
  for (int64_t f = 0; f < num_frames; ++f) {
    entries += counts[f];
    if (counts[f] == 0) continue;
    const int32_t first = positions[f][0], last = positions[f][counts[f] - 1];
    outside += first < 0 || last < first || last >= n;
  }
  if (outside > 0) return outside;
  // A range of the total per thread, where each frame's share is found by bisection.
  parallel_over(n, std::min(useful_threads(16 * entries, threads), useful_threads(n, threads)),
                [&](int, int64_t begin, int64_t end) {
    for (int64_t f = 0; f < num_frames; ++f) {
      const int32_t* const stop = positions[f] + counts[f];
      const int32_t* at = std::lower_bound(positions[f], stop, begin);
      const float* value = values[f] + (at - positions[f]);
      for (; at != stop && *at < end; ++at, ++value) total[*at] += *value;
    }
  });
  return 0;
}
