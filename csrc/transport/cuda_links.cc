#include "transport/cuda_links.h"

#include <algorithm>

#include "base/error.h"
#include "base/pattern.h"
#include "transport/cuda_ipc.h"
#include "transport/staged.h"

namespace dpp {

namespace {

constexpr size_t kHeadBytes = 1 << 20;
constexpr size_t kTailBytes = 64 << 10;

}  // namespace

CudaLinks::CudaLinks(Transport& transport, int ordinal, uint32_t max_pending)
    : transport_(transport), device_(cuda::Device::open(ordinal)), max_pending_(max_pending) {}

std::vector<ChannelSpec> CudaLinks::incoming_specs(const std::vector<size_t>& channels) const {
  std::vector<ChannelSpec> specs;
  for (const size_t index : channels) specs.push_back(transport_.incoming(index));
  return specs;
}

std::vector<ChannelSpec> CudaLinks::outgoing_specs(const std::vector<size_t>& channels) const {
  std::vector<ChannelSpec> specs;
  for (const size_t index : channels) specs.push_back(transport_.outgoing(index));
  return specs;
}

CudaLinks::Offer CudaLinks::make_ipc_slots(int peer, const std::vector<size_t>& channels,
                                           bool legacy) {
  const std::vector<ChannelSpec> specs = incoming_specs(channels);
  const SlotLayout layout(specs);
  const auto make = legacy ? &cuda::Memory::allocate : &cuda::Memory::create;
  auto memory =
      std::make_shared<cuda::Memory>(make(device_, std::max<size_t>(layout.total_bytes, 1)));
  const auto block = ShmBlock::create(without_payload(specs));
  const auto stream = std::make_shared<cuda::Stream>(device_);
  const auto written = std::make_shared<const Written>(device_, block, *stream);
  for (size_t i = 0; i < channels.size(); ++i) {
    auto ring = std::make_unique<ShmReceiver>(block, i, transport_.find_peer(peer));
    const DeviceSlots slots(memory, layout.offsets[i], specs[i]);
    transport_.set_receiver(
        channels[i], peer,
        std::make_unique<CudaIpcReceiver>(device_, slots, std::move(ring), written, i));
  }
  Region& region = incoming_[peer];
  region = {memory, stream, layout.total_bytes, UniqueFd(), written->fault()};
  if (legacy) return {block->fd(), memory->handle(), -1};
  region.exported = memory->descriptor();
  return {block->fd(), "", region.exported.get()};
}

void CudaLinks::use_ipc_slots(int peer, const std::vector<size_t>& channels, UniqueFd control,
                              const std::string& handle, UniqueFd fd) {
  const std::vector<ChannelSpec> specs = outgoing_specs(channels);
  const SlotLayout layout(specs);
  auto memory =
      std::make_shared<cuda::Memory>(fd ? cuda::Memory::import(device_, fd, layout.total_bytes)
                                        : cuda::Memory::open(device_, handle));
  const auto stream = std::make_shared<cuda::Stream>(device_);
  const auto block = ShmBlock::adopt(std::move(control), without_payload(specs));
  const auto written = std::make_shared<const Written>(device_, block, *stream);
  for (size_t i = 0; i < channels.size(); ++i) {
    auto ring = std::make_unique<ShmSender>(block, i, transport_.find_peer(peer));
    const DeviceSlots slots(memory, layout.offsets[i], specs[i]);
    transport_.set_sender(channels[i], peer,
                          std::make_unique<CudaIpcSender>(device_, stream, slots, std::move(ring),
                                                          written, i, max_pending_));
  }
  outgoing_[peer] = {memory, stream, layout.total_bytes, UniqueFd(), written->fault()};
}

std::string CudaLinks::ahead_fault(int peer) const {
  for (const auto* regions : {&incoming_, &outgoing_}) {
    const auto found = regions->find(peer);
    if (found != regions->end() && !found->second.ahead_fault.empty()) {
      return found->second.ahead_fault;
    }
  }
  return "";
}

std::pair<int, int> CudaLinks::make_staged_slots(int peer, const std::vector<size_t>& channels,
                                                 uint64_t workload) {
  const std::vector<ChannelSpec> specs = incoming_specs(channels);
  const SlotLayout layout(specs);
  auto memory = std::make_shared<cuda::Memory>(
      cuda::Memory::allocate(device_, std::max<size_t>(layout.total_bytes, 1)));
  const auto stream = std::make_shared<cuda::Stream>(device_);
  const auto block = ShmBlock::create(without_payload(specs));
  const auto chunks = StagedBlock::create(device_, specs, workload);
  for (size_t i = 0; i < channels.size(); ++i) {
    const auto other = transport_.find_peer(peer);
    const DeviceSlots slots(memory, layout.offsets[i], specs[i]);
    transport_.set_receiver(
        channels[i], peer,
        std::make_unique<StagedReceiver>(device_, stream, slots, chunks, i,
                                         std::make_unique<ShmReceiver>(block, i, other), other));
  }
  return {block->fd(), chunks->fd()};
}

void CudaLinks::use_staged_slots(int peer, const std::vector<size_t>& channels, UniqueFd control,
                                 UniqueFd fd, uint64_t workload) {
  const std::vector<ChannelSpec> specs = outgoing_specs(channels);
  const auto stream = std::make_shared<cuda::Stream>(device_);
  const auto block = ShmBlock::adopt(std::move(control), without_payload(specs));
  const auto chunks = StagedBlock::adopt(device_, std::move(fd), specs, workload);
  for (size_t i = 0; i < channels.size(); ++i) {
    const auto other = transport_.find_peer(peer);
    transport_.set_sender(channels[i], peer,
                          std::make_unique<StagedSender>(
                              device_, stream, chunks, i,
                              std::make_unique<ShmSender>(block, i, other), other, max_pending_));
  }
}

std::vector<CudaLinks::Piece> CudaLinks::Region::pieces() const {
  const size_t head = std::min(bytes, kHeadBytes);
  const size_t tail = std::min(bytes - head, kTailBytes);
  return {{memory->address(), head}, {memory->address() + bytes - tail, tail}};
}

void CudaLinks::write_pattern(int peer, uint64_t seed) {
  const Region& region = outgoing_.at(peer);
  // Through device memory, so that it takes the way that messages take.
  const cuda::Memory source = cuda::Memory::allocate(device_, kHeadBytes);
  for (const Piece& piece : region.pieces()) {
    if (piece.bytes == 0) continue;
    cuda::write(*device_, source.address(), pattern(seed + piece.bytes, piece.bytes).data(),
                piece.bytes, region.stream->get());
    const cuda::Current current(*device_);
    device_->api().check(device_->api().cuMemcpyDtoDAsync(piece.address, source.address(),
                                                          piece.bytes, region.stream->get()),
                         "the self-test of a link from " + device_->name());
    region.stream->synchronize();
  }
}

std::string CudaLinks::pattern_fault(int peer, uint64_t seed) {
  const Region& region = incoming_.at(peer);
  for (const Piece& piece : region.pieces()) {
    std::vector<uint64_t> found((piece.bytes + 7) / 8);
    cuda::read(*device_, found.data(), piece.address, piece.bytes, region.stream->get());
    const std::string fault = dpp::pattern_fault(found, seed + piece.bytes, piece.bytes);
    if (!fault.empty()) return fault + " on " + device_->name();
  }
  return "";
}

}  // namespace dpp
