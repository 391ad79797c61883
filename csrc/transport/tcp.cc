#include "transport/tcp.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/utsname.h>

#include <algorithm>
#include <cstdio>

#include "base/copy.h"
#include "base/error.h"

namespace dpp {

namespace {

struct CreditNote {
  uint32_t channel;
  uint32_t reserved;
  uint64_t released;
};

// A quarter of a segment, within these bounds, wakes the progress thread. Without it the kernel
// wakes it for each packet, which costs more than the copies.
constexpr uint64_t kLeastWakeBytes = 128 << 10;
constexpr uint64_t kMostWakeBytes = 256 << 10;

// Before Linux 5.7 a socket whose buffer is full of small packets may never be reported as
// readable.
bool may_wait_for_bytes() {
  utsname kernel = {};
  int major = 0, minor = 0;
  return ::uname(&kernel) == 0 && std::sscanf(kernel.release, "%d.%d", &major, &minor) == 2 &&
         (major > 5 || (major == 5 && minor >= 7));
}

// Time by which a goodbye may follow the end of a data connection: it may have to be sent again.
constexpr uint64_t kGoodbyeNs = 1'000'000'000;

// The part of a message that a connection carries: both sides compute it alike.
struct Part {
  uint64_t offset;
  uint64_t length;
};

uint64_t num_parts(uint64_t bytes, size_t connections) {
  return bytes >= kStripeBytes ? connections : 1;
}

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

Part part_of(uint64_t bytes, uint64_t parts, uint64_t index) {
  const uint64_t stripe = parts == 1 ? bytes : round_up((bytes + parts - 1) / parts, 4096);
  const uint64_t offset = std::min(bytes, index * stripe);
  return {offset, std::min(stripe, bytes - offset)};
}

}  // namespace

// ---- sender
// ---------------------------------------------------------------------------------------------------

bool TcpSender::has_credit() {
  const uint64_t begun = begun_.load(std::memory_order_relaxed);
  // A receiver can give credit for a message that it does not have yet, whose entry is needed.
  return begun - released_.load(std::memory_order_acquire) < unwritten_.size() &&
         begun - finished_ < unwritten_.size();
}

void TcpSender::begin(Parcel& parcel) {
  const uint64_t begun = begun_.load(std::memory_order_relaxed);
  begun_.store(begun + 1, std::memory_order_release);
  link_->send(channel_, parcel, unwritten_[begun % unwritten_.size()]);
}

Step TcpSender::finished() {
  // Acquire: the kernel has read the payload before the caller may free it.
  if (unwritten_[finished_ % unwritten_.size()].load(std::memory_order_acquire) != 0)
    return Step::kAgain;
  ++finished_;
  return Step::kDone;
}

// ---- receiver
// -------------------------------------------------------------------------------------------------

TcpReceiver::TcpReceiver(std::shared_ptr<TcpLink> link, uint32_t channel, const ChannelSpec& spec)
    : link_(std::move(link)),
      channel_(channel),
      spec_(spec),
      blocks_(Blocks::create(spec.slot_bytes, size_t{2} * spec.depth)),
      slots_(spec.depth) {
  blocks_->fill(spec.depth, "the tcp slots of " + spec.text());
}

void TcpReceiver::copy_out(uint64_t sequence, void* to, uint64_t bytes, uintptr_t) {
  expect_large_pages(to, bytes);
  link_->copier_.copy(to, slot(sequence).memory.get(), bytes);
}

Block TcpReceiver::hand_over(uint64_t sequence, uint64_t bytes) {
  // A short message would keep the memory of a long one.
  if (bytes < kLeastHandedOver || bytes < spec_.slot_bytes - spec_.slot_bytes / 8) return nullptr;
  return std::move(slot(sequence).memory);
}

void TcpReceiver::release(uint64_t sequence) {
  slot(sequence).memory.reset();
  released_.store(sequence, std::memory_order_release);
  const CreditNote note = {channel_, 0, sequence};
  link_->peer_->send_note(Peer::Note::kCredit,
                          std::string_view(reinterpret_cast<const char*>(&note), sizeof(note)));
}

std::byte* TcpReceiver::accept(const TcpFrame& frame, size_t connection) {
  const uint64_t sequence = frame.header.sequence;
  const uint64_t released = released_.load(std::memory_order_acquire);
  if (sequence <= arrived_.load(std::memory_order_relaxed) || sequence > released + spec_.depth) {
    link_->refuse("message " + std::to_string(sequence) + " without credit on " + spec_.text());
  }
  Slot& target = slot(sequence);
  if (target.sequence != sequence) {
    const std::string fault = header_fault(frame.header, spec_, sequence);
    if (!fault.empty()) link_->refuse("a broken header on " + spec_.text() + ": " + fault);
    target.header = frame.header;
    target.sequence = sequence;
    target.begun = target.received = 0;
    target.memory = blocks_->get();
    if (!target.memory) {
      throw Error(Fault::kSetup,
                  with_errno("mapping " + std::to_string(spec_.slot_bytes) +
                             " bytes for a message on " + spec_.text() + " (ulimit -v?)"));
    }
  } else if (std::memcmp(&target.header, &frame.header, sizeof(Header)) != 0) {
    link_->refuse("two headers for one message on " + spec_.text());
  }
  const uint64_t bytes = target.header.bytes;
  const uint64_t parts = num_parts(bytes, link_->connections_.size());
  const Part part = part_of(bytes, parts, connection);
  const uint64_t bit = uint64_t{1} << connection;
  if (connection >= parts || (target.begun & bit) != 0 || frame.offset != part.offset ||
      frame.length != part.length) {
    link_->refuse("bytes " + std::to_string(frame.offset) + " to " +
                  std::to_string(frame.offset + frame.length) + " over connection " +
                  std::to_string(connection) + ", which carries " + std::to_string(part.offset) +
                  " to " + std::to_string(part.offset + part.length) + " once, on " + spec_.text());
  }
  target.begun |= bit;
  return target.memory.get() + frame.offset;
}

bool TcpReceiver::receive(uint64_t sequence, uint64_t bytes) {
  slot(sequence).received += bytes;
  const uint64_t before = arrived_.load(std::memory_order_relaxed);
  uint64_t arrived = before;
  // Stripes may finish out of order; messages arrive in order.
  while (slot(arrived + 1).sequence == arrived + 1 &&
         slot(arrived + 1).received == slot(arrived + 1).header.bytes) {
    ++arrived;
    if (arrived - before == slots_.size()) break;
  }
  // Release: the caller's thread that sees the count sees the header and the payload.
  if (arrived != before) arrived_.store(arrived, std::memory_order_release);
  return arrived != before;
}

// ---- link
// -----------------------------------------------------------------------------------------------------

TcpLink::TcpLink(std::shared_ptr<Peer> peer, Bell* bell, Watch* watch, const Copier& copier,
                 std::vector<UniqueFd> sockets)
    : peer_(std::move(peer)),
      bell_(bell),
      watch_(watch),
      copier_(copier),
      waits_for_bytes_(may_wait_for_bytes()),
      connections_(sockets.size()) {
  for (size_t i = 0; i < sockets.size(); ++i) {
    const int flags = ::fcntl(sockets[i].get(), F_GETFL);
    if (flags < 0 || ::fcntl(sockets[i].get(), F_SETFL, flags | O_NONBLOCK) != 0) {
      throw Error(Fault::kSetup, with_errno("setting a connection to " + peer_->description()));
    }
    descriptors_.push_back(sockets[i].get());
    connections_[i].socket = std::move(sockets[i]);
  }
}

std::unique_ptr<Sender> TcpLink::add_sender(const ChannelSpec& spec) {
  auto sender =
      std::make_unique<TcpSender>(shared_from_this(), static_cast<uint32_t>(senders_.size()), spec);
  senders_.push_back(sender.get());
  return sender;
}

std::unique_ptr<Receiver> TcpLink::add_receiver(const ChannelSpec& spec) {
  auto receiver = std::make_unique<TcpReceiver>(shared_from_this(),
                                                static_cast<uint32_t>(receivers_.size()), spec);
  receivers_.push_back(receiver.get());
  return receiver;
}

void TcpLink::refuse(const std::string& why) const {
  throw Error(Fault::kProtocol,
              peer_->description() + " sent " + why + "; it is not listened to any longer");
}

void TcpLink::send(uint32_t channel, const Parcel& parcel, std::atomic<uint32_t>& unwritten) {
  const uint64_t bytes = parcel.header.bytes;
  const uint64_t parts = num_parts(bytes, connections_.size());
  const auto* data = static_cast<const std::byte*>(parcel.data);
  unwritten.store(static_cast<uint32_t>(parts), std::memory_order_relaxed);
  for (uint64_t index = 0; index < parts; ++index) {
    const Part part = part_of(bytes, parts, index);
    TcpFrame frame;
    frame.header = parcel.header;
    frame.channel = channel;
    frame.offset = part.offset;
    frame.length = part.length;
    Connection& connection = connections_[index];
    bool first = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      first = connection.queue.empty();
      connection.queue.push_back(Segment{frame, data + frame.offset, 0, &unwritten});
    }
    // Of more than our own segment: the other thread, which waits for them, sees no edge.
    if (first && pump(connection, false) > 1) watch_->kick();
  }
}

