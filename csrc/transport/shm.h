// Kind "shm": slots in sealed shared memory of the receiver, written by the sender, for CPU tensors
// on one host.
//
// One block per pair of ranks and direction, so that a sender can reach nothing but its own slots:
//
//   [control of channel 0 | 1 | ...] then for each channel [headers x depth][payload x depth]
//
// The sender writes payload, header, then `tail` with release; the receiver acquires `tail`, copies
// the header out and validates the copy. The receiver frees a slot by storing `head` with release.
//
// A GPU kind whose payload is still on its way may say so before: it stores `begun`, and its GPU
// writes the message's number into `written` behind the payload, for which the receiver's GPU can
// wait.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "base/copy.h"
#include "base/os.h"
#include "transport/kind.h"
#include "transport/peer.h"

namespace dpp {

class ShmBlock {
 public:
  static std::shared_ptr<ShmBlock> create(std::vector<ChannelSpec> channels);
  static std::shared_ptr<ShmBlock> adopt(UniqueFd fd, std::vector<ChannelSpec> channels);

  int fd() const { return memory_.fd.get(); }

  // The part that GPUs write, and where in it a channel's `written` lies.
  std::pair<void*, size_t> controls() const;
  static size_t written_offset(size_t channel) {
    return channel * sizeof(Control) + offsetof(Control, written);
  }

 private:
  friend class ShmSender;
  friend class ShmReceiver;

  struct Control {
    alignas(64) std::atomic<uint64_t> tail;  // messages announced; written by the sender
    alignas(64) std::atomic<uint64_t> head;  // messages released; written by the receiver
    alignas(
        64) std::atomic<uint32_t> hungry;  // 1: the sender waits for head to move and wants a note
    alignas(64) std::atomic<uint64_t> begun;    // messages on their way; written by the sender
    alignas(64) std::atomic<uint32_t> written;  // messages written, mod 2^32; by the sender's GPU
  };
  static_assert(std::atomic<uint64_t>::is_always_lock_free);

  ShmBlock(SharedMemory memory, std::vector<ChannelSpec> channels);
  static size_t total_bytes(const std::vector<ChannelSpec>& channels);
  Control& control(size_t channel) const;
  Header* header(size_t channel, uint64_t sequence) const;
  std::byte* payload(size_t channel, uint64_t sequence) const;

  SharedMemory memory_;
  std::vector<ChannelSpec> channels_;
  std::vector<size_t> offsets_;
};

class ShmSender : public Sender {
 public:
  ShmSender(std::shared_ptr<ShmBlock> block, size_t channel, std::shared_ptr<Peer> peer,
            const Copier& copier = Copier());
  bool has_credit() override;
  bool ask_for_credit() override;
  void begin(Parcel& parcel) override;
  Step finished() override { return Step::kDone; }

  // begin() in halves, for kinds whose payload moves elsewhere and takes time: the next slot is
  // ours and has its header, but the receiver does not know; then the oldest such slot is shown to
  // it. Returns its number.
  uint64_t claim(const Header& header);
  uint64_t announce();
  // Between the two: the slots claimed so far are being written by a GPU, which will say when it
  // has done so.
  void show_begun();

 private:
  bool has_room(std::memory_order order);

  const std::shared_ptr<ShmBlock> block_;
  const size_t channel_;
  const std::shared_ptr<Peer> peer_;
  ShmBlock::Control& control_;
  const uint64_t depth_;
  const Copier copier_;
  uint64_t claimed_ = 0;
  uint64_t announced_ = 0;
};

class ShmReceiver : public Receiver {
 public:
  ShmReceiver(std::shared_ptr<ShmBlock> block, size_t channel, std::shared_ptr<Peer> peer,
              const Copier& copier = Copier());
  ~ShmReceiver() override {
    if (blocks_) blocks_->keep_none();
  }
  uint64_t arrived() override;
  Header header(uint64_t sequence) override;
  void copy_out(uint64_t sequence, void* to, uint64_t bytes, uintptr_t stream) override;
  Block hand_over(uint64_t sequence, uint64_t bytes) override;
  void release(uint64_t sequence) override;

  // Messages whose header is there and whose payload a GPU has, or will have, written.
  uint64_t begun();
  // As if a GPU had written message `sequence`: ends a GPU's wait for it. Any thread.
  void pretend_written(uint64_t sequence);

 private:
  uint64_t checked(uint64_t total, const char* what) const;

  const std::shared_ptr<ShmBlock> block_;
  const size_t channel_;
  const std::shared_ptr<Peer> peer_;
  ShmBlock::Control& control_;
  const uint64_t depth_;
  const Copier copier_;
  uint64_t seen_ = 0;
  std::shared_ptr<Blocks> blocks_;     // for large messages, from the first one on
  std::atomic<uint64_t> released_{0};  // a GPU kind releases from the progress thread
};

}  // namespace dpp
