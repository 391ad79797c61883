// A small block of shared memory in which the ranks of one stage agree on one order: see Board in
// base.py.
//
//   [BoardHead][member 0: read position, counters...][member 1 ...][words x kWords]
//
// Words: the leader writes the word, then `written` with release; a follower acquires `written`,
// reads the word, then stores its read position with release, which is what the leader acquires
// before it writes over an old word.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/os.h"
#include "transport/peer.h"

namespace dpp {

class Board {
 public:
  static constexpr uint64_t kWords = 4096;

  static std::unique_ptr<Board> create(uint32_t members, uint32_t counters);
  static std::unique_ptr<Board> adopt(UniqueFd fd, uint32_t index, uint32_t members,
                                      uint32_t counters);

  int fd() const { return memory_.fd.get(); }
  uint32_t num_counters() const { return counters_; }
  // The members to ring: all others for the leader, the leader for a follower.
  void connect(std::shared_ptr<Peer> peer) { peers_.push_back(std::move(peer)); }

  void post(const uint64_t* counters);
  void common(uint64_t* counters) const;
  bool append(uint64_t word);  // leader; false: a reader lags a full ring
  bool next(uint64_t& word);   // followers; false: nothing new

 private:
  struct Head {
    alignas(64) std::atomic<uint64_t> written;
  };

  Board(SharedMemory memory, uint32_t index, uint32_t members, uint32_t counters);
  static size_t member_words(uint32_t counters);
  static size_t total_bytes(uint32_t members, uint32_t counters);
  Head& head() const;
  std::atomic<uint64_t>* member(uint32_t index) const;  // [0] read position, [1..] counters
  std::atomic<uint64_t>& word(uint64_t index) const;
  uint64_t slowest_reader() const;
  void ring();

  SharedMemory memory_;
  const uint32_t index_;
  const uint32_t members_;
  const uint32_t counters_;
  uint64_t position_ = 0;  // words written (leader) or read (follower) by this process
  std::vector<std::shared_ptr<Peer>> peers_;
};

}  // namespace dpp
