// Accumulate and take out the k largest: exact, sorted, in one pass over memory when the first threshold is good.
//
// The first threshold is a quantile of a sample, a few sigma on the low side. Each thread streams over its range and keeps what reaches the threshold, zeroed where it stood. When its store is
// full, only the k largest of it can still matter: the others go back, and the threshold rises to the smallest kept.
// So a threshold that is too low costs time but no second pass, and ties, zeros and constants need no special case:
// of equals the first are kept, and then only what is larger can come in.

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "lanes.h"
#include "parallel.h"

namespace laconic {
namespace {

// A sample of 1/512, within bounds: 50 us for 1 M entries, 0.3 ms for 25 M, and then 1.2 k candidates at 1 %.
constexpr int64_t kLinesPerSampledLine = 512;
constexpr int64_t kFewestSampledLines = 512;
constexpr int64_t kMostSampledLines = 4096;

struct Kth {
  uint32_t bits;  // of the k-th largest magnitude
  int64_t ties;   // how many of those equal to it are among the k
};

// Some magnitudes that are searched together with those of other threads.
struct Values {
  const float* begin;
  int64_t count;
};

// Radix selection of the k-th largest magnitude of all parts, 1 <= k <= their count, in rounds of 11, 10 and 10 bits.
Kth kth_largest(const std::vector<Values>& parts, int64_t k) {
  constexpr int64_t kBins = 2048;
  const int threads = static_cast<int>(parts.size());
  std::vector<int32_t> tallies(kBins * threads);
  uint32_t prefix = 0;
  int64_t left = k;
  for (int shift : {20, 10, 0}) {
    const int width = shift == 20 ? 11 : 10;
    in_parallel(threads, [&](int thread) {
      int32_t* tally = tallies.data() + thread * kBins;
      std::fill_n(tally, kBins, 0);
      const auto [values, count] = parts[thread];
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t bits = magnitude_bits(values[i]);
        if (shift == 20 || bits >> (shift + width) == prefix) ++tally[bits >> shift & ((1u << width) - 1)];
      }
    });
    int64_t bin = int64_t{1} << width;
    for (int64_t here = 0;; left -= here) {
      --bin;
      here = 0;
      for (int thread = 0; thread < threads; ++thread) here += tallies[thread * kBins + bin];
      if (here >= left) break;
    }
    prefix = prefix << width | static_cast<uint32_t>(bin);
  }
  return {prefix, left};
}

// A magnitude that a little more than k of n entries of balance + factor * addend reach, most likely.
//
// One cache line out of each of `lines` equal stretches, at a scrambled place in it, so that no period of a layer's
// shape is met in step. The rank asked for lies four sigma of a binomial, and a few, past the expected one.
float likely_threshold(const float* balance, const float* addend, float factor, int64_t n, int64_t k) {
  const int64_t lines = std::min(kMostSampledLines, std::max(kFewestSampledLines, n / kLanes / kLinesPerSampledLine));
  const int64_t stretch = n / kLanes / lines;
  if (stretch < 2) return 0.0f;  // so small that everything may be a candidate at first
  std::vector<float> sample(lines * kLanes);
  for (int64_t line = 0; line < lines; ++line) {
    const int64_t scrambled = static_cast<uint32_t>(line) * 2654435761u >> 8;
    const int64_t at = (line * stretch + scrambled % stretch) * kLanes;
    Sixteen x = Sixteen::load(balance + at);
    if (addend != nullptr) x = x.plus(Sixteen::load(addend + at).times(factor));
    x.store(sample.data() + line * kLanes);
  }
  const auto size = static_cast<int64_t>(sample.size());
  const double expected = static_cast<double>(k) * static_cast<double>(size) / static_cast<double>(n);
  const auto rank = static_cast<int64_t>(expected + 4 * std::sqrt(expected) + 4);
  return rank > size ? 0.0f : from_bits(kth_largest({{sample.data(), size}}, rank).bits);
}

// What one thread has caught, in ascending order of position.
struct Catch {
  int32_t* index;
  float* value;
  int64_t capacity;  // besides room for one block
  int64_t count = 0;
  int64_t caught = 0;  // all that ever came in
  int32_t least = 0;   // magnitude bits that the next one must reach

  // Keep the k largest, give the others back to `balance`; what comes later must be larger than all that is kept.
  void shrink(float* balance, int64_t k) {
    const Kth kth = kth_largest({{value, count}}, k);
    keep(balance, kth, index, value);
    count = k;
    least = static_cast<int32_t>(std::min(kth.bits, kMagnitude - 1)) + 1;
  }

  // How many are larger than the k-th, and how many are equal to it.
  std::pair<int64_t, int64_t> above_and_at(Kth kth) const {
    int64_t above = 0, at = 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = magnitude_bits(value[i]);
      above += bits > kth.bits;
      at += bits == kth.bits;
    }
    return {above, at};
  }

  // Move the chosen to where they belong, which may be here, and give the others back; kth.ties are this catch's.
  void keep(float* balance, Kth kth, int32_t* to_index, float* to_value) const {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = magnitude_bits(value[i]);
      if (bits > kth.bits || (bits == kth.bits && kth.ties-- > 0)) {
        to_index[kept] = index[i];
        to_value[kept++] = value[i];
      } else {
        balance[index[i]] = value[i];
      }
    }
  }
};

