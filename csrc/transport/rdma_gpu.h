// The ends of an RDMA channel whose tensors are on a GPU. With GPUDirect the link's buffers and
// slots lie in the GPU's memory, where its copy engines fill and empty them; else they lie in
// pinned memory of the host, and the copies cross the bus.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "transport/device.h"
#include "transport/gpu_direct.h"
#include "transport/rdma.h"

namespace dpp {

enum class GpuDirectUse { kOff, kAuto, kOn };

// A link and its memory as one GPU sees them.
class RdmaGpu {
 public:
  using MakeLink = std::function<std::shared_ptr<RdmaLink>(std::shared_ptr<PayloadMemory>)>;

  // kOn: what GPUDirect lacks is an error, kAuto: the link is staged then. Throws kUnavailable or
  // kSetup.
  RdmaGpu(const MakeLink& make_link, int ordinal, GpuDirectUse use);

  const std::shared_ptr<RdmaLink>& link() const { return link_; }
  const cuda::DevicePtr& device() const { return device_; }
  const std::shared_ptr<cuda::Stream>& stream() const { return stream_; }
  const GpuDirect* direct() const { return direct_.get(); }  // null: staged
  const std::string& way() const { return way_; }            // and why, for the user

  // max_pending: puts that may wait at once on a channel.
  std::unique_ptr<Sender> make_sender(uint32_t channel, uint32_t max_pending,
                                      std::shared_ptr<RdmaGpu> self);
  std::unique_ptr<Receiver> make_receiver(uint32_t channel, const ChannelSpec& spec,
                                          std::shared_ptr<RdmaGpu> self);

 private:
  void open_direct(const MakeLink& make_link);
  void open_staged(const MakeLink& make_link, const std::string& why);

  const cuda::DevicePtr device_;
  const std::shared_ptr<cuda::Stream> stream_;
  std::shared_ptr<GpuDirect> direct_;
  std::shared_ptr<RdmaLink> link_;
  std::unique_ptr<cuda::Pinned> buffers_, slots_;  // staged
  std::string way_;
};

class RdmaGpuSender : public DeviceSender, private PieceCopier {
 public:
  RdmaGpuSender(std::shared_ptr<RdmaGpu> gpu, RdmaOutbox* outbox, uint32_t max_pending);
  bool has_credit() override { return outbox_->has_credit(); }
  bool ask_for_credit() override { return outbox_->has_credit(); }
  void begin(Parcel& parcel) override { outbox_->begin(parcel); }
  Step finished() override;

 private:
  void start(const Parcel& parcel) override { follow_producer(parcel); }
  void copy(std::byte* to, const std::byte* from, uint64_t bytes, int buffer) override;
  bool copied(int buffer) override { return marks_.passed(static_cast<uint64_t>(buffer)); }

  const std::shared_ptr<RdmaGpu> gpu_;
  RdmaOutbox* const outbox_;
  Marks marks_;  // by buffer
};

class RdmaGpuReceiver : public RdmaReceiver {
 public:
  RdmaGpuReceiver(std::shared_ptr<RdmaGpu> gpu, uint32_t channel, const ChannelSpec& spec);
  void copy_out(uint64_t sequence, void* to, uint64_t bytes, uintptr_t stream) override;
  uint32_t checksum(const void* to, uint64_t bytes, uintptr_t stream) override;
  // The slot is free once the copy out of it has happened, which settle() finds.
  void release(uint64_t sequence) override { wanted_.store(sequence, std::memory_order_release); }
  bool settles() const override { return true; }
  Step settle(bool& progressed) override;
  bool comes_to_rest(uint64_t deadline_ns) override;

 private:
  const std::shared_ptr<RdmaGpu> gpu_;
  Marks copied_;
  std::atomic<uint64_t> wanted_{0};  // release: the mark is set before
  uint64_t freed_ = 0;               // progress thread only
};

}  // namespace dpp
