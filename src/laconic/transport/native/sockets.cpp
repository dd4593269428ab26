// Bytes to and from several sockets at once, and a sum over all workers in two hops of them. Nothing returns to Python
// in between: a thread that must take the interpreter's lock after every piece waits for whoever holds it, 5 ms a bucket
// where other threads select and apply meanwhile.

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <poll.h>
#include <sys/socket.h>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr int OVERDUE = -1;
constexpr int TOO_LONG = -2;
constexpr int64_t HEAD_BYTES = 8;

#ifdef MSG_NOSIGNAL
constexpr int QUIETLY = MSG_DONTWAIT | MSG_NOSIGNAL;
#else
constexpr int QUIETLY = MSG_DONTWAIT;
#endif

#ifdef MSG_MORE
constexpr int MORE = MSG_MORE;
#else
constexpr int MORE = 0;
#endif

// What a call of send or recv moved: none where it would have to wait, or minus the error.
int64_t moved(ssize_t result, bool receives) {
  if (result > 0 || (result == 0 && !receives)) return result;
  if (result == 0) return -ECONNRESET;  // the other end has hung up
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -errno;
}

// What is left to send to a socket, and to receive from it.
struct Flow {
  int32_t socket;
  const uint8_t* out;
  int64_t out_left;
  uint8_t* in;
  int64_t in_left;
  bool has_more = false;  // to send, after that
};

// Moves all flows at once until they are through; or, in pieces, until nothing is left to send or to receive of any one,
// or a signal has come. `emptied(i)` and `filled(i)` are called whenever nothing is left of flow i, and may give it more;
// the latter says what to return, if not 0. Returns 0, OVERDUE if it takes longer than timeout_ms, or the error of flow
// *failed.
template <class Emptied, class Filled>
int exchange(std::vector<Flow>& flows, bool in_pieces, int timeout_ms, int64_t* failed, const Emptied& emptied,
             const Filled& filled) {
  const auto count = static_cast<int64_t>(flows.size());
  std::vector<pollfd> waiting(count);
  const auto until = Clock::now() + std::chrono::milliseconds(timeout_ms);
  while (true) {
    bool is_open = false, is_piece = false;
    for (int64_t i = 0; i < count; ++i) {
      const int events = (flows[i].out_left ? POLLOUT : 0) | (flows[i].in_left ? POLLIN : 0);
      waiting[i] = {events ? flows[i].socket : -1, static_cast<short>(events), 0};
      is_open |= events != 0;
    }
    if (!is_open) return 0;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    const int ready = poll(waiting.data(), count, static_cast<int>(std::max<int64_t>(left, 0)));
    if (ready == 0) return OVERDUE;
    if (ready < 0 && (in_pieces || errno != EINTR)) return errno == EINTR ? 0 : errno;
    for (int64_t i = 0; i < count && ready > 0; ++i) {
      const int events = waiting[i].revents;
      Flow& flow = flows[i];
      int64_t sent = 0;
      int64_t received = 0;
      if (flow.out_left && (events & (POLLOUT | POLLERR))) {
        sent = moved(send(flow.socket, flow.out, flow.out_left, flow.has_more ? QUIETLY | MORE : QUIETLY), false);
      }
      if (flow.in_left && (events & (POLLIN | POLLHUP | POLLERR))) {
        received = moved(recv(flow.socket, flow.in, flow.in_left, MSG_DONTWAIT), true);
      }
      *failed = i;
      flow.out += std::max<int64_t>(sent, 0);
      flow.out_left -= std::max<int64_t>(sent, 0);
      flow.in += std::max<int64_t>(received, 0);  // a peer that takes nothing may have sent why
      flow.in_left -= std::max<int64_t>(received, 0);
      if (received < 0 || sent < 0) return static_cast<int>(-(received < 0 ? received : sent));
      if (sent > 0 && flow.out_left == 0) emptied(i);
      if (received > 0 && flow.in_left == 0) {
        const int error = filled(i);
        if (error != 0) return error;
      }
      is_piece |= (sent > 0 && flow.out_left == 0) || (received > 0 && flow.in_left == 0);
    }
    if (in_pieces && is_piece) return 0;
  }
}

}  // namespace

