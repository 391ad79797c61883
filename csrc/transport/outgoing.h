// The queue of one outgoing channel: keeps messages in order and lets exactly one thread drive the
// Sender.
//
// The caller's thread owns the Sender while nothing is pending (queued == done) and then sends at
// once, without a hand-over. What cannot finish there and then is published in `queued_`, which
// hands the Sender to the progress thread until `done_` has caught up.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "transport/kind.h"

namespace dpp {

class Outgoing {
 public:
  enum class Put { kDone, kPending, kFull };

  // capacity: a power of two.
  Outgoing(const ChannelSpec& spec, int peer, std::unique_ptr<Sender> sender, uint32_t capacity)
      : spec_(spec), peer_(peer), sender_(std::move(sender)), parcels_(capacity) {}

  const ChannelSpec& spec() const { return spec_; }
  int peer() const { return peer_; }

  // Caller's thread. kFull: nothing was queued.
  Put put(const Parcel& parcel);
  uint32_t checksum(const Parcel& parcel) { return sender_->checksum(parcel); }
  uint64_t num_puts() const { return queued_.load(std::memory_order_relaxed); }
  uint64_t done() const { return done_.load(std::memory_order_acquire); }
  uint64_t pending() const { return queued_.load(std::memory_order_relaxed) - done(); }

  // As Sender's.
  bool comes_to_rest(uint64_t deadline_ns) { return sender_->comes_to_rest(deadline_ns); }

  // Progress thread. Says whether work is left and how it will go on; `progressed` is set when a
  // message finished.
  Step advance(bool& progressed);

 private:
  Parcel& parcel(uint64_t index) { return parcels_[index & (parcels_.size() - 1)]; }
  Step drive(uint64_t target, bool& progressed);

  // Constant after construction.
  const ChannelSpec spec_;
  const int peer_;

  // Owner of the Sender only.
  std::unique_ptr<Sender> sender_;
  std::vector<Parcel> parcels_;
  uint64_t begun_ = 0;

  // queued_: written by the caller's thread with release, so that the progress thread sees the
  // parcel and begun_. done_: written by the owner with release, so that the other thread sees the
  // Sender as the owner left it.
  std::atomic<uint64_t> queued_{0};
  std::atomic<uint64_t> done_{0};
};

}  // namespace dpp
