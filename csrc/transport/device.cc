#include "transport/device.h"

#include <chrono>
#include <thread>

#include "base/copy.h"
#include "base/error.h"

namespace dpp {

namespace {

constexpr size_t kSlotAlignment = 256;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

cuda::StreamHandle as_stream(uintptr_t stream) {
  return reinterpret_cast<cuda::StreamHandle>(stream);
}
cuda::Address as_address(const void* data) { return reinterpret_cast<cuda::Address>(data); }

size_t stride_of(const ChannelSpec& channel) {
  return round_up(channel.slot_bytes, kSlotAlignment);
}

uint32_t device_checksum(const cuda::Device& device, const void* data, uint64_t bytes,
                         uintptr_t stream) {
  std::vector<char> copy(bytes);
  cuda::read(device, copy.data(), as_address(data), bytes, as_stream(stream));
  return crc32c(copy.data(), bytes);
}

}  // namespace

Marks::Marks(const cuda::DevicePtr& device, size_t depth) : device_(device) {
  for (size_t i = 0; i < depth; ++i) events_.push_back(std::make_unique<cuda::Event>(device));
}

void Marks::set(uint64_t sequence, cuda::StreamHandle stream) { slot(sequence).record(stream); }

bool Marks::passed(uint64_t sequence) const { return slot(sequence).done(); }

bool Marks::all_passed(uint64_t first, uint64_t last, uint64_t deadline_ns) const noexcept {
  if (!device_->usable()) return true;
  try {
    const cuda::Current current(*device_);
    while (first != last) {
      if (passed(first + 1)) {
        ++first;
      } else if (monotonic_ns() >= deadline_ns) {
        return false;
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    }
  } catch (const Error&) {
    // The GPU has failed; nothing runs on it any more.
  }
  return true;
}

SlotLayout::SlotLayout(const std::vector<ChannelSpec>& channels) {
  for (const ChannelSpec& channel : channels) {
    offsets.push_back(total_bytes);
    total_bytes += channel.depth * stride_of(channel);
  }
}

std::vector<ChannelSpec> without_payload(std::vector<ChannelSpec> channels) {
  for (ChannelSpec& channel : channels) channel.slot_bytes = 0;
  return channels;
}

DeviceSlots::DeviceSlots(std::shared_ptr<cuda::Memory> slots, size_t offset,
                         const ChannelSpec& spec)
    : memory(std::move(slots)),
      first(memory->address() + offset),
      stride(stride_of(spec)),
      depth(spec.depth) {}

DeviceSender::DeviceSender(cuda::DevicePtr device, std::shared_ptr<cuda::Stream> stream,
                           std::unique_ptr<ShmSender> ring, uint32_t max_pending)
    : device_(std::move(device)),
      stream_(std::move(stream)),
      ring_(std::move(ring)),
      events_(max_pending) {}

void DeviceSender::prepare(Parcel& parcel) {
  // With nothing outstanding every event is free: start over, so that few of them are ever made.
  if (followed_.load(std::memory_order_acquire) == prepared_) first_ = prepared_;
  std::unique_ptr<cuda::Event>& event = events_[(prepared_ - first_) % events_.size()];
  const cuda::Current current(*device_);
  if (!event) event = std::make_unique<cuda::Event>(device_);
  event->record(as_stream(parcel.stream));
  parcel.handle = reinterpret_cast<uintptr_t>(event.get());
  ++prepared_;
}

void DeviceSender::follow_producer(const Parcel& parcel) {
  stream_->wait_for(*reinterpret_cast<const cuda::Event*>(parcel.handle));
  followed_.fetch_add(1, std::memory_order_release);
}

uint32_t DeviceSender::checksum(const Parcel& parcel) {
  return device_checksum(*device_, parcel.data, parcel.header.bytes, parcel.stream);
}

DeviceReceiver::DeviceReceiver(cuda::DevicePtr device, DeviceSlots slots,
                               std::unique_ptr<ShmReceiver> ring)
    : device_(std::move(device)),
      slots_(std::move(slots)),
      ring_(std::move(ring)),
      copied_(device_, slots_.depth) {}

void DeviceReceiver::copy_out(uint64_t sequence, void* to, uint64_t bytes, uintptr_t stream) {
  const cuda::Current current(*device_);
  if (bytes != 0) {
    device_->api().check(device_->api().cuMemcpyDtoDAsync(as_address(to), slots_.of(sequence),
                                                          bytes, as_stream(stream)),
                         "copying a message out of its slot on " + device_->name());
  }
  copied_.set(sequence, as_stream(stream));
}

bool DeviceReceiver::comes_to_rest(uint64_t deadline_ns) {
  return copied_.all_passed(freed_, wanted_.load(std::memory_order_acquire), deadline_ns);
}

uint32_t DeviceReceiver::checksum(const void* to, uint64_t bytes, uintptr_t stream) {
  return device_checksum(*device_, to, bytes, stream);
}

Step DeviceReceiver::settle(bool&) {
  while (freed_ != wanted_.load(std::memory_order_acquire)) {
    if (!copied_.passed(freed_ + 1)) return Step::kPoll;
    ring_->release(++freed_);
  }
  return Step::kDone;
}

}  // namespace dpp
