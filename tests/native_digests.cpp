// Every native kernel on the inputs where kernels go wrong, one digest a line: builds that print the same compute the
// same bits. Inputs are made of integers and products alone, so that every machine has the same ones.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "native.h"

namespace {

using Floats = std::vector<float>;
using Words = std::vector<uint32_t>;
using Positions = std::vector<int32_t>;

constexpr int kThreads = 2;

// FNV-1a over the bytes of results; a NaN counts as a NaN, since its payload differs by instruction set.
class Digest {
 public:
  template <class T>
  Digest& of(const T* values, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      T value = values[i];
      if constexpr (std::is_floating_point_v<T>) {
        if (std::isnan(value)) value = std::numeric_limits<T>::quiet_NaN();
      }
      unsigned char bytes[sizeof(T)];
      std::memcpy(bytes, &value, sizeof(T));
      for (unsigned char byte : bytes) state_ = (state_ ^ byte) * 0x100000001b3u;
    }
    return *this;
  }
  template <class T>
  Digest& of(const std::vector<T>& values) {
    return of(values.data(), static_cast<int64_t>(values.size()));
  }
  template <class T>
  Digest& of(T value) {
    return of(&value, 1);
  }
  void print(const char* kernel, const std::string& input) const {
    std::printf("%s, %s: %016llx\n", kernel, input.c_str(), static_cast<unsigned long long>(state_));
  }

 private:
  uint64_t state_ = 0xcbf29ce484222325u;
};

uint32_t mix(uint64_t i) {
  i = (i + 1) * 0x9e3779b97f4a7c15u;
  i = (i ^ i >> 29) * 0xbf58476d1ce4e5b9u;
  return static_cast<uint32_t>(i >> 32);
}

// As tests/inputs.py has them, with a law of its own: cubes of uniform numbers, small ones being common.
std::vector<std::pair<std::string, Floats>> vectors(int64_t n) {
  Floats cubes(n), ties(n), zeros(n), sparse(n);
  for (int64_t i = 0; i < n; ++i) {
    const float uniform = static_cast<float>(static_cast<int32_t>(mix(n + i))) * 0x1p-31f;
    cubes[i] = uniform * uniform * uniform * 4.0f;
    ties[i] = static_cast<float>(static_cast<int32_t>(mix(i) % 5) - 2);
    sparse[i] = i % std::max<int64_t>(1, n / 5) == 0 ? 1e-20f : 0.0f;
  }
  Floats outlier = cubes, strange = cubes, denormal = cubes, one_place = cubes, sorted = cubes;
  outlier[n / 2] = 1e30f;
  for (int64_t i = 0; i < n; i += std::max<int64_t>(1, n / 3)) strange[i] = std::nanf("");
  strange[n / 2] = -std::numeric_limits<float>::infinity();
  for (float& x : denormal) x *= 1e-42f;
  for (int64_t i = 0; i < n - n / 50; ++i) one_place[i] *= 1e-6f;
  std::sort(sorted.begin(), sorted.end());
  return {{"cubes", cubes},       {"ties", ties},
          {"zeros", zeros},       {"constant", Floats(n, -2.5f)},
          {"outlier", outlier},   {"mostly zero", sparse},
          {"denormal", denormal}, {"large in one place", one_place},
          {"sorted", sorted},     {"nan and inf", strange}};
}

void select(const std::string& name, const Floats& x, const Floats& addend) {
  const auto n = static_cast<int64_t>(x.size());
  Positions index(n);
  Floats value(n);
  for (int64_t k : {int64_t{1}, std::max<int64_t>(1, n / 100), std::max<int64_t>(1, n / 2), n}) {
    Digest digest;
    for (float guess : {-1.0f, 0.5f}) {
      for (float factor : {0.0f, 1.0f, 0.3f}) {  // 0: nothing is added
        Floats balance = x;
        Facts facts;
        laconic_withdraw(balance.data(), factor == 0 ? nullptr : addend.data(), factor, n, k, guess, kThreads,
                         index.data(), value.data(), &facts);
        digest.of(balance).of(index.data(), k).of(value.data(), k).of(facts.mean).of(facts.kth);
        digest.of(facts.caught).of(facts.passes);
      }
    }
    digest.print("withdraw", name + ", k " + std::to_string(k));
  }
  const Floats thresholds = {0.0f, 1e-41f, 0.5f, 2.0f, 1e30f, std::numeric_limits<float>::infinity()};
  std::vector<int64_t> counts(thresholds.size());
  laconic_count_at_least(x.data(), n, thresholds.data(), thresholds.size(), kThreads, counts.data());
  Digest().of(counts).print("count_at_least", name);
  Digest().of(laconic_all_finite(x.data(), n, kThreads)).print("all_finite", name);
  Digest().of(laconic_sum_magnitudes(x.data(), n, kThreads)).print("sum_magnitudes", name);
}

