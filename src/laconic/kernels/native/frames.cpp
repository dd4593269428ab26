// Several frames of bf16 values behind Rice's code at once, a thread each.

#include "frames.h"

#include "parallel.h"

using namespace laconic;

// How many words in all, to be found where it is written, and of its index; k positions under n, values, the last k
// there; where it is written, what it says of those. `is_fine` is to be found: that it could be read, or written.
struct Frame {
  uint32_t* words;
  int64_t num_words, num_index_words, n, k, num_values;
  int32_t* positions;
  float *values, *said;
  int64_t is_fine;
};

namespace {

int64_t num_values(const Frame* frames, int64_t count) {
  int64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += frames[i].num_values;
  return sum;
}

}  // namespace

extern "C" void laconic_write_frames(Frame* frames, int64_t count, int threads) {
  for_each(count, num_values(frames, count), threads, [&](int64_t i) {
    Frame& one = frames[i];
    FrameWriter frame(one.words, one.positions, one.k);
    frame.put(one.values, one.num_values, one.said);
    one.num_words = frame.finish();
    one.is_fine = frame.ascends;
  });
}

extern "C" void laconic_read_frames(Frame* frames, int64_t count, int threads) {
  for_each(count, num_values(frames, count), threads, [&](int64_t i) {
    Frame& one = frames[i];
    one.is_fine = read_frame(one.words, one.num_words, one.num_index_words, one.n, one.k, one.num_values, one.positions,
                             one.values);
  });
}
