// One other process that passed authentication: its socket, its life, its bell, and the notes it
// sends.
//
// Notes are small (credit for a starving sender, a reason for leaving, the words of a board between
// hosts); payloads never pass here. On one host the socket is SOCK_SEQPACKET, across hosts it is
// TCP; framing is the same: u16 length, u8 kind, body.
#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "base/bell.h"
#include "base/os.h"

namespace dpp {

// Waits until the other host has what was sent over a TCP connection, or the connection ended, or
// `deadline_ns`. Closing before drops it when the other side sends on. Returns at once for others.
void wait_until_received(int socket, uint64_t deadline_ns);

// Seconds since something came from the other host of a TCP connection, if it owes an answer; 0 if
// it does not, and for other sockets.
double silence(int socket);

// The text of an error of a TCP connection whose other host does not answer; "" for other errors.
std::string lost_host(int socket, int error);

class Peer {
 public:
  // kArrivals, kWord, kLook: of the board, see board.h.
  enum class Note : uint8_t {
    kCredit = 1,
    kBye = 2,
    kFailed = 3,
    kArrivals = 4,
    kWord = 5,
    kLook = 6
  };
  using OnNote = std::function<void(Note, std::string_view)>;

  static constexpr size_t kMaxNote = 1024;

  // description: "rank 3 (pid 4711 on node7, shm)", for messages.
  Peer(int rank, std::string description, UniqueFd socket, UniqueFd pidfd,
       std::optional<Bell> bell);

  int rank() const { return rank_; }
  const std::string& description() const { return description_; }
  void describe(std::string description) { description_ = std::move(description); }  // at set-up
  int socket() const { return socket_.get(); }
  int pidfd() const { return pidfd_.get(); }
  bool departed() const { return departed_.load(std::memory_order_acquire); }
  // Messages that it had sent when it departed. They may arrive after its goodbye.
  uint64_t num_sent() const { return num_sent_; }

  // Gives the descriptors back and says nothing. In a forked child, which has no other thread.
  void disown() {
    socket_.reset();
    pidfd_.reset();
  }

  // Any thread.
  void ring() {
    if (bell_) bell_->ring();
  }
  void send_note(Note note, std::string_view body);

  // Reads at a time: a peer that never stops must not keep its reader. One that has ended left no
  // more than its socket holds.
  static constexpr int kMostReads = 64, kReadsOfTheEnd = 1 << 16;
  // Progress thread. Reads what is there, or a part of much: the socket then stays readable. Throws
  // kPeerDead or kProtocol. False when the peer has left in good order and the socket needs no more
  // watching.
  bool receive(const OnNote& on_note, int most_reads);
  void flush();  // sends what did not fit before
  bool has_unsent() const { return unsent_.load(std::memory_order_acquire); }

 private:
  void parse(const OnNote& on_note);

  const int rank_;
  std::string description_;
  UniqueFd socket_;
  UniqueFd pidfd_;
  std::optional<Bell> bell_;
  uint64_t num_sent_ = 0;              // written before departed_
  std::atomic<bool> departed_{false};  // set by the progress thread, read by any

  std::string inbox_;  // progress thread only

  std::mutex mutex_;
  std::string outbox_;               // guarded by mutex_
  std::atomic<bool> unsent_{false};  // whether there is something in it
};

}  // namespace dpp
