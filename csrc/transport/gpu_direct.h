// GPUDirect: memory of a GPU that an RDMA card reads and writes itself.
//
// Registering it is tried, not guessed: as a dma-buf (the GPU's driver exports the memory, the
// card's driver imports it), else by its address, which the module nvidia-peermem gives a meaning.
//
// A completion in the host's memory does not say that the card's writes have arrived in the GPU's.
// On GPUs that order such writes themselves nothing has to be done, on others the driver's
// cuFlushGPUDirectRDMAWrites waits for them, and where there is neither GPUDirect is refused.
#pragma once

#include <memory>
#include <string>

#include "base/cuda_driver.h"
#include "transport/rdma.h"

namespace dpp {

class GpuDirect : public PayloadMemory {
 public:
  explicit GpuDirect(cuda::DevicePtr device);  // throws kUnavailable: what the GPU lacks

  // Throws kUnavailable with what each way said, kSetup when the GPU's memory is full.
  Block make(const verbs::Api& api, verbs::Domain* domain, uint64_t bytes, bool remote) override;
  void fill(uint64_t to, const void* from, uint64_t bytes) override;
  void fetch(void* to, uint64_t from, uint64_t bytes) override;  // flushes
  // Returns once what the card has announced is visible to work that the caller queues from now on.
  void flush() const;

  std::string way() const;  // "dma-buf, the GPU orders writes": after make()

 private:
  verbs::Owner<verbs::MemoryRegion> by_dmabuf(const verbs::Api& api, verbs::Domain* domain,
                                              const cuda::Memory& memory, bool remote,
                                              std::string& refusal) const;
  verbs::Owner<verbs::MemoryRegion> by_peer_memory(const verbs::Api& api, verbs::Domain* domain,
                                                   const cuda::Memory& memory, bool remote,
                                                   std::string& refusal) const;

  const cuda::DevicePtr device_;
  const bool ordered_;
  cuda::Stream stream_;
  std::string registered_by_;
};

// Registers memory of a GPU with an RDMA device: success, and the way or the error. For the doctor.
std::pair<bool, std::string> probe_gpu_direct(const std::string& rdma_device, int gpu);

}  // namespace dpp
