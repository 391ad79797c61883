// Two transports of one process exchange random messages; meant to be built with a sanitizer. Exits
// 0 when every byte arrived, in order. Argument: "shm" or "tcp", then the number of messages.
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "transport/transport.h"

namespace {

using dpp::Geometry;
using dpp::Transport;
using dpp::UniqueFd;

constexpr uint64_t kSlotBytes = 1 << 16;
// Below max_pending: with both ranks waiting inside put(), nobody would take.
constexpr uint64_t kMostPending = 6;
constexpr uint64_t kSecond = 1'000'000'000;

[[noreturn]] void give_up(const char* what) {
  std::fprintf(stderr, "stress: %s\n", what);
  std::_Exit(1);
}

std::pair<UniqueFd, UniqueFd> connected(int type) {
  int ends[2];
  if (::socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, ends) != 0) give_up("socketpair");
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

Geometry channel(int source, int chunk, uint32_t depth) {
  return Geometry{source, 1 - source, chunk, 0, kSlotBytes, depth};
}

std::unique_ptr<Transport> make(int rank) {
  dpp::Settings settings;
  settings.rank = rank;
  settings.timeout_ns = 20 * kSecond;
  settings.checksum = true;
  settings.max_pending = 8;
  return std::make_unique<Transport>(
      settings, std::vector<Geometry>{channel(1 - rank, 0, 1), channel(1 - rank, 1, 3)},
      std::vector<Geometry>{channel(rank, 0, 1), channel(rank, 1, 3)});
}

void join(Transport& a, Transport& b, bool tcp) {
  auto [control_a, control_b] = connected(tcp ? SOCK_STREAM : SOCK_SEQPACKET);
  a.add_peer(1, "rank 1", std::move(control_a), UniqueFd(), UniqueFd(::dup(b.bell_fd())));
  b.add_peer(0, "rank 0", std::move(control_b), UniqueFd(), UniqueFd(::dup(a.bell_fd())));
  if (!tcp) {
    b.use_shm_slots(0, {0, 1}, UniqueFd(::dup(a.make_shm_slots(1, {0, 1}))));
    a.use_shm_slots(1, {0, 1}, UniqueFd(::dup(b.make_shm_slots(0, {0, 1}))));
    return;
  }
  std::vector<UniqueFd> of_a, of_b;
  for (int i = 0; i < 2; ++i) {
    auto [one, other] = connected(SOCK_STREAM);
    of_a.push_back(std::move(one));
    of_b.push_back(std::move(other));
  }
  a.add_tcp_link(1, {0, 1}, {0, 1}, std::move(of_a));
  b.add_tcp_link(0, {0, 1}, {0, 1}, std::move(of_b));
}

// Sends and takes `count` messages on two channels each, in a random order.
class Rank {
 public:
  Rank(Transport& transport, unsigned seed, uint64_t count)
      : transport_(transport), random_(seed), count_(count) {}

  void run() {
    uint64_t arrived[2] = {0, 0};
    while (put_[0] + put_[1] + taken_[0] + taken_[1] != 4 * count_) {
      transport_.poll(arrived);
      const size_t index = random_() % 2;
      if (put_[index] < count_ && transport_.pending() < kMostPending && random_() % 2 == 0) {
        put(index);
      } else if (taken_[index] < arrived[index]) {
        take(index);
      } else if (put_[0] + put_[1] == 2 * count_ &&
                 arrived[0] + arrived[1] == taken_[0] + taken_[1]) {
        if (!transport_.wait(20 * kSecond)) give_up("nothing arrived");
      }
      drop_sent();
    }
    for (int i = 0; transport_.pending() != 0; ++i) {
      if (i == 20000) give_up("puts stay pending");
      ::usleep(1000);
    }
  }

 private:
  void put(size_t index) {
    kept_[index].emplace_back(random_() % kSlotBytes, static_cast<unsigned char>(put_[index]));
    const auto& payload = kept_[index].back();
    dpp::Parcel parcel;
    parcel.data = payload.data();
    parcel.header.bytes = payload.size();
    parcel.header.dtype = 4;  // uint8
    parcel.header.num_dims = 1;
    parcel.header.shape[0] = payload.size();
    parcel.header.num_parts = 1;
    parcel.header.microbatch = static_cast<int64_t>(put_[index]++);
    transport_.put(index, parcel);
  }

  void take(size_t index) {
    uint64_t when = 0;
    const dpp::Header& header = transport_.head(index, when);
    if (header.microbatch != static_cast<int64_t>(taken_[index])) give_up("out of order");
    std::vector<unsigned char> payload(header.bytes);
    transport_.take(index, payload.data(), payload.size(), 0);
    for (const unsigned char byte : payload) {
      if (byte != static_cast<unsigned char>(taken_[index])) give_up("torn message");
    }
    ++taken_[index];
  }

  void drop_sent() {
    for (size_t index = 0; index < 2; ++index) {
      for (; dropped_[index] < transport_.done(index); ++dropped_[index]) kept_[index].pop_front();
    }
  }

  Transport& transport_;
  std::minstd_rand random_;
  const uint64_t count_;
  uint64_t put_[2] = {0, 0};
  uint64_t taken_[2] = {0, 0};
  uint64_t dropped_[2] = {0, 0};
  std::deque<std::vector<unsigned char>> kept_[2];
};

}  // namespace

int main(int argc, char** argv) {
  const bool tcp = argc > 1 && std::string(argv[1]) == "tcp";
  const uint64_t count = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 200;
  auto a = make(0), b = make(1);
  join(*a, *b, tcp);
  a->start();
  b->start();
  std::thread other([&] { Rank(*b, 2, count).run(); });
  Rank(*a, 1, count).run();
  other.join();
  a->close();
  b->close();
  return 0;
}
