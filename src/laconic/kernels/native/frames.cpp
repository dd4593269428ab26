// Several frames of bf16 values behind Rice's code at once, a thread each.

#include "frames.h"

#include "parallel.h"

using namespace laconic;

namespace {

// A frame to be written: its words have room, and a head; how many they are, and `said` of the values, is found.
struct Written {
  uint32_t* words;
  int64_t num_words, k, num_values;
  const int32_t* positions;
  const float* values;
  float* said;
  int64_t ascends;  // to be found: whether its positions do
};

// A frame to be read; `is_fine` is found.
struct Read {
  Heard heard;
  int32_t* positions;
  float* values;
  int64_t is_fine;
};

}  // namespace

extern "C" void laconic_write_frames(Written* frames, int64_t count, int threads) {
  int64_t entries = 0;
  for (int64_t i = 0; i < count; ++i) entries += frames[i].num_values;
  for_each(count, entries, threads, [&](int64_t i) {
    Written& one = frames[i];
    FrameWriter frame(one.words, one.positions, one.k);
    frame.put(one.values, one.num_values, one.said);
    one.num_words = frame.finish();
    one.ascends = frame.ascends;
  });
}

extern "C" void laconic_read_frames(Read* frames, int64_t count, int threads) {
  int64_t entries = 0;
  for (int64_t i = 0; i < count; ++i) entries += frames[i].heard.num_values;
  for_each(count, entries, threads,
           [&](int64_t i) { frames[i].is_fine = read_frame(frames[i].heard, frames[i].positions, frames[i].values); });
}
