// Mutants of valid codes through every native reader: ./native_fuzz SEED MUTANTS, built with sanitizers.
//
// Each reader gets its share of them, in memory that ends where a heap block ends and is poisoned before its first
// entry, so that a look beside it is seen. It prints one object a reader; a promise that does not hold ends it with a
// line that says so.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sanitizer/asan_interface.h>
#include <vector>

#include "native.h"

// No stack is kept of who allocated what, and little of what was freed: a third of the time.
extern "C" const char* __asan_default_options() { return "malloc_context_size=0:quarantine_size_mb=1"; }

namespace {

using Words = std::vector<uint32_t>;

constexpr int kMutantsOfOne = 16;  // of each valid code
constexpr int64_t kBlock = 256;    // entries that share a step
uint64_t state;

uint32_t draw() {
  uint64_t z = state += 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return static_cast<uint32_t>((z ^ z >> 31) >> 32);
}
int64_t under(int64_t n) { return static_cast<int64_t>(draw() % static_cast<uint64_t>(n)); }
int64_t between(int64_t least, int64_t most) { return least + under(most - least + 1); }
bool one_in(int64_t n) { return under(n) == 0; }

void promise(bool held, const char* what) {
  if (held) return;
  std::fprintf(stderr, "not held: %s\n", what);
  std::abort();
}

// Memory whose last entry is the last of a heap block, and whose first follows poisoned memory.
template <class T>
class Room {
 public:
  explicit Room(int64_t most) : size_((most * sizeof(T) + 15) / 16 * 16), base_(static_cast<char*>(std::malloc(size_))) {}
  Room(const Room&) = delete;
  ~Room() {
    ASAN_UNPOISON_MEMORY_REGION(base_, size_);
    std::free(base_);
  }
  T* of(int64_t count) {
    promise(count * sizeof(T) <= size_, "the fuzzer's own room");
    if (count != count_) {
      ASAN_UNPOISON_MEMORY_REGION(base_ + before_, std::min(size_ - before_, kGuard));
      count_ = count;
      const size_t first = (size_ - count * sizeof(T)) / 8 * 8;
      before_ = first - std::min(first, kGuard);
      ASAN_POISON_MEMORY_REGION(base_ + before_, first - before_);
    }
    return reinterpret_cast<T*>(base_ + size_ - count * sizeof(T));
  }
  template <class U>
  T* copy(const std::vector<U>& entries) {
    T* there = of(static_cast<int64_t>(entries.size()));
    if (!entries.empty()) std::memcpy(there, entries.data(), entries.size() * sizeof(T));
    return there;
  }

