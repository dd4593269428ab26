// Bytes to and from several sockets at once, without a word to Python: a thread that must take the interpreter's lock
// after every piece waits for whoever holds it, 5 ms a bucket where others choose and apply meanwhile.

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <poll.h>
#include <sys/socket.h>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr int LATE = -1;
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
// the latter says what to return, if not 0. Returns 0, LATE if it takes longer than timeout_ms, or the error of flow
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
    if (ready == 0) return LATE;
    if (ready < 0 && (in_pieces || errno != EINTR)) return errno == EINTR ? 0 : errno;
    for (int64_t i = 0; i < count && ready > 0; ++i) {
      const int told = waiting[i].revents;
      Flow& flow = flows[i];
      int64_t sent = 0;
      int64_t received = 0;
      if (flow.out_left && (told & (POLLOUT | POLLERR))) {
        sent = moved(send(flow.socket, flow.out, flow.out_left, flow.has_more ? QUIETLY | MORE : QUIETLY), false);
      }
      if (flow.in_left && (told & (POLLIN | POLLHUP | POLLERR))) {
        received = moved(recv(flow.socket, flow.in, flow.in_left, MSG_DONTWAIT), true);
      }
      *failed = i;
      flow.out += std::max<int64_t>(sent, 0);
      flow.out_left -= std::max<int64_t>(sent, 0);
      flow.in += std::max<int64_t>(received, 0);  // who can be told nothing may have said why
      flow.in_left -= std::max<int64_t>(received, 0);
      if (received < 0 || sent < 0) return static_cast<int>(-(received < 0 ? received : sent));
      if (sent > 0 && flow.out_left == 0) emptied(i);
      if (received > 0 && flow.in_left == 0) {
        const int strange = filled(i);
        if (strange != 0) return strange;
      }
      is_piece |= (sent > 0 && flow.out_left == 0) || (received > 0 && flow.in_left == 0);
    }
    if (in_pieces && is_piece) return 0;
  }
}

}  // namespace

// Sends out_left[i] bytes from out[i] to sockets[i] and receives in_left[i] into in[i], all at once, until all of these
// are through, or, if `in_pieces`, any one; the counts tell what is left of each. Returns 0, LATE, or the error of
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
extern "C" int laconic_deal(int64_t count, const int32_t* sockets, uint8_t* const* out, int64_t* out_left,
                            uint8_t* const* in, int64_t* in_left, const int64_t* sizes, const int64_t* longest,
                            uint8_t* (*room)(int64_t, int64_t), int64_t* lengths, int timeout_ms, int64_t* failed) {
  std::vector<Flow> flows;
  const std::vector<int64_t> heads(out_left, out_left + count);
  std::vector<int64_t> heard(count);
  for (int64_t i = 0; i < count; ++i) {
    flows.push_back({sockets[i], reinterpret_cast<const uint8_t*>(&heads[i]), HEAD_BYTES,
                     reinterpret_cast<uint8_t*>(&heard[i]), HEAD_BYTES, heads[i] > 0});
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
    lengths[i] = heard[i];
    if (heard[i] < 0 || heard[i] > longest[i]) return TOO_LONG;
    flows[i].in = heard[i] <= sizes[i] ? in[i] : room(i, heard[i]);
    flows[i].in_left = heard[i];
    return 0;
  };
  const int error = exchange(flows, false, timeout_ms, failed, emptied, filled);
  for (int64_t i = 0; i < count; ++i) {
    out_left[i] = flows[i].out_left;
    in_left[i] = flows[i].in_left;
  }
  return error;
}
