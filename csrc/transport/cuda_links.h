// Sets up the links of one rank that carry GPU tensors: makes and opens slots, and proves each link
// with a pattern. Needed until Transport::start(); senders and receivers keep what they use.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "transport/device.h"
#include "transport/transport.h"

namespace dpp {

class CudaLinks {
 public:
  CudaLinks(Transport& transport, int ordinal, uint32_t max_pending);  // throws kUnavailable

  const cuda::Device& device() const { return *device_; }

  // A receiver's message to one sender. Either handle or memory names the slots.
  // Descriptors stay ours.
  struct Offer {
    int control = -1;
    std::string handle;  // legacy IPC handle
    int memory = -1;     // exported allocation
  };

  // Receiver's side of "cuda_ipc". legacy: cuMemAlloc and an IPC handle, else cuMemCreate and a
  // descriptor. Calling it again replaces the slots.
  Offer make_ipc_slots(int peer, const std::vector<size_t>& channels, bool legacy);
  // Sender's side. Throws kSetup when the driver refuses the memory; may then be called with
  // another offer.
  void use_ipc_slots(int peer, const std::vector<size_t>& channels, UniqueFd control,
                     const std::string& handle, UniqueFd memory);
  // "staged": the descriptors of headers and of chunks, both ours. workload: elements per chunk.
  std::pair<int, int> make_staged_slots(int peer, const std::vector<size_t>& channels,
                                        uint64_t workload);
  void use_staged_slots(int peer, const std::vector<size_t>& channels, UniqueFd control,
                        UniqueFd chunks, uint64_t workload);
  // For "cuda_ipc". Sender's side: writes a pattern through the link; returns once it is there.
  void write_pattern(int peer, uint64_t seed);
  // Receiver's side: empty, or what differs.
  std::string pattern_fault(int peer, uint64_t seed);
  // For "cuda_ipc". Why messages of a peer cannot be taken before they have arrived, or ours by it;
  // else empty.
  std::string ahead_fault(int peer) const;

 private:
  struct Piece {
    cuda::Address address;
    size_t bytes;
  };
  // Memory of one link and direction, in which the pattern goes.
  struct Region {
    std::shared_ptr<cuda::Memory> memory;
    std::shared_ptr<cuda::Stream> stream;
    size_t bytes = 0;
    UniqueFd exported;
    std::string ahead_fault;
    std::vector<Piece> pieces() const;
  };

  std::vector<ChannelSpec> incoming_specs(const std::vector<size_t>& channels) const;
  std::vector<ChannelSpec> outgoing_specs(const std::vector<size_t>& channels) const;

  Transport& transport_;
  const cuda::DevicePtr device_;
  const uint32_t max_pending_;
  std::map<int, Region> incoming_;
  std::map<int, Region> outgoing_;
};

}  // namespace dpp
