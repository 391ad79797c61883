#include "transport/board.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace dpp {

namespace {
// A reader that has read so many words more tells so, long before the writer waits for it.
constexpr uint64_t kTellEvery = Board::kWords / 4;

std::string_view bytes_of(const uint64_t* values, size_t count) {
  return {reinterpret_cast<const char*>(values), count * sizeof(uint64_t)};
}
}  // namespace

std::unique_ptr<Board> Board::create(uint32_t lines, uint32_t counters, bool spans_hosts) {
  if (spans_hosts && (counters + 1) * sizeof(uint64_t) > Peer::kMaxNote) {
    throw Error(Fault::kSetup, "a board between hosts with " + std::to_string(counters) +
                                   " channels per member; " +
                                   std::to_string(Peer::kMaxNote / sizeof(uint64_t) - 1) +
                                   " are the most");
  }
  SharedMemory memory = SharedMemory::create("dpp-board", total_bytes(lines, counters));
  return std::unique_ptr<Board>(new Board(std::move(memory), 0, lines, counters));
}

std::unique_ptr<Board> Board::adopt(UniqueFd fd, uint32_t index, uint32_t lines,
                                    uint32_t counters) {
  SharedMemory memory = SharedMemory::adopt(std::move(fd), total_bytes(lines, counters));
  return std::unique_ptr<Board>(new Board(std::move(memory), index, lines, counters));
}

Board::Board(SharedMemory memory, uint32_t index, uint32_t lines, uint32_t counters)
    : memory_(std::move(memory)),
      index_(index),
      lines_(lines),
      counters_(counters),
      line_(counters + 1),
      told_(counters + 1) {}

// Whole cache lines per member: a member that posts does not slow the others' reads of their own
// lines.
size_t Board::line_words(uint32_t counters) { return (counters + 1 + 7) / 8 * 8; }

size_t Board::total_bytes(uint32_t lines, uint32_t counters) {
  const size_t words = lines * line_words(counters) + kWords;
  return (sizeof(Head) + words * sizeof(uint64_t) + 4095) / 4096 * 4096;
}

Board::Head& Board::head() const { return *reinterpret_cast<Head*>(memory_.mapping.data()); }

std::atomic<uint64_t>* Board::line(uint32_t index) const {
  auto* first = reinterpret_cast<std::atomic<uint64_t>*>(memory_.mapping.data() + sizeof(Head));
  return first + index * line_words(counters_);
}

std::atomic<uint64_t>& Board::word(uint64_t index) const { return line(lines_)[index % kWords]; }

void Board::ring() {
  for (const auto& peer : peers_) peer->ring();
}

// After a change of this member's line. True if this process's progress thread has work: the head's
// relays the line.
bool Board::wake_relay() {
  if (upstream_ && index_ != 0) upstream_->send_note(Peer::Note::kLook, {});
  return is_relay() || (upstream_ && upstream_->has_unsent());
}

bool Board::post(const uint64_t* counters) {
  std::atomic<uint64_t>* own = line(index_) + 1;
  for (uint32_t i = 0; i < counters_; ++i) own[i].store(counters[i], std::memory_order_release);
  if (upstream_) return wake_relay();
  ring();
  return false;
}

void Board::common(uint64_t* counters) const {
  std::fill_n(counters, counters_, ~uint64_t{0});
  for (uint32_t m = 0; m < lines_; ++m) {
    const std::atomic<uint64_t>* posted = line(m) + 1;
    for (uint32_t i = 0; i < counters_; ++i) {
      counters[i] = std::min(counters[i], posted[i].load(std::memory_order_acquire));
    }
  }
}

// The leader reads no words; the head of another host does.
uint64_t Board::slowest_reader(uint64_t written) const {
  uint64_t slowest = written;
  for (uint32_t m = is_relay() ? 0 : 1; m < lines_; ++m) {
    slowest = std::min(slowest, line(m)->load(std::memory_order_acquire));
  }
  return slowest;
}

bool Board::write(uint64_t value) {
  const uint64_t written = head().written.load(std::memory_order_relaxed);
  if (written - slowest_reader(written) >= kWords) return false;
  word(written).store(value, std::memory_order_relaxed);
  head().written.store(written + 1, std::memory_order_release);
  ring();
  return true;
}

Board::Append Board::append(uint64_t value) {
  if (!write(value)) return Append::kFull;
  bool unsent = false;
  for (const auto& host : hosts_) {
    host->send_note(Peer::Note::kWord, bytes_of(&value, 1));
    unsent = unsent || host->has_unsent();
  }
  return unsent ? Append::kUnsent : Append::kDone;
}

bool Board::next(uint64_t& value, bool& relay) {
  if (head().written.load(std::memory_order_acquire) == position_) return false;
  value = word(position_).load(std::memory_order_relaxed);
  line(index_)->store(++position_, std::memory_order_release);
  if (upstream_ && position_ % kTellEvery == 0) relay = wake_relay();
  return true;
}

bool Board::relay() {
  if (!is_relay()) return false;
  // What is not sent yet would only be followed by more; the next pass sends the newest.
  if (upstream_->has_unsent()) return true;
  line_[0] = slowest_reader(head().written.load(std::memory_order_relaxed));
  common(line_.data() + 1);
  const bool changed = !std::equal(line_.begin() + 1, line_.end(), told_.begin() + 1);
  if (!changed && line_[0] - told_[0] < kTellEvery) return false;
  upstream_->send_note(Peer::Note::kArrivals, bytes_of(line_.data(), line_.size()));
  told_ = line_;
  return upstream_->has_unsent();
}

void Board::accept(const Peer& peer, Peer::Note note, std::string_view body) {
  const auto is_sender = [&peer](const std::shared_ptr<Peer>& one) { return one.get() == &peer; };
  if (note == Peer::Note::kLook && is_relay() && body.empty()) {
    if (std::any_of(peers_.begin(), peers_.end(), is_sender)) return;  // relay() follows
  }
  if (note == Peer::Note::kWord && is_relay() && is_sender(upstream_) &&
      body.size() == sizeof(uint64_t)) {
    uint64_t value = 0;
    std::memcpy(&value, body.data(), sizeof(value));
    if (write(value)) return;
  }
  const auto host = std::find_if(hosts_.begin(), hosts_.end(), is_sender);
  if (note == Peer::Note::kArrivals && host != hosts_.end() &&
      body.size() == (counters_ + 1) * sizeof(uint64_t)) {
    const auto number = static_cast<uint32_t>(host - hosts_.begin());
    return accept_line(peer, lines_ - static_cast<uint32_t>(hosts_.size()) + number, body);
  }
  throw Error(Fault::kProtocol, peer.description() + " sent a note of the board, kind " +
                                    std::to_string(static_cast<int>(note)) + ", " +
                                    std::to_string(body.size()) +
                                    " bytes, that this rank does not expect from it");
}

void Board::accept_line(const Peer& host, uint32_t index, std::string_view body) {
  std::vector<uint64_t> told(counters_ + 1);
  std::memcpy(told.data(), body.data(), body.size());
  std::atomic<uint64_t>* posted = line(index);
  bool grows = told[0] <= head().written.load(std::memory_order_acquire);
  for (uint32_t i = 0; i <= counters_; ++i) {
    grows = grows && told[i] >= posted[i].load(std::memory_order_relaxed);
  }
  if (!grows) {
    throw Error(Fault::kProtocol, host.description() +
                                      " sent arrivals of its host that shrink, or that it has read "
                                      "words that were not sent");
  }
  for (uint32_t i = 0; i <= counters_; ++i) posted[i].store(told[i], std::memory_order_release);
}

}  // namespace dpp