// balance += factor * addend over [begin, end) (addend may be null) while catching; sums |balance| per block.
void stream(float* balance, const float* addend, float factor, int64_t begin, int64_t end, int64_t k, Catch& caught,
            double* block_sums) {
  for (int64_t block = begin; block < end; block += kBlock) {
    const int64_t stop = std::min(end, block + kBlock);
    if (caught.count > caught.capacity) caught.shrink(balance, k);
    const int32_t least = caught.least;
    int64_t count = caught.count;
    Sixteen sums = Sixteen::zero();
    int64_t i = block;
    for (; i + kLanes <= stop; i += kLanes) {
      Sixteen x = Sixteen::load(balance + i);
      if (addend != nullptr) {
        const Sixteen more = Sixteen::load(addend + i);
        x = x.plus(factor == 1.0f ? more : more.times(factor));
        x.store(balance + i);
      }
      sums = sums.plus(x.magnitude());
      if (const uint32_t hits = x.at_least(least)) {
        count += take_hits(x, hits, static_cast<int32_t>(i), balance + i, caught.index + count, caught.value + count);
      }
    }
    double sum = sum_lanes(sums);
    for (; i < stop; ++i) {
      const float x = addend != nullptr ? balance[i] + factor * addend[i] : balance[i];
      const uint32_t bits = magnitude_bits(x);
      const bool hit = static_cast<int32_t>(bits) >= least;
      sum += from_bits(bits);
      balance[i] = hit ? 0.0f : x;
      caught.index[count] = static_cast<int32_t>(i);
      caught.value[count] = x;
      count += hit;
    }
    caught.caught += count - caught.count;
    caught.count = count;
    block_sums[block / kBlock] = sum;
  }
}

// The k largest of all catches, which stand in the order of their ranges, to index and value; the others go back.
float choose(float* balance, const std::vector<Catch>& catches, int64_t k, int32_t* index, float* value) {
  const int threads = static_cast<int>(catches.size());
  std::vector<Values> parts;
  for (const Catch& one : catches) parts.push_back({one.value, one.count});
  const Kth kth = kth_largest(parts, k);
  std::vector<std::pair<int64_t, int64_t>> counts(threads);
  in_parallel(threads, [&](int thread) { counts[thread] = catches[thread].above_and_at(kth); });
  std::vector<int64_t> starts(threads), ties(threads);
  int64_t start = 0, ties_left = kth.ties;
  for (int thread = 0; thread < threads; ++thread) {
    starts[thread] = start;
    ties[thread] = std::min(ties_left, counts[thread].second);
    start += counts[thread].first + ties[thread];
    ties_left -= ties[thread];
  }
  in_parallel(threads, [&](int thread) {
    catches[thread].keep(balance, {kth.bits, ties[thread]}, index + starts[thread], value + starts[thread]);
  });
  return from_bits(kth.bits);
}

// Grows and stays with the thread that calls, so that pages are touched once and not at every step.
template <class T>
T* scratch(int64_t count) {
  thread_local std::vector<T> room;
  if (static_cast<int64_t>(room.size()) < count) room.resize(count);
  return room.data();
}

}  // namespace
}  // namespace laconic

using namespace laconic;

// What a withdrawal found out.
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
                                 int threads, int32_t* index, float* value, Facts* facts) {
  if (guess < 0) guess = likely_threshold(balance, addend, factor, n, k);
  threads = useful_threads(n, threads);
  const int64_t range = (n / threads / kBlock + 2) * kBlock;
  const int64_t capacity = std::min(std::max(2 * k, kBlock), range);
  const int64_t room = capacity + 2 * kBlock;
  int32_t* indices = scratch<int32_t>(room * threads);
  float* values = scratch<float>(room * threads);
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  double* block_sums = scratch<double>(blocks);
  std::vector<Catch> catches(threads);

  int64_t count = 0;
  int32_t least = static_cast<int32_t>(magnitude_bits(guess));
  for (facts->passes = 1;; ++facts->passes) {
    const float* added = facts->passes == 1 ? addend : nullptr;
    parallel_over(n, threads, [&](int thread, int64_t begin, int64_t end) {
      Catch& caught = catches[thread];
      caught = Catch{indices + thread * room, values + thread * room, capacity};
      caught.least = least;
      stream(balance, added, factor, begin, end, k, caught, block_sums);
    });
    count = 0;
    int64_t caught = 0;
    for (const Catch& one : catches) count += one.count, caught += one.caught;
    if (facts->passes == 1) {
      facts->caught = caught;
      double sum = 0;
      for (int64_t block = 0; block < blocks; ++block) sum += block_sums[block];
      facts->mean = sum / static_cast<double>(n);
    }
    if (count >= k) break;
    for (const Catch& one : catches) {
      for (int64_t i = 0; i < one.count; ++i) balance[one.index[i]] = one.value[i];
    }
    least = 0;  // everything is a candidate at first, and the threshold rises by itself
  }

  facts->kth = choose(balance, catches, k, index, value);
}
