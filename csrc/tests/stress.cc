// Two transports of one process exchange random messages; meant to be built with a sanitizer, and
// to run where there is no PyTorch. Exits 0 when every byte arrived, in order.
//
//   stress shm|tcp|rdma [MESSAGES per channel] [SLOT_BYTES] [DEVICE DEVICE GID_INDEX]
#include <unistd.h>

#include <cstdio>
#include <deque>
#include <random>
#include <thread>
#include <vector>

#include "two_ranks.h"

namespace {

using dpp::Transport;
using dpp::tests::give_up;
using dpp::tests::kPatience;
using dpp::tests::Options;

// Below max_pending: with both ranks waiting inside put(), nobody would take.
constexpr uint64_t kMostPending = 6;

// Sends and takes `count` messages on two channels each, in a random order.
class Rank {
 public:
  Rank(Transport& transport, unsigned seed, const Options& options)
      : transport_(transport),
        random_(seed),
        count_(options.count),
        slot_bytes_(options.slot_bytes) {}

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
        if (!transport_.wait(kPatience)) give_up("nothing arrived");
      }
      drop_sent();
    }
    for (int i = 0; transport_.pending() != 0; ++i) {
      if (i == 60000) give_up("puts stay pending");
      ::usleep(1000);
    }
  }

 private:
  void put(size_t index) {
    kept_[index].emplace_back(random_() % slot_bytes_, static_cast<unsigned char>(put_[index]));
    const auto& payload = kept_[index].back();
    dpp::Parcel parcel;
    parcel.data = payload.data();
    parcel.header.bytes = payload.size();
    parcel.header.dtype = 4;  // uint8
    parcel.header.num_dims = 1;
    parcel.header.shape[0] = payload.size();
    parcel.header.num_parts = 1;
    parcel.header.microbatch = static_cast<int64_t>(put_[index]++);
    if (transport_.put(index, parcel) == dpp::Outgoing::Put::kFull) give_up("no room");
  }

  void take(size_t index) {
    uint64_t when = 0;
    const dpp::Header& header = transport_.head(index, when);
    if (header.microbatch != static_cast<int64_t>(taken_[index])) give_up("out of order");
    const uint64_t bytes = header.bytes;
    if (const dpp::Block memory = transport_.take_memory(index)) {
      check(reinterpret_cast<const unsigned char*>(memory.get()), bytes, index);
      if (random_() % 2 == 0) given_[index] = memory;  // it stays for a while
    } else {
      std::vector<unsigned char> payload(bytes);
      transport_.take(index, payload.data(), payload.size(), 0);
      check(payload.data(), bytes, index);
    }
    ++taken_[index];
  }

  void check(const unsigned char* payload, uint64_t bytes, size_t index) const {
    for (uint64_t i = 0; i < bytes; ++i) {
      if (payload[i] != static_cast<unsigned char>(taken_[index])) give_up("torn message");
    }
  }

  void drop_sent() {
    for (size_t index = 0; index < 2; ++index) {
      for (; dropped_[index] < transport_.done(index); ++dropped_[index]) kept_[index].pop_front();
    }
  }

  Transport& transport_;
  std::minstd_rand random_;
  const uint64_t count_, slot_bytes_;
  uint64_t put_[2] = {0, 0};
  uint64_t taken_[2] = {0, 0};
  uint64_t dropped_[2] = {0, 0};
  std::deque<std::vector<unsigned char>> kept_[2];
  dpp::Block given_[2];
};

void run(Transport& transport, unsigned seed, const Options& options) {
  try {
    Rank(transport, seed, options).run();
  } catch (const dpp::Error& error) {
    give_up(error.what());
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = dpp::tests::parse(argc, argv);
  auto a = dpp::tests::make(0, options), b = dpp::tests::make(1, options);
  try {
    dpp::tests::join(*a, *b, options);
    a->start();
    b->start();
    std::thread other([&] { run(*b, 2, options); });
    run(*a, 1, options);
    other.join();
  } catch (const dpp::Error& error) {
    give_up(error.what());
  }
  a->close();
  b->close();
  std::printf("%llu messages over %s: every byte arrived, in order\n",
              static_cast<unsigned long long>(4 * options.count), options.kind.c_str());
  return 0;
}
