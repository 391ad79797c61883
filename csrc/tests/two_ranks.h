// Two transports of one process, joined over a kind; for the programs of this folder.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/rdma.h"
#include "transport/transport.h"

namespace dpp::tests {

constexpr uint64_t kPatience = 60'000'000'000;

[[noreturn]] inline void give_up(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::_Exit(1);
}

inline std::pair<UniqueFd, UniqueFd> connected(int type) {
  int ends[2];
  if (::socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, ends) != 0) give_up("socketpair");
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

struct Options {
  std::string kind = "shm";
  uint64_t count = 200;
  uint64_t slot_bytes = 1 << 16;
  bool checksum = true;
  uint64_t timeout_ns = kPatience;
  RdmaPlace places[2];
};

inline Options parse(int argc, char** argv) {
  Options options;
  if (argc > 1) options.kind = argv[1];
  if (argc > 2) options.count = std::strtoull(argv[2], nullptr, 10);
  if (argc > 3) options.slot_bytes = std::strtoull(argv[3], nullptr, 10);
  if (options.kind == "rdma" && argc != 7) give_up("rdma needs two devices and a GID index");
  for (int i = 0; argc == 7 && i < 2; ++i) {
    options.places[i].device = argv[4 + i];
    options.places[i].gid_index = static_cast<uint32_t>(std::atoi(argv[6]));
    options.places[i].piece_bytes = 1 << 20;
    options.places[i].adaptive_routing = i == 1;
  }
  return options;
}

inline std::unique_ptr<Transport> make(int rank, const Options& options) {
  const auto channel = [slot_bytes = options.slot_bytes](int source, int chunk, uint32_t depth) {
    return ChannelSpec{source, 1 - source, chunk, 0, slot_bytes, depth};
  };
  Settings settings;
  settings.rank = rank;
  settings.timeout_ns = options.timeout_ns;
  settings.checksum = options.checksum;
  settings.max_pending = 8;
  return std::make_unique<Transport>(
      settings, std::vector<ChannelSpec>{channel(1 - rank, 0, 1), channel(1 - rank, 1, 3)},
      std::vector<ChannelSpec>{channel(rank, 0, 1), channel(rank, 1, 3)});
}

inline std::shared_ptr<RdmaLink> add_rdma(Transport& transport, int peer, const RdmaPlace& place) {
  auto link = std::make_shared<RdmaLink>(
      transport.find_peer(peer), transport.bell(), transport.copier(), place,
      std::vector<ChannelSpec>{transport.incoming(0), transport.incoming(1)},
      std::vector<ChannelSpec>{transport.outgoing(0), transport.outgoing(1)});
  for (uint32_t i = 0; i < 2; ++i) {
    transport.set_receiver(i, peer, link->make_receiver(i));
    transport.set_sender(i, peer, link->make_sender(i));
  }
  transport.add_link(peer, link);
  return link;
}

// The tests of a new link, both ways.
inline void require_delivery(RdmaLink& a, RdmaLink& b) {
  for (const auto test : {RdmaLink::Test::kPath, RdmaLink::Test::kSlots}) {
    a.post_pattern(test, 1);
    b.post_pattern(test, 2);
    const uint64_t deadline = monotonic_ns() + kPatience;
    if (!a.await_pattern(deadline) || !b.await_pattern(deadline)) give_up("a write is lost");
    const std::string fault = a.pattern_fault(test, 2) + b.pattern_fault(test, 1);
    if (!fault.empty()) give_up(fault.c_str());
  }
}

inline void join(Transport& a, Transport& b, const Options& options) {
  const bool shm = options.kind == "shm";
  auto [control_a, control_b] = connected(shm ? SOCK_SEQPACKET : SOCK_STREAM);
  a.add_peer(1, "rank 1", std::move(control_a), UniqueFd(), UniqueFd(::dup(b.bell_fd())));
  b.add_peer(0, "rank 0", std::move(control_b), UniqueFd(), UniqueFd(::dup(a.bell_fd())));
  if (options.kind == "rdma") {
    const auto of_a = add_rdma(a, 1, options.places[0]), of_b = add_rdma(b, 0, options.places[1]);
    of_a->connect(of_b->offer());
    of_b->connect(of_a->offer());
    require_delivery(*of_a, *of_b);
    return;
  }
  if (shm) {
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

// Puts bytes, which stay valid until they are sent.
inline void put(Transport& transport, size_t index, const std::vector<unsigned char>& payload) {
  dpp::Parcel parcel;
  parcel.data = payload.data();
  parcel.header.bytes = parcel.header.shape[0] = payload.size();
  parcel.header.dtype = 4;  // uint8
  parcel.header.num_dims = 1;
  parcel.header.num_parts = 1;
  transport.put(index, parcel);
}

}  // namespace dpp::tests
