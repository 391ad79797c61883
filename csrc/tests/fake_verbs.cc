// A libibverbs.so.1 without a network card, for tests of what surrounds it: queue pairs of one
// process, whose writes a thread carries out later, in order within a queue pair and in random
// order between them. One device, fake0, with the address 127.0.0.1.
//
//   g++ -std=c++17 -shared -fPIC -pthread -Icsrc -Wl,-soname,libibverbs.so.1
//       csrc/tests/fake_verbs.cc -o libibverbs.so.1
//
// fake_verbs_set(name, value) asks for trouble:
//   fail-registration N  the next N registrations of memory are refused with ENOMEM
//   fail-connection N    the next N transitions to "ready to receive" are refused with ETIMEDOUT
//   fail-query N         the next N questions for a queue pair's attributes are refused with EINVAL
//   fail-post N          the next N sends are refused with ENOMEM
//   error-status S       the next send completes with status S, and what follows is flushed
//   lose-receives 1      posted receives vanish: the peer's immediates find none
//   lose-writes N        the next N sends, and what follows them on their queue pairs, neither
//                        arrive nor complete, as behind a firewall
//   hold-sends 1         nothing that was posted is carried out until `hold-sends 0`
//   spare-writes N       lose-writes, error-status and break-pairs begin after the next N sends
//   break-pairs N        the queue pairs that the next N sends go to are in the error state
//   short-regions N      peers can write into the first half only of the next N regions
//   drop-completions 1   nothing completes any more, although the bytes arrive
//   port-down 1          the port reports an error, and every send runs out of retries
//   peermem 1            memory of fake_cuda.cc's GPU can be registered by its address, else EFAULT
//   no-dmabuf 1          dma-bufs cannot be registered
//   late-gpu-writes 1    writes to the GPU's memory are seen after fake_verbs_flush(), not before
//   lose-gpu-writes 1    or never
//   lose-host-writes 1   writes to the host's memory complete, but are never seen
//   max-message N        the port carries N bytes in one write, 2^30 otherwise
//   infiniband 1         the port is an InfiniBand port: its LID is 7, or `lid N`; GID 0 is in the
//                        subnet 0xfe80 << 48, plus N with `subnet N`; with `needs-route 1` the port
//                        takes no path without a GID, and with `flid N` GID 1 has a LID for routers
//   ipv6 1               the port's RoCE v2 address is ::1
//   other-device 1       there is fake1 as well, before fake0, and it cannot be opened
//   reset 0              all is well again
#include "fake_verbs.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <iterator>

namespace {

using namespace dpp::tests;

Device device = {"fake0"}, other_device = {"fake1"};

int poll(CompletionQueue* from, int most, Completion* found) {
  const std::lock_guard<std::mutex> lock(fabric().mutex);
  auto& queue = static_cast<Queue*>(from)->found;
  int count = 0;
  for (; count < most && !queue.empty(); ++count) {
    found[count] = queue.front();
    queue.pop_front();
  }
  return count;
}

int notify(CompletionQueue* queue, int) {
  const std::lock_guard<std::mutex> lock(fabric().mutex);
  static_cast<Queue*>(queue)->armed = true;
  return 0;
}

int post_send(QueuePair* to, SendRequest* request, SendRequest** bad) {
  const std::lock_guard<std::mutex> lock(fabric().mutex);
  auto* pair = static_cast<Pair*>(to);
  if (fabric().take("fail-post") || pair->state != kStateReadyToSend ||
      pair->sends.size() >= pair->most_sends) {
    *bad = request;
    return ENOMEM;
  }
  pair->sends.emplace_back(*request, request->num_pieces != 0 ? *request->pieces : Piece{});
  fabric().posted();
  return 0;
}

int post_receive(QueuePair* to, ReceiveRequest* request, ReceiveRequest** bad) {
  const std::lock_guard<std::mutex> lock(fabric().mutex);
  auto* pair = static_cast<Pair*>(to);
  if (pair->receives.size() >= pair->most_receives) {
    *bad = request;
    return ENOMEM;
  }
  pair->receives.push_back(request->id);
  return 0;
}

// Mutex held. GID 0, and with `flid` GID 1; the table's other entries are unused.
int infiniband_gid(uint32_t index, GidEntry* entry) {
  const long lid = index == 1 ? fabric().faults["flid"] : 0;
  if (index > 1 || (index == 1 && lid == 0)) return ENODATA;
  const auto subnet = static_cast<uint8_t>(fabric().faults["subnet"]);
  const auto high = static_cast<uint8_t>(lid >> 8), low = static_cast<uint8_t>(lid);
  const uint8_t gid[16] = {0xfe, 0x80, 0, 0, high, low, 0, subnet, 2, 0, 0, 0, 0, 0, 0, 1};
  *entry = {};
  entry->index = index;
  entry->port = 1;
  entry->type = kGidInfiniband;
  std::memcpy(entry->gid.raw, gid, sizeof(gid));
  return 0;
}

// Mutex held. Whether the port can send along a path.
bool possible(const Path& path) {
  const bool by_lid = fabric().faults["infiniband"] != 0 && fabric().faults["needs-route"] == 0;
  return path.has_route != 0 || (by_lid && path.lid != 0);
}

bool waits(int fd) {
  uint64_t count = 0;
  return read(fd, &count, sizeof(count)) == sizeof(count);
}

}  // namespace

