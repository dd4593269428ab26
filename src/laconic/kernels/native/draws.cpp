// Distinct numbers drawn by a key, ascending: a permutation of [0, n) that needs no memory, and a map of bits to sort by.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "mixing.h"

namespace {

constexpr int kRounds = 6;
constexpr int64_t kRun = 256;         // numbers that go through a round together
constexpr int64_t kFew = 3;           // places of bits that are written whether or not there are so many
constexpr int64_t kWorthMapping = 10;  // a map of n bits is read sooner than k numbers are sorted where k >= n >> this

// The high half of the mix of v, by the round's key, times range: in [0, range).
inline uint32_t drawn(uint32_t v, uint32_t first, uint32_t second, uint32_t range) {
  return static_cast<uint32_t>(static_cast<uint64_t>(laconic::mixed(v, first, second)) * range >> 32);
}

struct Permutation {
  uint32_t rows, columns, first, second;

  Permutation(int64_t n, uint32_t first, uint32_t second) : first(first), second(second) {
    auto root = static_cast<int64_t>(std::sqrt(static_cast<double>(n)));
    while (root * root < n) ++root;
    while (root > 1 && (root - 1) * (root - 1) >= n) --root;
    rows = static_cast<uint32_t>(root);
    columns = static_cast<uint32_t>((n + root - 1) / root);
  }

  // Numbers row * columns + column to their images, in place.
  void apply(uint32_t* row, uint32_t* column, int64_t count) const {
    for (int round = 0; round < kRounds; round += 2) {
      const uint32_t even = first + 0x9e3779b9u * round, odd = even + 0x9e3779b9u;
      for (int64_t i = 0; i < count; ++i) {
        uint32_t r = row[i] + drawn(column[i], even, second, rows);
        r = std::min(r, r - rows);  // unsigned: r - rows wraps around where r is under it
        uint32_t c = column[i] + drawn(r, odd, second, columns);
        row[i] = r;
        column[i] = std::min(c, c - columns);
      }
    }
  }
};

}  // namespace

// out = the images of start, ..., start + k - 1 (mod n), ascending; 1 <= k <= n < 2^32.
extern "C" void laconic_draw_distinct(int64_t n, int64_t start, int64_t k, uint32_t first, uint32_t second,
                                      int64_t* out) {
  const Permutation permutation(n, first, second);
  const bool maps = k >= n >> kWorthMapping;
  std::vector<uint64_t> map(maps ? (n + 63) / 64 : 0);
  uint32_t row[kRun], column[kRun];
  for (int64_t done = 0; done < k; done += kRun) {
    const int64_t count = std::min(kRun, k - done);
    for (int64_t i = 0, number = (start + done) % n; i < count; ++i, number = number + 1 < n ? number + 1 : 0) {
      if (i == 0 || number == 0) {
        row[i] = static_cast<uint32_t>(number / permutation.columns);
        column[i] = static_cast<uint32_t>(number % permutation.columns);
      } else {
        const bool ends = column[i - 1] + 1 == permutation.columns;
        row[i] = row[i - 1] + ends;
        column[i] = ends ? 0 : column[i - 1] + 1;
      }
    }
    permutation.apply(row, column, count);
    for (int64_t i = 0; i < count; ++i) {
      int64_t image = static_cast<int64_t>(row[i]) * permutation.columns + column[i];
      while (image >= n) {  // the grid is larger than n by less than a row: on with the image's own
        permutation.apply(row + i, column + i, 1);
        image = static_cast<int64_t>(row[i]) * permutation.columns + column[i];
      }
      if (maps) {
        map[image >> 6] |= uint64_t{1} << (image & 63);
      } else {
        out[done + i] = image;
      }
    }
  }
  if (!maps) {
    std::sort(out, out + k);
    return;
  }
  const int64_t* const end = out + k;
  for (size_t word = 0; word < map.size(); ++word) {
    const int64_t base = static_cast<int64_t>(word) * 64;
    uint64_t bits = map[word];
    int64_t* at = out;
    out += __builtin_popcountll(bits);
    if (end - at >= kFew) {  // whether a word has none, one or two is nothing that a processor could foretell
      for (int64_t i = 0; i < kFew; ++i, bits &= bits - 1) {
        *at++ = base + __builtin_ctzll(bits | uint64_t{1} << 63);
      }
    }
    for (; bits != 0; bits &= bits - 1) *at++ = base + __builtin_ctzll(bits);
  }
}
