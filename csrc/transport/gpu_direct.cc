#include "transport/gpu_direct.h"

#include <cerrno>

#include "base/error.h"

namespace dpp {

namespace {

// Numbers of CUdevice_attribute, and the values that count.
constexpr int kDirectSupported = 116, kFlushOptions = 117, kWritesOrdering = 118,
              kDmabufSupported = 124;
constexpr int kFlushByCall = 1, kOrderedForOwner = 100;
// cuFlushGPUDirectRDMAWrites: of the current context, for its own GPU.
constexpr int kCurrentContext = 0, kToOwner = 100;

}  // namespace

GpuDirect::GpuDirect(cuda::DevicePtr device)
    : device_(std::move(device)),
      ordered_(device_->attribute(kWritesOrdering) >= kOrderedForOwner),
      stream_(device_) {
  if (ordered_ || (device_->attribute(kFlushOptions) & kFlushByCall) != 0) return;
  throw Error(Fault::kUnavailable, device_->name() +
                                       " neither orders an RDMA card's writes nor can wait for "
                                       "them");
}

PayloadMemory::Block GpuDirect::make(const verbs::Api& api, verbs::Domain* domain, uint64_t bytes,
                                     bool remote) {
  auto memory = std::make_shared<cuda::Memory>(cuda::Memory::allocate(device_, bytes));
  std::string refusal;
  registered_by_ = "dma-buf";
  auto region = by_dmabuf(api, domain, *memory, remote, refusal);
  if (!region) {
    registered_by_ = "nvidia-peermem";
    region = by_peer_memory(api, domain, *memory, remote, refusal);
  }
  if (!region) {
    throw Error(Fault::kUnavailable,
                "memory of " + device_->name() + " cannot be registered: " + refusal);
  }
  memory->synchronize_copies();
  const uint64_t address = memory->address();
  return {std::move(memory), address, std::move(region)};
}

verbs::Owner<verbs::MemoryRegion> GpuDirect::by_dmabuf(const verbs::Api& api, verbs::Domain* domain,
                                                       const cuda::Memory& memory, bool remote,
                                                       std::string& refusal) const {
  refusal = "dma-buf: ";
  if (device_->attribute(kDmabufSupported) == 0) {
    refusal += "the GPU's driver has none (open kernel modules and Linux 5.12 do)";
    return {};
  }
  if (api.reg_dmabuf_mr == nullptr) {
    refusal += "libibverbs is older than rdma-core 34";
    return {};
  }
  try {
    const UniqueFd fd = memory.dmabuf();  // the registration keeps the memory by itself
    auto region =
        verbs::register_gpu_memory(api, domain, memory.address(), memory.bytes(), fd.get(), remote);
    if (!region) refusal += with_errno("ibv_reg_dmabuf_mr");
    return region;
  } catch (const Error& error) {
    refusal += error.what();
    return {};
  }
}

verbs::Owner<verbs::MemoryRegion> GpuDirect::by_peer_memory(const verbs::Api& api,
                                                            verbs::Domain* domain,
                                                            const cuda::Memory& memory, bool remote,
                                                            std::string& refusal) const {
  refusal += "; nvidia-peermem: ";
  if (device_->attribute(kDirectSupported) == 0) {
    refusal += "the GPU does not support it";
    return {};
  }
  auto region =
      verbs::register_gpu_memory(api, domain, memory.address(), memory.bytes(), -1, remote);
  if (region) return region;
  const bool unknown = errno == EFAULT;  // what the kernel says of addresses that are none to it
  refusal += with_errno("ibv_reg_mr") + (unknown ? " (modprobe nvidia-peermem)" : "");
  return {};
}

void GpuDirect::fill(uint64_t to, const void* from, uint64_t bytes) {
  cuda::write(*device_, to, from, bytes, stream_.get());
}

void GpuDirect::fetch(void* to, uint64_t from, uint64_t bytes) {
  const cuda::Current current(*device_);
  flush();
  cuda::read(*device_, to, from, bytes, stream_.get());
}

void GpuDirect::flush() const {
  if (ordered_) return;
  device_->api().check(device_->api().cuFlushGPUDirectRDMAWrites(kCurrentContext, kToOwner),
                       "waiting for an RDMA card's writes to " + device_->name());
}

std::string GpuDirect::way() const {
  return registered_by_ + (ordered_ ? ", the GPU orders writes" : ", writes are waited for");
}

std::pair<bool, std::string> probe_gpu_direct(const std::string& rdma_device, int gpu) {
  try {
    GpuDirect direct(cuda::Device::open(gpu));
    const verbs::ApiPtr api = verbs::Api::load();
    const auto context = verbs::open_device(*api, rdma_device);
    const verbs::Owner<verbs::Domain> domain(api->alloc_pd(context.get()), api->dealloc_pd);
    if (!domain) throw Error(Fault::kSetup, with_errno("a protection domain on " + rdma_device));
    direct.make(*api, domain.get(), 1, true);
    return {true, direct.way()};
  } catch (const Error& error) {
    return {false, error.what()};
  }
}

}  // namespace dpp
