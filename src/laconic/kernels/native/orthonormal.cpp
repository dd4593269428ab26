// Orthonormal bases of thin matrices.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

constexpr double kRidge = 1e-12;     // as in reference/orthonormal.py
constexpr double kSmallest = 1e-300;

// The columns of F that are all zeros are those of B.
struct Filled {
  const float* factor;
  const float* basis;
  std::vector<char> is_filled;

  Filled(const float* f, const float* b, int64_t rows, int64_t rank) : factor(f), basis(b), is_filled(rank, 0) {
    for (int64_t i = 0; i < rows * rank; ++i) is_filled[i % rank] |= f[i] != 0;
  }

  void row(int64_t number, double* out) const {
    const int64_t rank = static_cast<int64_t>(is_filled.size());
    for (int64_t c = 0; c < rank; ++c) out[c] = (is_filled[c] ? factor : basis)[number * rank + c];
  }
};

}  // namespace

// places: (start of B, start of F, rows of both), for each of `count`; B may lie where F does.
extern "C" void laconic_orthonormal(float* bases, const float* factors, const int64_t* places, int64_t count,
                                    int64_t rank) {
  std::vector<double> gram(rank * rank), turn(rank * rank), row(rank), scale(rank), out(rank);
  for (int64_t each = 0; each < count; ++each) {
    float* basis = bases + places[3 * each];
    const int64_t rows = places[3 * each + 2];
    const Filled filled(factors + places[3 * each + 1], basis, rows, rank);

    std::fill(gram.begin(), gram.end(), 0.0);
    for (int64_t r = 0; r < rows; ++r) {
      filled.row(r, row.data());
      for (int64_t i = 0; i < rank; ++i) {
        for (int64_t j = 0; j < rank; ++j) gram[i * rank + j] += row[i] * row[j];
      }
    }
    for (int64_t i = 0; i < rank; ++i) scale[i] = 1 / std::sqrt(std::max(gram[i * rank + i], kSmallest));
    for (int64_t i = 0; i < rank; ++i) {
      for (int64_t j = 0; j < rank; ++j) {
        gram[i * rank + j] *= scale[i] * scale[j];
        turn[i * rank + j] = i == j;
      }
      gram[i * rank + i] += kRidge;
    }
    // Each row takes what those before it have of it, and does the same to 1; what is left of 1 is T transposed.
    for (int64_t i = 0; i < rank; ++i) {
      const double unit = 1 / std::sqrt(gram[i * rank + i]);
      for (int64_t j = 0; j < rank; ++j) {
        gram[i * rank + j] *= unit;
        turn[i * rank + j] *= unit;
      }
      for (int64_t k = i + 1; k < rank; ++k) {
        const double share = gram[i * rank + k];
        for (int64_t j = 0; j < rank; ++j) {
          gram[k * rank + j] -= share * gram[i * rank + j];
          turn[k * rank + j] -= share * turn[i * rank + j];
        }
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      filled.row(r, row.data());
      for (int64_t c = 0; c < rank; ++c) {
        double sum = 0;
        for (int64_t i = 0; i <= c; ++i) sum += row[i] * scale[i] * turn[c * rank + i];
        out[c] = sum;
      }
      for (int64_t c = 0; c < rank; ++c) basis[r * rank + c] = static_cast<float>(out[c]);
    }
  }
}
