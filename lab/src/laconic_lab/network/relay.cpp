// Delay and loss between the interfaces of hosts and a switch: relay WATCHED PORT...
//
// A port is NEAR:FAR:DELAY_NS:JITTER_NS:LOSS: two packet sockets that are open already (they take a capability that this
// program need not have), and what befalls a packet between them, either way. Packets of segmentation offload stay
// whole, by the virtio header before each; one of which a part is lost goes on as what is left of it on either side.
// WATCHED is a file that becomes readable when it is time to end: the pidfd of the process that holds the lab.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <deque>
#include <random>
#include <vector>

namespace {

struct VnetHeader {  // linux/virtio_net.h has it too, but is no C++
  std::uint8_t flags, gso_type;
  std::uint16_t header_size, gso_size, checksum_from, checksum_at;
};
constexpr std::uint8_t kTcp4 = 1, kEcn = 0x80;  // of gso_type
constexpr std::size_t kVnet = sizeof(VnetHeader), kEthernet = 14;
constexpr std::size_t kMostBytes = 64u << 20;   // waiting in one direction; what comes beyond is lost, as at a router
constexpr int kBatch = 64;                      // packets read before others have their turn
using Packet = std::vector<char>;

std::int64_t now_ns(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

std::uint32_t sum_of(const char* bytes, std::size_t size) {
  std::uint32_t sum = 0;
  for (std::size_t i = 0; i + 1 < size; i += 2) {
    std::uint16_t word;
    std::memcpy(&word, bytes + i, 2);
    sum += word;
  }
  return sum;
}

std::uint16_t folded(std::uint32_t sum) {
  while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
  return static_cast<std::uint16_t>(sum);
}

// A TCP packet of IPv4 that stands for several: where its payload starts, and how long a part of it is.
struct Segments {
  std::size_t payload = 0, size = 0, count = 1;

  explicit Segments(const Packet& packet) {
    VnetHeader head;
    std::memcpy(&head, packet.data(), kVnet);
    if ((head.gso_type & ~kEcn) != kTcp4 || head.gso_size == 0) return;
    const std::size_t ip_at = kVnet + kEthernet;
    const std::size_t tcp_at = ip_at + 4 * (packet[ip_at] & 0x0f);
    payload = tcp_at + 4 * ((packet[tcp_at + 12] >> 4) & 0x0f);
    size = head.gso_size;
    count = (packet.size() - payload + size - 1) / size;
  }

  // Parts [first, last) as a packet of their own, with the headers that the sender would have given them.
  Packet cut(const Packet& packet, std::size_t first, std::size_t last) const {
    const std::size_t from = payload + first * size;
    const std::size_t to = std::min(packet.size(), payload + last * size);
    Packet part(packet.begin(), packet.begin() + payload);
    part.insert(part.end(), packet.begin() + from, packet.begin() + to);
    VnetHeader head;
    std::memcpy(&head, part.data(), kVnet);
    if (last - first == 1) head.gso_type = 0, head.gso_size = 0;
    std::memcpy(part.data(), &head, kVnet);
    const std::size_t ip_at = kVnet + kEthernet;
    iphdr ip;
    std::memcpy(&ip, part.data() + ip_at, sizeof ip);
    const std::size_t tcp_at = ip_at + 4 * ip.ihl;
    ip.tot_len = htons(static_cast<std::uint16_t>(part.size() - ip_at));
    ip.id = htons(static_cast<std::uint16_t>(ntohs(ip.id) + first));
    ip.check = 0;
    std::memcpy(part.data() + ip_at, &ip, sizeof ip);
    ip.check = static_cast<std::uint16_t>(~folded(sum_of(part.data() + ip_at, tcp_at - ip_at)));
    std::memcpy(part.data() + ip_at, &ip, sizeof ip);
    tcphdr tcp;
    std::memcpy(&tcp, part.data() + tcp_at, sizeof tcp);
    tcp.seq = htonl(static_cast<std::uint32_t>(ntohl(tcp.seq) + first * size));
    if (last < count) tcp.fin = tcp.psh = 0;
    if (first > 0) tcp.res2 &= 1;  // CWR is said once
    // Of a checksum that is left to the card, the sum over addresses, protocol and length stands here.
    tcp.check = folded(sum_of(reinterpret_cast<const char*>(&ip.saddr), 8) + htons(IPPROTO_TCP) +
                       htons(static_cast<std::uint16_t>(part.size() - tcp_at)));
    std::memcpy(part.data() + tcp_at, &tcp, sizeof tcp);
    return part;
  }
};

// One way through a port: what came in at one socket waits here until it is due at the other.
class Direction {
 public:
  Direction(int from, int to, double delay_ns, double jitter_ns, double loss, unsigned seed)
      : from_(from), to_(to), delay_(delay_ns - jitter_ns, delay_ns + jitter_ns), lost_(loss), draws_(seed) {}

  void read() {
    static char buffer[kVnet + kEthernet + 65536];
    alignas(cmsghdr) char told[CMSG_SPACE(sizeof(timespec))];
    for (int i = 0; i < kBatch; ++i) {
      iovec piece{buffer, sizeof buffer};
      msghdr message{};
      message.msg_iov = &piece;
      message.msg_iovlen = 1;
      message.msg_control = told;
      message.msg_controllen = sizeof told;
      const ssize_t got = recvmsg(from_, &message, MSG_DONTWAIT);
      if (got < 0) return;
      if (static_cast<std::size_t>(got) > kVnet + kEthernet) admit(Packet(buffer, buffer + got), arrival_ns(message));
    }
  }

  void release(std::int64_t now) {
    for (; !waiting_.empty() && waiting_.front().due <= now; waiting_.pop_front()) {
      const Packet& packet = waiting_.front().packet;
      bytes_ -= packet.size();
      // An interface that is down takes nothing, and nothing waits for it.
      (void)!send(to_, packet.data(), packet.size(), MSG_DONTWAIT);
    }
  }

  std::int64_t due() const { return waiting_.empty() ? INT64_MAX : waiting_.front().due; }

 private:
  struct Waiting {
    std::int64_t due;
    Packet packet;
  };

  // When the kernel took it, which on a busy machine is earlier than when this process woke up.
  static std::int64_t arrival_ns(msghdr& message) {
    const std::int64_t now = now_ns(CLOCK_MONOTONIC);
    const cmsghdr* head = CMSG_FIRSTHDR(&message);
    if (head == nullptr) return now;
    timespec stamp;
    std::memcpy(&stamp, CMSG_DATA(head), sizeof stamp);
    const std::int64_t age = now_ns(CLOCK_REALTIME) - (stamp.tv_sec * 1'000'000'000LL + stamp.tv_nsec);
    return now - std::clamp<std::int64_t>(age, 0, 1'000'000'000);
  }

  void admit(Packet packet, std::int64_t arrived) {
    if (bytes_ + packet.size() > kMostBytes) return;
    last_due_ = std::max(last_due_, arrived + static_cast<std::int64_t>(delay_(draws_)));
    const Segments segments(packet);
    std::size_t first = 0;  // of those since the last that was lost
    for (std::size_t i = 0; i < segments.count; ++i) {
      if (!lost_(draws_)) continue;
      if (first < i) wait(segments.cut(packet, first, i));
      first = i + 1;
    }
    if (first == 0) wait(std::move(packet));
    else if (first < segments.count) wait(segments.cut(packet, first, segments.count));
  }

  void wait(Packet packet) {
    bytes_ += packet.size();
    waiting_.push_back({last_due_, std::move(packet)});
  }

  int from_, to_;
  std::uniform_real_distribution<double> delay_;
  std::bernoulli_distribution lost_;
  std::mt19937 draws_;  // seeded, so that a lab loses the same packets when it is made again
  std::deque<Waiting> waiting_;
  std::size_t bytes_ = 0;
  std::int64_t last_due_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const int events = epoll_create1(EPOLL_CLOEXEC), timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
  const auto watch = [events](int file, std::uint64_t tag) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = tag;
    return epoll_ctl(events, EPOLL_CTL_ADD, file, &event) == 0;
  };
  std::deque<Direction> directions;
  int ended = -1;
  bool is_ready = argc > 2 && std::sscanf(argv[1], "%d", &ended) == 1;
  for (int i = 2; i < argc && is_ready; ++i) {
    int near, far;
    double delay_ns, jitter_ns, loss;
    is_ready = std::sscanf(argv[i], "%d:%d:%lf:%lf:%lf", &near, &far, &delay_ns, &jitter_ns, &loss) == 5;
    if (!is_ready) break;
    for (const auto& [from, to] : {std::pair{near, far}, std::pair{far, near}}) {
      const auto index = directions.size();
      directions.emplace_back(from, to, delay_ns, jitter_ns, loss, static_cast<unsigned>(index));
      is_ready = is_ready && watch(from, index);
    }
  }
  const std::uint64_t timer_tag = directions.size(), end_tag = timer_tag + 1;
  if (!is_ready || !watch(timer, timer_tag) || !watch(ended, end_tag)) {
    std::fprintf(stderr, "relay WATCHED NEAR:FAR:DELAY_NS:JITTER_NS:LOSS...\n");
    return 2;
  }
  for (;;) {
    epoll_event ready[64];
    const int count = epoll_wait(events, ready, 64, -1);
    for (int i = 0; i < count; ++i) {
      const std::uint64_t tag = ready[i].data.u64;
      if (tag == end_tag) return 0;
      std::uint64_t times;
      if (tag == timer_tag) (void)!read(timer, &times, sizeof times);
      else directions[tag].read();
    }
    std::int64_t next = INT64_MAX;
    const std::int64_t now = now_ns(CLOCK_MONOTONIC);
    for (Direction& direction : directions) {
      direction.release(now);
      next = std::min(next, direction.due());
    }
    itimerspec due{};
    if (next != INT64_MAX) due.it_value = {next / 1'000'000'000LL, next % 1'000'000'000LL};
    timerfd_settime(timer, TFD_TIMER_ABSTIME, &due, nullptr);
  }
}
