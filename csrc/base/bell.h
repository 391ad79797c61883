// The one thing that an idle rank sleeps on: a futex word in shared memory that every peer may
// ring.
//
//   ringer:  change something; word += 1; if sleepers > 0: futex_wake
//   sleeper: seen = word; look for changes; sleepers += 1; if word == seen: futex_wait(word, seen)
//
// word and sleepers are sequentially consistent: either the ringer sees the sleeper, or the sleeper
// sees the new word.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/os.h"

namespace dpp {

// How long a rank looks at its bell before it sleeps: 1.5 times its recent wait. A spin gives its
// core to others that want it. Where one of them keeps the core, waits sleep at once for a while:
// the kernel runs a sleeper as soon as it is woken, but one that has yielded only when the other's
// slice of some milliseconds is over.
class Spin {
 public:
  explicit Spin(bool allowed) : allowed_(allowed) {}

  uint64_t limit_ns(uint64_t now) const;
  // False if another process kept the core: sleep now.
  bool give_core(uint64_t now);
  void learn(uint64_t waited_ns) { recent_ns_ = (3 * recent_ns_ + waited_ns) / 4; }

 private:
  const bool allowed_;
  uint64_t recent_ns_ = 0;
  uint64_t again_at_ns_ = 0;
};

class Bell {
 public:
  static Bell create();
  static Bell adopt(UniqueFd fd);

  int fd() const { return memory_.fd.get(); }
  uint32_t word() const { return state()->word.load(std::memory_order_seq_cst); }
  // Gives the descriptor back; ringing still works.
  void close_descriptor() { memory_.fd.reset(); }
  void ring();
  // Returns true as soon as the word differs from `seen`, false after `nanoseconds`. Spins first,
  // for as long as `spin` says.
  bool wait(uint32_t seen, uint64_t nanoseconds, Spin& spin);

 private:
  struct State {
    std::atomic<uint32_t> word;
    std::atomic<uint32_t> sleepers;
  };
  static_assert(std::atomic<uint32_t>::is_always_lock_free);

  explicit Bell(SharedMemory memory) : memory_(std::move(memory)) {}
  State* state() const { return reinterpret_cast<State*>(memory_.mapping.data()); }
  bool sleep(uint32_t seen, uint64_t deadline_ns);

  SharedMemory memory_;
};

}  // namespace dpp
