// How fast messages of one size go from one transport to another of the same process, put and
// taken; prints MB/s of payload. Arguments as stress.cc's; SLOT_BYTES is the size.
#include <cstdio>
#include <thread>
#include <vector>

#include "two_ranks.h"

namespace {

using dpp::Transport;
using dpp::tests::kPatience;
using dpp::tests::Options;

void send(Transport& transport, const std::vector<unsigned char>& payload, uint64_t count) {
  uint64_t arrived[2];
  for (uint64_t i = 0; i < count; ++i) {
    while (transport.pending() > 2) {
      transport.poll(arrived);
      if (transport.pending() > 2) transport.wait(kPatience);
    }
    dpp::tests::put(transport, 1, payload);
  }
}

// Seconds from the first message's arrival to the last's being taken.
double take(Transport& transport, std::vector<unsigned char>& to, uint64_t count) {
  uint64_t arrived[2] = {0, 0}, start = 0, when = 0;
  for (uint64_t i = 0; i < count; ++i) {
    while (arrived[1] <= i) {
      transport.poll(arrived);
      if (arrived[1] <= i && !transport.wait(kPatience)) dpp::tests::give_up("nothing arrived");
    }
    transport.head(1, when);
    transport.take(1, to.data(), to.size(), 0);
    if (i == 0) start = dpp::monotonic_ns();
  }
  return static_cast<double>(dpp::monotonic_ns() - start) * 1e-9;
}

}  // namespace

int main(int argc, char** argv) {
  Options options = dpp::tests::parse(argc, argv);
  options.checksum = false;
  auto a = dpp::tests::make(0, options), b = dpp::tests::make(1, options);
  std::vector<unsigned char> payload(options.slot_bytes, 1), to(options.slot_bytes, 0);
  try {
    dpp::tests::join(*a, *b, options);
    a->start();
    b->start();
    double seconds = 0;
    std::thread receiver([&] { seconds = take(*b, to, options.count); });
    send(*a, payload, options.count);
    receiver.join();
    const double moved = static_cast<double>((options.count - 1) * options.slot_bytes);
    std::printf("%.1f\n", moved / seconds * 1e-6);
  } catch (const dpp::Error& error) {
    dpp::tests::give_up(error.what());
  }
  a->close();
  b->close();
  return 0;
}