uint64_t TcpLink::pump(Connection& connection, bool writable) {
  uint64_t finished = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  if (connection.pumping) {
    connection.writable = connection.writable || writable;
    return finished;
  }
  connection.pumping = true;
  while (!connection.queue.empty()) {
    Segment& segment = connection.queue.front();  // stays in its place while others are added
    connection.writable = false;
    lock.unlock();
    const uint64_t total = sizeof(TcpFrame) + segment.frame.length;
    iovec pieces[2];
    int count = 0;
    if (segment.sent < sizeof(TcpFrame)) {
      pieces[count++] = {reinterpret_cast<char*>(&segment.frame) + segment.sent,
                         sizeof(TcpFrame) - segment.sent};
    }
    const uint64_t skip = segment.sent < sizeof(TcpFrame) ? 0 : segment.sent - sizeof(TcpFrame);
    if (skip < segment.frame.length) {
      pieces[count++] = {const_cast<std::byte*>(segment.payload) + skip,
                         segment.frame.length - skip};
    }
    msghdr message = {};
    message.msg_iov = pieces;
    message.msg_iovlen = static_cast<size_t>(count);
    const ssize_t sent = ::sendmsg(connection.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    const int error = sent < 0 ? errno : 0;
    lock.lock();
    if (error == EINTR) continue;
    if (error == EAGAIN && connection.writable) continue;
    if (error != 0) {
      // EAGAIN: the edge of EPOLLOUT wakes the progress thread. Any other error is reported where
      // we read, which no longer sees it: the kernel tells an error once.
      if (error != EAGAIN) {
        connection.send_error = error;
        ::shutdown(connection.socket.get(), SHUT_RDWR);  // an edge, if there was none
      }
      break;
    }
    segment.sent += static_cast<uint64_t>(sent);
    if (segment.sent < total) continue;
    segment.unwritten->fetch_sub(1, std::memory_order_release);
    connection.queue.pop_front();
    ++finished;
  }
  connection.pumping = false;
  return finished;
}

bool TcpLink::on_ready(size_t index) {
  Connection& connection = connections_[index];
  pump(connection, true);
  return receive(connection);
}

bool TcpLink::receive(Connection& connection) {
  while (true) {
    uint64_t got = 0;
    if (connection.payload == nullptr) {
      auto* frame = reinterpret_cast<std::byte*>(&connection.frame);
      if (!receive_some(connection, frame + connection.frame_bytes,
                        sizeof(TcpFrame) - connection.frame_bytes, got)) {
        return connection.open;
      }
      connection.frame_bytes += got;
      if (connection.frame_bytes < sizeof(TcpFrame)) continue;
      if (connection.frame.channel >= receivers_.size()) refuse("a frame of an unknown channel");
      connection.payload = receivers_[connection.frame.channel]->accept(
          connection.frame, static_cast<size_t>(&connection - connections_.data()));
      connection.left = connection.frame.length;
    } else {
      if (!receive_some(connection, connection.payload, connection.left, got)) {
        const uint64_t length = connection.frame.length;
        if (length >= kLeastWakeBytes) {
          wake_at(connection, std::min(connection.left,
                                       std::clamp(length / 4, kLeastWakeBytes, kMostWakeBytes)));
        }
        return connection.open;
      }
      connection.payload += got;
      connection.left -= got;
    }
    if (connection.left != 0) continue;
    TcpReceiver& receiver = *receivers_[connection.frame.channel];
    if (receiver.receive(connection.frame.header.sequence, connection.frame.length)) bell_->ring();
    wake_at(connection, 1);
    connection.payload = nullptr;
    connection.frame_bytes = 0;
  }
}

void TcpLink::wake_at(Connection& connection, uint64_t bytes) const {
  if (!waits_for_bytes_ || bytes == connection.wakes_at) return;
  const int least = static_cast<int>(bytes);
  const int socket = connection.socket.get();
  if (::setsockopt(socket, SOL_SOCKET, SO_RCVLOWAT, &least, sizeof(least)) == 0) {
    connection.wakes_at = bytes;
  }
}

// False when nothing more is there now, or ever (connection.open is false then).
bool TcpLink::receive_some(Connection& connection, std::byte* to, uint64_t bytes, uint64_t& got) {
  while (true) {
    const ssize_t result = ::recv(connection.socket.get(), to, bytes, MSG_DONTWAIT);
    if (result > 0) {
      got = static_cast<uint64_t>(result);
      return true;
    }
    if (result < 0 && errno == EINTR) continue;
    if (result < 0 && errno == EAGAIN) return false;
    end(connection, result < 0 ? errno : 0);
    return false;
  }
}

void TcpLink::end(Connection& connection, int error) {
  connection.open = false;
  if (peer_->departed()) return;
  if (error == 0) {
    const std::lock_guard<std::mutex> lock(mutex_);
    error = connection.send_error;
  }
  // A peer that closes causes these, and its goodbye comes over another connection.
  const std::string lost = lost_host(connection.socket.get(), error);
  if (!lost.empty()) throw Error(Fault::kPeerDead, peer_->description() + lost);
  if (error != 0 && error != ECONNRESET && error != EPIPE) lose(error);
  if (ended_ns_ != 0) return;
  ended_ns_ = monotonic_ns();
  end_error_ = error;
}

bool TcpLink::in_doubt() {
  if (peer_->departed()) {
    check_complete();
    return false;
  }
  if (ended_ns_ == 0) return false;
  if (monotonic_ns() - ended_ns_ > kGoodbyeNs) lose(end_error_);
  return true;
}

void TcpLink::check_complete() const {
  for (const Connection& connection : connections_) {
    if (connection.open) return;
  }
  uint64_t arrived = 0;
  for (TcpReceiver* receiver : receivers_) arrived += receiver->arrived();
  if (arrived >= peer_->num_sent()) return;
  throw Error(Fault::kPeerDead, peer_->description() + " closed its transport, and " +
                                    std::to_string(peer_->num_sent() - arrived) +
                                    " messages that it had sent were lost on the way");
}

void TcpLink::drain(uint64_t deadline_ns) {
  for (const Connection& connection : connections_) {
    if (peer_->departed()) return;
    wait_until_received(connection.socket.get(), deadline_ns);
  }
}

void TcpLink::disown() {
  for (Connection& connection : connections_) connection.socket.reset();
}

void TcpLink::lose(int error) const {
  const std::string end = error == 0 ? "was closed" : with_errno("ended", error);
  throw Error(Fault::kPeerDead, peer_->description() + " died or cannot be reached any more: a " +
                                    "data connection " + end + ", and there was no goodbye");
}

void TcpLink::on_credit(std::string_view body) {
  CreditNote note = {};
  if (body.size() != sizeof(note))
    refuse("a credit note of " + std::to_string(body.size()) + " bytes");
  std::memcpy(&note, body.data(), sizeof(note));
  if (note.channel >= senders_.size()) refuse("credit for an unknown channel");
  TcpSender& sender = *senders_[note.channel];
  if (note.released > sender.begun_.load(std::memory_order_acquire))
    refuse("credit for messages never sent");
  if (note.released < sender.released_.load(std::memory_order_relaxed))
    refuse("credit that it had given before");
  sender.released_.store(note.released, std::memory_order_release);
}

}  // namespace dpp
