// The progress thread of Transport: sends what could not be sent at once, settles what was taken,
// reads notes and watches lives.
#include <pthread.h>
#include <sys/prctl.h>
#include <time.h>

#include <algorithm>

#include "transport/transport.h"

namespace dpp {

namespace {

constexpr int kNotesMs = 5;
// While a GPU works the progress thread asks again after a 32nd of the time that it has waited so
// far: what it waits for is noticed at most 3 % late, and a long wait costs little.
constexpr uint64_t kNapShare = 32;
constexpr uint64_t kShortestNapNs = 2'000;
constexpr uint64_t kLongestNapNs = 25'000;

// Urgency with which the progress thread asks again.
int urgency(Step step) {
  switch (step) {
    case Step::kDone: return 0;
    case Step::kAgain: return 1;
    case Step::kPoll: return 2;
    case Step::kMoved: return 3;
  }
  return 0;
}

void nap(uint64_t nanoseconds) {
  if (nanoseconds < kShortestNapNs) return;
  const timespec length = {0, static_cast<long>(std::min(nanoseconds, kLongestNapNs))};
  ::nanosleep(&length, nullptr);
}

}  // namespace

void Transport::run() {
  ::pthread_setname_np(::pthread_self(), "dpp-transport");
  // By default the kernel may add 50 us to every nap, which is more than most of them are long.
  ::prctl(PR_SET_TIMERSLACK, 1);
  try {
    progress();
  } catch (const Error& error) {
    fail(error.fault(), error.what());
  } catch (const std::exception& error) {
    fail(Fault::kSetup, std::string("progress thread: ") + error.what());
  }
}

void Transport::progress() {
  uint64_t polling_since = 0;
  while (!stop_.load(std::memory_order_acquire)) {
    bool progressed = false;
    const Step step = advance_all(progressed);
    const bool active = urgency(step) >= urgency(Step::kPoll);
    if (progressed) bell_.ring();  // flush() sleeps on it
    if (!active || progressed || step == Step::kMoved) polling_since = 0;
    if (active) {
      const uint64_t now = monotonic_ns();
      if (polling_since == 0) polling_since = now;
      nap((now - polling_since) / kNapShare);
    }
    bool unsent = flush_notes();
    if (board_) unsent = board_->relay() || unsent;  // behind the flush, which makes room for it
    const bool doubtful = links_in_doubt();
    const int patience = active ? 0 : unsent || doubtful ? kNotesMs : -1;
    for (const Watch::Ready& ready : watch_.wait(patience)) handle(ready);
  }
}

Step Transport::advance_all(bool& progressed) {
  Step all = Step::kDone;
  const auto add = [&all](Step step) {
    if (urgency(step) > urgency(all)) all = step;
  };
  for (const auto& channel : outgoing_) add(channel->advance(progressed));
  for (Receiver* receiver : settling_) add(receiver->settle(progressed));
  return all;
}

// True while a note waits for room in a socket.
bool Transport::flush_notes() {
  bool unsent = false;
  for (const auto& peer : peers_) {
    peer->flush();
    unsent = unsent || peer->has_unsent();
  }
  return unsent;
}

// True while a link waits for a goodbye.
bool Transport::links_in_doubt() {
  bool doubtful = false;
  for (const auto& [peer, link] : links_) doubtful = link->in_doubt() || doubtful;
  return doubtful;
}

void Transport::handle(const Watch::Ready& ready) {
  if (ready.source == Watch::Source::kLink) {
    Link& link = *links_[ready.owner].second;
    if (!link.on_ready(ready.index)) watch_.remove(link.descriptors()[ready.index]);
    return;
  }
  Peer& peer = *peers_[ready.owner];
  const bool has_ended = ready.source == Watch::Source::kProcess;
  read_notes(peer, has_ended ? Peer::kReadsOfTheEnd : Peer::kMostReads);
  if (!has_ended) return;
  watch_.remove(peer.pidfd());
  // What it said before it ended has just been read: a clean goodbye is not a death.
  if (!peer.departed())
    throw Error(Fault::kPeerDead, peer.description() + " died: its process ended");
}

void Transport::read_notes(Peer& peer, int most_reads) {
  const auto react = [&](Peer::Note note, std::string_view body) { on_note(peer, note, body); };
  const bool open = peer.receive(react, most_reads);
  if (!open) watch_.remove(peer.socket());
}

void Transport::on_note(const Peer& peer, Peer::Note note, std::string_view body) {
  if (note == Peer::Note::kBye) bell_.ring();
  if (note == Peer::Note::kCredit && !body.empty()) {
    for (const auto& [rank, link] : links_) {
      if (rank == peer.rank()) link->on_credit(body);
    }
  }
  if (note >= Peer::Note::kArrivals) {
    if (!board_) {
      throw Error(Fault::kProtocol,
                  peer.description() + " sent a note of a board, which this rank does not have");
    }
    board_->accept(peer, note, body);
    bell_.ring();
  }
  if (note != Peer::Note::kFailed || body.empty()) return;
  const auto fault = static_cast<Fault>(body[0]);
  const std::string text(body.substr(1));
  const bool known = fault > Fault::kNone && fault < Fault::kForked;
  fail(Error(known ? fault : Fault::kPeerDead, prefixed(text)), body);
}

}  // namespace dpp
