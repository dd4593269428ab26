// What a worker tells the owners of a bucket's entries, what an owner says to that, and what all of them said: each in
// one call, since every word to Python between them waits for the threads that choose and apply meanwhile.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "frames.h"
#include "parallel.h"
#include "withdraw.h"

using namespace laconic;

extern "C" int64_t laconic_sum_over_union(float* total, int64_t n, const int32_t* const* positions,
                                          const float* const* values, const int64_t* counts, int64_t num_frames,
                                          int take, int threads, int32_t* places, float* sums);

namespace {

// The positions and values of several frames, in memory that is kept: it would take as long to be given it anew.
struct Contents {
  std::vector<std::vector<int32_t>> positions;
  std::vector<std::vector<float>> values;

  // Whether all frames are as they should be.
  bool read(const Heard* frames, int64_t count, int threads) {
    positions.resize(count);
    values.resize(count);
    int64_t entries = 0;
    for (int64_t f = 0; f < count; ++f) entries += frames[f].num_values;
    std::atomic<bool> fine{true};
    for_each(count, entries, threads, [&](int64_t f) {
      const Heard& one = frames[f];
      positions[f].resize(one.k);
      values[f].resize(one.num_values);
      if (!read_frame(one, positions[f].data(), values[f].data())) fine = false;
    });
    return fine;
  }
};

// A sum beyond float32 becomes the largest there, and one that is not a number nothing. Whether there was any.
bool tame(float* values, int64_t count) {
  bool is_finite = true;
  for (int64_t i = 0; i < count; ++i) is_finite &= std::fabs(values[i]) <= std::numeric_limits<float>::max();
  for (int64_t i = 0; i < count && !is_finite; ++i) {
    if (std::isnan(values[i])) values[i] = 0.0f;
    if (std::isinf(values[i])) values[i] = std::copysign(std::numeric_limits<float>::max(), values[i]);
  }
  return !is_finite;
}

}  // namespace

// A frame for each of P owners: of a bucket's pieces, piece i*P + p for owner p, that which begins at borders[i*P + p]
// among the ascending positions has its entries moved by ways[i*P + p]; before those it tells its fixed entries, whose
// pieces begin at fixed_borders among the first values. `words` have room, and heads; num_words and `said`, what the
// frames say of the values, are found. Whether all positions ascend.
extern "C" int laconic_write_parts(const int32_t* positions, const float* values, const int64_t* borders,
                                   const int32_t* ways, int64_t num_pieces, const int64_t* fixed_borders,
                                   int64_t num_fixed_pieces, int64_t num_owners, int threads, uint32_t* const* words,
                                   int64_t* num_words, float* said) {
  const int64_t num_fixed = fixed_borders[num_fixed_pieces];
  std::atomic<bool> fine{true};
  for_each(num_owners, num_fixed + borders[num_pieces], threads, [&](int64_t p) {
    thread_local std::vector<int32_t> places;
    places.clear();
    for (int64_t i = p; i < num_pieces; i += num_owners) {
      for (int64_t j = borders[i]; j < borders[i + 1]; ++j) places.push_back(positions[j] - ways[i]);
    }
    FrameWriter frame(words[p], places.data(), static_cast<int64_t>(places.size()));
    const auto put = [&](int64_t begin, int64_t end) { frame.put(values + begin, end - begin, said + begin); };
    for (int64_t i = p; i < num_fixed_pieces; i += num_owners) put(fixed_borders[i], fixed_borders[i + 1]);
    for (int64_t i = p; i < num_pieces; i += num_owners) put(num_fixed + borders[i], num_fixed + borders[i + 1]);
    num_words[p] = frame.finish();
    if (!frame.ascends) fine = false;
  });
  return fine;
}

// What P owners' frames say, put together: the values of their fixed entries, owner after owner, then those of the
// others in the order of the bucket, whose positions these are. Piece s of owner p begins at within[p*S + s] of its
// share, and its entries are moved by ways[p*S + s]. Whether all frames are as they should be.
extern "C" int laconic_read_answers(const Heard* frames, int64_t num_owners, const int32_t* within, const int32_t* ways,
                                    int64_t num_spans, int threads, int64_t* positions, float* values) {
  thread_local Contents contents;
  const Contents& heard = contents;  // which all threads see
  if (!contents.read(frames, num_owners, threads)) return 0;
  std::vector<int64_t> borders(num_owners * (num_spans + 1));
  int64_t entries = 0, num_fixed = 0;
  for (int64_t p = 0; p < num_owners; ++p) {
    const auto& places = heard.positions[p];
    for (int64_t s = 0; s < num_spans; ++s) {
      borders[p * (num_spans + 1) + s] =
          std::lower_bound(places.begin(), places.end(), within[p * num_spans + s]) - places.begin();
    }
    borders[p * (num_spans + 1) + num_spans] = frames[p].k;
    entries += frames[p].k;
    num_fixed += frames[p].num_values - frames[p].k;
  }
  std::vector<int64_t> starts(num_owners * num_spans);
  for (int64_t s = 0, at = 0; s < num_spans; ++s) {
    for (int64_t p = 0; p < num_owners; ++p) {
      const int64_t* const border = &borders[p * (num_spans + 1) + s];
      starts[p * num_spans + s] = at;
      at += border[1] - border[0];
    }
  }
  for_each(num_owners, entries, threads, [&](int64_t p) {
    const int32_t* const places = heard.positions[p].data();
    const float* const said = heard.values[p].data() + (frames[p].num_values - frames[p].k);
    for (int64_t s = 0; s < num_spans; ++s) {
      const int64_t begin = borders[p * (num_spans + 1) + s], end = borders[p * (num_spans + 1) + s + 1];
      const int64_t at = starts[p * num_spans + s], way = ways[p * num_spans + s];
      for (int64_t i = begin; i < end; ++i) positions[at + i - begin] = places[i] + way;
      std::copy(said + begin, said + end, values + num_fixed + at);
    }
  });
  for (int64_t p = 0; p < num_owners; ++p) {
    values = std::copy_n(heard.values[p].data(), frames[p].num_values - frames[p].k, values);
  }
  return 1;
}

