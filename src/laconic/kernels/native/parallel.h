// Threads for one call: started when there is enough work, joined before it returns.
//
// No pool and no OpenMP: torch has a runtime of its own, a second one would fight it for the cores, and threads that
// do not outlive a call cannot hang after a fork. A start costs about 20 us, so small calls stay on the caller's thread.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace laconic {

constexpr int64_t kBlock = 4096;                 // entries that fit the first-level cache twice
constexpr int64_t kAhead = 24;                   // entries to fetch that are far from all caches, and apart
constexpr int64_t kEntriesPerThread = 1 << 18;   // a millisecond's half: below that a second thread does not pay

inline int useful_threads(int64_t entries, int threads) {
  const int64_t most = entries / kEntriesPerThread;
  return static_cast<int>(most < 1 ? 1 : (most < threads ? most : threads));
}

// Calls work(thread, begin, end) over [0, entries), cut at multiples of kBlock; the cut follows from its arguments alone.
template <class Work>
void parallel_over(int64_t entries, int threads, const Work& work) {
  const int64_t blocks = (entries + kBlock - 1) / kBlock;
  const auto cut = [&](int64_t thread) {
    const int64_t at = blocks * thread / threads * kBlock;
    return at < entries ? at : entries;
  };
  std::vector<std::thread> others;
  others.reserve(threads - 1);
  for (int thread = 1; thread < threads; ++thread) {
    others.emplace_back([&, thread] { work(thread, cut(thread), cut(thread + 1)); });
  }
  work(0, cut(0), cut(1));
  for (auto& other : others) other.join();
}

// Calls work(number, first, count) for each group of n entries; a group is one thread's.
template <class Work>
void over_groups(int64_t n, int64_t group, int threads, const Work& work) {
  const int64_t groups = (n + group - 1) / group;
  const int useful = static_cast<int>(std::clamp<int64_t>(groups, 1, useful_threads(n, threads)));
  parallel_over(groups * kBlock, useful, [&](int, int64_t from, int64_t to) {
    for (int64_t number = from / kBlock; number < to / kBlock; ++number) {
      work(number, number * group, std::min(group, n - number * group));
    }
  });
}

// Calls work(thread) once for each thread.
template <class Work>
void in_parallel(int threads, const Work& work) {
  parallel_over(threads * kBlock, threads, [&](int thread, int64_t, int64_t) { work(thread); });
}

// Calls work(i) for each of `count` pieces, in as many threads as pay for so many entries in all, whoever is free.
template <class Work>
void for_each(int64_t count, int64_t entries, int threads, const Work& work) {
  constexpr int64_t kEntriesOfPieces = 1 << 13;  // which are decoded one by one
  const int64_t useful = std::min<int64_t>({threads, count, entries / kEntriesOfPieces});
  std::atomic<int64_t> next{0};
  in_parallel(static_cast<int>(std::max<int64_t>(useful, 1)), [&](int) {
    for (int64_t i = next++; i < count; i = next++) work(i);
  });
}

}  // namespace laconic
