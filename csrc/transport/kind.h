// The seam between what is common to all kinds (order, pending puts, errors, waking) and what is special to one:
// where slots live and how bytes get into them. A kind implements Sender and Receiver; see docs/transport.md.
//
// "Owner" below means: the caller's thread or the progress thread, never both at once (see outgoing.h).
#pragma once

#include <cstdint>
#include <string>

#include "transport/message.h"

namespace dpp {

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
};

// The sending half of one channel. Errors are thrown as dpp::Error.
class Sender {
 public:
  virtual ~Sender() = default;

  // Caller's thread, once per message, in order: note what the payload waits for (an event on parcel.stream).
  virtual void prepare(Parcel&) {}
  // Owner. Whether the receiver has a free slot.
  virtual bool has_credit() = 0;
  // Owner. No credit was there: arrange to be woken. True when credit has come meanwhile.
  virtual bool ask_for_credit() = 0;
  // Owner. Start to move the next message into the next slot; has_credit() was true. Several may be under way.
  virtual void begin(Parcel& parcel) = 0;
  // Owner. Whether the oldest begun message has left its source and was announced to the receiver.
  virtual Step finished() = 0;
};

// The receiving half of one channel; all calls come from the caller's thread.
class Receiver {
 public:
  virtual ~Receiver() = default;

  // Messages that arrived in full since the start. Only grows.
  virtual uint64_t arrived() = 0;
  // Copies the header of message `sequence` out. Not validated yet.
  virtual Header header(uint64_t sequence) = 0;
  // Moves the payload of message `sequence` to `to`. On a GPU the copy is queued on `stream`.
  virtual void copy_out(uint64_t sequence, void* to, uint64_t bytes, uintptr_t stream) = 0;
  // The slot of message `sequence` may be written again, as soon as copy_out() is done with it.
  virtual void release(uint64_t sequence) = 0;
};

}  // namespace dpp
