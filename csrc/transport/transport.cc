#include "transport/transport.h"

#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "base/copy.h"
#include "transport/shm.h"
#include "transport/tcp.h"

namespace dpp {

namespace {

constexpr uint64_t kKickTag = 0;
constexpr uint64_t kLinkTag = uint64_t{1} << 32;
constexpr uint64_t kShortestSpinNs = 20'000;
constexpr uint64_t kLongestSpinNs = 200'000;
constexpr uint64_t kRoomNapNs = 1'000'000;
constexpr int kByeMs = 500;
constexpr uint64_t kDrainNs = 2'000'000'000;
constexpr int kNotesMs = 5;
// While a GPU works the progress thread asks again after a 32nd of the time that it has waited so
// far: what it waits for is noticed at most 3 % late, and a long wait costs little.
constexpr uint64_t kNapShare = 32;
constexpr uint64_t kShortestNapNs = 2'000;
constexpr uint64_t kLongestNapNs = 25'000;

// epoll data: peer index and which of its descriptors.
uint64_t socket_tag(size_t peer) { return 2 * (peer + 1); }
uint64_t pidfd_tag(size_t peer) { return 2 * (peer + 1) + 1; }
uint64_t link_tag(size_t link, size_t index) { return kLinkTag + (link << 8) + index; }
size_t tagged_peer(uint64_t tag) { return tag / 2 - 1; }

uint64_t largest_slot(const std::vector<Geometry>& channels) {
  uint64_t largest = 0;
  for (const Geometry& channel : channels) largest = std::max(largest, channel.slot_bytes);
  return largest;
}

// How urgently the progress thread has to ask again.
int urgency(Step step) {
  switch (step) {
    case Step::kDone: return 0;
    case Step::kAgain: return 1;
    case Step::kPoll: return 2;
    case Step::kMoved: return 3;
  }
  return 0;
}

void nap(uint64_t nanoseconds) {
  if (nanoseconds < kShortestNapNs) return;
  const timespec length = {0, static_cast<long>(std::min(nanoseconds, kLongestNapNs))};
  ::nanosleep(&length, nullptr);
}

}  // namespace

Transport::Transport(const Settings& settings, std::vector<Geometry> incoming,
                     std::vector<Geometry> outgoing)
    : settings_(settings),
      copier_(Copier::measured(std::max(largest_slot(incoming), largest_slot(outgoing)))),
      bell_(Bell::create()),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      kick_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      outgoing_geometry_(std::move(outgoing)),
      outgoing_(outgoing_geometry_.size()) {
  if (!epoll_ || !kick_) throw Error(Fault::kSetup, with_errno("epoll and eventfd (ulimit -n?)"));
  for (const Geometry& geometry : incoming) {
    Incoming channel;
    channel.geometry = geometry;
    channel.arrived_ns.resize(geometry.depth);
    incoming_.push_back(std::move(channel));
  }
  watch(kick_.get(), kKickTag, EPOLLIN);
}

Transport::~Transport() { close(); }

void Transport::watch(int fd, uint64_t tag, uint32_t events) {
  epoll_event event = {};
  event.events = events;
  event.data.u64 = tag;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    throw Error(Fault::kSetup, with_errno("watching a descriptor"));
  }
}

void Transport::add_peer(int rank, std::string description, UniqueFd socket, UniqueFd pidfd,
                         UniqueFd bell) {
  std::optional<Bell> peer_bell;
  if (bell) peer_bell = Bell::adopt(std::move(bell));
  auto peer = std::make_shared<Peer>(rank, std::move(description), std::move(socket),
                                     std::move(pidfd), std::move(peer_bell));
  watch(peer->socket(), socket_tag(peers_.size()), EPOLLIN);
  if (peer->pidfd() >= 0) watch(peer->pidfd(), pidfd_tag(peers_.size()), EPOLLIN);
  peers_.push_back(std::move(peer));
}

std::shared_ptr<Peer> Transport::find_peer(int rank) const {
  for (const auto& peer : peers_) {
    if (peer->rank() == rank) return peer;
  }
  throw Error(Fault::kSetup, "rank " + std::to_string(rank) + " is not a peer");
}

