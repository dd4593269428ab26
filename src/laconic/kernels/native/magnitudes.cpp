// The parts of a selection on their own: is everything finite, how large is it on average, how many reach a threshold.

#include <atomic>
#include <vector>

#include "lanes.h"
#include "parallel.h"

using namespace laconic;

namespace {

constexpr int32_t kInfinity = 0x7F800000;

}  // namespace

// Whether x holds neither Inf nor NaN.
extern "C" int laconic_all_finite(const float* x, int64_t n, int threads) {
  std::atomic<bool> finite{true};
  parallel_over(n, useful_threads(n, threads), [&](int, int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end && finite; block += kBlock) {
      const int64_t stop = block + kBlock < end ? block + kBlock : end;
      uint32_t hits = 0;
      int64_t i = block;
      for (; i + kLanes <= stop; i += kLanes) hits |= Sixteen::load(x + i).at_least(kInfinity);
      for (; i < stop; ++i) hits |= static_cast<int32_t>(magnitude_bits(x[i])) >= kInfinity;
      if (hits != 0) finite = false;
    }
  });
  return finite;
}

// The sum of |x|: in float within a block, in double over the blocks in their order, whatever the number of threads.
extern "C" double laconic_sum_magnitudes(const float* x, int64_t n, int threads) {
  std::vector<double> sums((n + kBlock - 1) / kBlock);
  parallel_over(n, useful_threads(n, threads), [&](int, int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block += kBlock) {
      const int64_t stop = block + kBlock < end ? block + kBlock : end;
      Sixteen lanes = Sixteen::zero();
      int64_t i = block;
      for (; i + kLanes <= stop; i += kLanes) lanes = lanes.plus(Sixteen::load(x + i).magnitude());
      double sum = sum_lanes(lanes);
      for (; i < stop; ++i) sum += from_bits(magnitude_bits(x[i]));
      sums[block / kBlock] = sum;
    }
  });
  double total = 0;
  for (double sum : sums) total += sum;
  return total;
}

// counts[j] = how many |x| reach thresholds[j], all in one pass.
extern "C" void laconic_count_at_least(const float* x, int64_t n, const float* thresholds, int64_t num_thresholds,
                                       int threads, int64_t* counts) {
  threads = useful_threads(n, threads);
  std::vector<int64_t> found(threads * num_thresholds);
  parallel_over(n, threads, [&](int thread, int64_t begin, int64_t end) {
    int64_t* mine = found.data() + thread * num_thresholds;
    for (int64_t block = begin; block < end; block += kBlock) {
      const int64_t stop = block + kBlock < end ? block + kBlock : end;
      for (int64_t j = 0; j < num_thresholds; ++j) {
        const auto least = static_cast<int32_t>(magnitude_bits(thresholds[j]));
        int32_t count = 0;
        for (int64_t i = block; i < stop; ++i) count += static_cast<int32_t>(magnitude_bits(x[i])) >= least;
        mine[j] += count;
      }
    }
  });
  for (int64_t j = 0; j < num_thresholds; ++j) {
    counts[j] = 0;
    for (int thread = 0; thread < threads; ++thread) counts[j] += found[thread * num_thresholds + j];
  }
}
