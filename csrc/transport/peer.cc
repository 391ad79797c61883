#include "transport/peer.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <array>
#include <cstdio>
#include <cstring>

#include "base/error.h"

namespace dpp {

namespace {
constexpr size_t kMaxOutbox = 1 << 20;
constexpr size_t kFrameHead = 3;
constexpr int kLookMs = 1;

// Errors of send() after which the same bytes may be sent later.
bool is_for_now(int error) {
  return error == EAGAIN || error == EINTR || error == ENOBUFS || error == ENOMEM;
}
}  // namespace

void wait_until_received(int socket, uint64_t deadline_ns) {
  int domain = 0, unsent = 0;
  socklen_t size = sizeof(domain);
  if (::getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &size) != 0) return;
  if (domain != AF_INET && domain != AF_INET6) return;
  pollfd end = {socket, 0, 0};
  while (::ioctl(socket, SIOCOUTQ, &unsent) == 0 && unsent > 0 && monotonic_ns() < deadline_ns) {
    if (::poll(&end, 1, kLookMs) > 0) return;  // POLLERR or POLLHUP
  }
}

namespace {
// What the kernel knows of a TCP connection; false for other sockets.
bool read_facts(int socket, tcp_info& facts) {
  socklen_t size = sizeof(facts);
  return ::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &facts, &size) == 0;
}

double seconds_since_last(const tcp_info& facts) {
  return std::min(facts.tcpi_last_ack_recv, facts.tcpi_last_data_recv) / 1e3;
}
}  // namespace

double silence(int socket) {
  tcp_info facts = {};
  if (!read_facts(socket, facts)) return 0.0;
  const bool owes = facts.tcpi_probes != 0 || facts.tcpi_retransmits != 0;
  return owes ? seconds_since_last(facts) : 0.0;
}

std::string lost_host(int socket, int error) {
  if (error != ETIMEDOUT && error != EHOSTUNREACH && error != ENETUNREACH) return "";
  tcp_info facts = {};
  std::array<char, 64> since = {};
  if (read_facts(socket, facts)) {
    std::snprintf(since.data(), since.size(), "nothing has come from its host for %.1f s",
                  seconds_since_last(facts));
  }
  return " cannot be reached: " + with_errno(since.data(), error) +
         ": that host is down, or the network between is cut";
}

Peer::Peer(int rank, std::string description, UniqueFd socket, UniqueFd pidfd,
           std::optional<Bell> bell)
    : rank_(rank),
      description_(std::move(description)),
      socket_(std::move(socket)),
      pidfd_(std::move(pidfd)),
      bell_(std::move(bell)) {
  const int flags = ::fcntl(socket_.get(), F_GETFL);
  if (flags < 0 || ::fcntl(socket_.get(), F_SETFL, flags | O_NONBLOCK) != 0) {
    throw Error(Fault::kSetup, with_errno("setting the socket to " + description_));
  }
}

void Peer::send_note(Note note, std::string_view body) {
  body = body.substr(0, kMaxNote);
  std::string frame;
  frame.push_back(static_cast<char>(body.size() & 0xff));
  frame.push_back(static_cast<char>(body.size() >> 8));
  frame.push_back(static_cast<char>(note));
  frame.append(body);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (outbox_.empty()) {
    const ssize_t sent =
        ::send(socket_.get(), frame.data(), frame.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) frame.erase(0, static_cast<size_t>(sent));
    // A broken socket is reported where it is read.
    if (sent < 0 && !is_for_now(errno)) return;
  }
  if (outbox_.size() < kMaxOutbox) outbox_ += frame;
  unsent_.store(!outbox_.empty(), std::memory_order_release);
}

void Peer::flush() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (outbox_.empty()) return;
  const size_t piece = std::min<size_t>(outbox_.size(), 4096);
  const ssize_t sent = ::send(socket_.get(), outbox_.data(), piece, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent > 0) outbox_.erase(0, static_cast<size_t>(sent));
  // What cannot be sent any more must not keep the progress thread awake.
  if (sent < 0 && !is_for_now(errno)) outbox_.clear();
  unsent_.store(!outbox_.empty(), std::memory_order_release);
}

bool Peer::receive(const OnNote& on_note, int most_reads) {
  std::array<char, 4096> buffer;
  bool reset = false;
  for (int reads = 0; reads < most_reads; ++reads) {
    const ssize_t got = ::recv(socket_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR) && !reset) return true;
    if (got < 0 && errno == ECONNRESET && !reset) {
      // It closed with notes of ours unread. Linux may say so before it hands out the peer's own
      // last notes, and these name who really died.
      reset = true;
      continue;
    }
    if (got <= 0) {
      if (departed()) return false;
      const int error = got == 0 ? 0 : errno;
      const std::string lost = lost_host(socket_.get(), error);
      if (!lost.empty()) throw Error(Fault::kPeerDead, description_ + lost);
      const std::string cause =
          error == 0 ? "its socket was closed" : with_errno("reading its socket", error);
      throw Error(Fault::kPeerDead, description_ + " died: " + cause);
    }
    inbox_.append(buffer.data(), static_cast<size_t>(got));
    parse(on_note);
  }
  return true;
}

void Peer::parse(const OnNote& on_note) {
  while (inbox_.size() >= kFrameHead) {
    const size_t length =
        static_cast<unsigned char>(inbox_[0]) + 256u * static_cast<unsigned char>(inbox_[1]);
    const auto note = static_cast<Note>(inbox_[2]);
    if (length > kMaxNote || note < Note::kCredit || note > Note::kLook) {
      throw Error(Fault::kProtocol, description_ + " sent a note of kind " +
                                        std::to_string(static_cast<int>(note)) + " and " +
                                        std::to_string(length) +
                                        " bytes; it is not listened to any longer");
    }
    if (inbox_.size() < kFrameHead + length) return;
    if (note == Note::kBye) {
      // Once it has departed, any thread may read how much it had sent.
      if (length != sizeof(num_sent_) || departed()) {
        throw Error(Fault::kProtocol, description_ + " sent " +
                                          (departed() ? "a second goodbye" : "a goodbye") + " of " +
                                          std::to_string(length) + " bytes");
      }
      std::memcpy(&num_sent_, inbox_.data() + kFrameHead, length);
      departed_.store(true, std::memory_order_release);
    }
    on_note(note, std::string_view(inbox_).substr(kFrameHead, length));
    inbox_.erase(0, kFrameHead + length);
  }
}

}  // namespace dpp