int Transport::make_shm_slots(int peer, const std::vector<size_t>& channels) {
  std::vector<Geometry> geometry;
  for (const size_t index : channels) geometry.push_back(incoming_.at(index).geometry);
  auto block = ShmBlock::create(geometry);
  for (size_t i = 0; i < channels.size(); ++i) {
    set_receiver(channels[i], peer,
                 std::make_unique<ShmReceiver>(block, i, find_peer(peer), copier_));
  }
  return block->fd();
}

void Transport::use_shm_slots(int peer, const std::vector<size_t>& channels, UniqueFd fd) {
  std::vector<Geometry> geometry;
  for (const size_t index : channels) geometry.push_back(outgoing_geometry_.at(index));
  auto block = ShmBlock::adopt(std::move(fd), geometry);
  for (size_t i = 0; i < channels.size(); ++i) {
    set_sender(channels[i], peer, std::make_unique<ShmSender>(block, i, find_peer(peer), copier_));
  }
}

void Transport::set_receiver(size_t channel, int peer, std::unique_ptr<Receiver> receiver) {
  incoming_.at(channel).peer = peer;
  incoming_[channel].receiver = std::move(receiver);
}

void Transport::set_sender(size_t channel, int peer, std::unique_ptr<Sender> sender) {
  outgoing_.at(channel) = std::make_unique<Outgoing>(outgoing_geometry_[channel], peer,
                                                     std::move(sender), settings_.max_pending);
}

void Transport::add_tcp_link(int peer, const std::vector<size_t>& incoming,
                             const std::vector<size_t>& outgoing, std::vector<UniqueFd> sockets) {
  auto link = std::make_shared<TcpLink>(find_peer(peer), &bell_, copier_, std::move(sockets));
  for (const size_t index : incoming) {
    set_receiver(index, peer, link->add_receiver(incoming_.at(index).geometry));
  }
  for (const size_t index : outgoing) {
    set_sender(index, peer, link->add_sender(outgoing_geometry_.at(index)));
  }
  add_link(peer, std::move(link));
}

int Transport::make_board(uint32_t members, uint32_t counters, const std::vector<int>& followers) {
  board_ = Board::create(members, counters);
  for (const int follower : followers) board_->connect(find_peer(follower));
  return board_->fd();
}

void Transport::use_board(UniqueFd fd, uint32_t index, uint32_t members, uint32_t counters,
                          int leader) {
  board_ = Board::adopt(std::move(fd), index, members, counters);
  board_->connect(find_peer(leader));
}

void Transport::start() {
  for (const auto& channel : outgoing_) {
    if (!channel) throw Error(Fault::kSetup, "an outgoing channel has no kind");
  }
  for (const Incoming& channel : incoming_) {
    if (!channel.receiver) throw Error(Fault::kSetup, "an incoming channel has no kind");
    if (channel.receiver->settles()) settling_.push_back(channel.receiver.get());
  }
  for (size_t i = 0; i < links_.size(); ++i) {
    const std::vector<int>& descriptors = links_[i].second->descriptors();
    for (size_t j = 0; j < descriptors.size(); ++j) {
      watch(descriptors[j], link_tag(i, j), EPOLLIN | EPOLLOUT | EPOLLET);
    }
  }
  thread_ = std::make_unique<std::thread>([this] { run(); });
}

// ---- hot calls
// ------------------------------------------------------------------------------------------------

void Transport::check() {
  if (fork_guard_.forked()) {
    throw Error(Fault::kForked,
                "rank " + std::to_string(settings_.rank) +
                    ": this transport was opened by the parent process; a forked child must not "
                    "use it (open one of its own)");
  }
  if (closed_) {
    throw Error(Fault::kUnavailable,
                "rank " + std::to_string(settings_.rank) + ": the transport is closed");
  }
  // Acquire: pairs with the release in fail(), which makes failure_ visible.
  if (failed_.load(std::memory_order_acquire)) throw_failure();
}

void Transport::throw_failure() {
  throw Error(failure_->fault(), failure_->what() + oldest_missing());
}

// The channel that has brought the fewest messages: what this rank most likely waits for.
std::string Transport::oldest_missing() const {
  const auto behind = [](const Incoming& one, const Incoming& other) {
    return one.seen < other.seen;
  };
  const auto oldest = std::min_element(incoming_.begin(), incoming_.end(), behind);
  if (oldest == incoming_.end()) return "";
  std::string text = "; the oldest missing message here is number " +
                     std::to_string(oldest->seen + 1) + " of " + oldest->geometry.text();
  if (oldest->taken == oldest->seen && oldest->taken != 0) {
    text += ", after microbatch " + std::to_string(oldest->header.microbatch) + " of iteration " +
            std::to_string(oldest->header.iteration);
  }
  return text;
}

