#include "transport/transport.h"

#include <poll.h>

#include <algorithm>

#include "base/copy.h"

namespace dpp {

namespace {

constexpr uint64_t kRoomNapNs = 1'000'000;
constexpr uint64_t kByeNs = 500'000'000;
constexpr uint64_t kRestNs = 2'000'000'000;
constexpr uint64_t kDrainNs = 2'000'000'000;

uint64_t largest_slot(const std::vector<ChannelSpec>& channels) {
  uint64_t largest = 0;
  for (const ChannelSpec& channel : channels) largest = std::max(largest, channel.slot_bytes);
  return largest;
}

// The first `limit` bytes of a text, and never a part of a character of UTF-8.
std::string_view cut(std::string_view text, size_t limit) {
  if (text.size() <= limit) return text;
  while (limit != 0 && (static_cast<unsigned char>(text[limit]) & 0xc0) == 0x80) --limit;
  return text.substr(0, limit);
}

}  // namespace

Transport::Transport(const Settings& settings, std::vector<ChannelSpec> incoming,
                     std::vector<ChannelSpec> outgoing)
    : settings_(settings),
      copier_(Copier::measured(std::max(largest_slot(incoming), largest_slot(outgoing)))),
      bell_(Bell::create()),
      outgoing_specs_(std::move(outgoing)),
      outgoing_(outgoing_specs_.size()) {
  for (const ChannelSpec& spec : incoming) {
    Incoming channel;
    channel.spec = spec;
    channel.arrived_ns.resize(spec.depth);
    incoming_.push_back(std::move(channel));
  }
}

Transport::~Transport() { close(); }

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
  if (failure_.happened()) throw_failure();
}

void Transport::throw_failure() {
  throw Error(failure_.error().fault(), failure_.error().what() + oldest_missing());
}

// The channel that has brought the fewest messages: what this rank most likely waits for.
std::string Transport::oldest_missing() const {
  const auto behind = [](const Incoming& one, const Incoming& other) {
    return one.seen < other.seen;
  };
  const auto oldest = std::min_element(incoming_.begin(), incoming_.end(), behind);
  if (oldest == incoming_.end()) return "";
  std::string text = "; the oldest missing message here is number " +
                     std::to_string(oldest->seen + 1) + " of " + oldest->spec.text();
  if (oldest->taken == oldest->seen && oldest->taken != 0) {
    text += ", after microbatch " + std::to_string(oldest->header.microbatch) + " of iteration " +
            std::to_string(oldest->header.iteration);
  }
  return text;
}

Outgoing::Put Transport::put(size_t channel, const Parcel& parcel) {
  check();
  Outgoing& out = *outgoing_.at(channel);
  if (out.pending() == settings_.max_pending) return Outgoing::Put::kFull;
  try {
    Parcel sealed = parcel;
    sealed.header.sent_ns = monotonic_ns();
    if (settings_.checksum) {
      sealed.header.has_payload_crc = 1;
      sealed.header.payload_crc = out.checksum(sealed);
    }
    const Outgoing::Put result = out.put(sealed);
    if (result == Outgoing::Put::kPending) watch_.kick();
    return result;
  } catch (const Error& error) {
    fail_and_throw(error);
  }
}

