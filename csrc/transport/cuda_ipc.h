// Kind "cuda_ipc": slots in the receiver's GPU memory, opened by the sender, for GPUs of one host
// with peer access.
//
//   sender's thread   : record event on the current stream; our stream waits for it, copies into
//   the slot, marks sender's progress : mark passed? header and sequence number into host memory,
//   bell receiver's thread : take queues slot -> tensor on its current stream, marks receiver's
//   progress: mark passed? the slot is the sender's again
//
// The copy engine writes over NVLink or PCIe; no multiprocessor takes part until take().
#pragma once

#include "transport/device.h"

namespace dpp {

class CudaIpcSender : public DeviceSender {
 public:
  CudaIpcSender(cuda::DevicePtr device, std::shared_ptr<cuda::Stream> stream, DeviceSlots slots,
                std::unique_ptr<ShmSender> ring, uint32_t max_pending);
  void begin(Parcel& parcel) override;
  Step finished() override;

 private:
  const DeviceSlots slots_;  // the receiver's
  Marks written_;
  uint64_t announced_ = 0;
};

}  // namespace dpp
