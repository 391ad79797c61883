// What the attacks of hostile.cc share: random numbers, a transport under attack, and its owner.
#pragma once

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/copy.h"
#include "transport/message.h"
#include "two_ranks.h"

namespace dpp::tests {

constexpr uint64_t kSettleNs = 10'000'000'000;
constexpr uint64_t kLookNs = 100'000;

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  uint64_t below(uint64_t bound) { return engine_() % bound; }
  bool one_in(uint64_t bound) { return below(bound) == 0; }
  // Small numbers, those around powers of two, and any.
  uint64_t odd() {
    switch (below(4)) {
      case 0: return below(9);
      case 1: return (uint64_t{1} << below(64)) - 1 + below(3);
      case 2: return ~uint64_t{0} - below(9);
      default: return engine_();
    }
  }
  std::string bytes(size_t count) {
    std::string made(count, '\0');
    for (size_t at = 0; at < count; at += 8) {
      const uint64_t word = engine_();
      std::memcpy(made.data() + at, &word, std::min<size_t>(8, count - at));
    }
    return made;
  }
  void flip(void* data, size_t count) {
    static_cast<unsigned char*>(data)[below(count)] ^= static_cast<unsigned char>(1 << below(8));
  }

 private:
  std::mt19937_64 engine_;
};

template <typename Value>
std::string as_bytes(const Value& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

inline std::string note(uint8_t kind, const std::string& body) {
  const auto length = static_cast<uint16_t>(body.size());
  return as_bytes(length) + static_cast<char>(kind) + body;
}

inline void seal(Header& header) {
  header.header_crc = dpp::crc32c(&header, offsetof(Header, header_crc));
}

// Rank 1 over tcp, and the other ends of its connections.
struct Victim {
  std::unique_ptr<Transport> transport;
  UniqueFd control;
  std::vector<UniqueFd> data;

  Victim(uint64_t slot_bytes, bool small_buffers) {
    Options options;
    options.slot_bytes = slot_bytes;
    options.checksum = false;
    transport = dpp::tests::make(1, options);
    auto [ours, theirs] = connected(SOCK_STREAM);
    transport->add_peer(0, "rank 0", std::move(ours), UniqueFd(), UniqueFd());
    control = std::move(theirs);
    std::vector<UniqueFd> ends;
    for (int i = 0; i < 2; ++i) {
      auto [one, other] = connected(SOCK_STREAM);
      const int few = 4096;
      if (small_buffers) ::setsockopt(one.get(), SOL_SOCKET, SO_SNDBUF, &few, sizeof(few));
      ends.push_back(std::move(one));
      data.push_back(std::move(other));
    }
    transport->add_tcp_link(0, {0, 1}, {0, 1}, std::move(ends));
  }

  // Sends bytes, unless the transport has failed and reads no more.
  void say(const UniqueFd& to, const std::string& bytes) {
    for (size_t sent = 0; sent < bytes.size();) {
      const ssize_t more =
          ::send(to.get(), bytes.data() + sent, bytes.size() - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
      const int error = errno;
      if (more > 0) sent += static_cast<size_t>(more);
      if (more <= 0) ::usleep(20);
      if (more <= 0 && (error != EAGAIN || !transport->failure().empty())) return;
    }
  }

  // Until the transport has read everything, or has failed.
  void settle() {
    const uint64_t deadline = dpp::monotonic_ns() + kSettleNs;
    while (transport->failure().empty() && unread() != 0) {
      if (dpp::monotonic_ns() > deadline) give_up("the transport reads no more");
      ::usleep(20);
    }
    const uint64_t until = dpp::monotonic_ns() + kLookNs;
    while (transport->failure().empty() && dpp::monotonic_ns() < until) ::usleep(20);
  }

  int unread() const {
    int sum = 0, queued = 0;
    if (::ioctl(control.get(), SIOCOUTQ, &queued) == 0) sum += queued;
    for (const UniqueFd& end : data) {
      if (::ioctl(end.get(), SIOCOUTQ, &queued) == 0) sum += queued;
    }
    return sum;
  }
};

// Takes what has arrived; every byte of it is read.
inline void take_all(Transport& transport, Random& random) {
  static std::vector<unsigned char> target;
  uint64_t arrived[2], coming[2];
  transport.poll(arrived);
  transport.coming(coming);
  for (size_t index = 0; index < 2; ++index) {
    for (int most = 8; most != 0; --most) {
      uint64_t when = 0;
      try {
        const Header header = transport.head(index, when);
        if (header.bytes > transport.incoming(index).slot_bytes) give_up("too long a message");
        if (header.part >= header.num_parts) give_up("an impossible part");
        if (random.one_in(2) && transport.take_memory(index)) continue;
        target.resize(header.bytes);
        transport.take(index, target.data(), header.bytes, 0);
      } catch (const std::out_of_range&) {
        break;  // nothing more has arrived
      }
    }
  }
}

// Lets an act run that may end in a failure of the transport, and in nothing else.
template <typename Act>
bool fails(const Act& act) {
  try {
    act();
    return false;
  } catch (const dpp::Error& error) {
    if (error.what()[0] == '\0') give_up("a failure without a text");
    return true;
  }
}

}  // namespace dpp::tests
