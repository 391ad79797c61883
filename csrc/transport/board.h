// How the ranks of one stage agree on one order: see Board in base.py.
//
// The members on one host share a block of memory:
//
//   [BoardHead][line 0: read position, counters...][line 1 ...][words x kWords]
//
// Words: the writer stores the word, then `written` with release; a reader acquires `written`,
// reads the word, then stores its read position with release, which is what the writer acquires
// before it writes over an old word.
//
// A board may span hosts. Each host has a block of its own, and a head: its first member, on the
// leader's host the leader. The leader's block has one more line per other host. The progress
// thread of such a host's head sends the minimum of its lines to the leader, whose progress thread
// stores it in the host's line; it sends each word to the heads, whose progress threads append it
// to their blocks. The control connection carries both as notes.
#pragma once

#include <atomic>
#include <memory>
#include <string_view>
#include <vector>

#include "base/os.h"
#include "transport/peer.h"

namespace dpp {

class Board {
 public:
  static constexpr uint64_t kWords = 4096;

  // lines: of the members on this host and, on the leader's, of the other hosts. spans_hosts: the
  // members are on several hosts.
  static std::unique_ptr<Board> create(uint32_t lines, uint32_t counters, bool spans_hosts);
  static std::unique_ptr<Board> adopt(UniqueFd fd, uint32_t index, uint32_t lines,
                                      uint32_t counters);

  int fd() const { return memory_.fd.get(); }
  uint32_t num_counters() const { return counters_; }
  // The members of this host to ring: all others for its head, the head for another member.
  void connect(std::shared_ptr<Peer> peer) { peers_.push_back(std::move(peer)); }
  // Leader: the heads of the other hosts, in the order of their lines.
  void connect_host(std::shared_ptr<Peer> head) { hosts_.push_back(std::move(head)); }
  // Members on other hosts than the leader's. The head's upstream is the leader; another member
  // wakes the head's progress thread.
  void connect_upstream(std::shared_ptr<Peer> upstream) { upstream_ = std::move(upstream); }
  bool is_relay() const { return upstream_ && index_ == 0; }

  // Caller's thread. True if the own progress thread has something to relay or to send.
  bool post(const uint64_t* counters);
  void common(uint64_t* counters) const;
  enum class Append { kFull, kDone, kUnsent };
  Append append(uint64_t word);  // leader; kFull: a reader lags a full ring
  // False: nothing new. `relay` becomes true as post() returns true.
  bool next(uint64_t& word, bool& relay);

  // Progress thread.
  bool relay();  // of a relay: tells the leader; true if another pass must follow
  void accept(const Peer& peer, Peer::Note note, std::string_view body);  // throws kProtocol

 private:
  struct Head {
    alignas(64) std::atomic<uint64_t> written;
  };

  Board(SharedMemory memory, uint32_t index, uint32_t lines, uint32_t counters);
  static size_t line_words(uint32_t counters);
  static size_t total_bytes(uint32_t lines, uint32_t counters);
  Head& head() const;
  std::atomic<uint64_t>* line(uint32_t index) const;  // [0] read position, [1..] counters
  std::atomic<uint64_t>& word(uint64_t index) const;
  uint64_t slowest_reader(uint64_t written) const;
  bool write(uint64_t word);  // false: a reader lags a full ring
  void ring();
  bool wake_relay();
  void accept_line(const Peer& head, uint32_t line, std::string_view body);

  SharedMemory memory_;
  const uint32_t index_;
  const uint32_t lines_;
  const uint32_t counters_;
  uint64_t position_ = 0;  // words read by this process
  // Progress thread: the line of this host, and as the leader was told.
  std::vector<uint64_t> line_;
  std::vector<uint64_t> told_;
  std::vector<std::shared_ptr<Peer>> peers_;
  std::vector<std::shared_ptr<Peer>> hosts_;
  std::shared_ptr<Peer> upstream_;
};

}  // namespace dpp
