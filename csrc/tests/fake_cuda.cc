// A libcuda.so.1 without a GPU, for tests of what surrounds the driver: device memory is shared
// host memory, copies happen at once, and an event says "not ready" for a few queries after it was
// recorded. One device, one context.
//
//   g++ -std=c++17 -shared -fPIC csrc/tests/fake_cuda.cc -o libcuda.so.1
//
// FAKE_CUDA_REFUSE_IPC=1 refuses IPC handles, FAKE_CUDA_CORRUPT=1 loses what is written between
// processes, FAKE_CUDA_SLOW=N keeps events back for N queries, FAKE_CUDA_SLOW_COPIES=N those of
// streams that were made here, FAKE_CUDA_SILENT=1 never writes a value from a stream,
// FAKE_CUDA_NO_VALUES=1 refuses to. A stream that waits for a value waits in the call, for five
// seconds at most. FAKE_CUDA_DIRECT lists what the GPU has for GPUDirect: dmabuf, peermem, ordered,
// flush. FAKE_CUDA_BUSY=N: after a copy a stream that was made here is busy for N queries.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace {

using Address = unsigned long long;

constexpr int kInvalid = 1, kOutOfMemory = 2, kNotSupported = 801, kNotReady = 600;
constexpr int kPatience = 3;
constexpr size_t kGranularity = 2 << 20;

struct Block {
  int fd;
  size_t bytes;
};
thread_local long contexts_pushed = 0;
std::atomic<long> strays{0};
std::atomic<long> stream_waits{0};
std::atomic<long> busy{0};      // queries of our stream that will say so
std::atomic<long> unseen{0};    // events recorded again before anybody saw that they had happened
std::atomic<long> pageable{0};  // copies from and to memory of the host that is not pinned
std::atomic<long> early{0};     // pieces of memory that were given up while it was
struct FakeEvent {
  std::atomic<int> patience{0};
  std::atomic<bool> ours{false}, seen{false};  // recorded on a stream made here; said "ready"
};

std::mutex mutex;
std::map<Address, Block> blocks;   // ours
std::map<Address, size_t> opened;  // other processes'
std::map<Address, size_t> mapped;  // allocations, at addresses that were reserved
std::map<Address, size_t> pinned;  // memory of the host

bool flag(const char* name) { return std::getenv(name) != nullptr; }

bool has(const char* ability) {
  const char* all = std::getenv("FAKE_CUDA_DIRECT");
  return all != nullptr && std::strstr(all, ability) != nullptr;
}

int make(size_t bytes) {
  const int fd = memfd_create("fake-gpu", MFD_CLOEXEC);
  return ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? fd : -1;
}

Address map(int fd, size_t bytes, Address where = 0) {
  void* hint = reinterpret_cast<void*>(where);
  void* data =
      mmap(hint, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | (where ? MAP_FIXED : 0), fd, 0);
  return data == MAP_FAILED ? 0 : reinterpret_cast<Address>(data);
}

void* const kOurStream = reinterpret_cast<void*>(2);

void give_up_memory() { early += busy > 0; }

bool within(const std::map<Address, size_t>& pieces, Address address) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto next = pieces.upper_bound(address);
  if (next == pieces.begin()) return false;
  const auto& [start, bytes] = *std::prev(next);
  return address < start + bytes;
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return 0; }
int cuGetErrorName(int, const char** text) { return *text = "FAKE_ERROR", 0; }
int cuGetErrorString(int, const char** text) { return *text = "refused by the fake driver", 0; }
int cuDeviceGetCount(int* count) { return *count = 1, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetName(char* name, int size, int) { return std::snprintf(name, size, "Fake GPU"), 0; }
int cuDeviceGetUuid(void* uuid, int) { return std::memset(uuid, 0x5a, 16), 0; }
int cuDeviceGetPCIBusId(char* id, int size, int) {
  return std::snprintf(id, size, "0000:00:00.0"), 0;
}
int cuDeviceGetAttribute(int* value, int which, int) {
  switch (which) {
    case 116: return *value = has("peermem"), 0;
    case 117: return *value = has("flush"), 0;
    case 118: return *value = has("ordered") ? 100 : 0, 0;
    case 124: return *value = has("dmabuf"), 0;
    default: return kInvalid;
  }
}
int cuDeviceCanAccessPeer(int* can, int, int) { return *can = 1, 0; }
int cuDevicePrimaryCtxRetain(void** context, int) {
  return *context = reinterpret_cast<void*>(1), 0;
}
int cuDevicePrimaryCtxRelease(int) { return 0; }
int cuCtxGetCurrent(void** context) {
  return *context = contexts_pushed != 0 ? reinterpret_cast<void*>(1) : nullptr, 0;
}
int cuCtxPushCurrent(void*) { return ++contexts_pushed, 0; }
int cuCtxPopCurrent(void** context) {
  return --contexts_pushed, *context = reinterpret_cast<void*>(1), 0;
}
// Contexts that this thread has pushed and not popped.
long fake_cuda_contexts() { return contexts_pushed; }
// Calls that gave back what is not there, or is of another kind, and pieces that are there.
long fake_cuda_strays() { return strays; }
long fake_cuda_pieces() {
  const std::lock_guard<std::mutex> lock(mutex);
  return static_cast<long>(blocks.size() + opened.size() + mapped.size() + pinned.size());
}

int cuMemAlloc(Address* address, size_t bytes) {
  const int fd = make(bytes);
  if (fd < 0 || (*address = map(fd, bytes)) == 0) return kOutOfMemory;
  const std::lock_guard<std::mutex> lock(mutex);
  blocks[*address] = {fd, bytes};
  return 0;
}

int cuMemFree(Address address) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = blocks.find(address);
  if (found == blocks.end()) return ++strays, kInvalid;
  give_up_memory();
  munmap(reinterpret_cast<void*>(address), found->second.bytes);
  close(found->second.fd);
  blocks.erase(found);
  return 0;
}

