// All channels of one rank: order, pending puts, waking, failures. Knows neither Python nor torch.
//
// Threads: one caller's thread (put, poll, head, take, wait, pending) and one owned progress
// thread, which sends what could not be sent at once, watches the peers' lives and reads their
// notes. Set-up calls throw dpp::Error. The first failure, wherever it happens, is stored and
// thrown by every later call but close().
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/bell.h"
#include "base/blocks.h"
#include "base/copy.h"
#include "base/error.h"
#include "base/os.h"
#include "transport/board.h"
#include "transport/failure.h"
#include "transport/kind.h"
#include "transport/outgoing.h"
#include "transport/peer.h"
#include "transport/watch.h"

namespace dpp {

struct Settings {
  int rank = 0;
  uint64_t timeout_ns = 0;
  bool checksum = false;
  uint32_t max_pending = 1024;  // a power of two
  bool spin = false;
};

class Transport {
 public:
  Transport(const Settings& settings, std::vector<ChannelSpec> incoming,
            std::vector<ChannelSpec> outgoing);
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  ~Transport();

  // Set-up, before start(). Channels are named by their index in the vectors given above.
  int bell_fd() const { return bell_.fd(); }
  void add_peer(int rank, std::string description, UniqueFd socket, UniqueFd pidfd, UniqueFd bell);
  // Makes the slots of channels that come from one peer; the descriptor (not owned) is for that
  // peer.
  int make_shm_slots(int peer, const std::vector<size_t>& channels);
  void use_shm_slots(int peer, const std::vector<size_t>& channels, UniqueFd fd);
  // For kinds with a set-up of their own.
  void set_receiver(size_t channel, int peer, std::unique_ptr<Receiver> receiver);
  void set_sender(size_t channel, int peer, std::unique_ptr<Sender> sender);
  // Watched from start() on; its senders and receivers are set like any others.
  void add_link(int peer, std::shared_ptr<Link> link) {
    links_.emplace_back(peer, std::move(link));
  }
  // Undoes the set-up of a peer's channels and link, which another kind then sets up anew.
  void drop_link(int peer);
  void describe_peer(int peer, std::string description) {
    find_peer(peer)->describe(std::move(description));
  }
  Bell* bell() { return &bell_; }
  const Copier& copier() const { return copier_; }
  const ChannelSpec& incoming(size_t channel) const { return incoming_.at(channel).spec; }
  const ChannelSpec& outgoing(size_t channel) const { return outgoing_specs_.at(channel); }
  std::shared_ptr<Peer> find_peer(int rank) const;
  // Channels with one peer over authenticated TCP connections, which it owns from here on.
  void add_tcp_link(int peer, const std::vector<size_t>& incoming,
                    const std::vector<size_t>& outgoing, std::vector<UniqueFd> sockets);
  // The block of this host's members, whose head this rank is. hosts: the heads of the other hosts,
  // if it leads them all; else leader is the rank that does, or -1 on one host. The descriptor (not
  // owned) is for the followers.
  int make_board(uint32_t counters, const std::vector<int>& followers,
                 const std::vector<int>& hosts, int leader);
  // relayed: the leader is on another host than the head.
  void use_board(UniqueFd fd, uint32_t index, uint32_t lines, uint32_t counters, int head,
                 bool relayed);
  void start();

  // Hot calls, caller's thread only.
  // kFull: nothing was queued, and max_pending puts wait on the channel; see wait_for_room().
  Outgoing::Put put(size_t channel, const Parcel& parcel);
  // Waits for at most `nanoseconds` until a channel takes puts again; true when it does. Throws
  // kTimeout, or kPeerDead where the receiver has left, when it has not since `since_ns`; this is
  // kept like any failure.
  bool wait_for_room(size_t channel, uint64_t since_ns, uint64_t nanoseconds);
  uint64_t done(size_t channel) const { return outgoing_.at(channel)->done(); }
  // Puts so far; 0 after close().
  uint64_t num_puts(size_t channel) const {
    return channel < outgoing_.size() ? outgoing_[channel]->num_puts() : 0;
  }
  uint64_t pending() const;
  void poll(uint64_t* arrived);
  // As poll(), with what is on its way and may be taken (Receiver::coming).
  void coming(uint64_t* total);
  const Header& head(size_t channel, uint64_t& arrived_ns);
  void take(size_t channel, void* to, uint64_t bytes, uintptr_t stream);
  // As take(), without a copy: the memory that holds the payload. Null, and nothing is taken, where
  // the kind or the message has none to give.
  Block take_memory(size_t channel);
  bool wait(uint64_t nanoseconds);
  void ring() { bell_.ring(); }

