// The CUDA driver, found at run time: no toolkit, header or runtime library of CUDA is needed to
// build or to start.
//
// Load: dlopen("libcuda.so.1"), then every function through cuGetProcAddress with the version whose
// ABI is declared here. Owners are move-only; each remembers its Device, which holds the primary
// context that PyTorch uses too. Control-path calls throw dpp::Error; a destructor ignores what the
// driver says, which may be shut down by then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/os.h"

namespace dpp::cuda {

using Result = int;
using Address = unsigned long long;  // CUdeviceptr
using StreamHandle = void*;
using EventHandle = void*;
using ContextHandle = void*;

struct IpcHandle {
  char bytes[64];
};
struct Uuid {
  unsigned char bytes[16];
};
// CUmemAllocationProp and CUmemAccessDesc of CUDA 11.8.
struct Location {
  int type;
  int id;
};
struct AllocationProperties {
  int type;
  int requested_handle_types;
  Location location;
  void* win32_metadata;
  unsigned char compression;
  unsigned char gpu_direct_rdma_capable;
  unsigned short usage;
  unsigned char reserved[4];
};
static_assert(sizeof(AllocationProperties) == 32);
struct AccessDescription {
  Location location;
  int flags;
};

// name, arguments. The suffix _v2 is chosen by the version given to cuGetProcAddress.
#define DPP_CUDA_FUNCTIONS(X)                                                                  \
  X(cuInit, unsigned)                                                                          \
  X(cuGetErrorName, Result, const char**)                                                      \
  X(cuGetErrorString, Result, const char**)                                                    \
  X(cuDeviceGetCount, int*)                                                                    \
  X(cuDeviceGet, int*, int)                                                                    \
  X(cuDeviceGetName, char*, int, int)                                                          \
  X(cuDeviceGetUuid, Uuid*, int)                                                               \
  X(cuDeviceGetPCIBusId, char*, int, int)                                                      \
  X(cuDeviceCanAccessPeer, int*, int, int)                                                     \
  X(cuDeviceGetAttribute, int*, int, int)                                                      \
  X(cuDevicePrimaryCtxRetain, ContextHandle*, int)                                             \
  X(cuDevicePrimaryCtxRelease, int)                                                            \
  X(cuCtxGetCurrent, ContextHandle*)                                                           \
  X(cuCtxPushCurrent, ContextHandle)                                                           \
  X(cuCtxPopCurrent, ContextHandle*)                                                           \
  X(cuMemAlloc, Address*, size_t)                                                              \
  X(cuMemFree, Address)                                                                        \
  X(cuMemGetHandleForAddressRange, void*, Address, size_t, int, unsigned long long)            \
  X(cuPointerSetAttribute, const void*, int, Address)                                          \
  X(cuFlushGPUDirectRDMAWrites, int, int)                                                      \
  X(cuIpcGetMemHandle, IpcHandle*, Address)                                                    \
  X(cuIpcOpenMemHandle, Address*, IpcHandle, unsigned)                                         \
  X(cuIpcCloseMemHandle, Address)                                                              \
  X(cuMemGetAllocationGranularity, size_t*, const AllocationProperties*, int)                  \
  X(cuMemCreate, unsigned long long*, size_t, const AllocationProperties*, unsigned long long) \
  X(cuMemRelease, unsigned long long)                                                          \
  X(cuMemExportToShareableHandle, void*, unsigned long long, int, unsigned long long)          \
  X(cuMemImportFromShareableHandle, unsigned long long*, void*, int)                           \
  X(cuMemAddressReserve, Address*, size_t, size_t, Address, unsigned long long)                \
  X(cuMemAddressFree, Address, size_t)                                                         \
  X(cuMemMap, Address, size_t, size_t, unsigned long long, unsigned long long)                 \
  X(cuMemUnmap, Address, size_t)                                                               \
  X(cuMemSetAccess, Address, size_t, const AccessDescription*, size_t)                         \
  X(cuMemHostRegister, void*, size_t, unsigned)                                                \
  X(cuMemHostUnregister, void*)                                                                \
  X(cuMemHostGetDevicePointer, Address*, void*, unsigned)                                      \
  X(cuMemcpyDtoDAsync, Address, Address, size_t, StreamHandle)                                 \
  X(cuMemcpyDtoHAsync, void*, Address, size_t, StreamHandle)                                   \
  X(cuMemcpyHtoDAsync, Address, const void*, size_t, StreamHandle)                             \
  X(cuStreamCreate, StreamHandle*, unsigned)                                                   \
  X(cuStreamDestroy, StreamHandle)                                                             \
  X(cuStreamQuery, StreamHandle)                                                               \
  X(cuStreamSynchronize, StreamHandle)                                                         \
  X(cuStreamWaitEvent, StreamHandle, EventHandle, unsigned)                                    \
  X(cuStreamWaitValue32, StreamHandle, Address, uint32_t, unsigned)                            \
  X(cuStreamWriteValue32, StreamHandle, Address, uint32_t, unsigned)                           \
  X(cuEventCreate, EventHandle*, unsigned)                                                     \
  X(cuEventDestroy, EventHandle)                                                               \
  X(cuEventRecord, EventHandle, StreamHandle)                                                  \
  X(cuEventQuery, EventHandle)

struct Api {
#define DPP_CUDA_MEMBER(name, ...) Result (*name)(__VA_ARGS__) = nullptr;
  DPP_CUDA_FUNCTIONS(DPP_CUDA_MEMBER)
#undef DPP_CUDA_MEMBER