Outgoing::Put Transport::put(size_t channel, const Parcel& parcel) {
  check();
  Outgoing& out = *outgoing_.at(channel);
  try {
    Parcel sealed = parcel;
    sealed.header.sent_ns = monotonic_ns();
    if (settings_.checksum) {
      sealed.header.has_payload_crc = 1;
      sealed.header.payload_crc = out.checksum(sealed);
    }
    Outgoing::Put result = out.put(sealed);
    while (result == Outgoing::Put::kFull) {
      wait_for_room(channel);
      result = out.put(sealed);
    }
    if (result == Outgoing::Put::kPending) kick();
    return result;
  } catch (const Error& error) {
    fail_and_throw(error);
  }
}

void Transport::wait_for_room(size_t channel) {
  const Outgoing& out = *outgoing_[channel];
  const uint64_t deadline = monotonic_ns() + settings_.timeout_ns;
  while (out.pending() == settings_.max_pending) {
    check();
    if (monotonic_ns() > deadline) {
      throw Error(Fault::kTimeout, std::to_string(out.pending()) + " puts wait for credit on " +
                                       out.geometry().text() + "; rank " +
                                       std::to_string(out.peer()) +
                                       " is alive but takes nothing (--dpp-timeout)");
    }
    const timespec nap = {0, static_cast<long>(kRoomNapNs)};
    ::nanosleep(&nap, nullptr);
  }
}

uint64_t Transport::pending() const {
  uint64_t sum = 0;
  for (const auto& channel : outgoing_) sum += channel->pending();
  return sum;
}

void Transport::poll(uint64_t* arrived) {
  check();
  // Before the channels are read: what arrives after this makes the next wait() return at once.
  seen_word_ = bell_.word();
  try {
    for (size_t i = 0; i < incoming_.size(); ++i) {
      Incoming& channel = incoming_[i];
      arrived[i] = channel.receiver->arrived();
      if (arrived[i] == channel.seen) continue;
      const uint64_t now = monotonic_ns();
      for (; channel.seen != arrived[i]; ++channel.seen) {
        channel.arrived_ns[channel.seen % channel.arrived_ns.size()] = now;
      }
    }
  } catch (const Error& error) {
    fail_and_throw(error);
  }
}

Transport::Incoming& Transport::arrived_channel(size_t index) {
  check();
  Incoming& channel = incoming_.at(index);
  if (channel.seen == channel.taken) {
    throw std::out_of_range("rank " + std::to_string(settings_.rank) + ": nothing has arrived on " +
                            channel.geometry.text());
  }
  return channel;
}

const Header& Transport::head(size_t index, uint64_t& arrived_ns) {
  Incoming& channel = arrived_channel(index);
  if (!channel.has_header) {
    channel.header = channel.receiver->header(channel.taken + 1);
    const std::string fault = header_fault(channel.header, channel.geometry, channel.taken + 1);
    if (!fault.empty()) {
      break_off(Fault::kProtocol, find_peer(channel.peer)->description() +
                                      " sent a broken header on " + channel.geometry.text() + ": " +
                                      fault + "; it is not listened to any longer");
    }
    channel.has_header = true;
  }
  arrived_ns = channel.arrived_ns[channel.taken % channel.arrived_ns.size()];
  return channel.header;
}

void Transport::take(size_t index, void* to, uint64_t bytes, uintptr_t stream) {
  Incoming& channel = arrived_channel(index);
  if (!channel.has_header || bytes != channel.header.bytes) {
    throw std::invalid_argument("take() without head(), or with another number of bytes");
  }
  const uint64_t sequence = channel.taken + 1;
  channel.receiver->copy_out(sequence, to, bytes, stream);
  if (channel.header.has_payload_crc &&
      channel.receiver->checksum(to, bytes, stream) != channel.header.payload_crc) {
    break_off(Fault::kProtocol, "payload checksum of microbatch " +
                                    std::to_string(channel.header.microbatch) + " on " +
                                    channel.geometry.text() + " is wrong");
  }
  channel.receiver->release(sequence);
  if (channel.receiver->settles()) kick();
  channel.taken = sequence;
  channel.has_header = false;
}

