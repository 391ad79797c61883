// Parts that the kinds for GPUs share: marks on a stream, slots in device memory, and the common
// halves of senders and receivers. Order, headers, credit and waking are those of "shm": a
// block of host memory without payload.
//
// A stream that waits for another process can hold up every other stream that shares its hardware
// queue, all of them with CUDA_DEVICE_MAX_CONNECTIONS=1. So a stream waits only for what is queued
// already on the other GPU, behind work of which the same holds: such waits make no circle
// (docs/decisions/0013-launching-ahead.md).
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/cuda_driver.h"
#include "transport/kind.h"
#include "transport/shm.h"

namespace dpp {

// For each slot of a channel: whether a stream has passed the point where the slot's current
// message was marked. Set and asked by different threads, in turn; the hand-over between them
// orders the accesses.
class Marks {
 public:
  Marks(const cuda::DevicePtr& device, size_t depth);
  void set(uint64_t sequence, cuda::StreamHandle stream);
  bool passed(uint64_t sequence) const;  // throws when the work before it failed
  // Waits until the marks of the messages after `first` and up to `last` are passed, or the GPU has
  // failed. False at the deadline.
  bool all_passed(uint64_t first, uint64_t last, uint64_t deadline_ns) const noexcept;

 private:
  cuda::Event& slot(uint64_t sequence) const { return *events_[sequence % events_.size()]; }

  const cuda::DevicePtr device_;
  std::vector<std::unique_ptr<cuda::Event>> events_;
};

// Where the slots of the channels of one link lie in one piece of device memory.
struct SlotLayout {
  explicit SlotLayout(const std::vector<ChannelSpec>& channels);
  std::vector<size_t> offsets;
  size_t total_bytes = 0;
};

std::vector<ChannelSpec> without_payload(std::vector<ChannelSpec> channels);

// Slots of one channel, as addresses.
struct DeviceSlots {
  std::shared_ptr<cuda::Memory> memory;
  cuda::Address first = 0;
  size_t stride = 0;
  size_t depth = 0;

  DeviceSlots(std::shared_ptr<cuda::Memory> slots, size_t offset, const ChannelSpec& spec);
  cuda::Address of(uint64_t sequence) const { return first + (sequence - 1) % depth * stride; }
};

class DeviceSender : public Sender {
 public:
  // max_pending: puts that may wait at once; each needs an event of its own.
  DeviceSender(cuda::DevicePtr device, std::shared_ptr<cuda::Stream> stream,
               std::unique_ptr<ShmSender> ring, uint32_t max_pending);

  void prepare(Parcel& parcel) override;
  uint32_t checksum(const Parcel& parcel) override;
  bool has_credit() override { return ring_->has_credit(); }
  bool ask_for_credit() override { return ring_->ask_for_credit(); }
  // Queued copies read the caller's memory and fill buffers or slots that are given up.
  bool comes_to_rest(uint64_t deadline_ns) override { return stream_->drain(deadline_ns); }

 protected:
  // Lets our stream wait for what produces the payload; after it the parcel's event may serve
  // another one.
  void follow_producer(const Parcel& parcel);

  const cuda::DevicePtr device_;
  const std::shared_ptr<cuda::Stream> stream_;
  const std::unique_ptr<ShmSender> ring_;

 private:
  // Caller's thread only.
  std::vector<std::unique_ptr<cuda::Event>> events_;
  uint64_t prepared_ = 0;
  uint64_t first_ = 0;  // the prepared message that has events_[0]
  // Written by the owner with release once it has used an event; acquired before that event is
  // recorded again.
  std::atomic<uint64_t> followed_{0};
};

class DeviceReceiver : public Receiver {
 public:
  DeviceReceiver(cuda::DevicePtr device, DeviceSlots slots, std::unique_ptr<ShmReceiver> ring);

  uint64_t arrived() override { return ring_->arrived(); }
  Header header(uint64_t sequence) override { return ring_->header(sequence); }
  void copy_out(uint64_t sequence, void* to, uint64_t bytes, uintptr_t stream) override;
  void release(uint64_t sequence) override { wanted_.store(sequence, std::memory_order_release); }
  uint32_t checksum(const void* to, uint64_t bytes, uintptr_t stream) override;
  bool settles() const override { return true; }
  Step settle(bool& progressed) override;
  bool comes_to_rest(uint64_t deadline_ns) override;

 protected:
  const cuda::DevicePtr device_;
  const DeviceSlots slots_;
  const std::unique_ptr<ShmReceiver> ring_;

 private:
  Marks copied_;
  // Messages whose slot the caller has done with, up to the mark. Release: the mark is set before.
  std::atomic<uint64_t> wanted_{0};
  uint64_t freed_ = 0;  // progress thread only
};

}  // namespace dpp
