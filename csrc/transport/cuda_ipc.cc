#include "transport/cuda_ipc.h"

namespace dpp {

CudaIpcSender::CudaIpcSender(cuda::DevicePtr device, std::shared_ptr<cuda::Stream> stream,
                             DeviceSlots slots, std::unique_ptr<ShmSender> ring,
                             uint32_t max_pending)
    : DeviceSender(std::move(device), std::move(stream), std::move(ring), max_pending),
      slots_(std::move(slots)),
      written_(device_, slots_.depth) {}

void CudaIpcSender::begin(Parcel& parcel) {
  const cuda::Current current(*device_);
  follow_producer(parcel);
  const uint64_t sequence = ring_->claim(parcel.header);
  if (parcel.header.bytes != 0) {
    const auto from = reinterpret_cast<cuda::Address>(parcel.data);
    device_->api().check(device_->api().cuMemcpyDtoDAsync(slots_.of(sequence), from,
                                                          parcel.header.bytes, stream_->get()),
                         "copying into a peer's slot from " + device_->name());
  }
  written_.set(sequence, stream_->get());
}

Step CudaIpcSender::finished() {
  if (!written_.passed(announced_ + 1)) return Step::kPoll;
  announced_ = ring_->announce();
  return Step::kDone;
}

}  // namespace dpp
