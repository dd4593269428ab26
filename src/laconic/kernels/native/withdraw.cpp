// Accumulate and take out the k largest: exact, sorted, in one pass over memory when the first threshold is good.
//
// The first threshold is a quantile of a sample, a few sigma on the low side. Each thread streams over its range and
// keeps what reaches the threshold, zeroed where it stood if it is likely to be among the k: few places have to be
// visited again, each of which is far from all caches by then. When its store is full, only the k largest of it can
// still matter: the others go back, and the threshold rises to the smallest kept. So a threshold that is too low costs
// time but no second pass, and ties, zeros and constants need no special case: of equals the first are kept, and then
// only what is larger can come in.

#include "withdraw.h"

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

// Grows and stays with the thread that calls, so that pages are touched once and not at every step.
template <class T, int kUse = 0>
T* scratch(int64_t count) {
  thread_local std::vector<T> room;
  if (static_cast<int64_t>(room.size()) < count) room.resize(count);
  return room.data();
}

// Radix selection of the k-th largest magnitude of all parts, 1 <= k <= their count; none has bits under `low`.
//
// A round counts in 2048 bins from `low` up, and only those in the bin of the k-th go on to the next, moved together
// without a branch. Where `low` is known, the k-th is most likely near it: the first bins are then fine, and the last
// one holds all above them.
Kth kth_largest(std::vector<Values> parts, int64_t k, uint32_t low) {
  constexpr int64_t kBins = 2048;
  constexpr int kCoarse = 20, kFine = 11;  // bits that a bin spans: 2048 coarse ones span all magnitudes
  const int threads = static_cast<int>(parts.size());
  std::vector<int32_t> tallies(kBins * threads);
  std::vector<int64_t> starts(threads);
  int64_t all = 0;
  for (int thread = 0; thread < threads; all += parts[thread++].count) starts[thread] = all;
  float* const room = scratch<float, 1>(all);
  uint32_t span = 0;  // of the bin that the round before found; zero in the first round
  for (int shift = low > 0 ? kFine : kCoarse;;) {
    in_parallel(threads, [&](int thread) {
      Values& part = parts[thread];
      if (span != 0) {
        float* const alike = room + starts[thread];
        int64_t count = 0;
        for (int64_t i = 0; i < part.count; ++i) {
          const float value = part.begin[i];
          alike[count] = value;
          count += magnitude_bits(value) - low < span;  // what is under `low` wraps around
        }
        part = {alike, count};
      }
      int32_t* tally = tallies.data() + thread * kBins;
      std::fill_n(tally, kBins, 0);
      for (int64_t i = 0; i < part.count; ++i) {
        ++tally[std::min<uint32_t>((magnitude_bits(part.begin[i]) - low) >> shift, kBins - 1)];
      }
    });
    int64_t bin = kBins;
    for (int64_t here = 0;; k -= here) {
      --bin;
      here = 0;
      for (int thread = 0; thread < threads; ++thread) here += tallies[thread * kBins + bin];
      if (here >= k) break;
    }
    low += static_cast<uint32_t>(bin) << shift;
    if (shift == kFine && bin == kBins - 1) {
      span = kMagnitude;
      shift = kCoarse;
    } else if (shift == 0) {
      return {low, k};
    } else {
      span = 1u << shift;
      shift = std::max(0, shift - kFine);
    }
  }
}

// Where a search starts.
struct Start {
  float least;   // a magnitude that a little more than k entries reach, most likely
  float likely;  // the likeliest magnitude of the k-th
};

