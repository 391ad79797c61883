#include "transport/cuda_ipc.h"

#include "base/error.h"

namespace dpp {

Written::Written(cuda::DevicePtr device, std::shared_ptr<ShmBlock> block, cuda::Stream& stream)
    : device_(std::move(device)), block_(std::move(block)) {
  try {
    const auto [data, bytes] = block_->controls();
    pinned_ = std::make_unique<cuda::Pinned>(device_, data, bytes);
    address_ = pinned_->address();
    const cuda::Current current(*device_);
    say(0, 0, stream.get());
    await(0, 0, stream.get());
    stream.synchronize();
  } catch (const Error& error) {
    fault_ = error.what();
  }
}

void Written::say(size_t channel, uint64_t sequence, cuda::StreamHandle stream) const {
  device_->write_value(stream, of(channel), static_cast<uint32_t>(sequence));
}

void Written::await(size_t channel, uint64_t sequence, cuda::StreamHandle stream) const {
  device_->wait_value(stream, of(channel), static_cast<uint32_t>(sequence));
}

CudaIpcSender::CudaIpcSender(cuda::DevicePtr device, std::shared_ptr<cuda::Stream> stream,
                             DeviceSlots slots, std::unique_ptr<ShmSender> ring,
                             std::shared_ptr<const Written> written, size_t channel,
                             uint32_t max_pending)
    : DeviceSender(std::move(device), std::move(stream), std::move(ring), max_pending),
      slots_(std::move(slots)),
      written_(std::move(written)),
      channel_(channel),
      copied_(device_, slots_.depth) {}

void CudaIpcSender::begin(Parcel& parcel) {
  const cuda::Current current(*device_);
  follow_producer(parcel);
  const uint64_t sequence = claimed_ = ring_->claim(parcel.header);
  if (parcel.header.bytes != 0) {
    const auto from = reinterpret_cast<cuda::Address>(parcel.data);
    device_->api().check(device_->api().cuMemcpyDtoDAsync(slots_.of(sequence), from,
                                                          parcel.header.bytes, stream_->get()),
                         "copying into a peer's slot from " + device_->name());
  }
  if (written_->fault().empty()) written_->say(channel_, sequence, stream_->get());
  copied_.set(sequence, stream_->get());
  // Only now: whoever waits for it waits for work that is queued.
  if (written_->fault().empty()) ring_->show_begun();
}

Step CudaIpcSender::finished() {
  if (!copied_.passed(announced_ + 1)) return Step::kPoll;
  announced_ = ring_->announce();
  return Step::kDone;
}

CudaIpcReceiver::CudaIpcReceiver(cuda::DevicePtr device, DeviceSlots slots,
                                 std::unique_ptr<ShmReceiver> ring,
                                 std::shared_ptr<const Written> written, size_t channel)
    : DeviceReceiver(std::move(device), std::move(slots), std::move(ring)),
      written_(std::move(written)),
      channel_(channel) {}

void CudaIpcReceiver::copy_out(uint64_t sequence, void* to, uint64_t bytes, uintptr_t stream) {
  if (ring_->arrived() < sequence) {
    awaited_.store(sequence);
    const cuda::Current current(*device_);
    written_->await(channel_, sequence, reinterpret_cast<cuda::StreamHandle>(stream));
    if (gone_.load()) let_go();
  }
  DeviceReceiver::copy_out(sequence, to, bytes, stream);
}

void CudaIpcReceiver::let_go() {
  gone_.store(true);
  // What the sender may still write itself ends the wait as well.
  if (const uint64_t sequence = awaited_.load()) ring_->pretend_written(sequence);
}

}  // namespace dpp
