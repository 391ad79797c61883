#include "transport/rdma_gpu.h"

#include <vector>

#include "base/error.h"

namespace dpp {

namespace {

cuda::StreamHandle as_stream(uintptr_t stream) {
  return reinterpret_cast<cuda::StreamHandle>(stream);
}
cuda::Address as_address(const void* data) { return reinterpret_cast<cuda::Address>(data); }

}  // namespace

RdmaGpu::RdmaGpu(const MakeLink& make_link, int ordinal, GpuDirectUse use)
    : device_(cuda::Device::open(ordinal)), stream_(std::make_shared<cuda::Stream>(device_)) {
  if (use == GpuDirectUse::kOff) {
    open_staged(make_link, setting("gpudirect", "off"));
    return;
  }
  try {
    open_direct(make_link);
  } catch (const Error& error) {
    if (use == GpuDirectUse::kOn) {
      throw Error(error.fault(), setting("gpudirect", "on") + ": " + error.what());
    }
    open_staged(make_link, error.what());
  }
}

void RdmaGpu::open_direct(const MakeLink& make_link) {
  auto direct = std::make_shared<GpuDirect>(device_);
  link_ = make_link(direct);
  direct_ = std::move(direct);
  way_ = "GPUDirect (" + direct_->way() + ")";
}

void RdmaGpu::open_staged(const MakeLink& make_link, const std::string& why) {
  link_ = make_link(nullptr);
  const auto pin = [this](const Mapping& memory) {
    return std::make_unique<cuda::Pinned>(device_, memory.data(), memory.size());
  };
  buffers_ = pin(link_->buffer_memory());
  slots_ = pin(link_->slot_memory());
  way_ = "staged in the host's memory, no GPUDirect: " + why;
}

std::unique_ptr<Sender> RdmaGpu::make_sender(uint32_t channel, uint32_t max_pending,
                                             std::shared_ptr<RdmaGpu> self) {
  return std::make_unique<RdmaGpuSender>(std::move(self), link_->outbox(channel), max_pending);
}

std::unique_ptr<Receiver> RdmaGpu::make_receiver(uint32_t channel, const ChannelSpec& spec,
                                                 std::shared_ptr<RdmaGpu> self) {
  auto receiver = std::make_unique<RdmaGpuReceiver>(std::move(self), channel, spec);
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
    const cuda::Api& api = device_->api();
    const auto stream = stream_->get();
    api.check(gpu_->direct() != nullptr
                  ? api.cuMemcpyDtoDAsync(as_address(to), as_address(from), bytes, stream)
                  : api.cuMemcpyDtoHAsync(to, as_address(from), bytes, stream),
              "copying a piece of a message from " + device_->name());
  }
  marks_.set(static_cast<uint64_t>(buffer), stream_->get());
}

RdmaGpuReceiver::RdmaGpuReceiver(std::shared_ptr<RdmaGpu> gpu, uint32_t channel,
                                 const ChannelSpec& spec)
    : RdmaReceiver(gpu->link(), channel, spec),
      gpu_(std::move(gpu)),
      copied_(gpu_->device(), spec.depth) {}

void RdmaGpuReceiver::copy_out(uint64_t sequence, void* to, uint64_t bytes, uintptr_t stream) {
  const cuda::Device& device = *gpu_->device();
  const cuda::Current current(device);
  const std::byte* from = payload(sequence);
  if (bytes != 0 && gpu_->direct() != nullptr) {
    gpu_->direct()->flush();
    device.api().check(
        device.api().cuMemcpyDtoDAsync(as_address(to), as_address(from), bytes, as_stream(stream)),
        "copying a message out of its slot on " + device.name());
  } else if (bytes != 0) {
    device.api().check(
        device.api().cuMemcpyHtoDAsync(as_address(to), from, bytes, as_stream(stream)),
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

bool RdmaGpuReceiver::comes_to_rest(uint64_t deadline_ns) {
  return copied_.all_passed(freed_, wanted_.load(std::memory_order_acquire), deadline_ns);
}

}  // namespace dpp
