#include "transport/rdma_gpu.h"

#include <vector>

namespace dpp {

namespace {

cuda::StreamHandle as_stream(uintptr_t stream) {
  return reinterpret_cast<cuda::StreamHandle>(stream);
}
cuda::Address as_address(const void* data) { return reinterpret_cast<cuda::Address>(data); }

}  // namespace

RdmaGpu::RdmaGpu(std::shared_ptr<RdmaLink> link, int ordinal)
    : link_(std::move(link)),
      device_(cuda::Device::open(ordinal)),
      stream_(std::make_shared<cuda::Stream>(device_)),
      buffers_(device_, link_->buffer_memory().data(), link_->buffer_memory().size()),
      slots_(device_, link_->slot_memory().data(), link_->slot_memory().size()) {}

std::unique_ptr<Sender> RdmaGpu::make_sender(uint32_t channel, uint32_t max_pending,
                                             std::shared_ptr<RdmaGpu> self) {
  return std::make_unique<RdmaGpuSender>(std::move(self), link_->outbox(channel), max_pending);
}

std::unique_ptr<Receiver> RdmaGpu::make_receiver(uint32_t channel, const Geometry& geometry,
                                                 std::shared_ptr<RdmaGpu> self) {
  auto receiver = std::make_unique<RdmaGpuReceiver>(std::move(self), channel, geometry);
  link_->set_receiver(channel, receiver.get());
  return receiver;
}

RdmaGpuSender::RdmaGpuSender(std::shared_ptr<RdmaGpu> gpu, RdmaOutbox* outbox, uint32_t max_pending)
    : DeviceSender(gpu->device(), gpu->stream(), nullptr, max_pending),
      gpu_(std::move(gpu)),
      outbox_(outbox),
      marks_(device_, gpu_->link()->num_buffers()) {}

Step RdmaGpuSender::finished() {
  const cuda::Current current(*device_);
  return outbox_->finished(*this);
}

void RdmaGpuSender::copy(std::byte* to, const std::byte* from, uint64_t bytes, int buffer) {
  if (bytes != 0) {
    device_->api().check(
        device_->api().cuMemcpyDtoHAsync(to, as_address(from), bytes, stream_->get()),
        "copying a piece of a message from " + device_->name());
  }
  marks_.set(static_cast<uint64_t>(buffer), stream_->get());
}

RdmaGpuReceiver::RdmaGpuReceiver(std::shared_ptr<RdmaGpu> gpu, uint32_t channel,
                                 const Geometry& geometry)
    : RdmaReceiver(gpu->link(), channel, geometry),
      gpu_(std::move(gpu)),
      copied_(gpu_->device(), geometry.depth) {}

void RdmaGpuReceiver::copy_out(uint64_t sequence, void* to, uint64_t bytes, uintptr_t stream) {
  const cuda::Device& device = *gpu_->device();
  const cuda::Current current(device);
  if (bytes != 0) {
    device.api().check(
        device.api().cuMemcpyHtoDAsync(as_address(to), payload(sequence), bytes, as_stream(stream)),
        "copying a message out of its slot to " + device.name());
  }
  copied_.set(sequence, as_stream(stream));
}

uint32_t RdmaGpuReceiver::checksum(const void* to, uint64_t bytes, uintptr_t stream) {
  std::vector<char> copy(bytes);
  cuda::read(*gpu_->device(), copy.data(), as_address(to), bytes, as_stream(stream));
  return crc32c(copy.data(), bytes);
}

Step RdmaGpuReceiver::settle(bool&) {
  while (freed_ != wanted_.load(std::memory_order_acquire)) {
    const cuda::Current current(*gpu_->device());
    if (!copied_.passed(freed_ + 1)) return Step::kPoll;
    RdmaReceiver::release(++freed_);
  }
  return Step::kDone;
}

}  // namespace dpp
