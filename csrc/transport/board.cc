#include "transport/board.h"

#include <algorithm>

namespace dpp {

std::unique_ptr<Board> Board::create(uint32_t members, uint32_t counters) {
  SharedMemory memory = SharedMemory::create("dpp-board", total_bytes(members, counters));
  return std::unique_ptr<Board>(new Board(std::move(memory), 0, members, counters));
}

std::unique_ptr<Board> Board::adopt(UniqueFd fd, uint32_t index, uint32_t members,
                                    uint32_t counters) {
  SharedMemory memory = SharedMemory::adopt(std::move(fd), total_bytes(members, counters));
  return std::unique_ptr<Board>(new Board(std::move(memory), index, members, counters));
}

Board::Board(SharedMemory memory, uint32_t index, uint32_t members, uint32_t counters)
    : memory_(std::move(memory)), index_(index), members_(members), counters_(counters) {}

// Whole cache lines per member: a member that posts does not slow the others' reads of their own
// lines.
size_t Board::member_words(uint32_t counters) { return (counters + 1 + 7) / 8 * 8; }

size_t Board::total_bytes(uint32_t members, uint32_t counters) {
  const size_t words = members * member_words(counters) + kWords;
  return (sizeof(Head) + words * sizeof(uint64_t) + 4095) / 4096 * 4096;
}

Board::Head& Board::head() const { return *reinterpret_cast<Head*>(memory_.mapping.data()); }

std::atomic<uint64_t>* Board::member(uint32_t index) const {
  auto* first = reinterpret_cast<std::atomic<uint64_t>*>(memory_.mapping.data() + sizeof(Head));
  return first + index * member_words(counters_);
}

std::atomic<uint64_t>& Board::word(uint64_t index) const {
  return member(members_)[index % kWords];
}

void Board::ring() {
  for (const auto& peer : peers_) peer->ring();
}

void Board::post(const uint64_t* counters) {
  std::atomic<uint64_t>* own = member(index_) + 1;
  for (uint32_t i = 0; i < counters_; ++i) own[i].store(counters[i], std::memory_order_release);
  ring();
}

void Board::common(uint64_t* counters) const {
  std::fill_n(counters, counters_, ~uint64_t{0});
  for (uint32_t m = 0; m < members_; ++m) {
    const std::atomic<uint64_t>* posted = member(m) + 1;
    for (uint32_t i = 0; i < counters_; ++i) {
      counters[i] = std::min(counters[i], posted[i].load(std::memory_order_acquire));
    }
  }
}

uint64_t Board::slowest_reader() const {
  uint64_t slowest = position_;
  for (uint32_t m = 1; m < members_; ++m) {
    slowest = std::min(slowest, member(m)->load(std::memory_order_acquire));
  }
  return slowest;
}

bool Board::append(uint64_t value) {
  if (position_ - slowest_reader() >= kWords) return false;
  word(position_).store(value, std::memory_order_relaxed);
  head().written.store(++position_, std::memory_order_release);
  ring();
  return true;
}

bool Board::next(uint64_t& value) {
  if (head().written.load(std::memory_order_acquire) == position_) return false;
  value = word(position_).load(std::memory_order_relaxed);
  member(index_)->store(++position_, std::memory_order_release);
  return true;
}

}  // namespace dpp