bool Transport::wait(uint64_t nanoseconds) {
  check();
  if (bell_.word() != seen_word_) return true;
  const uint64_t start = monotonic_ns();
  uint64_t spin_ns = 0;
  if (settings_.spin) {
    spin_ns = std::clamp(recent_wait_ns_ + recent_wait_ns_ / 2, kShortestSpinNs, kLongestSpinNs);
  }
  const bool rung = bell_.wait(seen_word_, nanoseconds, spin_ns);
  recent_wait_ns_ = (3 * recent_wait_ns_ + (monotonic_ns() - start)) / 4;
  check();
  return rung;
}

// ---- board
// ----------------------------------------------------------------------------------------------------

void Transport::board_post(const uint64_t* counters) {
  check();
  board_->post(counters);
}

void Transport::board_common(uint64_t* counters) {
  check();
  board_->common(counters);
}

void Transport::board_append(uint64_t word) {
  check();
  const uint64_t deadline = monotonic_ns() + settings_.timeout_ns;
  while (!board_->append(word)) {
    check();
    if (monotonic_ns() > deadline) {
      break_off(Fault::kTimeout, "a member of the stage's board has not read the last " +
                                     std::to_string(Board::kWords) +
                                     " words; it is alive (--dpp-timeout)");
    }
    const timespec nap = {0, static_cast<long>(kRoomNapNs)};
    ::nanosleep(&nap, nullptr);
  }
}

bool Transport::board_next(uint64_t& word) {
  check();
  return board_->next(word);
}

// ---- failures and closing
// -------------------------------------------------------------------------------------

bool Transport::departed(int rank) const { return find_peer(rank)->departed(); }

std::string Transport::prefixed(const std::string& text) const {
  return "rank " + std::to_string(settings_.rank) + ": " + text;
}

void Transport::fail(Fault fault, const std::string& text) {
  std::string body(1, static_cast<char>(fault));
  body += text.substr(0, Peer::kMaxNote - 64) + " (reported by rank " +
          std::to_string(settings_.rank) + ")";
  fail(Error(fault, prefixed(text)), body);
}

void Transport::fail(const Error& error, std::string_view body) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) return;
    failure_ = error;
    failed_.store(true, std::memory_order_release);
  }
  bell_.ring();
  // Ranks that are not linked to the culprit learn of it from us.
  for (const auto& peer : peers_) {
    if (!peer->departed()) peer->send_note(Peer::Note::kFailed, body);
  }
}

// A failure of the caller's thread. What check() threw is known already.
void Transport::fail_and_throw(const Error& error) {
  if (failed_.load(std::memory_order_acquire)) throw_failure();
  break_off(error.fault(), error.what());
}

void Transport::break_off(Fault fault, const std::string& text) {
  fail(fault, text);
  throw *failure_;
}

void Transport::abort(const std::string& reason) {
  if (closed_ || fork_guard_.forked()) return;
  fail(Fault::kPeerDead, "rank " + std::to_string(settings_.rank) + " gave up: " + reason);
}

void Transport::close() {
  if (closed_) return;
  closed_ = true;
  if (fork_guard_.forked()) {
    // The thread and the connections are the parent's. Our copies of descriptors close with this
    // object.
    static_cast<void>(thread_.release());
    return;
  }
  stop_.store(true, std::memory_order_release);
  kick();
  if (thread_) thread_->join();
  thread_.reset();
  drain_links();
  for (const auto& peer : peers_) {
    peer->send_note(Peer::Note::kBye, "");
    pollfd writable = {peer->socket(), POLLOUT, 0};
    if (peer->has_unsent() && ::poll(&writable, 1, kByeMs) > 0) peer->flush();
  }
  settling_.clear();
  outgoing_.clear();
  incoming_.clear();
  links_.clear();
  board_.reset();
  peers_.clear();
  epoll_.reset();
  kick_.reset();
  bell_.close_descriptor();
}

std::string Transport::failure() {
  if (!failed_.load(std::memory_order_acquire)) return "";
  return failure_->what();
}