  static std::shared_ptr<const Api> load();  // throws kUnavailable
  // Throws kSetup, "cuMemAlloc of 4096 bytes: CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
  void check(Result result, const std::string& what) const;
  std::string text(Result result) const;
};

constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;

// One GPU as this process sees it, with its primary context retained.
class Device {
 public:
  static std::shared_ptr<const Device> open(int ordinal);  // throws kUnavailable
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device();

  const Api& api() const { return *api_; }
  int ordinal() const { return ordinal_; }
  ContextHandle context() const { return context_; }
  // False in a forked child, where the driver must not be called: destructors ask.
  bool usable() const;
  const std::string& uuid() const { return uuid_; }  // 32 hexadecimal digits
  const std::string& name() const { return name_; }  // "NVIDIA H200 (cuda:0, 0000:04:00.0)"

  enum class Access { kSame, kYes, kNo, kHidden };
  // Access of this GPU to the memory of another one. kHidden: this process does not see that one.
  Access access_to(const std::string& uuid) const;
  // UUIDs of all GPUs that this process sees.
  std::vector<std::string> visible() const;
  int attribute(int which) const;  // a number of CUdevice_attribute; 0 where the driver has it not

  // Stream memory operations: no kernel, so neither needs a multiprocessor; a capture keeps them.
  // Everything that the stream wrote before is visible, also to other GPUs, when the value is.
  void write_value(StreamHandle stream, Address to, uint32_t value) const;
  // Waits for this value or a larger one, as a difference: a number that is counted up may wrap.
  void wait_value(StreamHandle stream, Address from, uint32_t value) const;

 private:
  Device(std::shared_ptr<const Api> api, int ordinal);

  const std::shared_ptr<const Api> api_;
  const int ordinal_;
  const int pid_;
  ContextHandle context_ = nullptr;
  std::string uuid_;
  std::string name_;
};

using DevicePtr = std::shared_ptr<const Device>;

// In its scope the device's context is this thread's current one. Cheap where it is so already.
class Current {
 public:
  explicit Current(const Device& device);
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  ~Current();

 private:
  const Device& device_;
  bool pushed_ = false;
};

class Event {
 public:
  explicit Event(DevicePtr device);
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event();
  EventHandle get() const { return handle_; }
  void record(StreamHandle stream);
  bool done() const;  // throws when the work before it failed

 private:
  DevicePtr device_;
  EventHandle handle_ = nullptr;
};

// A stream that does not synchronise with the default stream.
class Stream {
 public:
  explicit Stream(DevicePtr device);
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream();  // drains, for two seconds at most
  StreamHandle get() const { return handle_; }
  // Waits for its work: memory that it uses is freed after it. False: it was not done in time.
  bool drain(uint64_t deadline_ns);
  void wait_for(const Event& event);
  void synchronize();

 private:
  DevicePtr device_;
  StreamHandle handle_ = nullptr;
};

// Device memory: this process's own, in a form that another one can open, or such memory of another
// process.
class Memory {
 public:
  static Memory allocate(DevicePtr device, size_t bytes);  // cuMemAlloc, shared by handle()
  static Memory create(DevicePtr device, size_t bytes);    // cuMemCreate, shared by descriptor()
  static Memory open(DevicePtr device, const std::string& handle);
  static Memory import(DevicePtr device, const UniqueFd& fd, size_t bytes);
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&&) = delete;
  ~Memory();

  Address address() const { return address_; }
  size_t bytes() const { return bytes_; }  // whole units of the driver; of allocate() and create()
  std::string handle() const;
  UniqueFd descriptor() const;
  UniqueFd dmabuf() const;  // for other devices of this host; throws kUnavailable
  // Lets synchronous copies of this memory end before they return, as devices that access it
  // expect.
  void synchronize_copies() const;

 private:
  enum class Origin { kNone, kAllocated, kOpened, kMapped };
  Memory(DevicePtr device, Origin origin, Address address, size_t bytes)
      : device_(std::move(device)), origin_(origin), address_(address), bytes_(bytes) {}
  static Memory map(DevicePtr device, unsigned long long allocation, size_t bytes);

  DevicePtr device_;
  Origin origin_;
  Address address_;
  size_t bytes_;
  unsigned long long allocation_ = 0;
};

// Host memory that the GPU may read and write in the time of its life.
class Pinned {
 public:
  Pinned(DevicePtr device, void* data, size_t bytes);
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  ~Pinned();
  Address address() const;  // as the GPU sees it

 private:
  DevicePtr device_;
  void* data_;
};

// Copies for set-up, tests and checksums: queued on `stream` behind what is there, and waited for.
void read(const Device& device, void* to, Address from, size_t bytes, StreamHandle stream);
void write(const Device& device, Address to, const void* from, size_t bytes, StreamHandle stream);

}  // namespace dpp::cuda
