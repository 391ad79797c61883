// The network of fake_verbs.cc: what its objects are, and a thread that carries writes out.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/verbs.h"

namespace dpp::verbs {
struct Device {
  char name[8];
};
struct Domain {
  Context* context;
};
}  // namespace dpp::verbs

namespace dpp::tests {

using namespace dpp::verbs;

constexpr int kRoce = 4096;
constexpr uint32_t kFirstKey = 0x1000;
constexpr int kLocalLength = 1;  // the status of a write that is too long for the port

struct Queue : CompletionQueue {
  std::deque<Completion> found;
  bool armed = false;
};
struct Pair : QueuePair {
  std::deque<std::pair<SendRequest, Piece>> sends;
  std::deque<uint64_t> receives;
  uint32_t peer = 0;
  uint32_t most_sends = 0, most_receives = 0;
  QueuePairAttributes given = {};  // by modify
  bool broken = false;
  bool cut_off = false;  // nothing that it sends arrives or completes any more
};
struct Opened : Context {
  std::deque<AsyncEvent> events;
};
struct Channel : CompletionChannel {
  std::deque<Queue*> rung;
};
struct Region : MemoryRegion {
  std::byte* bytes_at =
      nullptr;  // where this process sees them: of a dma-buf, a mapping of its own
  bool gpu = false;
  bool mapped = false;
};
struct Late {
  std::byte* to;
  std::vector<std::byte> bytes;
};

// Whether an address is in memory of fake_cuda.cc's GPU.
inline bool on_gpu(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long first = 0, end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx", &first, &end) != 2) continue;
    if (address >= first && address < end) return line.find("memfd:fake-gpu") != std::string::npos;
  }
  return false;
}

class Fabric {
 public:
  std::mutex mutex;
  std::map<uint32_t, Pair*> pairs;
  std::map<uint32_t, Region*> regions;
  std::vector<Late> late;
  std::map<std::string, long> faults, seen;
  std::vector<Opened*> contexts;
  Path last_path = {};
  uint32_t next_number = 17, next_key = kFirstKey;

