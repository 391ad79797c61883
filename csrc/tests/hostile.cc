// A transport whose authenticated peer sends it mutated frames and notes, gives credit that it does
// not have, or writes into the memory that they share. Meant to be built with a sanitizer, and to
// run where there is no PyTorch. Exits 0 if all ended in dpp::Error or in good order.
//
//   hostile tcp|notes|sender|shm|board [INPUTS] [SEED]
#include "hostile.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <deque>

#include "transport/tcp.h"

namespace {

using dpp::Header;
using dpp::TcpFrame;
using dpp::Transport;
using dpp::UniqueFd;
using namespace dpp::tests;

constexpr unsigned kMostSeconds = 60;  // of one transport
constexpr uint32_t kCounters = 3;
constexpr size_t kControlBytes = 5 * 64;  // of a channel, at the front of its block (shm.h)

struct Count {
  uint64_t inputs = 0;
  uint64_t refused = 0;
};

// ---- tcp: frames
// ------------------------------------------------------------------------------------------

TcpFrame good_frame(const dpp::ChannelSpec& spec, uint32_t channel, uint64_t sequence,
                    uint64_t bytes) {
  TcpFrame frame;
  frame.header.dtype = 4;  // uint8
  frame.header.num_dims = 1;
  frame.header.shape[0] = frame.header.bytes = bytes;
  frame.header.num_parts = 1;
  frame.channel = channel;
  frame.length = bytes;
  dpp::seal_header(frame.header, spec, sequence);
  return frame;
}

void change_header(Header& header, Random& random) {
  switch (random.below(9)) {
    case 0: header.magic = static_cast<uint32_t>(random.odd()); break;
    case 1: header.dtype = static_cast<uint8_t>(random.odd()); break;
    case 2: header.num_dims = static_cast<uint8_t>(random.odd()); break;
    case 3: header.chunk = static_cast<int32_t>(random.odd()); break;
    case 4: header.part = static_cast<uint32_t>(random.odd()); break;
    case 5: header.num_parts = static_cast<uint32_t>(random.odd()); break;
    case 6:
      header.sequence = random.one_in(2) ? header.sequence + random.below(5) : random.odd();
      break;
    case 7: header.bytes = random.odd(); break;
    default: header.shape[random.below(dpp::kMaxDims)] = random.odd(); break;
  }
  if (random.one_in(3)) {
    header.num_dims = static_cast<uint8_t>(random.below(9));
    for (uint64_t& size : header.shape) size = random.one_in(3) ? random.odd() : 1;
  }
  if (random.one_in(4)) header.has_payload_crc = 1;
  seal(header);
}

void change_place(TcpFrame& frame, Random& random) {
  switch (random.below(4)) {
    case 0: frame.channel = static_cast<uint32_t>(random.odd()); break;
    case 1: frame.offset = random.odd(); break;
    case 2: frame.length = random.odd(); break;
    default: frame.reserved = static_cast<uint32_t>(random.odd()); break;
  }
}

// One or two frames that follow `frame`, changed.
std::string mutated(TcpFrame frame, Random& random) {
  const TcpFrame before = frame;
  const uint64_t length = frame.length;
  switch (random.below(6)) {
    case 0: random.flip(&frame, sizeof(frame)); break;
    case 1: change_header(frame.header, random); break;
    case 2: change_place(frame, random); break;
    case 3: return random.bytes(1 + random.below(1000));
    case 4: return as_bytes(before).substr(0, random.below(sizeof(frame)));
    default: return as_bytes(before) + random.bytes(length) + as_bytes(before);
  }
  const uint64_t payload = std::min<uint64_t>(frame.length, length + 64);
  return as_bytes(frame) + random.bytes(random.one_in(3) ? random.below(payload + 1) : payload);
}

Count attack_tcp(Random& random) {
  const bool striped = random.one_in(1000);
  Victim victim(striped ? dpp::kStripeBytes : 4096, false);
  Transport& transport = *victim.transport;
  transport.start();
  uint64_t sequence[2] = {0, 0};
  Count count;
  for (bool failed = false; !failed && count.inputs < 8; ++count.inputs) {
    const auto channel = static_cast<uint32_t>(random.below(2));
    const uint64_t bytes = striped && random.one_in(2) ? dpp::kStripeBytes : random.below(4097);
    TcpFrame frame = good_frame(transport.incoming(channel), channel, sequence[channel] + 1, bytes);
    const bool whole = bytes < dpp::kStripeBytes;
    if (!whole) frame.length = dpp::kStripeBytes / 2;
    if (random.one_in(2)) {
      victim.say(victim.data[random.below(2)], mutated(frame, random));
    } else {
      ++sequence[channel];
      victim.say(victim.data[0], as_bytes(frame) + random.bytes(frame.length));
      frame.offset = frame.length;
      if (!whole) victim.say(victim.data[1], as_bytes(frame) + random.bytes(frame.length));
    }
    if (random.one_in(16)) ::shutdown(victim.data[random.below(2)].get(), SHUT_WR);
    victim.settle();
    failed = fails([&] { take_all(transport, random); });
    count.refused += failed;
  }
  transport.close();
  return count;
}

// ---- notes
// ------------------------------------------------------------------------------------------------

struct Credit {
  uint32_t channel, reserved;
  uint64_t released;
};

std::string any_note(Random& random, uint64_t most_released) {
  const auto number = [&] {
    return random.one_in(2) ? random.below(most_released + 2) : random.odd();
  };
  switch (random.below(8)) {
    case 0: return note(1, as_bytes(Credit{static_cast<uint32_t>(number()), 0, number()}));
    case 1: return note(2, as_bytes(number()));
    case 2: return note(3, static_cast<char>(random.below(9)) + random.bytes(random.below(1100)));
    case 3: return note(5, as_bytes(number()));
    case 4: {
      std::string body;
      for (uint32_t i = 0; i <= kCounters; ++i) body += as_bytes(number());
      return note(4, body);
    }
    case 5: return note(6, random.one_in(4) ? "x" : "");
    case 6: return note(static_cast<uint8_t>(random.below(9)), random.bytes(random.below(40)));
    default: return random.bytes(1 + random.below(64));
  }
}

Count attack_with_notes(Random& random) {
  Victim victim(4096, false);
  Transport& transport = *victim.transport;
  const uint64_t way = random.below(3);  // no board, one that leads rank 0's, or one that it leads
  if (way == 1) transport.make_board(kCounters, {}, {0}, -1);
  if (way == 2) transport.make_board(kCounters, {}, {}, 0);
  transport.start();
  std::vector<unsigned char> payload(4096);
  std::array<uint64_t, kCounters> counters = {};
  Count count;
  for (bool failed = false; !failed && count.inputs < 8; ++count.inputs) {
    failed = fails([&] {
      for (size_t index = 0; index < 2 && transport.pending() < 4; ++index) {
        put(transport, index, payload);
      }
      std::string said = any_note(random, 4);
      if (random.one_in(4)) said += any_note(random, 4);
      if (random.one_in(6)) random.flip(said.data(), said.size());
      victim.say(victim.control, said.substr(0, 1));
      victim.say(victim.control, said.substr(1));
      victim.settle();
      take_all(transport, random);
      static_cast<void>(transport.departed(0));
      if (way == 0) return;
      for (uint64_t& counter : counters) counter += random.below(3);
      transport.board_post(counters.data());
      transport.board().common(counters.data());
      uint64_t word = 0;
      if (way == 1) transport.board_append(random.below(100));
      for (int most = 100; way == 2 && most != 0 && transport.board_next(word); --most) {
      }
    });
    count.refused += failed;
  }
  transport.close();
  return count;
}

// ---- sender: credit that comes too early, shrinks, or is of another channel
// ------------------------------------------------------------------------------------------------

Count attack_sender(Random& random) {
  constexpr uint64_t kMostBytes = 64 << 10;
  Victim victim(kMostBytes, true);
  Transport& transport = *victim.transport;
  transport.start();
  std::deque<std::vector<unsigned char>> kept[2];
  uint64_t puts[2] = {0, 0}, dropped[2] = {0, 0};
  std::vector<char> drain(1 << 16);
  Count count;
  for (bool failed = false; !failed && count.inputs < 40; ++count.inputs) {
    failed = fails([&] {
      const size_t index = random.below(2);
      if (transport.pending() < 8) {
        kept[index].emplace_back(random.below(kMostBytes));
        ++puts[index];
        put(transport, index, kept[index].back());
      }
      if (random.one_in(3)) {
        const UniqueFd& from = victim.data[random.below(2)];
        static_cast<void>(
            !::recv(from.get(), drain.data(), random.below(drain.size()), MSG_DONTWAIT));
      }
      if (random.one_in(2)) {
        const size_t of = random.below(2);
        const uint64_t released = puts[of] - std::min(puts[of], random.below(3));
        const Credit credit = {static_cast<uint32_t>(of), 0, released};
        victim.say(victim.control, note(1, as_bytes(credit)));
      }
      if (random.one_in(4)) ::usleep(50);
      for (size_t of = 0; of < 2; ++of) {
        for (; dropped[of] < transport.done(of); ++dropped[of]) kept[of].pop_front();
      }
      transport.check();
    });
    count.refused += failed;
  }
  for (UniqueFd& end : victim.data) end.reset();  // what is pending goes nowhere
  transport.close();
  return count;
}

// ---- shared memory
// ----------------------------------------------------------------------------------------------------

// The peer's own view of memory that it shares with a transport.
class View {
 public:
  explicit View(int fd) {
    struct stat facts = {};
    if (::fstat(fd, &facts) != 0) give_up("fstat");
    bytes_ = static_cast<size_t>(facts.st_size);
    data_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (data_ == MAP_FAILED) give_up("mmap");
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  ~View() { ::munmap(data_, bytes_); }

  size_t size() const { return bytes_; }
  char* at(size_t offset) const { return static_cast<char*>(data_) + offset; }
  std::atomic<uint64_t>& word(size_t offset) const {
    return *reinterpret_cast<std::atomic<uint64_t>*>(at(offset / 8 * 8));
  }
  void poke(Random& random, size_t offset) const {
    const uint64_t near = word(offset).load() + random.below(5) - 2;
    word(offset).store(random.one_in(2) ? near : random.odd());
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

constexpr size_t kPage = 4096;
constexpr size_t kHeaders[2] = {kPage, 3 * kPage};  // of a block whose slots fit into one page

// Changes a counter of a channel, or the header in one of its slots.
void change_block(const View& block, Random& random) {
  if (random.one_in(2)) return block.poke(random, random.below(2 * kControlBytes));
  const size_t channel = random.below(2);
  const size_t slot = channel == 0 ? 0 : random.below(3);
  auto* header = reinterpret_cast<Header*>(block.at(kHeaders[channel]) + slot * sizeof(Header));
  if (random.one_in(2)) return change_header(*header, random);
  random.flip(header, sizeof(*header));
  if (random.one_in(2)) seal(*header);
}

// Two ranks over shm, one of which also writes into both blocks as it likes.
Count attack_shm(Random& random) {
  Options options;
  options.slot_bytes = 256;
  options.checksum = random.one_in(4);
  auto a = dpp::tests::make(0, options), b = dpp::tests::make(1, options);
  auto [control_a, control_b] = connected(SOCK_SEQPACKET);
  a->add_peer(1, "rank 1", std::move(control_a), UniqueFd(), UniqueFd(::dup(b->bell_fd())));
  b->add_peer(0, "rank 0", std::move(control_b), UniqueFd(), UniqueFd(::dup(a->bell_fd())));
  const int of_b = b->make_shm_slots(0, {0, 1}), of_a = a->make_shm_slots(1, {0, 1});
  const View to_b(of_b), to_a(of_a);
  a->use_shm_slots(1, {0, 1}, UniqueFd(::dup(of_b)));
  b->use_shm_slots(0, {0, 1}, UniqueFd(::dup(of_a)));
  a->start();
  b->start();
  std::vector<unsigned char> payload(256);
  Count count;
  for (bool failed = false; !failed && count.inputs < 8; ++count.inputs) {
    for (int i = 0; i < 3; ++i) {
      Transport& from = random.one_in(3) ? *b : *a;
      failed = failed || fails([&] {
                 if (from.pending() < 4) put(from, random.below(2), payload);
               });
    }
    change_block(random.one_in(3) ? to_a : to_b, random);
    failed = failed || fails([&] { take_all(*b, random); });
    failed = failed || fails([&] { take_all(*a, random); });
    failed = failed || fails([&] { static_cast<void>(b->departed(0)); });
    count.refused += failed;
  }
  a->abort("the end");  // what is pending goes nowhere
  b->abort("the end");
  a->close();
  b->close();
  return count;
}

// A leader and its follower, either of which writes into their board as it likes.
Count attack_board(Random& random) {
  Options options;
  options.slot_bytes = 64;
  options.timeout_ns = 2'000'000;
  auto a = dpp::tests::make(0, options), b = dpp::tests::make(1, options);
  dpp::tests::join(*a, *b, options);
  const int fd = a->make_board(kCounters, {1}, {}, -1);
  b->use_board(UniqueFd(::dup(fd)), 1, 2, kCounters, 0, false);
  const View board(fd);
  a->start();
  b->start();
  std::array<uint64_t, kCounters> counters = {};
  Count count;
  for (bool failed = false; !failed && count.inputs < 8; ++count.inputs) {
    failed = fails([&] {
      for (uint64_t most = random.below(20); most != 0; --most) a->board_append(random.below(100));
      const size_t front = 64 + 2 * 64 + 64;  // written, two lines, some words
      board.poke(random, random.one_in(8) ? random.below(board.size()) : random.below(front));
      a->board_append(random.below(100));
      for (uint64_t& counter : counters) counter += random.below(3);
      for (Transport* one : {a.get(), b.get()}) {
        one->board_post(counters.data());
        one->board().common(counters.data());
      }
      uint64_t word = 0;
      for (int most = 100; most != 0 && b->board_next(word); --most) {
      }
    });
    count.refused += failed;
  }
  a->close();
  b->close();
  return count;
}

Count attack(const std::string& mode, Random& random) {
  if (mode == "tcp") return attack_tcp(random);
  if (mode == "notes") return attack_with_notes(random);
  if (mode == "sender") return attack_sender(random);
  if (mode == "shm") return attack_shm(random);
  if (mode == "board") return attack_board(random);
  give_up("hostile tcp|notes|sender|shm|board [INPUTS] [SEED]");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  const uint64_t inputs = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1000;
  const uint64_t seed = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1;
  Count all;
  for (uint64_t transport = 0; all.inputs < inputs; ++transport) {
    ::alarm(kMostSeconds);  // a transport that hangs ends the program
    Random random(seed * 1'000'000'007 + transport);
    try {
      const Count count = attack(mode, random);
      all.inputs += count.inputs;
      all.refused += count.refused;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s, seed %llu, transport %llu: ", mode.c_str(),
                   static_cast<unsigned long long>(seed),
                   static_cast<unsigned long long>(transport));
      give_up(error.what());
    }
  }
  std::printf("%llu hostile inputs over %s: %llu transports refused one\n",
              static_cast<unsigned long long>(all.inputs), mode.c_str(),
              static_cast<unsigned long long>(all.refused));
  return 0;
}
