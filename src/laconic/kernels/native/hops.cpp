// A sum over all workers in two hops, without a word to Python between them: whoever must take the interpreter's lock
// there keeps all others waiting.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "frames.h"

using laconic::from_bf16;

extern "C" int laconic_exchange(int64_t count, const int32_t* sockets, uint8_t* const* out, int64_t* out_left,
                                uint8_t* const* in, int64_t* in_left, int in_pieces, int timeout_ms,
                                int64_t* failed);

namespace {

// What leaves for each worker and comes from it, in the order in which they are asked: the one ahead first.
struct Hop {
  std::vector<int32_t> sockets;
  std::vector<int64_t> peers;
  std::vector<uint8_t*> out, in;
  std::vector<int64_t> out_left, in_left;

  void add(int32_t socket, int64_t peer, uint8_t* from, int64_t from_bytes, uint8_t* into, int64_t into_bytes) {
    sockets.push_back(socket);
    peers.push_back(peer);
    out.push_back(from);
    out_left.push_back(from_bytes);
    in.push_back(into);
    in_left.push_back(into_bytes);
  }

  // As laconic_exchange, with the rank of who failed: where all are late the lowest, and whether it has said anything.
  int take(int timeout_ms, int64_t* failed, int* has_moved) {
    const std::vector<int64_t> before = in_left;
    const int64_t count = peers.size();
    int64_t at = 0;
    const int error = laconic_exchange(count, sockets.data(), out.data(), out_left.data(), in.data(), in_left.data(),
                                       false, timeout_ms, &at);
    if (error == 0) return 0;
    if (error < 0) {
      const auto is_over = [&](int64_t i) { return out_left[i] == 0 && in_left[i] == 0; };
      for (int64_t i = 0; i < count; ++i) {
        if (!is_over(i) && (is_over(at) || peers[i] < peers[at])) at = i;
      }
    }
    *failed = peers[at];
    *has_moved = in_left[at] < before[at];
    return error;
  }
};

template <typename T>
void add(T* total, const T* row, int64_t count) {
  for (int64_t i = 0; i < count; ++i) total[i] += row[i];
}

struct BFloat16 {
  uint16_t bits;

  // To the nearest, of two to the even one, as torch rounds.
  void operator+=(BFloat16 other) {
    const float sum = from_bf16(bits) + from_bf16(other.bits);
    uint32_t word;
    std::memcpy(&word, &sum, sizeof word);
    bits = sum != sum ? 0x7FC0 : static_cast<uint16_t>((word + 0x7FFF + (word >> 16 & 1)) >> 16);
  }
};

template <typename T>
void add_as(uint8_t* total, const uint8_t* row, int64_t count) {
  add(reinterpret_cast<T*>(total), reinterpret_cast<const T*>(row), count);
}

struct Type {
  int64_t bytes;
  void (*add)(uint8_t*, const uint8_t*, int64_t);
};

// By the number that Python gives them; integers wrap.
const Type TYPES[] = {
    {4, add_as<float>},    {8, add_as<double>},   {2, add_as<BFloat16>}, {1, add_as<uint8_t>},
    {2, add_as<uint16_t>}, {4, add_as<uint32_t>}, {8, add_as<uint64_t>},
};

}  // namespace

// Overwrites `vector` with its sum over all workers: each adds up a share of it, in rank order, and tells all. Sockets
// are by rank. Returns 0, LATE of laconic_exchange if a hop takes longer than timeout_ms, or the error of the worker
// `failed`, which in that hop may have said something.
extern "C" int laconic_add_up(uint8_t* vector, int64_t count, int type, int64_t rank, int64_t num_workers,
                              const int32_t* sockets, int timeout_ms, int64_t* failed, int* has_moved) {
  const Type& entries = TYPES[type];
  // The first count % num_workers have one more, as torch.tensor_split cuts.
  const auto begin = [&](int64_t share) {
    return entries.bytes * (count / num_workers * share + std::min(share, count % num_workers));
  };
  const auto bytes = [&](int64_t share) { return begin(share + 1) - begin(share); };
  uint8_t* const mine = vector + begin(rank);
  const int64_t mine_bytes = bytes(rank);
  const std::unique_ptr<uint8_t[]> rows(new uint8_t[num_workers * mine_bytes]);
  Hop shares, sums;
  for (int64_t step = 1; step < num_workers; ++step) {
    const int64_t peer = (rank + step) % num_workers;
    uint8_t* const theirs = vector + begin(peer);
    shares.add(sockets[peer], peer, theirs, bytes(peer), rows.get() + peer * mine_bytes, mine_bytes);
    sums.add(sockets[peer], peer, mine, mine_bytes, theirs, bytes(peer));
  }
  if (const int error = shares.take(timeout_ms, failed, has_moved)) return error;
  std::memcpy(rows.get() + rank * mine_bytes, mine, mine_bytes);
  std::memcpy(mine, rows.get(), mine_bytes);
  for (int64_t peer = 1; peer < num_workers; ++peer) {
    entries.add(mine, rows.get() + peer * mine_bytes, mine_bytes / entries.bytes);
  }
  return sums.take(timeout_ms, failed, has_moved);
}
