// The parts of libibverbs in use, declared here and loaded with dlopen: neither its headers nor the
// library are needed to build, and one build serves machines with and without RDMA devices.
//
// Layouts and numbers are those of libibverbs' ABI 1 (rdma-core 31 and later), which has been
// stable since 2008; csrc/tests/verbs_abi.cc compares them with <infiniband/verbs.h> where that is
// installed. Calls that its header makes inline (post, poll, notify) go through the context's
// table.
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace dpp::verbs {

struct Context;
struct Device;  // opaque: only handed back
struct Domain;  // a protection domain, opaque likewise

union Gid {
  uint8_t raw[16];
  uint64_t halves[2];
};

struct GidEntry {
  Gid gid;
  uint32_t index;
  uint32_t port;
  uint32_t type;
  uint32_t interface_index;
};
constexpr uint32_t kGidInfiniband = 0, kGidRoceV1 = 1, kGidRoceV2 = 2;

struct PortAttributes {
  int state;
  int max_mtu;
  int active_mtu;
  int num_gids;
  uint32_t capabilities;
  uint32_t max_message_bytes;
  uint32_t bad_pkeys, qkey_violations;
  uint16_t num_pkeys, lid, sm_lid;
  uint8_t lmc, max_vl, sm_sl, subnet_timeout, init_type_reply;
  uint8_t active_width, active_speed, physical_state, link_layer, flags;
  uint16_t capabilities2;
};
constexpr int kPortActive = 4;
constexpr uint8_t kLinkInfiniband = 1, kLinkEthernet = 2;

struct CompletionChannel {
  Context* context;
  int fd;
  int num_references;
};

struct CompletionQueue {
  Context* context;
  CompletionChannel* channel;
  void* user;
  uint32_t handle;
  int num_entries;
  pthread_mutex_t mutex;
  pthread_cond_t condition;
  uint32_t events, async_events;
};

struct MemoryRegion {
  Context* context;
  Domain* domain;
  void* address;
  size_t bytes;
  uint32_t handle, lkey, rkey;
};

struct QueuePair {
  Context* context;
  void* user;
  Domain* domain;
  CompletionQueue *send_queue, *receive_queue;
  void* shared_receive_queue;
  uint32_t handle, number;
  int state, type;
  pthread_mutex_t mutex;
  pthread_cond_t condition;
  uint32_t events;
};

struct QueuePairLimits {
  uint32_t sends, receives, send_pieces, receive_pieces, inline_bytes;
};

struct QueuePairSettings {
  void* user;
  CompletionQueue *send_queue, *receive_queue;
  void* shared_receive_queue;
  QueuePairLimits limits;
  int type;
  int signal_all;
};
constexpr int kReliableConnection = 2;

struct Path {
  struct {
    Gid gid;
    uint32_t flow_label;
    uint8_t source_gid_index, hop_limit, traffic_class;
  } route;
  uint16_t lid;
  uint8_t service_level, source_bits, static_rate, has_route, port;
};

struct QueuePairAttributes {
  int state, current_state, mtu, migration;
  uint32_t qkey, receive_psn, send_psn, peer_number;
  unsigned access;
  QueuePairLimits limits;
  Path path, other_path;
  uint16_t pkey_index, other_pkey_index;
  uint8_t notify_drained, draining, max_reads, max_peer_reads, min_rnr_timer, port;
  uint8_t timeout, retries, rnr_retries, other_port, other_timeout;
  uint32_t rate_limit;
};
constexpr uint8_t kNeedsRoute = 1;  // of PortAttributes::flags
constexpr int kStateInit = 1, kStateReadyToReceive = 2, kStateReadyToSend = 3;
enum AttributeMask : int {
  kHasState = 1 << 0,
  kHasAccess = 1 << 3,
  kHasPkey = 1 << 4,
  kHasPort = 1 << 5,
  kHasPath = 1 << 7,
  kHasMtu = 1 << 8,
  kHasTimeout = 1 << 9,
  kHasRetries = 1 << 10,
  kHasRnrRetries = 1 << 11,
  kHasReceivePsn = 1 << 12,
  kHasMaxReads = 1 << 13,
  kHasMinRnrTimer = 1 << 15,
  kHasSendPsn = 1 << 16,
  kHasMaxPeerReads = 1 << 17,
  kHasPeer = 1 << 20,
};

constexpr int kLocalWrite = 1, kRemoteWrite = 2, kRelaxedOrdering = 1 << 20;

struct Piece {
  uint64_t address;
  uint32_t bytes, lkey;
};

struct SendRequest {
  uint64_t id;
  SendRequest* next;
  Piece* pieces;
  int num_pieces;
  int opcode;
  unsigned flags;
  uint32_t immediate;  // big endian
  struct {
    uint64_t address;
    uint32_t rkey, reserved;
    uint64_t of_atomics[2];
  } remote;
  uint64_t of_other_opcodes[7];
};
constexpr int kWrite = 0, kWriteWithImmediate = 1;
constexpr unsigned kSignaled = 1 << 1;

struct ReceiveRequest {
  uint64_t id;
  ReceiveRequest* next;
  Piece* pieces;
  int num_pieces;
};

struct Completion {
  uint64_t id;
  int status, opcode;
  uint32_t vendor_error, bytes;
  uint32_t immediate;  // big endian
  uint32_t queue_pair, source;
  unsigned flags;
  uint16_t pkey_index, source_lid;
  uint8_t service_level, path_bits;
};
constexpr int kReceivedImmediate = 129;
constexpr int kFlushed = 5, kRemoteInvalid = 9, kRemoteAccess = 10, kRemoteOperation = 11,
              kRetriesExceeded = 12, kReceiverNotReady = 13, kResponseTimeout = 20;

struct AsyncEvent {
  union {
    void* object;
    int port;
  } element;
  int type;
};
constexpr int kPortActiveEvent = 9, kPortErrorEvent = 10, kDeviceFatalEvent = 8;

struct Context {
  Device* device;
  struct {
    void* compat_before[11];
    int (*poll)(CompletionQueue*, int, Completion*);
    int (*notify)(CompletionQueue*, int);
    void* compat_between[12];
    int (*post_send)(QueuePair*, SendRequest*, SendRequest**);
    int (*post_receive)(QueuePair*, ReceiveRequest*, ReceiveRequest**);
    void* compat_after[5];
  } calls;
  int command_fd, async_fd, num_vectors;
  pthread_mutex_t mutex;
  void* compat;
};

#define DPP_VERBS_FUNCTIONS(X)                                                  \
  X(get_device_list, Device**, int*)                                            \
  X(free_device_list, void, Device**)                                           \
  X(get_device_name, const char*, Device*)                                      \
  X(open_device, Context*, Device*)                                             \
  X(close_device, int, Context*)                                                \
  X(query_port, int, Context*, uint8_t, PortAttributes*)                        \
  X(alloc_pd, Domain*, Context*)                                                \
  X(dealloc_pd, int, Domain*)                                                   \
  X(reg_mr, MemoryRegion*, Domain*, void*, size_t, int)                         \
  X(dereg_mr, int, MemoryRegion*)                                               \
  X(create_comp_channel, CompletionChannel*, Context*)                          \
  X(destroy_comp_channel, int, CompletionChannel*)                              \
  X(create_cq, CompletionQueue*, Context*, int, void*, CompletionChannel*, int) \
  X(destroy_cq, int, CompletionQueue*)                                          \
  X(get_cq_event, int, CompletionChannel*, CompletionQueue**, void**)           \
  X(ack_cq_events, void, CompletionQueue*, unsigned)                            \
  X(create_qp, QueuePair*, Domain*, QueuePairSettings*)                         \
  X(modify_qp, int, QueuePair*, QueuePairAttributes*, int)                      \
  X(query_qp, int, QueuePair*, QueuePairAttributes*, int, QueuePairSettings*)   \
  X(destroy_qp, int, QueuePair*)                                                \
  X(get_async_event, int, Context*, AsyncEvent*)                                \
  X(ack_async_event, void, AsyncEvent*)                                         \
  X(wc_status_str, const char*, int)                                            \
  X(fork_init, int)

struct Api {
#define DPP_VERBS_MEMBER(name, result, ...) result (*name)(__VA_ARGS__) = nullptr;
  DPP_VERBS_FUNCTIONS(DPP_VERBS_MEMBER)
#undef DPP_VERBS_MEMBER
  int (*query_gid)(Context*, uint32_t port, uint32_t index, GidEntry*, uint32_t flags,
                   size_t entry_bytes) = nullptr;
  // Missing before rdma-core 28 and 34: flags that a device may ignore; memory of other devices.
  MemoryRegion* (*reg_mr_optional)(Domain*, void*, size_t, uint64_t, unsigned) = nullptr;
  MemoryRegion* (*reg_dmabuf_mr)(Domain*, uint64_t, size_t, uint64_t, int, int) = nullptr;

  static std::shared_ptr<const Api> load();  // throws kUnavailable
};
using ApiPtr = std::shared_ptr<const Api>;

// One port of one device, as it was when it was asked.
struct Port {
  struct Address {
    uint32_t index;
    std::string gid;   // 32 hexadecimal digits
    std::string kind;  // "InfiniBand", "RoCE v1", "RoCE v2"
  };
  std::string device;
  uint8_t number = 0;
  bool active = false;
  bool infiniband = false;
  bool dmabuf = false;  // can register memory of other devices
  uint16_t lid = 0;
  int mtu_bytes = 0;
  std::vector<Address> addresses;
};
struct Ports {
  std::vector<Port> found;
  std::vector<std::string> refused;  // devices that could not be opened, and why
};
Ports list_ports(const Api& api);  // throws kSetup

std::string gid_text(const Gid& gid);
Gid gid_from(const std::string& text);  // throws kProtocol
// Of InfiniBand: a GID begins with 32 bits of prefix, 16 of a LID for routers or 0, and 16 of
// prefix.
bool same_subnet(const Gid& one, const Gid& other);
uint16_t forwarding_lid(const Gid& gid);

// Owners. Each knows the library; a null pointer owns nothing. In a forked child nothing is given
// back: the kernel knows these objects by the descriptor that the child shares with its parent.
template <typename Object>
class Owner {
 public:
  using Release = int (*)(Object*);
  Owner() = default;
  Owner(Object* object, Release release) : object_(object), release_(release), pid_(::getpid()) {}
  Owner(Owner&& other) noexcept { swap(other); }
  Owner& operator=(Owner&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Owner() {
    if (object_ != nullptr && ::getpid() == pid_) release_(object_);
  }
  Object* get() const { return object_; }
  Object* operator->() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  void swap(Owner& other) noexcept {
    std::swap(object_, other.object_);
    std::swap(release_, other.release_);
    std::swap(pid_, other.pid_);
  }
  Object* object_ = nullptr;
  Release release_ = nullptr;
  pid_t pid_ = 0;
};

// A device by name; throws kUnavailable when it is not there, kSetup when it cannot be opened.
Owner<Context> open_device(const Api& api, const std::string& name);
// Moves a queue pair; 0 or an error number. Tried again after a time-out: the kernel looks the
// peer's Ethernet address up meanwhile.
int modify(const Api& api, QueuePair* pair, QueuePairAttributes& attributes, int mask);
PortAttributes query_port(const Api& api, Context* context, uint8_t port);  // throws kSetup
// Registers memory for writes by the device and, with `remote`, by the peer. Throws kSetup.
Owner<MemoryRegion> register_memory(const Api& api, Domain* domain, void* data, size_t bytes,
                                    bool remote);
// The same for memory of a GPU: by a dma-buf's descriptor, or without one by its address, which a
// kernel module has to understand (nvidia-peermem). Owns nothing, errno says why, when refused.
Owner<MemoryRegion> register_gpu_memory(const Api& api, Domain* domain, uint64_t address,
                                        size_t bytes, int dmabuf, bool remote);

}  // namespace dpp::verbs
