#include "base/cuda_driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <thread>

#include "base/error.h"

namespace dpp::cuda {

namespace {

constexpr int kApiVersion = 11080;  // the ABI declared in the header; drivers from 520 on have it
constexpr unsigned kDisableTiming = 2;
constexpr unsigned kNonBlocking = 1;
constexpr unsigned kLazyPeerAccess = 1;
constexpr unsigned kPortableAndMapped = 1 | 2;
constexpr int kPinnedAllocation = 1;
constexpr int kDeviceLocation = 1;
constexpr int kReadWrite = 3;
constexpr int kPosixFd = 1;
constexpr int kDmabufFd = 1;
constexpr int kSynchronousCopies = 6;
constexpr uint64_t kDrainNs = 2'000'000'000;

using Find = Result (*)(const char*, void**, int, uint64_t);
using FindV2 = Result (*)(const char*, void**, int, uint64_t, int*);

void* look_up(void* library, const char* name) {
  void* function = nullptr;
  if (auto* find = reinterpret_cast<FindV2>(::dlsym(library, "cuGetProcAddress_v2"))) {
    int status = 0;
    if (find(name, &function, kApiVersion, 0, &status) != kSuccess) return nullptr;
  } else if (auto* older = reinterpret_cast<Find>(::dlsym(library, "cuGetProcAddress"))) {
    if (older(name, &function, kApiVersion, 0) != kSuccess) return nullptr;
  }
  return function;
}

std::string uuid_of(const Api& api, int device) {
  Uuid uuid = {};
  api.check(api.cuDeviceGetUuid(&uuid, device), "reading a GPU's UUID");
  std::string text;
  for (const unsigned char byte : uuid.bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    text.push_back(kDigits[byte >> 4]);
    text.push_back(kDigits[byte & 15]);
  }
  return text;
}

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

AllocationProperties properties(int ordinal) {
  AllocationProperties result = {};
  result.type = kPinnedAllocation;
  result.requested_handle_types = kPosixFd;
  result.location = {kDeviceLocation, ordinal};
  return result;
}

size_t granularity(const Device& device) {
  const AllocationProperties wanted = properties(device.ordinal());
  size_t unit = 0;
  device.api().check(device.api().cuMemGetAllocationGranularity(&unit, &wanted, 0),
                     "cuMemGetAllocationGranularity");
  return unit;
}

}  // namespace

std::shared_ptr<const Api> Api::load() {
  // NODELETE: the driver has threads of its own, and PyTorch uses it too.
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == nullptr)
    throw Error(Fault::kUnavailable, std::string("no CUDA driver: ") + ::dlerror());
  auto api = std::make_shared<Api>();
#define DPP_CUDA_LOAD(name, ...)                                                            \
  api->name = reinterpret_cast<decltype(api->name)>(look_up(library, #name));               \
  if (api->name == nullptr) {                                                               \
    throw Error(Fault::kUnavailable,                                                        \
                "the CUDA driver lacks " #name " (CUDA 11.8, driver 520 or later needed)"); \
  }
  DPP_CUDA_FUNCTIONS(DPP_CUDA_LOAD)
#undef DPP_CUDA_LOAD
  if (const Result result = api->cuInit(0)) {
    throw Error(Fault::kUnavailable, "cuInit: " + api->text(result));
  }
  return api;
}

std::string Api::text(Result result) const {
  const char* name = nullptr;
  const char* meaning = nullptr;
  if (cuGetErrorName(result, &name) != kSuccess || name == nullptr)
    return "CUDA error " + std::to_string(result);
  static_cast<void>(cuGetErrorString(result, &meaning));
  return std::string(name) + " (" + (meaning == nullptr ? "" : meaning) + ")";
}

void Api::check(Result result, const std::string& what) const {
  if (result != kSuccess) throw Error(Fault::kSetup, what + ": " + text(result));
}

DevicePtr Device::open(int ordinal) { return DevicePtr(new Device(Api::load(), ordinal)); }

Device::Device(std::shared_ptr<const Api> api, int ordinal)
    : api_(std::move(api)), ordinal_(ordinal), pid_(::getpid()) {
  int count = 0;
  int device = 0;
  api_->check(api_->cuDeviceGetCount(&count), "cuDeviceGetCount");
  if (ordinal < 0 || ordinal >= count) {
    throw Error(Fault::kUnavailable, "no GPU cuda:" + std::to_string(ordinal) +
                                         ": this process sees " + std::to_string(count) +
                                         " (CUDA_VISIBLE_DEVICES)");
  }
  api_->check(api_->cuDeviceGet(&device, ordinal), "cuDeviceGet");
  std::array<char, 128> name = {};
  std::array<char, 32> address = {};
  api_->check(api_->cuDeviceGetName(name.data(), name.size(), device), "cuDeviceGetName");
  api_->check(api_->cuDeviceGetPCIBusId(address.data(), address.size(), device),
              "cuDeviceGetPCIBusId");
  uuid_ = uuid_of(*api_, device);
  name_ =
      std::string(name.data()) + " (cuda:" + std::to_string(ordinal) + ", " + address.data() + ")";
  api_->check(api_->cuDevicePrimaryCtxRetain(&context_, device),
              "retaining the primary context of " + name_);
}

Device::~Device() {
  if (usable()) static_cast<void>(api_->cuDevicePrimaryCtxRelease(ordinal_));
}

bool Device::usable() const { return ::getpid() == pid_; }

Device::Access Device::access_to(const std::string& uuid) const {
  if (uuid == uuid_) return Access::kSame;
  int count = 0;
  api_->check(api_->cuDeviceGetCount(&count), "cuDeviceGetCount");
  for (int other = 0; other < count; ++other) {
    if (uuid_of(*api_, other) != uuid) continue;
    int possible = 0;
    api_->check(api_->cuDeviceCanAccessPeer(&possible, ordinal_, other), "cuDeviceCanAccessPeer");
    return possible != 0 ? Access::kYes : Access::kNo;
  }
  return Access::kHidden;
}

std::vector<std::string> Device::visible() const {
  int count = 0;
  api_->check(api_->cuDeviceGetCount(&count), "cuDeviceGetCount");
  std::vector<std::string> found;
  for (int device = 0; device < count; ++device) found.push_back(uuid_of(*api_, device));
  return found;
}

int Device::attribute(int which) const {
  int value = 0;
  return api_->cuDeviceGetAttribute(&value, which, ordinal_) == kSuccess ? value : 0;
}

void Device::write_value(StreamHandle stream, Address to, uint32_t value) const {
  api_->check(api_->cuStreamWriteValue32(stream, to, value, 0), "cuStreamWriteValue32 on " + name_);
}

void Device::wait_value(StreamHandle stream, Address from, uint32_t value) const {
  constexpr unsigned kAtLeast = 0;  // CU_STREAM_WAIT_VALUE_GEQ
  api_->check(api_->cuStreamWaitValue32(stream, from, value, kAtLeast),
              "cuStreamWaitValue32 on " + name_);
}

Current::Current(const Device& device) : device_(device) {
  ContextHandle now = nullptr;
  device.api().check(device.api().cuCtxGetCurrent(&now), "cuCtxGetCurrent");
  if (now == device.context()) return;
  device.api().check(device.api().cuCtxPushCurrent(device.context()), "cuCtxPushCurrent");
  pushed_ = true;
}

Current::~Current() {
  ContextHandle popped = nullptr;
  if (pushed_) static_cast<void>(device_.api().cuCtxPopCurrent(&popped));
}

Event::Event(DevicePtr device) : device_(std::move(device)) {
  const Current current(*device_);
  device_->api().check(device_->api().cuEventCreate(&handle_, kDisableTiming), "cuEventCreate");
}

Event::~Event() {
  if (device_->usable()) static_cast<void>(device_->api().cuEventDestroy(handle_));
}

void Event::record(StreamHandle stream) {
  device_->api().check(device_->api().cuEventRecord(handle_, stream),
                       "cuEventRecord on the current stream");
}

bool Event::done() const {
  const Result result = device_->api().cuEventQuery(handle_);
  if (result == kNotReady) return false;
  device_->api().check(result, "a copy on " + device_->name() + ", or a kernel queued before it");
  return true;
}

Stream::Stream(DevicePtr device) : device_(std::move(device)) {
  const Current current(*device_);
  device_->api().check(device_->api().cuStreamCreate(&handle_, kNonBlocking), "cuStreamCreate");
}

Stream::~Stream() {
  drain(monotonic_ns() + kDrainNs);
  if (device_->usable()) static_cast<void>(device_->api().cuStreamDestroy(handle_));
}

bool Stream::drain(uint64_t deadline_ns) {
  if (!device_->usable()) return true;
  while (device_->api().cuStreamQuery(handle_) == kNotReady) {
    if (monotonic_ns() >= deadline_ns) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

void Stream::wait_for(const Event& event) {
  device_->api().check(device_->api().cuStreamWaitEvent(handle_, event.get(), 0),
                       "cuStreamWaitEvent");
}

void Stream::synchronize() {
  device_->api().check(device_->api().cuStreamSynchronize(handle_), "cuStreamSynchronize");
}

Memory::Memory(Memory&& other) noexcept
    : device_(other.device_),
      origin_(std::exchange(other.origin_, Origin::kNone)),
      address_(other.address_),
      bytes_(other.bytes_),
      allocation_(other.allocation_) {}

Memory Memory::allocate(DevicePtr device, size_t bytes) {
  // Whole units, so that the driver does not put anything else into the block that the handle
  // opens.
  bytes = round_up(bytes, granularity(*device));
  const Current current(*device);
  Address address = 0;
  device->api().check(device->api().cuMemAlloc(&address, bytes),
                      std::to_string(bytes) + " bytes for slots on " + device->name() + " (lower " +
                          setting("slots") + ")");
  return {std::move(device), Origin::kAllocated, address, bytes};
}

Memory Memory::create(DevicePtr device, size_t bytes) {
  bytes = round_up(bytes, granularity(*device));
  const Current current(*device);
  const AllocationProperties wanted = properties(device->ordinal());
  unsigned long long allocation = 0;
  device->api().check(device->api().cuMemCreate(&allocation, bytes, &wanted, 0),
                      std::to_string(bytes) + " bytes for slots on " + device->name());
  return map(std::move(device), allocation, bytes);
}

Memory Memory::open(DevicePtr device, const std::string& handle) {
  IpcHandle raw = {};
  if (handle.size() != sizeof(raw))
    throw Error(Fault::kProtocol, "a CUDA IPC handle of a wrong size");
  std::memcpy(&raw, handle.data(), sizeof(raw));
  const Current current(*device);
  Address address = 0;
  device->api().check(device->api().cuIpcOpenMemHandle(&address, raw, kLazyPeerAccess),
                      "opening a peer's memory on " + device->name() + " (cuIpcOpenMemHandle)");
  return {std::move(device), Origin::kOpened, address, 0};
}

Memory Memory::import(DevicePtr device, const UniqueFd& fd, size_t bytes) {
  bytes = round_up(bytes, granularity(*device));
  const Current current(*device);
  unsigned long long allocation = 0;
  auto* os_handle = reinterpret_cast<void*>(static_cast<intptr_t>(fd.get()));
  device->api().check(
      device->api().cuMemImportFromShareableHandle(&allocation, os_handle, kPosixFd),
      "importing a peer's memory on " + device->name());
  return map(std::move(device), allocation, bytes);
}

Memory Memory::map(DevicePtr device, unsigned long long allocation, size_t bytes) {
  const Api& api = device->api();
  Address address = 0;
  Result result = api.cuMemAddressReserve(&address, bytes, 0, 0, 0);
  if (result == kSuccess) {
    result = api.cuMemMap(address, bytes, 0, allocation, 0);
    if (result != kSuccess) static_cast<void>(api.cuMemAddressFree(address, bytes));
  }
  if (result != kSuccess) static_cast<void>(api.cuMemRelease(allocation));
  api.check(result, "mapping " + std::to_string(bytes) + " bytes on " + device->name());
  Memory memory(std::move(device), Origin::kMapped, address, bytes);
  memory.allocation_ = allocation;
  const AccessDescription access = {{kDeviceLocation, memory.device_->ordinal()}, kReadWrite};
  api.check(api.cuMemSetAccess(address, bytes, &access, 1),
            "giving " + memory.device_->name() + " access to memory");
  return memory;
}

Memory::~Memory() {
  if (origin_ == Origin::kNone || !device_->usable()) return;
  const Api& api = device_->api();
  ContextHandle popped = nullptr;
  if (api.cuCtxPushCurrent(device_->context()) != kSuccess) return;  // the driver is shut down
  if (origin_ == Origin::kAllocated) static_cast<void>(api.cuMemFree(address_));
  if (origin_ == Origin::kOpened) static_cast<void>(api.cuIpcCloseMemHandle(address_));
  if (origin_ == Origin::kMapped) {
    static_cast<void>(api.cuMemUnmap(address_, bytes_));
    static_cast<void>(api.cuMemAddressFree(address_, bytes_));
    static_cast<void>(api.cuMemRelease(allocation_));
  }
  static_cast<void>(api.cuCtxPopCurrent(&popped));
}

std::string Memory::handle() const {
  IpcHandle raw = {};
  const Current current(*device_);
  device_->api().check(device_->api().cuIpcGetMemHandle(&raw, address_),
                       "sharing memory of " + device_->name() + " (cuIpcGetMemHandle)");
  return {raw.bytes, sizeof(raw.bytes)};
}

UniqueFd Memory::descriptor() const {
  int fd = -1;
  device_->api().check(device_->api().cuMemExportToShareableHandle(&fd, allocation_, kPosixFd, 0),
                       "exporting memory of " + device_->name() + " as a descriptor");
  return UniqueFd(fd);
}

UniqueFd Memory::dmabuf() const {
  const Current current(*device_);
  int fd = -1;
  const Result result =
      device_->api().cuMemGetHandleForAddressRange(&fd, address_, bytes_, kDmabufFd, 0);
  if (result != kSuccess) {
    throw Error(Fault::kUnavailable,
                "cuMemGetHandleForAddressRange: " + device_->api().text(result));
  }
  return UniqueFd(fd);
}

void Memory::synchronize_copies() const {
  const Current current(*device_);
  const unsigned yes = 1;
  device_->api().check(device_->api().cuPointerSetAttribute(&yes, kSynchronousCopies, address_),
                       "cuPointerSetAttribute on " + device_->name());
}

Pinned::Pinned(DevicePtr device, void* data, size_t bytes)
    : device_(std::move(device)), data_(data) {
  const Current current(*device_);
  device_->api().check(device_->api().cuMemHostRegister(data, bytes, kPortableAndMapped),
                       "pinning " + std::to_string(bytes) + " bytes of host memory");
}

Pinned::~Pinned() {
  if (!device_->usable()) return;
  ContextHandle popped = nullptr;
  if (device_->api().cuCtxPushCurrent(device_->context()) != kSuccess) return;
  static_cast<void>(device_->api().cuMemHostUnregister(data_));
  static_cast<void>(device_->api().cuCtxPopCurrent(&popped));
}

Address Pinned::address() const {
  const Current current(*device_);
  Address address = 0;
  device_->api().check(device_->api().cuMemHostGetDevicePointer(&address, data_, 0),
                       "cuMemHostGetDevicePointer");
  return address;
}

void read(const Device& device, void* to, Address from, size_t bytes, StreamHandle stream) {
  const Current current(device);
  if (bytes != 0)
    device.api().check(device.api().cuMemcpyDtoHAsync(to, from, bytes, stream),
                       "reading GPU memory");
  device.api().check(device.api().cuStreamSynchronize(stream), "reading GPU memory");
}

void write(const Device& device, Address to, const void* from, size_t bytes, StreamHandle stream) {
  const Current current(device);
  if (bytes != 0)
    device.api().check(device.api().cuMemcpyHtoDAsync(to, from, bytes, stream),
                       "writing GPU memory");
  device.api().check(device.api().cuStreamSynchronize(stream), "writing GPU memory");
}

}  // namespace dpp::cuda