 private:
  static constexpr size_t kGuard = 64;  // bytes
  size_t size_;
  char* base_;
  size_t before_ = 0;  // where the poison begins
  int64_t count_ = 0;
};

Room<uint32_t> in(1 << 14);
Room<int32_t> positions(1 << 14);
Room<float> floats(1 << 14);
Room<float> moved(1 << 14);
Room<uint8_t> bytes(1 << 14);
Room<uint8_t> more_bytes(1 << 14);
Room<int8_t> small(1 << 14);
Room<uint64_t> wide(1 << 12);
Room<uint64_t> means(1 << 12);
Words words;  // of the mutant at hand, like the next two
std::vector<uint8_t> codes;
std::vector<int32_t> checks;

uint32_t odd_word() {
  const uint32_t edges[] = {0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF};
  return one_in(2) ? draw() : edges[under(5)];
}

template <class T>
void mutate(std::vector<T>& entries) {
  if (entries.empty()) return;
  const int64_t size = static_cast<int64_t>(entries.size()), width = 8 * sizeof(T);
  switch (under(5)) {
    case 0:
      entries[under(size)] ^= static_cast<T>(T{1} << under(width));
      break;
    case 1:
      for (int64_t flips = between(2, 8); flips > 0; --flips) entries[under(size)] ^= static_cast<T>(T{1} << under(width));
      break;
    case 2:
      entries[under(size)] = static_cast<T>(odd_word());
      break;
    case 3:
      std::swap(entries[under(size)], entries[under(size)]);
      break;
    default: {  // a piece of it over another
      const int64_t from = under(size), to = under(size), count = between(1, size - std::max(from, to));
      std::memmove(&entries[to], &entries[from], count * sizeof(T));
    }
  }
}

// Another length: cut short, or with words behind the last.
void relengthen(Words& words, int64_t size) {
  while (static_cast<int64_t>(words.size()) < size) words.push_back(odd_word());
  words.resize(size);
}

struct Some {
  int64_t n;
  std::vector<int32_t> positions;
  int64_t k() const { return static_cast<int64_t>(positions.size()); }
};

// Ascending positions, now and then of a bucket as large as there may be.
Some some() {
  const int64_t most[] = {40, 40, 40, 500, 0x7FFFFFFF};
  Some made{between(1, most[under(5)]), {}};
  const int64_t wanted = between(1, std::min<int64_t>(made.n, one_in(8) ? 300 : 24));
  const int64_t apart = std::max<int64_t>(1, 2 * made.n / wanted - (one_in(2) ? 1 : 0));
  for (int64_t at = under(made.n); made.k() < wanted && at < made.n; at += between(1, one_in(3) ? 1 : apart)) {
    made.positions.push_back(static_cast<int32_t>(at));
  }
  return made;
}

void check_positions(const int32_t* found, int64_t n, int64_t k) {
  for (int64_t i = 0; i < k; ++i) promise(found[i] > (i == 0 ? -1 : found[i - 1]) && found[i] < n, "ascending under n");
}

int64_t words_of(int64_t bits) { return (bits + 31) / 32; }

int low_width(int64_t n, int64_t k) {
  int best = 0;
  for (int width = 1; width < 31; ++width) {
    if (k * width + ((n - 1) >> width) < k * best + ((n - 1) >> best)) best = width;
  }
  return best;
}

int64_t elias_fano() {
  const Some given = some();
  const int width = low_width(given.n, given.k());
  const int64_t high = given.k() + ((given.n - 1) >> width);
  Words valid(words_of(given.k() * width) + words_of(high));
  laconic_encode_elias_fano(given.positions.data(), given.k(), width, high, valid.data());
  int64_t read = 0;
  for (int mutant = 0; mutant < kMutantsOfOne; ++mutant) {
    words = valid;
    int64_t n = given.n, k = given.k();
    int low = width;
    if (one_in(8)) {  // as a header says that tells of another shape
      n = one_in(2) ? n : between(1, 200);
      k = between(1, std::min<int64_t>(n, 40));
      low = low_width(n, k);
      relengthen(words, words_of(k * low) + words_of(k + ((n - 1) >> low)));
    }
    if (mutant > 0) mutate(words);
    int32_t* found = positions.of(k);
    const int64_t count = laconic_decode_elias_fano(in.copy(words), words.size(), n, k, low, found);
    if (count == k) check_positions(found, n, k);
    read += count == k;
  }
  return read;
}

int64_t rice() {
  Some given = some();
  given.n = std::max<int64_t>(given.n, given.k() + 1);
  Words valid(laconic_most_rice_words(given.k()));
  valid.resize(laconic_encode_rice(given.positions.data(), given.k(), valid.data()));
  int64_t read = 0;
  for (int mutant = 0; mutant < kMutantsOfOne; ++mutant) {
    words = valid;
    int64_t n = given.n, k = given.k();
    if (one_in(8)) {
      n = one_in(2) ? n : between(2, 200);
      k = between(1, std::min<int64_t>(n - 1, 130));
    }
    if (one_in(8)) relengthen(words, between(1, static_cast<int64_t>(words.size()) + 3));
    if (mutant > 0) mutate(words);
    int32_t* found = positions.of(k);
    const int64_t count = laconic_decode_rice(in.copy(words), words.size(), n, k, found);
    if (count == k) check_positions(found, n, k);
    read += count == k;
  }
  return read;
}

int64_t bitmap() {
  Some given = some();
  given.n = std::min<int64_t>(given.n, 2000);
  Words valid(words_of(given.n));
  laconic_set_bits(given.positions.data(), given.k(), valid.data(), given.n);
  int64_t read = 0;
  for (int mutant = 0; mutant < kMutantsOfOne; ++mutant) {
    words = valid;
    if (mutant > 0) mutate(words);
    const auto num_words = static_cast<int64_t>(words.size());
    const int64_t count = laconic_unpack_bits(in.copy(words), num_words, nullptr, 0);
    int32_t* found = positions.of(count);
    promise(laconic_unpack_bits(in.copy(words), num_words, found, count) == count, "as many as were counted");
    check_positions(found, 32 * num_words, count);
    laconic_check_sum(in.copy(words), num_words);
    read += count == given.k() && (count == 0 || found[count - 1] < given.n);
  }
  return read;
}

int64_t lanes() {
  const int width = static_cast<int>(between(1, 31));
  const int64_t count = between(1, 70);
  for (int mutant = 0; mutant < kMutantsOfOne; ++mutant) {
    words.clear();
    relengthen(words, words_of(count * width));
    int32_t* found = positions.of(count);
    laconic_unpack_lanes(in.copy(words), count, width, found);
    for (int64_t i = 0; i < count; ++i) promise(found[i] >= 0 && found[i] >> width == 0, "a lane of so many bits");
  }
  return kMutantsOfOne;
}

int64_t signs() {
  const int64_t num_words = between(1, 12);
  for (int mutant = 0; mutant < kMutantsOfOne; ++mutant) {
    words.clear();
    relengthen(words, num_words);
    const int64_t n = 32 * num_words - under(32);
    laconic_unpack_signs(in.copy(words), n, 0.5f, 1, floats.of(n));
  }
  return kMutantsOfOne;
}

int64_t two_sizes() {
  const int64_t num_words = between(1, 12), group = 16 * between(1, 5), groups = (16 * num_words + group - 1) / group;
  for (int mutant = 0; mutant < kMutantsOfOne; ++mutant) {
    words.clear();
    relengthen(words, num_words);
    int32_t* lanes_of_groups = positions.of(groups);
    for (int64_t i = 0; i < groups; ++i) lanes_of_groups[i] = static_cast<int32_t>(under(1 << 12));
    float* found = floats.of(16 * num_words);
    laconic_decode_lloyd(lanes_of_groups, in.copy(words), num_words, 0.5f, group, 1, found);
    for (int64_t i = 0; i < 16 * num_words; ++i) promise(std::abs(found[i]) <= 0.5f, "no more than the largest");
  }
  return kMutantsOfOne;
}

float finite() {
  const uint32_t bits = odd_word();
  float x;
  std::memcpy(&x, &bits, 4);
  return std::isfinite(x) ? x : 1.0f;
}

std::vector<float> steps_for(int64_t n) {
  std::vector<float> steps((n + kBlock - 1) / kBlock);
  for (float& step : steps) step = std::exp2(static_cast<float>(between(-128, 127)) / 4);
  return steps;
}

int64_t modulo() {
  const int64_t n = one_in(16) ? between(250, 600) : between(1, 40);
  const int bits = static_cast<int>(between(3, 8));
  const std::vector<float> steps = steps_for(n);
  const float offset = static_cast<float>(draw() >> 8) * 0x1p-24f;
  std::vector<float> x(n);
  for (float& each : x) each = one_in(4) ? finite() : static_cast<float>(under(100)) * steps[0];
  std::vector<uint8_t> told((n + 7) / 8 * bits);
  std::vector<int32_t> sums(steps.size());
  laconic_encode_modulo(x.data(), n, steps.data(), offset, bits, 1, told.data(), sums.data());
  int64_t read = 0;
  for (int mutant = 0; mutant < kMutantsOfOne; ++mutant) {
    codes = told;
    checks = sums;
    if (mutant > 0) mutate(codes);
    if (one_in(4)) checks[under(static_cast<int64_t>(checks.size()))] = static_cast<int32_t>(odd_word());
    float* const moves = moved.of(n);
    uint8_t* const differences = more_bytes.of((n + 7) / 8 * (bits - 1));
    int8_t* const peaks = small.of(static_cast<int64_t>(steps.size()));
    laconic_compare_modulo(x.data(), n, bytes.copy(codes), positions.copy(checks), floats.copy(steps), offset, bits, 1,
                             moves, differences, peaks);
    for (int64_t i = 0; i < n; ++i) promise(std::isfinite(moves[i]), "a finite way");
    read += std::count(peaks, peaks + steps.size(), -1) == 0;
  }
  return read;
}

int64_t differences() {
  const int64_t n = one_in(16) ? between(250, 600) : between(1, 40);
  const int bits = static_cast<int>(between(2, 7));
  const std::vector<float> steps = steps_for(n);
  for (int mutant = 0; mutant < kMutantsOfOne; ++mutant) {
    codes.resize((n + 7) / 8 * bits);
    for (uint8_t& code : codes) code = static_cast<uint8_t>(odd_word());
    float* const moves = moved.of(n);
    laconic_decode_differences(bytes.copy(codes), n, floats.copy(steps), bits, 1, moves);
    for (int64_t i = 0; i < n; ++i) promise(std::isfinite(moves[i]), "a finite way");
  }
  return kMutantsOfOne;
}

int64_t grid() {
  const int word_bytes = one_in(2) ? 4 : 8, lane_bits = static_cast<int>(between(2, 16));
  const int64_t num_words = between(1, 9), rows = between(1, 5), n = between(0, num_words * (8 * word_bytes / lane_bits));
  const int64_t group = between(1, std::max<int64_t>(n, 1)), num_scales = std::max<int64_t>(1, (n + group - 1) / group);
  const std::vector<float> steps(num_scales, 0.5f);
  for (int mutant = 0; mutant < kMutantsOfOne; ++mutant) {
    words.clear();
    relengthen(words, rows * num_words * word_bytes / 4);
    void* const there = wide.of((static_cast<int64_t>(words.size()) + 1) / 2);  // an odd word more is not looked at
    std::memcpy(there, words.data(), 4 * words.size());
    float* const x = moved.of(n);
    laconic_unpack_scale(there, num_words, word_bytes, n, lane_bits, floats.copy(steps), num_scales, group, 1, x);
    for (int64_t i = 0; i < n; ++i) promise(std::fabs(x[i]) <= std::ldexp(0.5f, lane_bits - 1), "a code of its lane");
    laconic_average_words(there, rows, num_words, word_bytes, lane_bits, draw(), draw(), 1, means.of(num_words));
  }
  return kMutantsOfOne;
}

struct Reader {
  const char* name;
  int64_t (*round)();  // how many of a round's mutants were taken for valid
  int64_t cost;  // of one mutant, about: as many fewer are tried
};
constexpr Reader kReaders[] = {{"decode_elias_fano", elias_fano, 1},   {"unpack_bits, check_sum", bitmap, 2},
                               {"unpack_lanes", lanes, 2},             {"decode_rice", rice, 4},
                               {"decode_differences", differences, 8}, {"unpack_signs", signs, 8},
                               {"decode_lloyd", two_sizes, 8},
                               {"unpack_scale, average_words", grid, 16}, {"compare_modulo", modulo, 32}};

}  // namespace

int main(int argc, char** argv) {
  const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
  const int64_t mutants = argc > 2 ? std::strtoll(argv[2], nullptr, 10) : 100'000;
  for (const Reader& reader : kReaders) {
    const auto since = std::chrono::steady_clock::now();
    int64_t read = 0, done = 0;
    state = seed * 0xD1342543DE82EF95u;
    for (; done < mutants / reader.cost; done += kMutantsOfOne) read += reader.round();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
    std::printf("{\"reader\": \"%s\", \"mutants\": %lld, \"taken for valid\": %lld, \"seconds\": %.1f}\n", reader.name,
                static_cast<long long>(done), static_cast<long long>(read), seconds);
    std::fflush(stdout);
  }
}
