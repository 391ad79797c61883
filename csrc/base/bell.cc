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

uint32_t* address(std::atomic<uint32_t>& word) { return reinterpret_cast<uint32_t*>(&word); }

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Bell Bell::create() { return Bell(SharedMemory::create("dpp-bell", kBellBytes)); }

Bell Bell::adopt(UniqueFd fd) { return Bell(SharedMemory::adopt(std::move(fd), kBellBytes)); }

void Bell::ring() {
  State* bell = state();
  bell->word.fetch_add(1, std::memory_order_seq_cst);
  if (bell->sleepers.load(std::memory_order_seq_cst) != 0) {
    ::syscall(SYS_futex, address(bell->word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

bool Bell::wait(uint32_t seen, uint64_t nanoseconds, uint64_t spin_ns) {
  if (word() != seen) return true;
  const uint64_t start = monotonic_ns();
  const uint64_t spin_until = start + std::min(spin_ns, nanoseconds);
  uint64_t now = start;
  while (spin_ns != 0 && (now = monotonic_ns()) < spin_until) {
    if (now - start > kYieldAfterNs) ::sched_yield();
    for (int i = 0; i < 16; ++i) {
      if (word() != seen) return true;
      pause_cpu();
    }
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
