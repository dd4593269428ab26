// Vectors end to end, and sums of two: a copy's speed, and as many threads as it takes to get there.

#include <algorithm>

#include "parallel.h"

using namespace laconic;

namespace {

// out = a + b, where `out` may be one of them; out = a where there is no b.
inline void add(const float* a, const float* b, float* out, int64_t count) {
  if (b == nullptr) {
    if (out != a) std::copy(a, a + count, out);
    return;
  }
  for (int64_t i = 0; i < count; ++i) out[i] = a[i] + b[i];
}

}  // namespace

// out = the pieces end to end, n entries in all, plus `addend` if it is not null. A piece may lie where it goes to.
extern "C" void laconic_join(const float* const* pieces, const int64_t* counts, int64_t num_pieces,
                             const float* addend, float* out, int64_t n, int threads) {
  parallel_over(n, useful_threads(n, threads), [&](int, int64_t begin, int64_t end) {
    int64_t start = 0;  // of the piece
    for (int64_t p = 0; p < num_pieces && start < end; start += counts[p], ++p) {
      const int64_t first = std::max(begin, start), last = std::min(end, start + counts[p]);
      if (first < last) {
        add(pieces[p] + (first - start), addend == nullptr ? nullptr : addend + first, out + first, last - first);
      }
    }
  });
}