// A start for the k largest of n entries of balance + factor * addend.
//
// One cache line out of each of `lines` equal stretches, at a scrambled place in it, so that no period of a layer's
// shape is met in step. The rank of `least` lies four sigma of a binomial, and a few, past the expected one.
Start sampled_start(const float* balance, const float* addend, float factor, int64_t n, int64_t k) {
  const int64_t lines = std::min(kMostSampledLines, std::max(kFewestSampledLines, n / kLanes / kLinesPerSampledLine));
  const int64_t stretch = n / kLanes / lines;
  if (stretch < 2) return {0.0f, 0.0f};  // so small that everything may be a candidate at first
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
  if (rank > size) return {0.0f, 0.0f};
  const uint32_t least = kth_largest({{sample.data(), size}}, rank, 0).bits;
  const auto small = [&](float x) { return magnitude_bits(x) < least; };
  sample.erase(std::remove_if(sample.begin(), sample.end(), small), sample.end());
  const auto reach = static_cast<int64_t>(sample.size());
  const auto middle = std::max<int64_t>(1, static_cast<int64_t>(expected));
  return {from_bits(least), from_bits(kth_largest({{sample.data(), reach}}, middle, least).bits)};
}

struct Entry {
  int32_t position;
  float value;
};

// What one thread has caught, in ascending order of position.
struct Catch {
  int32_t* index;
  float* value;
  int64_t capacity;  // besides room for one block
  int64_t count = 0;
  int64_t caught = 0;  // all that ever came in
  int32_t least = 0;   // magnitude bits that the next one must reach
  int32_t likely = 0;  // magnitude bits from which they are zero in the balance

