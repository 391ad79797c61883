#include "transport/outgoing.h"

namespace dpp {

Outgoing::Put Outgoing::put(const Parcel& source) {
  const uint64_t queued = queued_.load(std::memory_order_relaxed);
  const uint64_t done = done_.load(std::memory_order_acquire);
  if (queued - done == parcels_.size()) return Put::kFull;
  Parcel& next = parcel(queued);
  next = source;
  seal_header(next.header, spec_, queued + 1);
  sender_->prepare(next);
  Step step = Step::kAgain;
  bool progressed = false;
  if (queued == done) step = drive(queued + 1, progressed);
  // From here on the progress thread may own the Sender, unless done_ is already queued + 1.
  queued_.store(queued + 1, std::memory_order_release);
  return step == Step::kDone ? Put::kDone : Put::kPending;
}

Step Outgoing::advance(bool& progressed) {
  const uint64_t queued = queued_.load(std::memory_order_acquire);
  // done_ may be one ahead of queued_ for a moment, when put() finished its message by itself.
  if (static_cast<int64_t>(queued - done_.load(std::memory_order_acquire)) <= 0) return Step::kDone;
  return drive(queued, progressed);
}

Step Outgoing::drive(uint64_t target, bool& progressed) {
  uint64_t done = done_.load(std::memory_order_relaxed);
  while (true) {
    bool starved = false;
    while (begun_ != target) {
      if (!sender_->has_credit() && !sender_->ask_for_credit()) {
        starved = true;
        break;
      }
      sender_->begin(parcel(begun_));
      ++begun_;
    }
    const uint64_t before = done;
    while (done != begun_) {
      const Step step = sender_->finished();
      if (step != Step::kDone) return step;
      progressed = true;
      done_.store(++done, std::memory_order_release);
      if (done == target) return Step::kDone;  // not the owner any more: touch nothing
    }
    // What has finished may have made room for more.
    if (starved && done == before) return Step::kAgain;
  }
}

}  // namespace dpp