void Transport::drain_links() {
  if (failed_.load(std::memory_order_acquire)) return;
  try {
    const uint64_t deadline = monotonic_ns() + kDrainNs;
    for (const auto& [peer, link] : links_) link->drain(deadline);
  } catch (const Error&) {
    // The peer is gone: there is nothing left to send to, and close() never throws.
  }
}

// ---- progress thread
// ------------------------------------------------------------------------------------------

void Transport::kick() {
  const uint64_t one = 1;
  // It can only fail when the counter is full, and then the thread is awake anyway.
  static_cast<void>(!::write(kick_.get(), &one, sizeof(one)));
}

void Transport::run() {
  ::pthread_setname_np(::pthread_self(), "dpp-transport");
  // By default the kernel may add 50 us to every nap, which is more than most of them are long.
  ::prctl(PR_SET_TIMERSLACK, 1);
  try {
    progress();
  } catch (const Error& error) {
    fail(error.fault(), error.what());
  } catch (const std::exception& error) {
    fail(Fault::kSetup, std::string("progress thread: ") + error.what());
  }
}

void Transport::progress() {
  std::array<epoll_event, 16> events;
  uint64_t polling_since = 0;
  while (!stop_.load(std::memory_order_acquire)) {
    bool progressed = false;
    const Step step = advance_all(progressed);
    const bool active = urgency(step) >= urgency(Step::kPoll);
    if (progressed) bell_.ring();  // flush() sleeps on it
    if (!active || progressed || step == Step::kMoved) polling_since = 0;
    if (active) {
      const uint64_t now = monotonic_ns();
      if (polling_since == 0) polling_since = now;
      nap((now - polling_since) / kNapShare);
    }
    const int patience = active ? 0 : flush_notes() ? kNotesMs : -1;
    const int room = static_cast<int>(events.size());
    const int count = ::epoll_wait(epoll_.get(), events.data(), room, patience);
    for (int i = 0; i < count; ++i) handle(events[i].data.u64);
  }
}

Step Transport::advance_all(bool& progressed) {
  Step all = Step::kDone;
  const auto add = [&all](Step step) {
    if (urgency(step) > urgency(all)) all = step;
  };
  for (const auto& channel : outgoing_) add(channel->advance(progressed));
  for (Receiver* receiver : settling_) add(receiver->settle(progressed));
  return all;
}

// True while a note waits for room in a socket.
bool Transport::flush_notes() {
  bool unsent = false;
  for (const auto& peer : peers_) {
    peer->flush();
    unsent = unsent || peer->has_unsent();
  }
  return unsent;
}

void Transport::handle(uint64_t tag) {
  if (tag == kKickTag) {
    uint64_t count = 0;
    static_cast<void>(!::read(kick_.get(), &count, sizeof(count)));
    return;
  }
  if (tag >= kLinkTag) return handle_link(tag - kLinkTag);
  Peer& peer = *peers_[tagged_peer(tag)];
  read_notes(peer);
  if (tag == pidfd_tag(tagged_peer(tag))) {
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, peer.pidfd(), nullptr);
    // What it said before it ended has just been read: a clean goodbye is not a death.
    if (!peer.departed())
      throw Error(Fault::kPeerDead, peer.description() + " died: its process ended");
  }
}

void Transport::handle_link(uint64_t tag) {
  Link& link = *links_[tag >> 8].second;
  const size_t index = tag & 0xff;
  if (!link.on_ready(index)) {
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, link.descriptors()[index], nullptr);
  }
}

void Transport::read_notes(Peer& peer) {
  const bool open =
      peer.receive([&](Peer::Note note, std::string_view body) { on_note(peer, note, body); });
  if (!open) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, peer.socket(), nullptr);
}

void Transport::on_note(const Peer& peer, Peer::Note note, std::string_view body) {
  if (note == Peer::Note::kBye) bell_.ring();
  if (note == Peer::Note::kCredit && !body.empty()) {
    for (const auto& [rank, link] : links_) {
      if (rank == peer.rank()) link->on_credit(body);
    }
  }
  if (note != Peer::Note::kFailed || body.empty()) return;
  const auto fault = static_cast<Fault>(body[0]);
  const std::string text(body.substr(1));
  const bool known = fault > Fault::kNone && fault < Fault::kForked;
  fail(Error(known ? fault : Fault::kPeerDead, prefixed(text)), body);
}

}  // namespace dpp
