// Sparse frames added to a vector, and what they name of it: one touch of each entry, in blocks that stay in the cache.

#include <algorithm>
#include <vector>

#include "parallel.h"

using namespace laconic;

// total[positions[f][i]] += values[f][i] for each frame f in turn; positions are ascending. `places` and `sums`, with
// room for all counts, get the union of the positions, ascending, and the totals there, which become zero if `take`.
// Returns the length of the union, or -1 where a frame reaches outside [0, n), with nothing done, or is not ascending.
extern "C" int64_t laconic_sum_over_union(float* total, int64_t n, const int32_t* const* positions,
                                          const float* const* values, const int64_t* counts, int64_t num_frames,
                                          int take, int threads, int32_t* places, float* sums) {
  int64_t entries = 0;
  for (int64_t f = 0; f < num_frames; ++f) {
    entries += counts[f];
    if (counts[f] == 0) continue;
    const int32_t first = positions[f][0], last = positions[f][counts[f] - 1];
    if (first < 0 || last < first || last >= n) return -1;
  }
  threads = std::min(useful_threads(16 * entries, threads), useful_threads(n, threads));
  std::vector<int64_t> starts(threads), found(threads, -1);
  // A range of the total per thread. What it finds begins where it would if no two frames named the same entry.
  parallel_over(n, threads, [&](int thread, int64_t begin, int64_t end) {
    std::vector<int64_t> at(num_frames);
    int64_t start = 0;
    for (int64_t f = 0; f < num_frames; ++f) {
      at[f] = std::lower_bound(positions[f], positions[f] + counts[f], begin) - positions[f];
      start += at[f];
    }
    int64_t out = start;
    uint64_t named[kBlock / 64] = {};
    for (int64_t first = begin; first < end; first += kBlock) {
      const int64_t stop = std::min(first + kBlock, end);
      for (int64_t f = 0; f < num_frames; ++f) {
        int64_t i = at[f];
        for (; i < counts[f] && positions[f][i] < stop; ++i) {
          const int64_t place = positions[f][i] - first;
          if (place < 0) return;  // not ascending: found stays -1
          if (i + kAhead < counts[f]) __builtin_prefetch(total + positions[f][i + kAhead], 1);
          total[first + place] += values[f][i];
          named[place / 64] |= 1ull << (place % 64);
        }
        at[f] = i;
      }
      for (int64_t w = 0; w < kBlock / 64; ++w) {
        for (uint64_t word = named[w]; word != 0; word &= word - 1) {
          const int64_t place = first + 64 * w + __builtin_ctzll(word);
          places[out] = static_cast<int32_t>(place);
          sums[out++] = total[place];
          if (take) total[place] = 0.0f;
        }
        named[w] = 0;
      }
    }
    starts[thread] = start;
    found[thread] = out - start;
  });
  if (*std::min_element(found.begin(), found.end()) < 0) return -1;
  int64_t length = found[0];
  for (int thread = 1; thread < threads; ++thread) {
    std::copy_n(places + starts[thread], found[thread], places + length);
    std::copy_n(sums + starts[thread], found[thread], sums + length);
    length += found[thread];
  }
  return length;
}
