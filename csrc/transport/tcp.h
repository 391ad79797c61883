// Kind "tcp": slots in memory of the receiver, filled by the progress thread from authenticated
// connections.
//
// A message travels as segments, each behind a frame that repeats the message's header, so that the
// receiver knows and checks everything before it accepts the first byte of payload. Small messages
// are one segment on the first connection; from kStripeBytes up, every connection carries an equal
// part. Credit comes back as notes on the peer's control connection.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "base/blocks.h"
#include "base/copy.h"
#include "base/os.h"
#include "transport/kind.h"
#include "transport/peer.h"
#include "transport/watch.h"

namespace dpp {

constexpr uint64_t kStripeBytes = 8 << 20;

struct TcpFrame {
  Header header;
  uint32_t channel = 0;  // index within the link, on which both sides agree
  uint32_t reserved = 0;
  uint64_t offset = 0;  // of this segment in the payload
  uint64_t length = 0;
};

class TcpLink;

class TcpSender : public Sender {
 public:
  TcpSender(std::shared_ptr<TcpLink> link, uint32_t channel, const ChannelSpec& spec)
      : link_(std::move(link)), channel_(channel), unwritten_(spec.depth) {}
  bool has_credit() override;
  bool ask_for_credit() override { return has_credit(); }
  void begin(Parcel& parcel) override;
  Step finished() override;

 private:
  friend class TcpLink;

  const std::shared_ptr<TcpLink> link_;
  const uint32_t channel_;
  uint64_t finished_ = 0;  // owner only
  std::atomic<uint64_t> begun_{
      0};  // written by the owner; the progress thread checks credit against it
  // Segments of each message under way that the kernel has not taken yet. A message's entry is used
  // again only when the receiver has released the message and finished() has said that it was sent.
  std::vector<std::atomic<uint32_t>> unwritten_;
  std::atomic<uint64_t> released_{0};  // by the receiver; written by the progress thread
};

class TcpReceiver : public Receiver {
 public:
  TcpReceiver(std::shared_ptr<TcpLink> link, uint32_t channel, const ChannelSpec& spec);
  ~TcpReceiver() override { blocks_->keep_none(); }
  uint64_t arrived() override { return arrived_.load(std::memory_order_acquire); }
  Header header(uint64_t sequence) override { return slot(sequence).header; }
  void copy_out(uint64_t sequence, void* to, uint64_t bytes, uintptr_t stream) override;
  Block hand_over(uint64_t sequence, uint64_t bytes) override;
  void release(uint64_t sequence) override;

 private:
  friend class TcpLink;

  struct Slot {
    Block memory;  // of the payload; none while no message is under way or waits here
    Header header;
    uint64_t sequence = 0;  // of the message that fills it
    uint64_t begun = 0;     // one bit per segment that was announced
    uint64_t received = 0;
  };

  Slot& slot(uint64_t sequence) { return slots_[(sequence - 1) % slots_.size()]; }
  // Progress thread. Where the segment's payload goes; throws kProtocol.
  std::byte* accept(const TcpFrame& frame, size_t connection);
  bool receive(uint64_t sequence, uint64_t bytes);  // true when messages became complete

  const std::shared_ptr<TcpLink> link_;
  const uint32_t channel_;
  const ChannelSpec spec_;
  const std::shared_ptr<Blocks> blocks_;
  std::vector<Slot> slots_;  // progress thread until arrived_ covers it, then caller's thread until
                             // released_ does
  std::atomic<uint64_t> arrived_{0};
  std::atomic<uint64_t> released_{0};
};

class TcpLink : public Link, public std::enable_shared_from_this<TcpLink> {
 public:
  TcpLink(std::shared_ptr<Peer> peer, Bell* bell, Watch* watch, const Copier& copier,
          std::vector<UniqueFd> sockets);

  std::unique_ptr<Sender> add_sender(const ChannelSpec& spec);
  std::unique_ptr<Receiver> add_receiver(const ChannelSpec& spec);

  const std::vector<int>& descriptors() const override { return descriptors_; }
  bool on_ready(size_t index) override;
  void on_credit(std::string_view note) override;
  bool in_doubt() override;
  void drain(uint64_t deadline_ns) override;
  void disown() override;

 private:
  friend class TcpSender;
  friend class TcpReceiver;

  struct Segment {
    TcpFrame frame;
    const std::byte* payload;
    uint64_t sent;                     // of frame and payload together
    std::atomic<uint32_t>* unwritten;  // of the sender, which lives as long as the link
  };
  struct Connection {
    UniqueFd socket;
    std::deque<Segment> queue;  // guarded by mutex_; who pumps alone touches the first one
    bool pumping = false;       // guarded by mutex_: a thread sends without holding it
    bool writable = false;      // likewise: room was announced to the other thread meanwhile
    int send_error = 0;         // likewise: why the kernel takes nothing more
    // Progress thread only: the segment that is being received.
    TcpFrame frame;
    uint64_t frame_bytes = 0;
    std::byte* payload = nullptr;
    uint64_t left = 0;
    uint64_t wakes_at = 1;  // bytes that have to be there before epoll reports them
    bool open = true;
  };

  // Any thread.
  void send(uint32_t channel, const Parcel& parcel, std::atomic<uint32_t>& unwritten);
  // Sends from the queue until it is empty or the kernel takes no more; returns the number of
  // segments that left it. Another thread that pumps goes on instead. Holds mutex_ between the
  // system calls only, so that a small put does not wait behind a large one.
  uint64_t pump(Connection& connection, bool writable);
  bool receive(Connection& connection);
  bool receive_some(Connection& connection, std::byte* to, uint64_t bytes, uint64_t& got);
  void wake_at(Connection& connection, uint64_t bytes) const;
  void end(Connection& connection, int error);
  // Once all connections have ended: throws if messages were lost that the peer had sent.
  void check_complete() const;
  [[noreturn]] void lose(int error) const;
  [[noreturn]] void refuse(const std::string& why) const;

  const std::shared_ptr<Peer> peer_;
  Bell* const bell_;    // of the transport, which outlives its links
  Watch* const watch_;  // likewise
  const Copier copier_;
  const bool waits_for_bytes_;
  std::vector<int> descriptors_;
  std::vector<TcpSender*>
      senders_;  // owned by the transport's channels, which are destroyed after the thread ends
  std::vector<TcpReceiver*> receivers_;  // likewise
  // Progress thread only: when a connection ended without a reason that excludes a goodbye, and
  // what was said of it.
  uint64_t ended_ns_ = 0;
  int end_error_ = 0;

  std::mutex mutex_;
  std::vector<Connection> connections_;
};

}  // namespace dpp
