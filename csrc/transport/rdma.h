// Kind "rdma": slots in registered memory of the receiver, written by the sender's network card.
//
//   tensor -(copy)-> [piece|piece|...] -(RDMA write)-> slot [header|payload] -(take())-> tensor
//                     registered, shared                 of the receiver
//                     by the channels of a link
//
// A message is cut into pieces; each is copied into a registered buffer and written from there, so
// that copying and sending overlap and no tensor has to be registered. The last write of a message
// carries an immediate value (channel, sequence) that completes a receive at the other side:
// nothing is read before. From kStripedBytes up the pieces go over all queue pairs of the link, and
// every queue pair closes its share with an immediate of its own. Credit comes back as an empty
// write with an immediate.
//
// Payloads may lie in other memory than the host's (PayloadMemory), on each side as it likes: then
// headers stay in the host's memory and are written by themselves, ahead of the first piece and on
// its queue pair.
//
// Threads: posting is guarded by a mutex; completions are handled by the progress thread, which
// sleeps on the completion channel's descriptor.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/copy.h"
#include "base/os.h"
#include "base/verbs.h"
#include "transport/kind.h"
#include "transport/peer.h"

namespace dpp {

// Our side's port, the settings of its queue pairs, and how much is copied at once.
struct RdmaPlace {
  std::string device;
  uint8_t port = 1;
  uint32_t gid_index = 0;
  uint8_t traffic_class = 0, service_level = 0;
  uint16_t pkey_index = 0;
  uint8_t timeout = 20, retries = 7;
  // The network may reorder the packets of a write. The immediate of a large one then follows in an
  // empty write, so that its packets need no order.
  bool adaptive_routing = false;
  uint64_t piece_bytes = 4 << 20;
};

// Where slots and buffers lie when not in the host's memory.
class PayloadMemory {
 public:
  struct Block {  // members in the order of acquisition
    std::shared_ptr<void> memory;
    uint64_t address = 0;
    verbs::Owner<verbs::MemoryRegion> region;
  };
  virtual ~PayloadMemory() = default;
  // Registered memory; with `remote` for the peer's writes. Throws when that is not possible.
  virtual Block make(const verbs::Api& api, verbs::Domain* domain, uint64_t bytes, bool remote) = 0;
  // Copies for the test of a link: they have happened when the call returns, and fetch() sees all
  // that has arrived.
  virtual void fill(uint64_t to, const void* from, uint64_t bytes) = 0;
  virtual void fetch(void* to, uint64_t from, uint64_t bytes) = 0;
};

// One side's message to the other: the places of its slots, the addresses of its queue pairs.
struct RdmaOffer {
  std::string gid;
  uint16_t lid = 0;
  int mtu = 0;  // libibverbs' number for it
  uint64_t address = 0;
  uint32_t rkey = 0;
  bool apart = false;  // payloads lie in memory of their own
  uint64_t payload_address = 0;
  uint32_t payload_rkey = 0;
  std::vector<uint32_t> queue_pairs;
  std::vector<uint32_t> first_packets;  // packet sequence numbers
};

constexpr size_t kRdmaRails = 4;  // queue pairs of a link

// The 32 bits that a write may carry: credit 1 | channel 11 | shares 4 | end of the sequence 16.
struct RdmaImmediate {
  static constexpr uint32_t kMostChannels = 1 << 11;

  bool credit;
  uint32_t channel, num_shares;
  uint16_t sequence;

  uint32_t packed() const {
    return static_cast<uint32_t>(credit) << 31 | channel << 20 | num_shares << 16 | sequence;
  }
  static RdmaImmediate unpacked(uint32_t value) {
    return {value >> 31 != 0, value >> 20 & (kMostChannels - 1), value >> 16 & 15,
            static_cast<uint16_t>(value)};
  }
};

// Where the slots of a link's channels lie in its memory; both sides compute it. Apart: headers in
// one piece of memory, payloads in another one; else each payload behind its header.
class RdmaLayout {
 public:
  RdmaLayout(const std::vector<ChannelSpec>& channels, bool apart);
  uint64_t header(uint32_t channel, uint64_t sequence) const;
  uint64_t payload(uint32_t channel, uint64_t sequence) const;
  bool apart() const { return apart_; }
  uint64_t header_bytes() const { return apart_ ? num_slots_ * sizeof(Header) : total_; }
  uint64_t payload_bytes() const { return total_; }
  uint64_t largest_slot() const { return largest_; }  // header included
  uint32_t num_slots() const { return num_slots_; }

 private:
  struct Channel {
    uint64_t first, stride;
    uint32_t depth, first_slot;
  };
  uint64_t slot(const Channel& of, uint64_t sequence) const { return (sequence - 1) % of.depth; }

