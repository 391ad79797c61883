// The seam between what is common to all kinds (order, pending puts, errors, waking) and what is
// special to one: where slots live and how bytes get into them. A kind implements Sender and
// Receiver; see docs/transport.md.
//
// "Owner" below means: the caller's thread or the progress thread, never both at once (see
// outgoing.h).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/blocks.h"
#include "base/copy.h"
#include "transport/message.h"

namespace dpp {

// Payloads below this are copied out of their slot: that is shorter than giving memory away.
constexpr uint64_t kLeastHandedOver = 256 << 10;

// One message that is to be sent. `data` stays valid until Sender::finished() has said so.
struct Parcel {
  const void* data = nullptr;
  Header header;
  uintptr_t stream = 0;  // the stream whose queued work produces `data`; 0 on the CPU
  uint64_t handle = 0;   // for the kind: what prepare() made, for example an event
};

enum class Step {
  kDone,   // finished
  kAgain,  // not yet: the owner is woken when that may have changed
  kPoll,   // not yet, and nothing will wake the owner: ask again soon
  kMoved,  // as kPoll, and a piece of the message has just moved: ask again at once
};

// The sending half of one channel. Errors are thrown as dpp::Error.
class Sender {
 public:
  virtual ~Sender() = default;

  // Caller's thread, once per message, in order: note what the payload waits for (an event on
  // parcel.stream).
  virtual void prepare(Parcel&) {}
  // Caller's thread. CRC32C of the payload, which it may wait for.
  virtual uint32_t checksum(const Parcel& parcel) {
    return crc32c(parcel.data, parcel.header.bytes);
  }
  // Owner. Whether the receiver has a free slot.
  virtual bool has_credit() = 0;
  // Owner. No credit was there: arrange to be woken. True when credit has come meanwhile.
  virtual bool ask_for_credit() = 0;
  // Owner. Start to move the next message into the next slot; has_credit() was true. Several may be
  // under way.
  virtual void begin(Parcel& parcel) = 0;
  // Owner. Whether the oldest begun message has left its source and was announced to the receiver.
  virtual Step finished() = 0;
  // Closing thread, after the progress thread: waits until no GPU uses memory any more that goes
  // with this object. False: one still did at `deadline_ns`, and the object must never go.
  virtual bool comes_to_rest(uint64_t deadline_ns) {
    static_cast<void>(deadline_ns);
    return true;
  }
};

// The receiving half of one channel; calls come from the caller's thread, settle() from the
// progress thread.
class Receiver {
 public:
  virtual ~Receiver() = default;

  // Messages that arrived in full since the start. Only grows.
  virtual uint64_t arrived() = 0;
  // Messages that have arrived or are on their way: these may be taken as well, and the stream that
  // copies them out waits for them. Only grows.
  virtual uint64_t coming() { return arrived(); }
  // Any thread. Nobody may wait any longer for what was taken before it had arrived; the data that
  // stands in its place means nothing.
  virtual void let_go() {}
  // Copies the header of message `sequence` out. Not validated yet.
  virtual Header header(uint64_t sequence) = 0;
  // Moves the payload of message `sequence` to `to`. On a GPU the copy is queued on `stream`.
  virtual void copy_out(uint64_t sequence, void* to, uint64_t bytes, uintptr_t stream) = 0;
  // Gives away the memory that holds the payload of message `sequence`, in the place of copy_out();
  // null where the kind or the message has none to give.
  virtual Block hand_over(uint64_t sequence, uint64_t bytes) {
    static_cast<void>(sequence);
    static_cast<void>(bytes);
    return nullptr;
  }
  // The slot of message `sequence` may be written again, as soon as copy_out() is done with it.
  virtual void release(uint64_t sequence) = 0;
  // CRC32C of what copy_out() moved to `to`.
  virtual uint32_t checksum(const void* to, uint64_t bytes, uintptr_t) { return crc32c(to, bytes); }

  // True if settle() has work to do: every release() then wakes the progress thread.
  virtual bool settles() const { return false; }
  // Progress thread: what goes on between arrival and take(), and after release(). kPoll or kMoved
  // while it waits for a GPU. `progressed` becomes true when the caller's thread should look again.
  virtual Step settle(bool& progressed) {
    static_cast<void>(progressed);
    return Step::kDone;
  }
  // As Sender::comes_to_rest().
  virtual bool comes_to_rest(uint64_t deadline_ns) {
    static_cast<void>(deadline_ns);
    return true;
  }
};

// Descriptors of a kind that the progress thread waits for, edge triggered. One Link serves all
// channels with a peer.
class Link {
 public:
  virtual ~Link() = default;
  virtual const std::vector<int>& descriptors() const = 0;
  // Progress thread. False: do not watch this descriptor any longer.
  virtual bool on_ready(size_t index) = 0;
  virtual void on_credit(std::string_view note) = 0;
  // Progress thread, before it sleeps: whether a descriptor has ended and the peer may yet turn out
  // to have left in good order, so that this is asked again soon. Throws once that is unlikely.
  virtual bool in_doubt() { return false; }
  // Closing thread, after the progress thread: wait until what was begun has left this process's
  // memory.
  virtual void drain(uint64_t deadline_ns) { static_cast<void>(deadline_ns); }
  // In a forked child: as Peer::disown(), for connections with the peer.
  virtual void disown() {}
};

}  // namespace dpp
