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

#ifdef MSG_NOSIGNAL
constexpr int QUIETLY = MSG_DONTWAIT | MSG_NOSIGNAL;
#else
constexpr int QUIETLY = MSG_DONTWAIT;
#endif

// What a call of send or recv moved: none where it would have to wait, or minus the error.
int64_t moved(ssize_t result, bool receives) {
  if (result > 0 || (result == 0 && !receives)) return result;
  if (result == 0) return -ECONNRESET;  // the other end has hung up
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -errno;
}

}  // namespace

// Sends out_left[i] bytes from out[i] to sockets[i] and receives in_left[i] into in[i], all at once, until all of these
// are through, or until any is where that is asked for; the pointers and counts tell how far each has come. Returns 0,
// LATE if that takes longer than timeout_ms, or the error of sockets[*failed].
extern "C" int laconic_exchange(int64_t count, const int32_t* sockets, uint8_t** out, int64_t* out_left, uint8_t** in,
                                int64_t* in_left, int until_any, int timeout_ms, int64_t* failed) {
  std::vector<pollfd> waiting(count);
  const auto until = Clock::now() + std::chrono::milliseconds(timeout_ms);
  for (bool any = false; !(any && until_any);) {
    bool is_open = false;
    for (int64_t i = 0; i < count; ++i) {
      const int events = (out_left[i] ? POLLOUT : 0) | (in_left[i] ? POLLIN : 0);
      waiting[i] = {events ? sockets[i] : -1, static_cast<short>(events), 0};
      is_open |= events != 0;
    }
    if (!is_open) break;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    const int ready = poll(waiting.data(), count, static_cast<int>(std::max<int64_t>(left, 0)));
    if (ready == 0) return LATE;
    if (ready < 0 && errno != EINTR) return errno;
    for (int64_t i = 0; i < count && ready > 0; ++i) {
      const int told = waiting[i].revents;
      int64_t sent = 0;
      int64_t received = 0;
      if (out_left[i] && (told & (POLLOUT | POLLERR))) sent = moved(send(sockets[i], out[i], out_left[i], QUIETLY), false);
      if (in_left[i] && (told & (POLLIN | POLLHUP | POLLERR))) {
        received = moved(recv(sockets[i], in[i], in_left[i], MSG_DONTWAIT), true);
      }
      if (received < 0 || sent < 0) {
        *failed = i;
        return static_cast<int>(-(received < 0 ? received : sent));
      }
      any |= (sent && sent == out_left[i]) || (received && received == in_left[i]);
      out[i] += sent;
      out_left[i] -= sent;
      in[i] += received;
      in_left[i] -= received;
    }
  }
  return 0;
}