extern "C" {

// "most-with-immediate": bytes of the largest write that had an immediate value. "events-read":
// reports about ports that were acknowledged. "remote-regions": registrations that peers may write.
__attribute__((visibility("default"))) long fake_verbs_seen(const char* name) {
  const std::lock_guard<std::mutex> lock(fabric().mutex);
  return fabric().seen[name];
}
// The path of the last queue pair that was connected: whether it has a route, LID, index of the own
// GID, hop limit, traffic class, then the 16 bytes of the peer's GID.
__attribute__((visibility("default"))) void fake_verbs_path(long* to) {
  const std::lock_guard<std::mutex> lock(fabric().mutex);
  const Path& path = fabric().last_path;
  const long numbers[] = {path.has_route, path.lid, path.route.source_gid_index,
                          path.route.hop_limit, path.route.traffic_class};
  to = std::copy(std::begin(numbers), std::end(numbers), to);
  std::copy(std::begin(path.route.gid.raw), std::end(path.route.gid.raw), to);
}
__attribute__((visibility("default"))) void fake_verbs_set(const char* name, long value) {
  const std::lock_guard<std::mutex> lock(fabric().mutex);
  if (std::string(name) == "reset") {
    fabric().faults.clear();
    fabric().late.clear();
    fabric().seen.clear();
  }
  fabric().faults[name] = value;
  fabric().posted();
  if (std::string(name) != "port-down") return;
  for (Opened* context : fabric().contexts) {
    AsyncEvent event = {};
    event.element.port = 1;
    event.type = value != 0 ? kPortErrorEvent : kPortActiveEvent;
    context->events.push_back(event);
    Fabric::ring(context->async_fd);
  }
}

// How much there is of what only its owner may give back.
__attribute__((visibility("default"))) long fake_verbs_objects() {
  const std::lock_guard<std::mutex> lock(fabric().mutex);
  return static_cast<long>(fabric().contexts.size() + fabric().pairs.size() +
                           fabric().regions.size());
}

__attribute__((visibility("default"))) void fake_verbs_flush() {
  const std::lock_guard<std::mutex> lock(fabric().mutex);
  for (const Late& write : fabric().late)
    std::memcpy(write.to, write.bytes.data(), write.bytes.size());
  fabric().late.clear();
}

Device** ibv_get_device_list(int* count) {
  const std::lock_guard<std::mutex> lock(fabric().mutex);
  if (fabric().faults["other-device"] == 0) {
    *count = 1;
    return new Device*[2]{&device, nullptr};
  }
  *count = 2;
  return new Device*[3]{&other_device, &device, nullptr};
}
void ibv_free_device_list(Device** list) { delete[] list; }
const char* ibv_get_device_name(Device* of) { return of->name; }

Context* ibv_open_device(Device* of) {
  if (of == &other_device) {
    errno = EPERM;
    return nullptr;
  }
  auto* context = new Opened;
  static_cast<Context&>(*context) = {};
  context->device = of;
  context->async_fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
  context->calls.poll = poll;
  context->calls.notify = notify;
  context->calls.post_send = post_send;
  context->calls.post_receive = post_receive;
  fabric().opened(context);
  return context;
}
int ibv_close_device(Context* context) {
  auto* opened = static_cast<Opened*>(context);
  fabric().closed(opened);
  close(opened->async_fd);
  delete opened;
  return 0;
}

int ibv_query_port(Context*, uint8_t port, PortAttributes* found) {
  if (port != 1) return EINVAL;
  *found = {};
  found->state = kPortActive;
  found->max_mtu = found->active_mtu = 5;
  found->num_gids = 3;
  found->link_layer = kLinkEthernet;
  found->max_message_bytes = fabric().max_message_bytes();
  const std::lock_guard<std::mutex> lock(fabric().mutex);
  if (fabric().faults["infiniband"] == 0) return 0;
  const long lid = fabric().faults["lid"];
  found->link_layer = kLinkInfiniband;
  found->lid = static_cast<uint16_t>(lid != 0 ? lid : 7);
  found->flags = fabric().faults["needs-route"] != 0 ? kNeedsRoute : 0;
  static_assert(kRoce == 128 << 5);
  return 0;
}
int _ibv_query_gid_ex(Context*, uint32_t port, uint32_t index, GidEntry* entry, uint32_t, size_t) {
  if (port != 1 || index > 2) return EINVAL;
  *entry = {};
  const std::lock_guard<std::mutex> lock(fabric().mutex);
  if (fabric().faults["infiniband"] != 0) return infiniband_gid(index, entry);
  entry->index = index;
  entry->port = port;
  entry->type = index == 2 ? kGidRoceV2 : kGidRoceV1;
  const uint8_t local[16] = {0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
  const uint8_t mapped[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1};
  const uint8_t loopback[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
  const uint8_t* routable = fabric().faults["ipv6"] != 0 ? loopback : mapped;
  std::memcpy(entry->gid.raw, index == 0 ? local : routable, sizeof(entry->gid.raw));
  return 0;
}

Domain* ibv_alloc_pd(Context* context) { return new Domain{context}; }
int ibv_dealloc_pd(Domain* domain) { return delete domain, 0; }

MemoryRegion* ibv_reg_mr(Domain* domain, void* data, size_t bytes, int access) {
  const std::lock_guard<std::mutex> lock(fabric().mutex);
  const bool remote = fabric().open_to_peers(access);
  if (remote && fabric().take("short-regions")) bytes /= 2;
  const bool gpu = on_gpu(data);
  if (fabric().take("fail-registration") || (gpu && fabric().faults["peermem"] == 0)) {
    errno = gpu ? EFAULT : ENOMEM;
    return nullptr;
  }
  return fabric().registered(domain, data, bytes, static_cast<std::byte*>(data), gpu, false);
}
MemoryRegion* ibv_reg_dmabuf_mr(Domain* domain, uint64_t offset, size_t bytes, uint64_t address,
                                int fd, int access) {
  const std::lock_guard<std::mutex> lock(fabric().mutex);
  fabric().open_to_peers(access);
  struct stat facts = {};
  if (fabric().faults["no-dmabuf"] != 0) {
    errno = EOPNOTSUPP;
    return nullptr;
  }
  if (fstat(fd, &facts) != 0) return nullptr;
  if (static_cast<uint64_t>(facts.st_size) < offset + bytes) {
    errno = EINVAL;
    return nullptr;
  }
  void* mapping =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (mapping == MAP_FAILED) return nullptr;
  return fabric().registered(domain, reinterpret_cast<void*>(address), bytes,
                             static_cast<std::byte*>(mapping), true, true);
}
int ibv_dereg_mr(MemoryRegion* of) {
  const std::lock_guard<std::mutex> lock(fabric().mutex);
  auto* region = static_cast<Region*>(of);
  fabric().regions.erase(region->lkey);
  if (region->mapped) munmap(region->bytes_at, region->bytes);
  return delete region, 0;
}

CompletionChannel* ibv_create_comp_channel(Context* context) {
  auto* channel = new Channel;
  channel->context = context;
  channel->fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
  return channel;
}
int ibv_destroy_comp_channel(CompletionChannel* channel) {
  close(channel->fd);
  return delete static_cast<Channel*>(channel), 0;
}
CompletionQueue* ibv_create_cq(Context* context, int entries, void*, CompletionChannel* channel,
                               int) {
  auto* queue = new Queue;
  queue->context = context;
  queue->channel = channel;
  queue->num_entries = entries;
  return queue;
}
int ibv_destroy_cq(CompletionQueue* queue) { return delete static_cast<Queue*>(queue), 0; }
int ibv_get_cq_event(CompletionChannel* channel, CompletionQueue** queue, void** user) {
  if (!waits(channel->fd)) return -1;
  const std::lock_guard<std::mutex> lock(fabric().mutex);
  auto& rung = static_cast<Channel*>(channel)->rung;
  *queue = rung.front();
  *user = nullptr;
  rung.pop_front();
  return 0;
}
void ibv_ack_cq_events(CompletionQueue*, unsigned) {}

QueuePair* ibv_create_qp(Domain* domain, QueuePairSettings* settings) {
  const std::lock_guard<std::mutex> lock(fabric().mutex);
  auto* pair = new Pair;
  pair->context = domain->context;
  pair->domain = domain;
  pair->send_queue = settings->send_queue;
  pair->receive_queue = settings->receive_queue;
  pair->most_sends = settings->limits.sends;
  pair->most_receives = settings->limits.receives;
  pair->state = 0;
  pair->number = fabric().next_number++;
  fabric().pairs[pair->number] = pair;
  return pair;
}
int ibv_modify_qp(QueuePair* of, QueuePairAttributes* to, int mask) {
  const std::lock_guard<std::mutex> lock(fabric().mutex);
  auto* pair = static_cast<Pair*>(of);
  if (to->state != pair->state + 1 || (mask & kHasState) == 0) return EINVAL;
  if (to->state == kStateReadyToReceive) {
    if (fabric().take("fail-connection")) return ETIMEDOUT;
    const int needed = kHasPath | kHasMtu | kHasPeer | kHasReceivePsn;
    if ((mask & needed) != needed || !possible(to->path)) return EINVAL;
    fabric().last_path = to->path;
    pair->peer = to->peer_number;
    pair->given.path = to->path;
  }
  if ((mask & kHasPkey) != 0) pair->given.pkey_index = to->pkey_index;
  if ((mask & kHasTimeout) != 0) pair->given.timeout = to->timeout;
  if ((mask & kHasRetries) != 0) pair->given.retries = to->retries;
  pair->state = to->state;
  return 0;
}
int ibv_query_qp(QueuePair* of, QueuePairAttributes* found, int, QueuePairSettings*) {
  const std::lock_guard<std::mutex> lock(fabric().mutex);
  if (fabric().take("fail-query")) return EINVAL;
  *found = static_cast<Pair*>(of)->given;
  return 0;
}
int ibv_destroy_qp(QueuePair* pair) {
  const std::lock_guard<std::mutex> lock(fabric().mutex);
  fabric().pairs.erase(pair->number);
  return delete static_cast<Pair*>(pair), 0;
}

int ibv_get_async_event(Context* context, AsyncEvent* event) {
  if (!waits(context->async_fd)) return -1;
  const std::lock_guard<std::mutex> lock(fabric().mutex);
  auto& events = static_cast<Opened*>(context)->events;
  *event = events.front();
  events.pop_front();
  return 0;
}
void ibv_ack_async_event(AsyncEvent*) {
  const std::lock_guard<std::mutex> lock(fabric().mutex);
  fabric().seen["events-read"] += 1;
}
const char* ibv_wc_status_str(int status) {
  switch (status) {
    case kFlushed: return "Work Request Flushed Error";
    case kRemoteAccess: return "remote access error";
    case kRetriesExceeded: return "transport retry counter exceeded";
    case kReceiverNotReady: return "RNR retry counter exceeded";
    default: return "some error";
  }
}
int ibv_fork_init() { return 0; }

}  // extern "C"