  // Keep the k largest, give the others back to `balance`; what comes later must be larger than all that is kept.
  void shrink(float* balance, int64_t k) {
    const Kth kth = kth_largest({{value, count}}, k, 0);
    keep(balance, kth, k, index, value);
    count = k;
    likely = 0;
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

  // Move the chosen, of which there are num_chosen, to where they belong, which may be here, and mend the balance: the
  // chosen are zero in it, and no others. kth.ties are this catch's. Without branches, which nothing could foretell.
  void keep(float* balance, Kth kth, int64_t num_chosen, int32_t* to_index, float* to_value) const {
    Entry* const wrong = scratch<Entry>(count + 1);
    const auto is_zeroed = [zeroed = likely](uint32_t bits) { return static_cast<int32_t>(bits) >= zeroed; };
    int64_t num_kept = 0, num_wrong = 0, i = 0;
    for (; num_kept < num_chosen; ++i) {
      const Entry entry{index[i], value[i]};
      const uint32_t bits = magnitude_bits(entry.value);
      const bool is_chosen = bits + (kth.ties > 0) > kth.bits;
      kth.ties -= bits == kth.bits;
      to_index[num_kept] = entry.position;
      to_value[num_kept] = entry.value;
      num_kept += is_chosen;
      wrong[num_wrong] = entry;
      num_wrong += is_chosen != is_zeroed(bits);
    }
    for (; i < count; ++i) {
      wrong[num_wrong] = {index[i], value[i]};
      num_wrong += is_zeroed(magnitude_bits(value[i]));
    }
    for (int64_t j = 0; j < num_wrong; ++j) {
      const auto [position, x] = wrong[j];
      balance[position] = is_zeroed(magnitude_bits(x)) ? x : 0.0f;
    }
  }
};

// Sixteen lanes, and which of them are to be taken out.
struct Hits {
  int32_t first;
  uint32_t hits;
};

// What a pass adds to the balance: a question that the compiler would leave in the innermost loop.
enum class Adding { nothing, addend, scaled_addend };

// balance += factor * addend over [begin, end), as far as kAdding says, while catching; sums |balance| per block.
template <Adding kAdding>
void stream(float* balance, const float* addend, float factor, int64_t begin, int64_t end, int64_t k, Catch& caught,
            double* block_sums) {
  for (int64_t block = begin; block < end; block += kBlock) {
    const int64_t stop = std::min(end, block + kBlock);
    if (caught.count > caught.capacity) caught.shrink(balance, k);
    const int32_t least = caught.least;
    const int32_t likely = caught.likely;
    int64_t count = caught.count;
    Sixteen sums = Sixteen::zero();
    Hits listed[kBlock / kLanes + 1];
    int64_t num_listed = 0;
    int64_t i = block;
    for (; i + kLanes <= stop; i += kLanes) {
      Sixteen x = Sixteen::load(balance + i);
      if (kAdding != Adding::nothing) {
        const Sixteen more = Sixteen::load(addend + i);
        x = x.plus(kAdding == Adding::addend ? more : more.times(factor));
        x.store(balance + i);
      }
      sums = sums.plus(x.magnitude());
      const auto first = static_cast<int32_t>(i);
      const uint32_t hits = x.at_least(least);
      if (kTakesLater) {
        listed[num_listed] = {first, hits};
        num_listed += hits != 0;
      } else if (hits != 0) {
        count += take_hits(x, hits, likely, first, balance + i, caught.index + count, caught.value + count);
      }
    }
    for (int64_t j = 0; j < num_listed; ++j) {
      const auto [first, hits] = listed[j];
      float* const x = balance + first;
      count += take_hits(Sixteen::load(x), hits, likely, first, x, caught.index + count, caught.value + count);
    }
    double sum = sum_lanes(sums);
    for (; i < stop; ++i) {
      const float x = kAdding != Adding::nothing ? balance[i] + factor * addend[i] : balance[i];
      const uint32_t bits = magnitude_bits(x);
      const bool hit = static_cast<int32_t>(bits) >= least;
      sum += from_bits(bits);
      balance[i] = hit && static_cast<int32_t>(bits) >= likely ? 0.0f : x;
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
float choose(float* balance, const std::vector<Catch>& catches, int64_t k, uint32_t low, int32_t* index, float* value) {
  const int threads = static_cast<int>(catches.size());
  std::vector<Values> parts;
  for (const Catch& one : catches) parts.push_back({one.value, one.count});
  const Kth kth = kth_largest(parts, k, low);
  std::vector<std::pair<int64_t, int64_t>> counts(threads);
  in_parallel(threads, [&](int thread) {
    if (thread + 1 < threads) counts[thread] = catches[thread].above_and_at(kth);  // the last has what is left
  });
  std::vector<int64_t> starts(threads + 1), ties(threads);
  int64_t ties_left = kth.ties;
  for (int thread = 0; thread + 1 < threads; ++thread) {
    ties[thread] = std::min(ties_left, counts[thread].second);
    starts[thread + 1] = starts[thread] + counts[thread].first + ties[thread];
    ties_left -= ties[thread];
  }
  starts[threads] = k;
  ties[threads - 1] = ties_left;
  in_parallel(threads, [&](int thread) {
    const int64_t start = starts[thread];
    catches[thread].keep(balance, {kth.bits, ties[thread]}, starts[thread + 1] - start, index + start, value + start);
  });
  return from_bits(kth.bits);
}

}  // namespace
}  // namespace laconic

using namespace laconic;

extern "C" void laconic_withdraw(float* balance, const float* addend, float factor, int64_t n, int64_t k, float guess,
                                 int threads, int32_t* index, float* value, Facts* facts) {
  Start start{guess, guess};
  if (guess < 0) start = sampled_start(balance, addend, factor, n, k);
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
  auto least = static_cast<int32_t>(magnitude_bits(start.least));
  auto likely = static_cast<int32_t>(magnitude_bits(start.likely));
  for (facts->passes = 1;; ++facts->passes) {
    const auto pass = addend == nullptr || facts->passes > 1 ? stream<Adding::nothing>
                      : factor == 1.0f                       ? stream<Adding::addend>
                                                             : stream<Adding::scaled_addend>;
    parallel_over(n, threads, [&](int thread, int64_t begin, int64_t end) {
      Catch& caught = catches[thread];
      caught = Catch{indices + thread * room, values + thread * room, capacity};
      caught.least = least;
      caught.likely = likely;
      pass(balance, addend, factor, begin, end, k, caught, block_sums);
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
    likely = 0;
    least = 0;  // everything is a candidate at first, and the threshold rises by itself
  }

  facts->kth = choose(balance, catches, k, static_cast<uint32_t>(least), index, value);
}