bool Transport::wait_for_room(size_t channel, uint64_t since_ns, uint64_t nanoseconds) {
  const Outgoing& out = *outgoing_.at(channel);
  const uint64_t deadline = since_ns + settings_.timeout_ns;
  const uint64_t until = std::min(deadline, monotonic_ns() + nanoseconds);
  while (true) {
    check();
    if (out.pending() != settings_.max_pending) return true;
    const uint64_t now = monotonic_ns();
    if (now >= deadline) break;
    if (now >= until) return false;
    const timespec nap = {0, static_cast<long>(std::min(kRoomNapNs, until - now))};
    ::nanosleep(&nap, nullptr);
  }
  const std::string what = std::to_string(out.pending()) + " puts wait for credit on " +
                           out.spec().text() + "; rank " + std::to_string(out.peer());
  if (departed(out.peer())) break_off(Fault::kPeerDead, what + " has closed its transport");
  break_off(Fault::kTimeout, what + " is alive but takes nothing (" + setting("timeout") + ")");
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
      // What was taken while it was coming counts, though nothing may have been heard of it since.
      arrived[i] = std::max(channel.receiver->arrived(), channel.taken);
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

void Transport::coming(uint64_t* total) {
  check();
  try {
    for (size_t i = 0; i < incoming_.size(); ++i) {
      total[i] = std::max(incoming_[i].receiver->coming(), incoming_[i].seen);
    }
  } catch (const Error& error) {
    fail_and_throw(error);
  }
}

Transport::Incoming& Transport::takeable_channel(size_t index) {
  check();
  Incoming& channel = incoming_.at(index);
  const auto coming = [&] { return channel.receiver->coming(); };
  if (channel.seen == channel.taken && keeping_failures(coming) <= channel.taken) {
    throw std::out_of_range("rank " + std::to_string(settings_.rank) + ": nothing has arrived on " +
                            channel.spec.text());
  }
  return channel;
}

const Header& Transport::head(size_t index, uint64_t& arrived_ns) {
  Incoming& channel = takeable_channel(index);
  if (!channel.has_header) {
    channel.header = keeping_failures([&] { return channel.receiver->header(channel.taken + 1); });
    const std::string fault = header_fault(channel.header, channel.spec, channel.taken + 1);
    if (!fault.empty()) {
      break_off(Fault::kProtocol, find_peer(channel.peer)->description() +
                                      " sent a broken header on " + channel.spec.text() + ": " +
                                      fault + "; it is not listened to any longer");
    }
    channel.has_header = true;
  }
  const bool arrived = channel.seen != channel.taken;
  arrived_ns = arrived ? channel.arrived_ns[channel.taken % channel.arrived_ns.size()] : 0;
  return channel.header;
}

Transport::Incoming& Transport::read_channel(size_t index, uint64_t bytes) {
  Incoming& channel = takeable_channel(index);
  if (!channel.has_header || bytes != channel.header.bytes) {
    throw std::invalid_argument("take() without head(), or with another number of bytes");
  }
  return channel;
}

void Transport::take(size_t index, void* to, uint64_t bytes, uintptr_t stream) {
  Incoming& channel = read_channel(index, bytes);
  const bool torn = keeping_failures([&] {
    channel.receiver->copy_out(channel.taken + 1, to, bytes, stream);
    return channel.header.has_payload_crc &&
           channel.receiver->checksum(to, bytes, stream) != channel.header.payload_crc;
  });
  if (torn) report_torn(channel);
  finish_take(channel);
}

Block Transport::take_memory(size_t index) {
  const uint64_t bytes = incoming_.at(index).header.bytes;
  Incoming& channel = read_channel(index, bytes);
  Block memory =
      keeping_failures([&] { return channel.receiver->hand_over(channel.taken + 1, bytes); });
  if (!memory) return nullptr;
  if (channel.header.has_payload_crc && crc32c(memory.get(), bytes) != channel.header.payload_crc) {
    report_torn(channel);
  }
  finish_take(channel);
  return memory;
}

void Transport::report_torn(const Incoming& channel) {
  break_off(Fault::kProtocol, "payload checksum of microbatch " +
                                  std::to_string(channel.header.microbatch) + " on " +
                                  channel.spec.text() + " is wrong");
}

void Transport::finish_take(Incoming& channel) {
  const uint64_t sequence = channel.taken + 1;
  keeping_failures([&] { channel.receiver->release(sequence); });
  const auto has_unsent = [](const auto& peer) { return peer->has_unsent(); };
  if (channel.receiver->settles() || std::any_of(peers_.begin(), peers_.end(), has_unsent)) {
    watch_.kick();
  }
  channel.taken = sequence;
  channel.seen = std::max(channel.seen, sequence);
  channel.has_header = false;
}

bool Transport::wait(uint64_t nanoseconds) {
  check();
  if (bell_.word() != seen_word_) return true;
  const uint64_t start = monotonic_ns();
  const bool rung = bell_.wait(seen_word_, nanoseconds, spin_);
  spin_.learn(monotonic_ns() - start);
  check();
  return rung;
}

// ---- board
// ----------------------------------------------------------------------------------------------------

Board& Transport::board() {
  check();
  if (!board_) {
    throw Error(Fault::kUnavailable,
                prefixed("this transport has no board (open it with board_ranks)"));
  }
  return *board_;
}

void Transport::board_append(uint64_t word) {
  const uint64_t deadline = monotonic_ns() + settings_.timeout_ns;
  Board::Append result;
  while ((result = board().append(word)) == Board::Append::kFull) {
    if (monotonic_ns() > deadline) {
      break_off(Fault::kTimeout, "a member of the stage's board has not read the last " +
                                     std::to_string(Board::kWords) + " words; it is alive (" +
                                     setting("timeout") + ")");
    }
    const timespec nap = {0, static_cast<long>(kRoomNapNs)};
    ::nanosleep(&nap, nullptr);
  }
  if (result == Board::Append::kUnsent) watch_.kick();
}

void Transport::board_post(const uint64_t* counters) {
  if (board().post(counters)) watch_.kick();
}

bool Transport::board_next(uint64_t& word) {
  bool relay = false;
  const bool found = board().next(word, relay);
  if (relay) watch_.kick();
  return found;
}

// ---- failures and closing
// -------------------------------------------------------------------------------------

bool Transport::departed(int rank) {
  const std::shared_ptr<Peer> peer = find_peer(rank);
  return peer->departed() && num_arrived_from(rank) >= peer->num_sent();
}

uint64_t Transport::num_arrived_from(int peer) {
  uint64_t sum = 0;
  for (const Incoming& channel : incoming_) {
    if (channel.peer != peer || !channel.receiver) continue;
    sum += std::max(keeping_failures([&] { return channel.receiver->arrived(); }), channel.taken);
  }
  return sum;
}

uint64_t Transport::num_sent_to(int peer) const {
  uint64_t sum = 0;
  for (const auto& channel : outgoing_) {
    if (channel && channel->peer() == peer) sum += channel->done();
  }
  return sum;
}

std::string Transport::prefixed(const std::string& text) const {
  return "rank " + std::to_string(settings_.rank) + ": " + text;
}

void Transport::fail(Fault fault, const std::string& text) {
  std::string body(1, static_cast<char>(fault));
  body += cut(text, Peer::kMaxNote - 64);
  body += " (reported by rank " + std::to_string(settings_.rank) + ")";
  fail(Error(fault, prefixed(text)), body);
}

void Transport::let_go() {
  for (Receiver* receiver : settling_) receiver->let_go();
}

void Transport::fail(const Error& error, std::string_view body) {
  if (!failure_.keep(error)) return;
  let_go();
  // Ranks that are not linked to the culprit learn of it from us, before our caller wakes and may
  // end the process.
  for (const auto& peer : peers_) {
    if (!peer->departed()) peer->send_note(Peer::Note::kFailed, body);
  }
  bell_.ring();
}

// A failure of the caller's thread. What check() threw is known already.
void Transport::fail_and_throw(const Error& error) {
  if (failure_.happened()) throw_failure();
  break_off(error.fault(), error.what());
}

void Transport::break_off(Fault fault, const std::string& text) {
  fail(fault, text);
  throw failure_.error();
}

void Transport::abort(const std::string& reason) {
  if (closed_ || fork_guard_.forked()) return;
  fail(Fault::kPeerDead, "rank " + std::to_string(settings_.rank) + " gave up: " + reason);
}

void Transport::close() {
  if (closed_) return;
  closed_ = true;
  if (fork_guard_.forked()) {
    // The thread and the connections are the parent's. What disown() has left of our copies of
    // descriptors closes with this object.
    static_cast<void>(thread_.release());
    return;
  }
  const uint64_t deadline = monotonic_ns() + kDrainNs;
  if (thread_) drain_puts(deadline);
  let_go();
  stop_.store(true, std::memory_order_release);
  watch_.kick();
  if (thread_) thread_->join();
  thread_.reset();
  drain_links(deadline);
  take_leave();
  keep_what_is_used();
  settling_.clear();
  outgoing_.clear();
  incoming_.clear();
  links_.clear();
  board_.reset();
  for (const auto& peer : peers_) peer->disown();  // also where a sender stays that knows it
  peers_.clear();
  watch_.close();
  bell_.close_descriptor();
}

void Transport::take_leave() {
  const uint64_t deadline = monotonic_ns() + kByeNs;
  for (const auto& peer : peers_) {
    const uint64_t num_sent = num_sent_to(peer->rank());
    peer->send_note(Peer::Note::kBye,
                    std::string_view(reinterpret_cast<const char*>(&num_sent), sizeof(num_sent)));
    const uint64_t now = monotonic_ns();
    const int patience = now < deadline ? static_cast<int>((deadline - now) / 1'000'000) : 0;
    pollfd writable = {peer->socket(), POLLOUT, 0};
    if (peer->has_unsent() && ::poll(&writable, 1, patience) > 0) peer->flush();
  }
  for (const auto& peer : peers_) {
    if (!peer->departed()) wait_until_received(peer->socket(), deadline);
  }
}

// A GPU that hangs, in a collective with a dead rank say, never does what is queued on it. Memory
// that this would use stays until the process ends: freeing it waits, or takes it from the GPU.
void Transport::keep_what_is_used() {
  const uint64_t deadline = monotonic_ns() + kRestNs;
  for (auto& channel : outgoing_) {
    if (channel && !channel->comes_to_rest(deadline)) static_cast<void>(channel.release());
  }
  for (Incoming& channel : incoming_) {
    auto& receiver = channel.receiver;
    if (receiver && !receiver->comes_to_rest(deadline)) static_cast<void>(receiver.release());
  }
}

void Transport::disown() {
  // Not what another thread of the parent was just taking apart.
  if (closed_ || !fork_guard_.forked()) return;
  for (const auto& peer : peers_) peer->disown();
  for (const auto& [rank, link] : links_) link->disown();
}

std::string Transport::failure() { return failure_.happened() ? failure_.error().what() : ""; }

// The progress thread goes on until all that was put to peers that are there has been sent.
void Transport::drain_puts(uint64_t deadline_ns) const {
  const auto is_pending = [this](const auto& channel) {
    return channel->pending() != 0 && !find_peer(channel->peer())->departed();
  };
  const timespec nap = {0, static_cast<long>(kRoomNapNs)};
  while (!failure_.happened() && monotonic_ns() < deadline_ns &&
         std::any_of(outgoing_.begin(), outgoing_.end(), is_pending)) {
    ::nanosleep(&nap, nullptr);
  }
}

void Transport::drain_links(uint64_t deadline_ns) {
  if (failure_.happened()) return;
  try {
    for (const auto& [peer, link] : links_) link->drain(deadline_ns);
  } catch (const Error&) {
    // The peer is gone: there is nothing left to send to, and close() never throws.
  }
}

}  // namespace dpp
