#include "transport/watch.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>

#include "base/error.h"

namespace dpp {

namespace {

constexpr size_t kMostAtOnce = 16;

// epoll data: source 8 bits | owner 28 | index 28.
constexpr int kFieldBits = 28;
constexpr uint64_t kField = (uint64_t{1} << kFieldBits) - 1;

uint64_t packed(const Watch::Ready& ready) {
  return static_cast<uint64_t>(ready.source) << 2 * kFieldBits | ready.owner << kFieldBits |
         ready.index;
}

Watch::Ready unpacked(uint64_t data) {
  return {static_cast<Watch::Source>(data >> 2 * kFieldBits), data >> kFieldBits & kField,
          data & kField};
}

}  // namespace

Watch::Watch()
    : epoll_(::epoll_create1(EPOLL_CLOEXEC)), kick_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!epoll_ || !kick_) throw Error(Fault::kSetup, with_errno("epoll and eventfd (ulimit -n?)"));
  ready_.reserve(kMostAtOnce);
  add(kick_.get(), {Source::kKick});
}

void Watch::add(int fd, const Ready& as, bool once) {
  epoll_event event = {};
  event.events = once ? EPOLLIN | EPOLLOUT | EPOLLET : EPOLLIN;
  event.data.u64 = packed(as);
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    throw Error(Fault::kSetup, with_errno("watching a descriptor"));
  }
}

void Watch::remove(int fd) { ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

void Watch::kick() {
  const uint64_t one = 1;
  // It can only fail when the counter is full, and then the thread is awake anyway.
  static_cast<void>(!::write(kick_.get(), &one, sizeof(one)));
}

const std::vector<Watch::Ready>& Watch::wait(int milliseconds) {
  std::array<epoll_event, kMostAtOnce> events;
  const int count = ::epoll_wait(epoll_.get(), events.data(), kMostAtOnce, milliseconds);
  ready_.clear();
  for (int i = 0; i < count; ++i) {
    const Ready found = unpacked(events[static_cast<size_t>(i)].data.u64);
    uint64_t kicks = 0;
    if (found.source == Source::kKick) {
      static_cast<void>(!::read(kick_.get(), &kicks, sizeof(kicks)));
    } else {
      ready_.push_back(found);
    }
  }
  return ready_;
}

void Watch::close() {
  epoll_.reset();
  kick_.reset();
}

}  // namespace dpp
