#include "base/bell.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

namespace dpp {

namespace {

constexpr size_t kBellBytes = 4096;
constexpr uint64_t kNapNs =
    50'000'000;  // belt to the braces: a lost wake-up costs this much and no more

// From here on a spin gives the core to whoever waits for it: on a core of two ranks that is the
// one that will ring.
constexpr uint64_t kYieldAfterNs = 5'000;

constexpr uint64_t kShortestSpinNs = 20'000;
constexpr uint64_t kLongestSpinNs = 200'000;
// A core that is away for longer was used by somebody who computes, and not by a thread that passes
// a message on.
constexpr uint64_t kKeptNs = 100'000;
constexpr uint64_t kNoSpinNs = 250'000'000;

uint32_t* address(std::atomic<uint32_t>& word) { return reinterpret_cast<uint32_t*>(&word); }

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

uint64_t Spin::limit_ns(uint64_t now) const {
  if (!allowed_ || now < again_at_ns_) return 0;
  return std::clamp(recent_ns_ + recent_ns_ / 2, kShortestSpinNs, kLongestSpinNs);
}

bool Spin::give_core(uint64_t now) {
  ::sched_yield();
  const uint64_t back = monotonic_ns();
  if (back - now < kKeptNs) return true;
  again_at_ns_ = back + kNoSpinNs;
  return false;
}

Bell Bell::create() { return Bell(SharedMemory::create("dpp-bell", kBellBytes)); }

Bell Bell::adopt(UniqueFd fd) { return Bell(SharedMemory::adopt(std::move(fd), kBellBytes)); }

void Bell::ring() {
  State* bell = state();
  bell->word.fetch_add(1, std::memory_order_seq_cst);
  if (bell->sleepers.load(std::memory_order_seq_cst) != 0) {
    ::syscall(SYS_futex, address(bell->word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

bool Bell::wait(uint32_t seen, uint64_t nanoseconds, Spin& spin) {
  if (word() != seen) return true;
  const uint64_t start = monotonic_ns();
  const uint64_t spin_until = start + std::min(spin.limit_ns(start), nanoseconds);
  for (uint64_t now = start; now < spin_until; now = monotonic_ns()) {
    const bool keep = now - start <= kYieldAfterNs || spin.give_core(now);
    for (int i = 0; i < 16; ++i) {
      if (word() != seen) return true;
      pause_cpu();
    }
    if (!keep) break;
  }
  return sleep(seen, start + nanoseconds);
}

bool Bell::sleep(uint32_t seen, uint64_t deadline_ns) {
  State* bell = state();
  bell->sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (word() == seen) {
    const uint64_t now = monotonic_ns();
    if (now >= deadline_ns) break;
    const uint64_t nap = std::min(deadline_ns - now, kNapNs);
    const timespec limit = {0, static_cast<long>(nap)};
    ::syscall(SYS_futex, address(bell->word), FUTEX_WAIT, seen, &limit, nullptr, 0);
  }
  bell->sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return word() != seen;
}

}  // namespace dpp