  void board_post(const uint64_t* counters);
  void board_append(uint64_t word);
  bool board_next(uint64_t& word);
  Board& board();  // throws where there is none

  // Whether a peer has closed, and nothing that it sent is still under way.
  bool departed(int peer);
  // Seconds that a peer's host owes an answer over the control connection; 0 if it does not.
  double silence(int peer) const { return dpp::silence(find_peer(peer)->socket()); }
  // The header of the last message that was taken from a channel; null before the first.
  const Header* last_taken(size_t channel) const {
    const Incoming& from = incoming_.at(channel);
    return from.taken != 0 && !from.has_header ? &from.header : nullptr;
  }
  void check();                           // throws what went wrong
  std::string failure();                  // any thread: what went wrong, or empty
  void abort(const std::string& reason);  // tells the peers that this rank gives up
  void close();                           // idempotent, bounded
  // In a forked child: gives its copies of the connections back, so that the peers see their end
  // when the parent ends. Does nothing in the parent.
  void disown();

 private:
  struct Incoming {
    ChannelSpec spec;
    int peer = -1;
    std::unique_ptr<Receiver> receiver;
    uint64_t seen = 0;
    uint64_t taken = 0;
    bool has_header = false;
    Header header;                     // of message taken + 1, when has_header
    std::vector<uint64_t> arrived_ns;  // by slot
  };

  std::string prefixed(const std::string& text) const;
  // Stores the first failure and tells the peers. `body`: what a peer reported, passed on as it is.
  void fail(Fault fault, const std::string& text);
  void fail(const Error& error, std::string_view body);
  [[noreturn]] void fail_and_throw(const Error& error);
  [[noreturn]] void break_off(Fault fault, const std::string& text);
  // Keeps what an act of a kind throws, for later calls and for the peers.
  template <typename Act>
  auto keeping_failures(const Act& act) -> decltype(act()) {
    try {
      return act();
    } catch (const Error& error) {
      fail_and_throw(error);
    }
  }
  void drain_puts(uint64_t deadline_ns) const;
  void drain_links(uint64_t deadline_ns);
  [[noreturn]] void throw_failure();
  std::string oldest_missing() const;
  Incoming& takeable_channel(size_t channel);
  Incoming& read_channel(size_t channel, uint64_t bytes);
  [[noreturn]] void report_torn(const Incoming& channel);
  void finish_take(Incoming& channel);
  void let_go();
  void take_leave();
  uint64_t num_sent_to(int peer) const;
  uint64_t num_arrived_from(int peer);
  void keep_what_is_used();

  // Progress thread.
  void run();
  void progress();
  Step advance_all(bool& progressed);
  bool flush_notes();
  bool links_in_doubt();
  void handle(const Watch::Ready& ready);
  void read_notes(Peer& peer, int most_reads);
  void on_note(const Peer& peer, Peer::Note note, std::string_view body);

  // Constant after start().
  const Settings settings_;
  const Copier copier_;
  ForkGuard fork_guard_;
  Bell bell_;
  Watch watch_;
  std::vector<std::shared_ptr<Peer>> peers_;
  std::vector<std::pair<int, std::shared_ptr<Link>>> links_;  // by peer
  std::vector<ChannelSpec> outgoing_specs_;
  std::vector<std::unique_ptr<Outgoing>> outgoing_;
  std::vector<Receiver*> settling_;  // of incoming_, for the progress thread and failures
  std::unique_ptr<Board> board_;

  // Caller's thread only.
  std::vector<Incoming> incoming_;
  uint32_t seen_word_ = 0;
  Spin spin_{settings_.spin};
  bool closed_ = false;

  FirstFailure failure_;
  std::atomic<bool> stop_{false};
  std::unique_ptr<std::thread> thread_;
};

}  // namespace dpp