// Sends out_left[i] bytes from out[i] to sockets[i] and receives in_left[i] into in[i], all at once, until all of these
// are through, or, if `in_pieces`, any one; the counts tell what is left of each. Returns 0, OVERDUE, or the error of
// sockets[*failed].
extern "C" int laconic_exchange(int64_t count, const int32_t* sockets, uint8_t* const* out, int64_t* out_left,
                                uint8_t* const* in, int64_t* in_left, int in_pieces, int timeout_ms,
                                int64_t* failed) {
  std::vector<Flow> flows;
  for (int64_t i = 0; i < count; ++i) flows.push_back({sockets[i], out[i], out_left[i], in[i], in_left[i]});
  const int error = exchange(flows, in_pieces, timeout_ms, failed, [](int64_t) {}, [](int64_t) { return 0; });
  for (int64_t i = 0; i < count; ++i) {
    out_left[i] = flows[i].out_left;
    in_left[i] = flows[i].in_left;
  }
  return error;
}

// The same for messages that begin with their length, in eight bytes: out_left[i] is that of out[i], and lengths[i]
// becomes that of what comes, -1 until it has. That goes to in[i], with room for sizes[i] bytes, or to where `room(i,
// length)` says. Returns TOO_LONG where lengths[*failed] is less than 0 or more than longest[*failed].
extern "C" int laconic_all_to_all(int64_t count, const int32_t* sockets, uint8_t* const* out, int64_t* out_left,
                            uint8_t* const* in, int64_t* in_left, const int64_t* sizes, const int64_t* longest,
                            uint8_t* (*room)(int64_t, int64_t), int64_t* lengths, int timeout_ms, int64_t* failed) {
  std::vector<Flow> flows;
  const std::vector<int64_t> heads(out_left, out_left + count);
  std::vector<int64_t> received(count);
  for (int64_t i = 0; i < count; ++i) {
    flows.push_back({sockets[i], reinterpret_cast<const uint8_t*>(&heads[i]), HEAD_BYTES,
                     reinterpret_cast<uint8_t*>(&received[i]), HEAD_BYTES, heads[i] > 0});
    lengths[i] = -1;
  }
  const auto emptied = [&](int64_t i) {
    if (!flows[i].has_more) return;
    flows[i].has_more = false;
    flows[i].out = out[i];
    flows[i].out_left = heads[i];
  };
  const auto filled = [&](int64_t i) {
    if (lengths[i] >= 0) return 0;
    lengths[i] = received[i];
    if (received[i] < 0 || received[i] > longest[i]) return TOO_LONG;
    flows[i].in = received[i] <= sizes[i] ? in[i] : room(i, received[i]);
    flows[i].in_left = received[i];
    return 0;
  };
  const int error = exchange(flows, false, timeout_ms, failed, emptied, filled);
  for (int64_t i = 0; i < count; ++i) {
    out_left[i] = flows[i].out_left;
    in_left[i] = flows[i].in_left;
  }
  return error;
}

namespace {

// What leaves for each worker and comes from it, in the order in which they are served: the next rank first.
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

  // As laconic_exchange, with the rank that failed: the lowest of those that are overdue, and whether it sent anything.
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

float widened(uint16_t bfloat16) {
  const uint32_t word = static_cast<uint32_t>(bfloat16) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

struct BFloat16 {
  uint16_t bits;

  // To the nearest, of two to the even one, as torch rounds.
  void operator+=(BFloat16 other) {
    const float sum = widened(bits) + widened(other.bits);
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

// Overwrites `vector` with its sum over all workers: each adds up a share of it, in rank order, and sends that to all. Sockets
// are by rank. Returns 0, OVERDUE of laconic_exchange if a hop takes longer than timeout_ms, or the error of the worker
// `failed`; `has_moved` tells whether it sent anything in that hop.
extern "C" int laconic_all_reduce(uint8_t* vector, int64_t count, int type, int64_t rank, int64_t num_workers,
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

// Raised when a function changes its arguments or what it returns: Python must not call one that was built for others.
extern "C" int laconic_transport_interface() { return 1; }