void sign(const std::string& name, const Floats& x, const Floats& other) {
  const auto n = static_cast<int64_t>(x.size()), num_words = (n + 31) / 32;
  Words one(num_words), two(num_words), three(num_words), negative(num_words), tie(num_words);
  laconic_pack_signs(x.data(), n, kThreads, one.data());
  laconic_pack_signs(other.data(), n, kThreads, two.data());
  Digest().of(one).of(two).print("pack_signs", name);
  for (int64_t i = 0; i < num_words; ++i) three[i] = mix(i);
  Floats back(n);
  laconic_unpack_signs(one.data(), n, 0.7f, kThreads, back.data());
  Digest().of(back).print("unpack_signs", name);
  for (int64_t group : {16, 48, 4096}) {
    std::vector<int32_t> lanes((n + group - 1) / group);
    Words codes((n + 15) / 16);
    Floats decoded(16 * codes.size());
    laconic_encode_lloyd(x.data(), n, 3e38f, group, kThreads, lanes.data(), codes.data());
    laconic_decode_lloyd(lanes.data(), codes.data(), codes.size(), 3e38f, group, kThreads, decoded.data());
    Digest().of(lanes).of(codes).of(decoded).print("lloyd", name);
  }
  const uint32_t* ballots[] = {one.data(), two.data(), three.data(), two.data()};
  for (int64_t voters : {1, 2, 3, 4}) {
    laconic_vote(ballots, voters, num_words, kThreads, negative.data(), tie.data());
    Digest().of(negative).of(tie).print("vote", name);
  }
}

template <class Word>
void round(const std::string& name, const Floats& x, int64_t group, int32_t levels, int lane_bits) {
  constexpr int kBytes = sizeof(Word);
  const auto n = static_cast<int64_t>(x.size()), groups = (n + group - 1) / group;
  Floats largest(groups), inverse(groups), back(n);
  laconic_largest_magnitudes(x.data(), n, group, kThreads, largest.data());
  for (int64_t i = 0; i < groups; ++i) {
    inverse[i] = largest[i] == 0 ? 0.0f : std::min(1e38f, static_cast<float>(levels) / largest[i]);
  }
  const int lanes = 8 * kBytes / lane_bits;
  const int64_t num_words = (n + lanes - 1) / lanes, quarter = num_words / 4;
  std::vector<Word> words(num_words), means(quarter);
  laconic_quantize_pack(x.data(), n, inverse.data(), groups, group, levels, lane_bits, 1, 2, kThreads, words.data(),
                        num_words, kBytes);
  laconic_unpack_scale(words.data(), num_words, kBytes, n, lane_bits, largest.data(), groups, group, kThreads,
                       back.data());
  laconic_average_words(words.data(), 4, quarter, kBytes, lane_bits, 3, 4, kThreads, means.data());
  const std::string input = name + ", groups of " + std::to_string(group) + ", bits " + std::to_string(lane_bits);
  Digest().of(largest).print("largest_magnitudes", input);
  Digest().of(words).print("quantize_pack", input);
  Digest().of(back).print("unpack_scale", input);
  Digest().of(means).print("average_words", input);
}

void remain(const std::string& name, const Floats& x, const Floats& other) {
  const auto n = static_cast<int64_t>(x.size()), blocks = (n + 255) / 256;
  Floats near = x, changes(blocks), sizes(blocks), steps(blocks), moves(n);
  for (int64_t i = 0; i < n; ++i) near[i] += other[i] * 0.01f;
  laconic_largest_changes(x.data(), near.data(), n, kThreads, changes.data(), sizes.data());
  Digest().of(changes).of(sizes).print("largest_changes", name);
  for (int bits = 3; bits <= 8; ++bits) {
    for (int64_t i = 0; i < blocks; ++i) steps[i] = i % 3 == 0 ? 0.125f : std::max(1e-6f, changes[i]);
    std::vector<uint8_t> codes((n + 7) / 8 * bits), differences((n + 7) / 8 * (bits - 1));
    Positions sums(blocks);
    std::vector<int8_t> peaks(blocks);
    const std::string input = name + ", bits " + std::to_string(bits);
    laconic_encode_modulo(x.data(), n, steps.data(), 0.3f, bits, kThreads, codes.data(), sums.data());
    Digest().of(codes).of(sums).print("encode_modulo", input);
    laconic_compare_modulo(near.data(), n, codes.data(), sums.data(), steps.data(), 0.3f, bits, kThreads,
                             moves.data(), differences.data(), peaks.data());
    Digest().of(moves).of(differences).of(peaks).print("compare_modulo", input);
    laconic_decode_differences(differences.data(), n, steps.data(), bits - 1, kThreads, moves.data());
    Digest().of(moves).print("decode_differences", input);
  }
}

