// Kind "cuda_ipc": slots in the receiver's GPU memory, opened by the sender, for GPUs of one host
// with peer access.
//
//   sender's thread   : record event on the current stream; our stream waits for it, copies into
//   the slot, writes the message's number into host memory, marks; header and "begun" into host
//   memory, bell
//   sender's progress : mark passed? sequence number into host memory, bell
//   receiver's thread : take queues slot -> tensor on its current stream, marks; for a message that
//   is begun and has not arrived the stream first waits for its number
//   receiver's progress: mark passed? the slot is the sender's again
//
// The copy engine writes over NVLink or PCIe; no multiprocessor takes part until take().
#pragma once

#include "transport/device.h"

namespace dpp {

// The host memory of one link in which the sender's GPU says what it has written, for both GPUs.
// Where this GPU cannot use it, messages may be taken once they have arrived, and not before.
class Written {
 public:
  // Tries it, on a stream that is idle.
  Written(cuda::DevicePtr device, std::shared_ptr<ShmBlock> block, cuda::Stream& stream);

  // Empty, or why this GPU cannot use it.
  const std::string& fault() const { return fault_; }
  // Queues on `stream`: say that message `sequence` is written.
  void say(size_t channel, uint64_t sequence, cuda::StreamHandle stream) const;
  // Queues on `stream`: wait until that was said.
  void await(size_t channel, uint64_t sequence, cuda::StreamHandle stream) const;

 private:
  cuda::Address of(size_t channel) const { return address_ + ShmBlock::written_offset(channel); }

  const cuda::DevicePtr device_;
  const std::shared_ptr<ShmBlock> block_;  // outlives the pinning
  std::unique_ptr<cuda::Pinned> pinned_;
  cuda::Address address_ = 0;
  std::string fault_;
};

class CudaIpcSender : public DeviceSender {
 public:
  CudaIpcSender(cuda::DevicePtr device, std::shared_ptr<cuda::Stream> stream, DeviceSlots slots,
                std::unique_ptr<ShmSender> ring, std::shared_ptr<const Written> written,
                size_t channel, uint32_t max_pending);
  bool has_credit() override { return has_mark() && DeviceSender::has_credit(); }
  bool ask_for_credit() override { return has_mark() && DeviceSender::ask_for_credit(); }
  void begin(Parcel& parcel) override;
  Step finished() override;

 private:
  // A slot may be free again, its message taken on its way, before its mark was looked at. The mark
  // is not set again before.
  bool has_mark() const { return claimed_ - announced_ < slots_.depth; }

  const DeviceSlots slots_;  // the receiver's
  const std::shared_ptr<const Written> written_;
  const size_t channel_;  // of the link
  Marks copied_;
  uint64_t claimed_ = 0;
  uint64_t announced_ = 0;
};

class CudaIpcReceiver : public DeviceReceiver {
 public:
  CudaIpcReceiver(cuda::DevicePtr device, DeviceSlots slots, std::unique_ptr<ShmReceiver> ring,
                  std::shared_ptr<const Written> written, size_t channel);
  uint64_t coming() override { return written_->fault().empty() ? ring_->begun() : arrived(); }
  void copy_out(uint64_t sequence, void* to, uint64_t bytes, uintptr_t stream) override;
  void let_go() override;

 private:
  const std::shared_ptr<const Written> written_;
  const size_t channel_;  // of the link
  // The last message that a stream was told to wait for. Written by the caller's thread, read by
  // whichever meets a failure: either sees the other's store (both are sequentially consistent).
  std::atomic<uint64_t> awaited_{0};
  std::atomic<bool> gone_{false};
};

}  // namespace dpp
