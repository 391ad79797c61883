#include "base/verbs.h"

#include <dlfcn.h>
#include <errno.h>
#include <sys/resource.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "base/error.h"

namespace dpp::verbs {

namespace {

constexpr char kDigits[] = "0123456789abcdef";
constexpr int kModifyTries = 4;
constexpr auto kFirstPause = std::chrono::milliseconds(100);

std::string locked_memory_limit() {
  rlimit limit = {};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  if (limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return std::to_string(limit.rlim_cur >> 10) + " KiB";
}

// The devices of this machine, for the time of a search.
class DeviceList {
 public:
  explicit DeviceList(const Api& api) : api_(api), devices_(api.get_device_list(&count_)) {
    if (devices_ == nullptr) throw Error(Fault::kSetup, with_errno("listing the RDMA devices"));
  }
  DeviceList(const DeviceList&) = delete;
  DeviceList& operator=(const DeviceList&) = delete;
  ~DeviceList() { api_.free_device_list(devices_); }
  Device** begin() const { return devices_; }
  Device** end() const { return devices_ + count_; }

 private:
  const Api& api_;
  int count_ = 0;
  Device** devices_;
};

Owner<Context> open(const Api& api, Device* device) {
  Context* context = api.open_device(device);
  if (context == nullptr) {
    throw Error(Fault::kSetup,
                with_errno(std::string("opening RDMA device ") + api.get_device_name(device)) +
                    " (docker's options device=/dev/infiniband and cap-add=IPC_LOCK)");
  }
  return {context, api.close_device};
}

const char* kind_name(uint32_t type) {
  switch (type) {
    case kGidRoceV1: return "RoCE v1";
    case kGidRoceV2: return "RoCE v2";
    default: return "InfiniBand";
  }
}

// Asks with a descriptor that cannot be: a driver that knows dma-buf complains about that.
bool knows_dmabuf(const Api& api, Context* context) {
  if (api.reg_dmabuf_mr == nullptr) return false;
  const Owner<Domain> domain(api.alloc_pd(context), api.dealloc_pd);
  if (!domain) return false;
  errno = 0;
  const Owner<MemoryRegion> region(api.reg_dmabuf_mr(domain.get(), 0, 0, 0, -1, 0), api.dereg_mr);
  return errno != EOPNOTSUPP && errno != EPROTONOSUPPORT;
}

Port describe(const Api& api, Context* context, const std::string& name, uint8_t number) {
  const PortAttributes found = query_port(api, context, number);
  Port port;
  port.device = name;
  port.number = number;
  port.active = found.state == kPortActive;
  port.infiniband = found.link_layer != kLinkEthernet;
  port.dmabuf = knows_dmabuf(api, context);
  port.lid = found.lid;
  port.mtu_bytes = 128 << found.active_mtu;
  for (int i = 0; i < found.num_gids; ++i) {
    GidEntry entry = {};
    // Unused entries of the table are refused.
    if (api.query_gid(context, number, i, &entry, 0, sizeof(entry)) != 0) continue;
    port.addresses.push_back({entry.index, gid_text(entry.gid), kind_name(entry.type)});
  }
  return port;
}

void add_ports(const Api& api, Context* context, const std::string& name, std::vector<Port>& to) {
  // Ports count from 1; asking for one beyond the last is refused.
  for (uint8_t number = 1; number < 255; ++number) {
    try {
      to.push_back(describe(api, context, name, number));
    } catch (const Error&) {
      return;
    }
  }
}

}  // namespace

ApiPtr Api::load() {
  // NODELETE: drivers keep state of their own, and NCCL may use the library too.
  void* library = ::dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == nullptr) {
    throw Error(Fault::kUnavailable, std::string("no RDMA library: ") + ::dlerror() +
                                         " (apt-get install libibverbs1 ibverbs-providers)");
  }
  auto api = std::make_shared<Api>();
  const auto find = [library](const char* name) { return ::dlsym(library, name); };
  const char* missing = nullptr;
#define DPP_VERBS_LOAD(name, ...)                                        \
  api->name = reinterpret_cast<decltype(api->name)>(find("ibv_" #name)); \
  if (api->name == nullptr) missing = "ibv_" #name;
  DPP_VERBS_FUNCTIONS(DPP_VERBS_LOAD)
#undef DPP_VERBS_LOAD
  api->query_gid = reinterpret_cast<decltype(api->query_gid)>(find("_ibv_query_gid_ex"));
  if (api->query_gid == nullptr) missing = "_ibv_query_gid_ex";
  if (missing != nullptr) {
    throw Error(Fault::kUnavailable, std::string("libibverbs.so.1 has no ") + missing +
                                         ": rdma-core 31 or newer is needed");
  }
  api->reg_mr_optional = reinterpret_cast<decltype(api->reg_mr_optional)>(find("ibv_reg_mr_iova2"));
  api->reg_dmabuf_mr = reinterpret_cast<decltype(api->reg_dmabuf_mr)>(find("ibv_reg_dmabuf_mr"));
  // Data loaders fork. Refused when something was registered before: then that one has asked.
  api->fork_init();
  return api;
}

Ports list_ports(const Api& api) {
  Ports ports;
  const DeviceList devices(api);
  for (Device* device : devices) {
    try {
      const Owner<Context> context = open(api, device);
      add_ports(api, context.get(), api.get_device_name(device), ports.found);
    } catch (const Error& error) {
      ports.refused.emplace_back(error.what());  // the others may serve
    }
  }
  return ports;
}

std::string gid_text(const Gid& gid) {
  std::string text;
  for (const uint8_t byte : gid.raw) {
    text.push_back(kDigits[byte >> 4]);
    text.push_back(kDigits[byte & 15]);
  }
  return text;
}

Gid gid_from(const std::string& text) {
  Gid gid = {};
  if (text.size() != 2 * sizeof(gid.raw)) throw Error(Fault::kProtocol, "a broken GID: " + text);
  for (size_t i = 0; i < text.size(); ++i) {
    const char* digit = std::strchr(kDigits, text[i]);
    if (digit == nullptr || *digit == 0) throw Error(Fault::kProtocol, "a broken GID: " + text);
    gid.raw[i / 2] = static_cast<uint8_t>(gid.raw[i / 2] * 16 + (digit - kDigits));
  }
  return gid;
}

bool same_subnet(const Gid& one, const Gid& other) {
  return std::memcmp(one.raw, other.raw, 4) == 0 && std::memcmp(one.raw + 6, other.raw + 6, 2) == 0;
}

uint16_t forwarding_lid(const Gid& gid) {
  return static_cast<uint16_t>(gid.raw[4] << 8 | gid.raw[5]);
}

Owner<Context> open_device(const Api& api, const std::string& name) {
  for (Device* device : DeviceList(api)) {
    if (name == api.get_device_name(device)) return open(api, device);
  }
  throw Error(Fault::kUnavailable, "RDMA device " + name + " is not there any more");
}

PortAttributes query_port(const Api& api, Context* context, uint8_t port) {
  PortAttributes found = {};
  if (const int error = api.query_port(context, port, &found)) {
    throw Error(Fault::kSetup, with_errno("querying port " + std::to_string(port), error));
  }
  return found;
}

int modify(const Api& api, QueuePair* pair, QueuePairAttributes& attributes, int mask) {
  int error = api.modify_qp(pair, &attributes, mask);
  auto pause = kFirstPause;
  for (int tries = 1; error == ETIMEDOUT && tries < kModifyTries; ++tries, pause *= 2) {
    std::this_thread::sleep_for(pause);
    error = api.modify_qp(pair, &attributes, mask);
  }
  return error;
}

Owner<MemoryRegion> register_memory(const Api& api, Domain* domain, void* data, size_t bytes,
                                    bool remote) {
  int access = kLocalWrite | (remote ? kRemoteWrite : 0);
  MemoryRegion* region = nullptr;
  // Relaxed ordering is safe here: nothing is read from a slot before the completion that closes
  // the message, and a completion never overtakes the writes before it.
  if (remote && api.reg_mr_optional != nullptr) {
    region = api.reg_mr_optional(domain, data, bytes, reinterpret_cast<uintptr_t>(data),
                                 static_cast<unsigned>(access | kRelaxedOrdering));
  }
  if (region == nullptr) region = api.reg_mr(domain, data, bytes, access);
  if (region == nullptr) {
    throw Error(Fault::kSetup,
                with_errno("registering " + std::to_string(bytes) + " bytes for RDMA") +
                    "; locked memory is " + locked_memory_limit() +
                    " (ulimit -l unlimited; docker's option ulimit memlock=-1; or lower " +
                    setting("slots") + ")");
  }
  return {region, api.dereg_mr};
}

// No relaxed ordering here: completions land in another memory than the payload, so that nothing
// but the order of the writes themselves would keep them behind it.
Owner<MemoryRegion> register_gpu_memory(const Api& api, Domain* domain, uint64_t address,
                                        size_t bytes, int dmabuf, bool remote) {
  const int access = kLocalWrite | (remote ? kRemoteWrite : 0);
  MemoryRegion* region = dmabuf >= 0
                             ? api.reg_dmabuf_mr(domain, 0, bytes, address, dmabuf, access)
                             : api.reg_mr(domain, reinterpret_cast<void*>(address), bytes, access);
  return {region, api.dereg_mr};
}

}  // namespace dpp::verbs