void code(int64_t n) {
  for (uint32_t apart : {1, 3, 50}) {
    Positions positions, back(n + 1);
    for (int64_t i = 0; i < n; ++i) {
      if (mix(i) % apart == 0) positions.push_back(static_cast<int32_t>(i));
    }
    const auto k = static_cast<int64_t>(positions.size());
    if (k == 0) continue;
    const std::string input = std::to_string(k) + " of " + std::to_string(n);
    Words bits((n + 31) / 32);
    Digest().of(laconic_set_bits(positions.data(), k, bits.data(), n)).of(bits).print("set_bits", input);
    Digest().of(laconic_unpack_bits(bits.data(), bits.size(), back.data(), k)).of(back).print("unpack_bits", input);
    Digest().of(laconic_check_sum(bits.data(), bits.size())).print("check_sum", input);
    for (int width : {0, 1, 4}) {
      const int64_t high = k + (n >> width);
      Words words((k * width + 31) / 32 + (high + 31) / 32);
      laconic_encode_elias_fano(positions.data(), k, width, high, words.data());
      Digest().of(words).print("encode_elias_fano", input);
      const int64_t found = laconic_decode_elias_fano(words.data(), words.size(), n, k, width, back.data());
      Digest().of(found).of(back).print("decode_elias_fano", input);
    }
    Words rice(laconic_most_rice_words(k));
    Digest().of(rice.size()).print("most_rice_words", input);
    const int64_t written = laconic_encode_rice(positions.data(), k, rice.data());
    Digest().of(written).of(rice.data(), written).print("encode_rice", input);
    Digest().of(laconic_decode_rice(rice.data(), written, n, k, back.data())).of(back).print("decode_rice", input);
    Floats values(k), total(n, 0.5f);
    for (int64_t i = 0; i < k; ++i) values[i] = static_cast<float>(mix(i)) * 0x1p-32f;
    const int32_t* where[] = {positions.data(), positions.data()};
    const float* what[] = {values.data(), values.data()};
    const int64_t counts[] = {k, k / 2};
    Digest().of(laconic_add_at(total.data(), n, where, what, counts, 2, kThreads)).of(total).print("add_at", input);
    std::vector<int64_t> drawn(k);
    laconic_draw_distinct(n, n - 1, k, 0x12345678u, 0x9abcdef0u, drawn.data());
    Digest().of(drawn).print("draw_distinct", input);
  }
  Positions lanes(n), back(n);
  for (int width = 1; width <= 31; ++width) {
    for (int64_t i = 0; i < n; ++i) lanes[i] = static_cast<int32_t>(mix(i) >> (32 - width));
    Words words((n * width + 31) / 32);
    laconic_pack_lanes(lanes.data(), n, width, words.data());
    laconic_unpack_lanes(words.data(), n, width, back.data());
    const std::string input = std::to_string(n) + ", bits " + std::to_string(width);
    Digest().of(words).print("pack_lanes", input);
    Digest().of(back).print("unpack_lanes", input);
  }
}

}  // namespace

int main() {
  for (int64_t n : {1, 2, 15, 16, 17, 31, 33, 1000, 16'385, 600'001}) {
    auto inputs = vectors(n);
    if (n == 600'001) inputs.resize(2);  // enough for two threads to be started, and slow under emulation
    const Floats& addend = inputs.front().second;
    for (const auto& [kind, x] : inputs) {
      const std::string name = std::to_string(n) + " " + kind;
      select(name, x, addend);
      sign(name, x, addend);
      if (kind == "nan and inf") continue;  // the others are defined for finite entries
      round<uint32_t>(name, x, n, 7, 6);
      round<uint32_t>(name, x, 100, 127, 10);
      round<uint64_t>(name, x, 64, 1, 3);
      remain(name, x, addend);
    }
    code(n);
  }
}