int cuMemGetHandleForAddressRange(void* fd, Address address, size_t bytes, int, Address) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = blocks.find(address);
  if (!has("dmabuf") || found == blocks.end() || found->second.bytes != bytes) return kNotSupported;
  return *static_cast<int*>(fd) = fcntl(found->second.fd, F_DUPFD_CLOEXEC, 0), 0;
}
int cuPointerSetAttribute(const void*, int, Address) { return 0; }
// What the card of fake_verbs.cc has written may only be seen after this.
int cuFlushGPUDirectRDMAWrites(int, int) {
  if (!has("flush")) return kNotSupported;
  void* card = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (card == nullptr) return kInvalid;
  reinterpret_cast<void (*)()>(dlsym(card, "fake_verbs_flush"))();
  return dlclose(card), 0;
}

struct Handle {
  char bytes[64];
};

int cuIpcGetMemHandle(Handle* handle, Address address) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = blocks.find(address);
  if (found == blocks.end()) return kInvalid;
  std::snprintf(handle->bytes, sizeof(handle->bytes), "/proc/%d/fd/%d", getpid(), found->second.fd);
  return 0;
}

int cuIpcOpenMemHandle(Address* address, Handle handle, unsigned) {
  if (flag("FAKE_CUDA_REFUSE_IPC")) return kNotSupported;
  const int fd = open(handle.bytes, O_RDWR | O_CLOEXEC);
  struct stat facts = {};
  if (fd < 0 || fstat(fd, &facts) != 0) return kInvalid;
  *address = map(fd, static_cast<size_t>(facts.st_size));
  close(fd);
  const std::lock_guard<std::mutex> lock(mutex);
  opened[*address] = static_cast<size_t>(facts.st_size);
  return *address == 0 ? kOutOfMemory : 0;
}

int cuIpcCloseMemHandle(Address address) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = opened.find(address);
  if (found == opened.end()) return ++strays, kInvalid;
  give_up_memory();
  munmap(reinterpret_cast<void*>(address), found->second);
  opened.erase(found);
  return 0;
}

int cuMemGetAllocationGranularity(size_t* bytes, const void*, int) {
  return *bytes = kGranularity, 0;
}
int cuMemCreate(Address* allocation, size_t bytes, const void*, Address) {
  const int fd = make(bytes);
  return *allocation = static_cast<Address>(fd), fd < 0 ? kOutOfMemory : 0;
}
int cuMemRelease(Address allocation) { return close(static_cast<int>(allocation)); }
int cuMemExportToShareableHandle(void* fd, Address allocation, int, Address) {
  return *static_cast<int*>(fd) = fcntl(static_cast<int>(allocation), F_DUPFD_CLOEXEC, 0), 0;
}
int cuMemImportFromShareableHandle(Address* allocation, void* fd, int) {
  const int copy = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(fd)), F_DUPFD_CLOEXEC, 0);
  return *allocation = static_cast<Address>(copy), copy < 0 ? kInvalid : 0;
}
int cuMemAddressReserve(Address* address, size_t bytes, size_t, Address, Address) {
  void* data = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return *address = reinterpret_cast<Address>(data), data == MAP_FAILED ? kOutOfMemory : 0;
}
int cuMemAddressFree(Address address, size_t bytes) {
  return munmap(reinterpret_cast<void*>(address), bytes);
}
int cuMemMap(Address address, size_t bytes, size_t, Address allocation, Address) {
  const std::lock_guard<std::mutex> lock(mutex);
  mapped[address] = bytes;
  return map(static_cast<int>(allocation), bytes, address) == 0 ? kOutOfMemory : 0;
}
int cuMemUnmap(Address address, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (mapped.erase(address) == 0) return ++strays, kInvalid;
  void* data = mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  return data == MAP_FAILED ? kInvalid : 0;
}
int cuMemSetAccess(Address, size_t, const void*, size_t) { return 0; }
int cuMemHostRegister(void* data, size_t bytes, unsigned) {
  const std::lock_guard<std::mutex> lock(mutex);
  return pinned[reinterpret_cast<Address>(data)] = bytes, 0;
}
int cuMemHostUnregister(void* data) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (pinned.erase(reinterpret_cast<Address>(data)) == 0) return ++strays, kInvalid;
  return give_up_memory(), 0;
}
int cuMemHostGetDevicePointer(Address* address, void* data, unsigned) {
  return *address = reinterpret_cast<Address>(data), 0;
}