// What an owner says to M frames: adds their values to what is held, then takes out the sums at the fixed entries, which
// frames tell first, and of each window [start, stop) the largest, `most` of them and no more than frames speak of there;
// or, where there is no window, all that they speak of. Zeros are not worth a place. What is held of a spare range that
// no frame speaks of stays. `places`, with room for all counts, and `means`, with that and the fixed entries' first, are
// found; also how many places those are, which is returned. Positions ascend under n.
extern "C" int64_t laconic_take_mean(float* held, int64_t n, const int64_t* fixed, int64_t num_fixed,
                                     const int32_t* const* positions, const float* const* values, const int64_t* counts,
                                     int64_t num_frames, const int64_t (*windows)[3], int64_t num_windows,
                                     const int64_t (*spare)[2], int64_t num_spare, int threads, int32_t* places,
                                     float* means, Facts* facts) {
  for (int64_t i = 0; i < num_fixed; ++i) {
    means[i] = held[fixed[i]];
    held[fixed[i]] = 0.0f;
  }
  std::vector<const float*> chosen(num_frames);
  for (int64_t f = 0; f < num_frames; ++f) {
    chosen[f] = values[f] + num_fixed;
    for (int64_t i = 0; i < num_fixed; ++i) means[i] += values[f][i];
  }
  tame(means, num_fixed);
  float* const sums = means + num_fixed;
  int64_t told = laconic_sum_over_union(held, n, positions, chosen.data(), counts, num_frames, num_windows == 0, threads,
                                        places, sums);
  if (told < 0) return told;
  if (tame(sums, told) && num_windows > 0) {
    for (int64_t i = 0; i < told; ++i) held[places[i]] = sums[i];
  }
  if (num_windows > 0 && told > 0) {
    const auto num_under = [&](int64_t end) { return std::lower_bound(places, places + told, end) - places; };
    const auto num_within = [&](int64_t start, int64_t stop) { return num_under(stop) - num_under(start); };
    std::vector<std::vector<float>> aside(num_spare);
    for (int64_t i = 0; i < num_spare; ++i) {
      if (num_within(spare[i][0], spare[i][1]) > 0) continue;
      aside[i].assign(held + spare[i][0], held + spare[i][1]);
      std::fill(held + spare[i][0], held + spare[i][1], 0.0f);
    }
    std::vector<int64_t> rooms(num_windows);
    for (int64_t w = 0; w < num_windows; ++w) rooms[w] = std::min(windows[w][2], num_within(windows[w][0], windows[w][1]));
    told = 0;
    for (int64_t w = 0; w < num_windows; ++w) {
      if (rooms[w] == 0) continue;
      const int64_t start = windows[w][0], end = told + rooms[w];
      laconic_withdraw(held + start, nullptr, 1.0f, windows[w][1] - start, rooms[w], -1.0f, threads, places + told,
                       sums + told, facts + w);
      for (int64_t i = told; i < end; ++i) {
        places[told] = static_cast<int32_t>(places[i] + start);
        sums[told] = sums[i];
        told += sums[i] != 0.0f;
      }
    }
    for (int64_t i = 0; i < num_spare; ++i) std::copy(aside[i].begin(), aside[i].end(), held + spare[i][0]);
  }
  for (int64_t i = 0; i < num_fixed + told; ++i) means[i] /= static_cast<float>(num_frames);
  return told;
}

// held[i] += (values - said) * factor at the fixed entries, which values tell first, and at the places.
extern "C" void laconic_owe(float* held, const int64_t* fixed, int64_t num_fixed, const int32_t* places, int64_t k,
                            const float* values, const float* said, float factor) {
  for (int64_t i = 0; i < num_fixed; ++i) held[fixed[i]] += (values[i] - said[i]) * factor;
  for (int64_t i = 0; i < k; ++i) {
    if (i + kAhead < k) __builtin_prefetch(held + places[i + kAhead], 1);
    held[places[i]] += (values[num_fixed + i] - said[num_fixed + i]) * factor;
  }
}