  bool apart_;
  std::vector<Channel> channels_;
  uint64_t total_ = 0;
  uint64_t largest_ = 0;
  uint32_t num_slots_ = 0;
};

class RdmaLink;

// The bytes of one write: a buffer that is filled, and a place in the peer's slots.
struct RdmaPiece {
  int buffer = -1;
  size_t rail = 0;
  uint64_t bytes = 0, payload = 0;
  bool has_header = false;
  uint64_t header = 0;
  bool closes = false;
};

// Copies the bytes of a piece into a registered buffer.
class PieceCopier {
 public:
  virtual ~PieceCopier() = default;
  // Once, before the first piece of a message.
  virtual void start(const Parcel& parcel) = 0;
  virtual void copy(std::byte* to, const std::byte* from, uint64_t bytes, int buffer) = 0;
  virtual bool copied(int buffer) = 0;
};

// The sending half of a channel, wherever its tensors are.
class RdmaOutbox {
 public:
  RdmaOutbox(RdmaLink& link, uint32_t channel, const ChannelSpec& spec);
  // Owner, as in Sender.
  bool has_credit() const;
  void begin(const Parcel& parcel);
  Step finished(PieceCopier& copier);
  // Progress thread.
  void receive_credit(uint16_t released);

 private:
  bool fill(const Parcel& parcel, PieceCopier& copier);  // false: no buffer was free
  Step send_filled(PieceCopier& copier);

  RdmaLink& link_;  // which owns us
  const uint32_t channel_;
  const ChannelSpec spec_;

  // Owner only.
  std::vector<Parcel> begun_parcels_;
  uint64_t num_finished_ = 0;
  // Of the oldest message: whether the copier knows of it, bytes copied, pieces copied, those of
  // them that are not posted yet.
  bool started_ = false;
  uint64_t copied_bytes_ = 0;
  uint64_t num_pieces_ = 0;
  std::deque<RdmaPiece> filled_;
  uint32_t immediate_ = 0;

  std::atomic<uint64_t> begun_{0};     // written by the owner
  std::atomic<uint64_t> released_{0};  // by the receiver; written by the progress thread
};

class RdmaSender : public Sender, private PieceCopier {
 public:
  RdmaSender(const std::shared_ptr<RdmaLink>& link, RdmaOutbox* outbox)
      : link_(link), outbox_(outbox) {}
  bool has_credit() override { return outbox_->has_credit(); }
  bool ask_for_credit() override { return outbox_->has_credit(); }
  void begin(Parcel& parcel) override { outbox_->begin(parcel); }
  Step finished() override { return outbox_->finished(*this); }

 private:
  void start(const Parcel&) override {}
  void copy(std::byte* to, const std::byte* from, uint64_t bytes, int buffer) override;
  bool copied(int) override { return true; }

  const std::shared_ptr<RdmaLink> link_;
  RdmaOutbox* const outbox_;  // the link's
};

class RdmaReceiver : public Receiver {
 public:
  RdmaReceiver(std::shared_ptr<RdmaLink> link, uint32_t channel, const ChannelSpec& spec);
  uint64_t arrived() override { return arrived_.load(std::memory_order_acquire); }
  Header header(uint64_t sequence) override;
  void copy_out(uint64_t sequence, void* to, uint64_t bytes, uintptr_t stream) override;
  void release(uint64_t sequence) override;

 protected:
  const std::byte* payload(uint64_t sequence) const;

 private:
  friend class RdmaLink;

  struct Slot {
    uint64_t sequence = 0;  // of the message that fills it
    uint32_t closed = 0;    // queue pairs that have closed their share
    uint32_t num_shares = 0;
  };

  Slot& slot(uint64_t sequence) { return slots_[(sequence - 1) % slots_.size()]; }
  bool close_share(uint16_t sequence, uint32_t num_shares);  // true when messages became complete

  const std::shared_ptr<RdmaLink> link_;
  const uint32_t channel_;
  const ChannelSpec spec_;
  std::vector<Slot> slots_;  // progress thread only
  std::atomic<uint64_t> arrived_{0};
  std::atomic<uint64_t> released_{0};
  uint64_t credited_ = 0;  // guarded by the link's mutex
};

class RdmaLink : public Link, public std::enable_shared_from_this<RdmaLink> {
 public:
  // Opens the device, registers memory and makes the queue pairs. Payloads lie in `payloads`, if
  // there is one. Throws kUnavailable or kSetup.
  RdmaLink(std::shared_ptr<Peer> peer, Bell* bell, const Copier& copier, const RdmaPlace& place,
           std::vector<ChannelSpec> incoming, std::vector<ChannelSpec> outgoing,
           std::shared_ptr<PayloadMemory> payloads = nullptr);