int cuMemcpyDtoDAsync(Address to, Address from, size_t bytes, void* stream) {
  if (const char* queries = std::getenv("FAKE_CUDA_BUSY"); queries && stream == kOurStream) {
    busy = std::atol(queries);
  }
  if (flag("FAKE_CUDA_CORRUPT") && within(opened, to)) return 0;
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
  return 0;
}
int cuMemcpyDtoHAsync(void* to, Address from, size_t bytes, void* stream) {
  pageable += !within(pinned, reinterpret_cast<Address>(to));
  return cuMemcpyDtoDAsync(reinterpret_cast<Address>(to), from, bytes, stream);
}
int cuMemcpyHtoDAsync(Address to, const void* from, size_t bytes, void* stream) {
  pageable += !within(pinned, reinterpret_cast<Address>(from));
  return cuMemcpyDtoDAsync(to, reinterpret_cast<Address>(from), bytes, stream);
}

int cuStreamCreate(void** stream, unsigned) { return *stream = kOurStream, 0; }
int cuStreamDestroy(void*) { return 0; }
int cuStreamQuery(void*) { return busy > 0 && busy-- > 0 ? kNotReady : 0; }
int cuStreamSynchronize(void*) { return busy = 0, 0; }
long fake_cuda_early() { return early; }
// Such a copy holds up who queues it, and the stream.
long fake_cuda_pageable() { return pageable; }
int cuStreamWaitEvent(void*, void*, unsigned) { return ++stream_waits, 0; }
// For tests: how often a stream was told to wait for an event.
long fake_cuda_waits() { return stream_waits; }
int cuStreamWriteValue32(void*, Address to, uint32_t value, unsigned) {
  if (flag("FAKE_CUDA_NO_VALUES")) return kNotSupported;
  if (!flag("FAKE_CUDA_SILENT")) reinterpret_cast<std::atomic<uint32_t>*>(to)->store(value);
  return 0;
}
int cuStreamWaitValue32(void*, Address from, uint32_t value, unsigned equal) {
  for (int naps = 0; naps != 5000; ++naps) {
    const uint32_t now = reinterpret_cast<std::atomic<uint32_t>*>(from)->load();
    if (equal != 0 ? now == value : static_cast<int32_t>(now - value) >= 0) return 0;
    usleep(1000);
  }
  return kInvalid;
}
int cuEventCreate(void** event, unsigned) { return *event = new FakeEvent, 0; }
int cuEventDestroy(void* event) { return delete static_cast<FakeEvent*>(event), 0; }
int cuEventRecord(void* handle, void* stream) {
  auto* event = static_cast<FakeEvent*>(handle);
  unseen += event->ours && !event->seen;
  event->ours = stream == kOurStream;
  event->seen = false;
  const char* slow = std::getenv(event->ours ? "FAKE_CUDA_SLOW_COPIES" : "FAKE_CUDA_SLOW");
  if (slow == nullptr) slow = std::getenv("FAKE_CUDA_SLOW");
  return event->patience = slow ? std::atoi(slow) : kPatience, 0;
}
int cuEventQuery(void* handle) {
  auto* event = static_cast<FakeEvent*>(handle);
  if (event->patience-- > 0) return kNotReady;
  return event->seen = true, 0;
}
long fake_cuda_unseen() { return unseen; }

int cuGetProcAddress_v2(const char* symbol, void** function, int, uint64_t, int* status) {
  Dl_info own = {};
  dladdr(reinterpret_cast<void*>(&cuInit), &own);
  void* library = dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  *function = dlsym(library, symbol);
  dlclose(library);
  *status = *function == nullptr ? 1 : 0;
  return *function == nullptr ? kInvalid : 0;
}

}  // extern "C"