  void opened(Opened* context) {
    const std::lock_guard<std::mutex> lock(mutex);
    contexts.push_back(context);
    if (contexts.size() == 1) thread_ = std::thread([this, which = current_] { run(which); });
  }
  void closed(Opened* context) {
    std::thread done;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      contexts.erase(std::find(contexts.begin(), contexts.end(), context));
      if (contexts.empty()) {
        ++current_;
        done.swap(thread_);
      }
    }
    posted_.notify_all();
    if (done.joinable()) done.join();
  }
  void posted() { posted_.notify_all(); }
  uint32_t max_message_bytes() {
    const std::lock_guard<std::mutex> lock(mutex);
    return most_bytes();
  }
  // Mutex held, as below.
  Region* registered(Domain* domain, void* address, size_t bytes, std::byte* at, bool gpu,
                     bool mapped) {
    const uint32_t key = next_key++;
    auto* region = new Region;
    static_cast<MemoryRegion&>(*region) = {domain->context, domain, address, bytes, 0, key, key};
    region->bytes_at = at;
    region->gpu = gpu;
    region->mapped = mapped;
    return regions[key] = region;
  }
  bool open_to_peers(int access) {
    const bool open = (access & kRemoteWrite) != 0;
    seen["remote-regions"] += open;
    return open;
  }
  // One fewer of a counted fault.
  bool take(const char* name) {
    long& left = faults[name];
    return left > 0 && left-- > 0;
  }
  void complete(CompletionQueue* to, const Completion& completion) {
    auto* queue = static_cast<Queue*>(to);
    queue->found.push_back(completion);
    if (!queue->armed || queue->channel == nullptr) return;
    queue->armed = false;
    static_cast<Channel*>(queue->channel)->rung.push_back(queue);
    ring(queue->channel->fd);
  }
  static void ring(int fd) {
    const uint64_t one = 1;
    if (write(fd, &one, sizeof(one)) != sizeof(one)) std::abort();
  }

 private:
  // A thread ends by its own number: when it wakes, the next one may have been started.
  void run(uint64_t which) {
    std::unique_lock<std::mutex> lock(mutex);
    while (which == current_) {
      std::vector<Pair*> ready;
      for (const auto& [number, pair] : pairs) {
        if (!pair->sends.empty() && faults["hold-sends"] == 0) ready.push_back(pair);
      }
      if (ready.empty()) {
        posted_.wait(lock);
        continue;
      }
      carry_out(*ready[random_() % ready.size()]);
      lock.unlock();  // let others post in between
      lock.lock();
    }
  }

  void carry_out(Pair& pair) {
    const auto [request, piece] = pair.sends.front();
    pair.sends.pop_front();
    const bool spared = take("spare-writes");
    if (!spared) pair.cut_off = pair.cut_off || take("lose-writes");
    if (pair.cut_off) return;
    if (!spared) break_peer(pair);
    Completion completion = {};
    completion.id = request.id;
    completion.queue_pair = pair.number;
    completion.opcode = 1;
    completion.status = pair.broken ? kFlushed : outcome(pair, request, piece, spared);
    pair.broken = pair.broken || completion.status != 0;
    const bool told = (request.flags & kSignaled) != 0 || completion.status != 0;
    if (told && faults["drop-completions"] == 0) complete(pair.send_queue, completion);
  }

  uint32_t most_bytes() {
    const long asked = faults["max-message"];
    return asked != 0 ? static_cast<uint32_t>(asked) : 1u << 30;
  }

  // With its receives flushed, as in the error state, it answers to nothing.
  void break_peer(const Pair& pair) {
    const auto target = pairs.find(pair.peer);
    if (target == pairs.end() || !take("break-pairs")) return;
    Pair& peer = *target->second;
    for (peer.broken = true; !peer.receives.empty(); peer.receives.pop_front()) {
      Completion flushed = {};
      flushed.id = peer.receives.front();
      flushed.status = kFlushed;
      flushed.queue_pair = peer.number;
      complete(peer.receive_queue, flushed);
    }
  }

  int outcome(const Pair& pair, const SendRequest& request, const Piece& piece, bool spared) {
    if (const long status = spared ? 0 : faults["error-status"]) {
      faults["error-status"] = 0;
      return static_cast<int>(status);
    }
    const auto target = pairs.find(pair.peer);
    if (target == pairs.end() || target->second->broken || faults["port-down"] != 0)
      return kRetriesExceeded;
    if (request.num_pieces != 0) {
      if (piece.bytes > most_bytes()) return kLocalLength;
      if (!inside(piece.lkey, piece.address, piece.bytes)) return 4;
      const auto region = regions.find(request.remote.rkey);
      if (region == regions.end() || region->second->domain != target->second->domain ||
          !inside(request.remote.rkey, request.remote.address, piece.bytes)) {
        return kRemoteAccess;
      }
      deliver(*region->second, request.remote.address, *regions[piece.lkey], piece);
    }
    if (request.opcode == kWrite) return 0;
    long& most = seen["most-with-immediate"];
    most = std::max(most, request.num_pieces != 0 ? static_cast<long>(piece.bytes) : 0);
    Pair& peer = *target->second;
    if (faults["lose-receives"] != 0) peer.receives.clear();
    if (peer.receives.empty()) return kReceiverNotReady;
    Completion arrival = {};
    arrival.id = peer.receives.front();
    peer.receives.pop_front();
    arrival.opcode = kReceivedImmediate;
    arrival.immediate = request.immediate;
    arrival.queue_pair = peer.number;
    if (faults["drop-completions"] == 0) complete(peer.receive_queue, arrival);
    return 0;
  }

  void deliver(const Region& into, uint64_t address, const Region& from, const Piece& piece) {
    const auto place = [](const Region& region, uint64_t of) {
      return region.bytes_at + (of - reinterpret_cast<uint64_t>(region.address));
    };
    const std::byte* source = place(from, piece.address);
    std::byte* target = place(into, address);
    if (faults[into.gpu ? "lose-gpu-writes" : "lose-host-writes"] != 0) return;
    if (into.gpu && faults["late-gpu-writes"] != 0) {
      late.push_back({target, {source, source + piece.bytes}});
    } else {
      std::memcpy(target, source, piece.bytes);
    }
  }

  bool inside(uint32_t key, uint64_t address, uint64_t bytes) const {
    const auto found = regions.find(key);
    if (found == regions.end()) return false;
    const auto first = reinterpret_cast<uint64_t>(found->second->address);
    return address >= first && address + bytes <= first + found->second->bytes;
  }

  std::condition_variable posted_;
  std::minstd_rand random_{7};
  uint64_t current_ = 0;
  std::thread thread_;
};

inline Fabric& fabric() {
  static auto* only = new Fabric;  // never destroyed: the library stays loaded
  return *only;
}

}  // namespace dpp::tests