  const RdmaOffer& offer() const { return offer_; }
  // Before the first message, and before the peer's.
  void connect(const RdmaOffer& peer);
  // Of the first queue pair, as the device has them. Throws kSetup.
  verbs::QueuePairAttributes attributes() const;
  // The two tests of a connected link, before start(). kPath writes into the host's memory of the
  // peer over every queue pair, kSlots into the payloads of its slots, wherever these lie. The
  // sender posts, and waits until all is acknowledged: false after the deadline, throws when the
  // device gives up. The receiver's half returns what differs, or nothing.
  enum class Test { kPath, kSlots };
  void post_pattern(Test test, uint64_t seed);
  bool await_pattern(uint64_t deadline_ns);
  std::string pattern_fault(Test test, uint64_t seed);
  // Headers and payloads, in our buffers as in the peer's slots, in the host's memory. Both sides
  // know.
  bool side_by_side() const { return !payloads_ && !peer_slots_.apart(); }
  // Channels by their index in the vectors given above, each once.
  RdmaOutbox* outbox(uint32_t channel) { return outboxes_.at(channel).get(); }
  std::unique_ptr<Sender> make_sender(uint32_t channel);
  std::unique_ptr<Receiver> make_receiver(uint32_t channel);
  void set_receiver(uint32_t channel, RdmaReceiver* receiver) { receivers_.at(channel) = receiver; }
  uint32_t num_buffers() const { return num_buffers_; }
  const Mapping& buffer_memory() const { return buffer_memory_.mapping; }
  const Mapping& slot_memory() const { return slot_memory_.mapping; }

  const std::vector<int>& descriptors() const override { return descriptors_; }
  bool on_ready(size_t index) override;
  void on_credit(std::string_view note) override;
  void drain(uint64_t deadline_ns) override;

 private:
  friend class RdmaOutbox;
  friend class RdmaSender;
  friend class RdmaReceiver;

  struct Rail {
    verbs::Owner<verbs::QueuePair> pair;
    uint32_t in_flight = 0;   // sends that have not completed; guarded by mutex_
    uint32_t unreported = 0;  // of them, those since the last one that will be reported; likewise
  };

  uint64_t buffer_bytes() const { return sizeof(Header) + (payloads_ ? 0 : piece_bytes_); }
  struct TestSlot {
    uint32_t channel;
    uint64_t sequence, bytes;
  };
  static std::vector<TestSlot> test_slots(const std::vector<ChannelSpec>& channels);
  void post_to_path(uint64_t seed);
  void post_to_slots(uint64_t seed);
  std::string slots_fault(uint64_t seed);
  bool all_acknowledged();
  void make_payloads();
  void make_completions(int count);
  void describe();  // fills in our offer
  void make_rail(uint32_t num_receives);
  void connect_rail(size_t rail, const RdmaOffer& peer);
  verbs::Path path_to(const RdmaOffer& peer) const;
  void post_receive(size_t rail);
  void modify(size_t rail, verbs::QueuePairAttributes& attributes, int mask, const char* what);

  // Any thread. A free buffer, or -1.
  int take_buffer();
  std::byte* header_buffer(int index) const;
  std::byte* payload_buffer(int index) const;  // behind the header, or an address of payloads_
  const std::byte* slot_payload(uint32_t channel, uint64_t sequence) const;  // likewise
  // Writes a filled buffer into the peer's slots; with an immediate if there is one.
  void write(const RdmaPiece& piece, const uint32_t* immediate);
  void send_credits();
  struct Target {
    uint64_t address;
    uint32_t rkey;
  };
  static constexpr uint64_t kNoBuffer = UINT32_MAX, kMore = kNoBuffer - 1;
  // mutex_ held. `done`: the buffer that is free again afterwards, or kNoBuffer; or kMore for a
  // write whose completion the next one reports.
  void post(size_t rail, uint64_t done, verbs::Piece* from, const Target& to,
            const uint32_t* immediate);

  // Progress thread, or the closing one after its end.
  void handle_completions();
  void handle(const verbs::Completion& completion);
  void handle_immediate(uint32_t value);
  void handle_device_events();
  [[noreturn]] void report(const verbs::Completion& completion) const;
  [[noreturn]] void refuse(const std::string& why) const;

  const std::shared_ptr<Peer> peer_;
  Bell* const bell_;  // of the transport, which outlives its links
  const Copier copier_;
  const RdmaPlace place_;
  const std::vector<ChannelSpec> incoming_, outgoing_;
  const std::shared_ptr<PayloadMemory> payloads_;
  const RdmaLayout slots_;
  RdmaLayout peer_slots_;  // as the peer lays them out from connect() on

  // In the order of acquisition.
  const verbs::ApiPtr api_;
  verbs::Owner<verbs::Context> context_;
  const verbs::PortAttributes port_;
  const uint64_t piece_bytes_;
  const uint32_t num_buffers_;
  const uint32_t most_sends_;  // per queue pair
  verbs::Owner<verbs::Domain> domain_;
  SharedMemory slot_memory_, buffer_memory_;
  verbs::Owner<verbs::MemoryRegion> slot_region_, buffer_region_;
  PayloadMemory::Block slot_payloads_, buffer_payloads_;  // with payloads_
  verbs::Owner<verbs::CompletionChannel> channel_;
  verbs::Owner<verbs::CompletionQueue> completions_;
  std::vector<Rail> rails_;

  RdmaOffer offer_;
  Target peer_headers_ = {}, peer_payloads_ = {};
  std::vector<int> descriptors_;
  std::vector<std::unique_ptr<RdmaOutbox>> outboxes_;
  std::vector<RdmaReceiver*> receivers_;  // owned by the transport, which ends the thread first
  bool port_down_ = false;                // progress thread only

  std::mutex mutex_;
  std::vector<int> free_buffers_;
};

}  // namespace dpp
