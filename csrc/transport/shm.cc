#include "transport/shm.h"

#include "base/copy.h"
#include "base/error.h"

namespace dpp {

namespace {

constexpr size_t kPage = 4096;
// glibc maps memory of this size anew for each tensor (M_MMAP_THRESHOLD_MAX), and reuses smaller.
constexpr uint64_t kLeastReused = 32 << 20;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

size_t stride(const ChannelSpec& channel) { return round_up(channel.slot_bytes, 64); }

size_t headers_bytes(const ChannelSpec& channel) {
  return round_up(channel.depth * sizeof(Header), kPage);
}

size_t channel_bytes(const ChannelSpec& channel) {
  return headers_bytes(channel) + round_up(channel.depth * stride(channel), kPage);
}

}  // namespace

std::shared_ptr<ShmBlock> ShmBlock::create(std::vector<ChannelSpec> channels) {
  SharedMemory memory = SharedMemory::create("dpp-slots", total_bytes(channels));
  return std::shared_ptr<ShmBlock>(new ShmBlock(std::move(memory), std::move(channels)));
}

std::shared_ptr<ShmBlock> ShmBlock::adopt(UniqueFd fd, std::vector<ChannelSpec> channels) {
  SharedMemory memory = SharedMemory::adopt(std::move(fd), total_bytes(channels));
  return std::shared_ptr<ShmBlock>(new ShmBlock(std::move(memory), std::move(channels)));
}

ShmBlock::ShmBlock(SharedMemory memory, std::vector<ChannelSpec> channels)
    : memory_(std::move(memory)), channels_(std::move(channels)) {
  size_t offset = round_up(channels_.size() * sizeof(Control), kPage);
  for (const ChannelSpec& channel : channels_) {
    offsets_.push_back(offset);
    offset += channel_bytes(channel);
  }
}

size_t ShmBlock::total_bytes(const std::vector<ChannelSpec>& channels) {
  size_t bytes = round_up(channels.size() * sizeof(Control), kPage);
  for (const ChannelSpec& channel : channels) bytes += channel_bytes(channel);
  return bytes;
}

std::pair<void*, size_t> ShmBlock::controls() const {
  return {memory_.mapping.data(), round_up(channels_.size() * sizeof(Control), kPage)};
}

ShmBlock::Control& ShmBlock::control(size_t channel) const {
  return reinterpret_cast<Control*>(memory_.mapping.data())[channel];
}

Header* ShmBlock::header(size_t channel, uint64_t sequence) const {
  const size_t slot = (sequence - 1) % channels_[channel].depth;
  return reinterpret_cast<Header*>(memory_.mapping.data() + offsets_[channel]) + slot;
}

std::byte* ShmBlock::payload(size_t channel, uint64_t sequence) const {
  const ChannelSpec& spec = channels_[channel];
  const size_t slot = (sequence - 1) % spec.depth;
  return memory_.mapping.data() + offsets_[channel] + headers_bytes(spec) + slot * stride(spec);
}

ShmSender::ShmSender(std::shared_ptr<ShmBlock> block, size_t channel, std::shared_ptr<Peer> peer,
                     const Copier& copier)
    : block_(std::move(block)),
      channel_(channel),
      peer_(std::move(peer)),
      control_(block_->control(channel)),
      depth_(block_->channels_[channel].depth),
      copier_(copier) {}

bool ShmSender::has_room(std::memory_order order) {
  const uint64_t in_use = claimed_ - control_.head.load(order);
  if (in_use > depth_) {
    throw Error(Fault::kProtocol, peer_->description() +
                                      " released messages that were never sent on " +
                                      block_->channels_[channel_].text());
  }
  return in_use < depth_;
}

// Acquire: the receiver's reads of the slot happen before our writes into it.
bool ShmSender::has_credit() { return has_room(std::memory_order_acquire); }

bool ShmSender::ask_for_credit() {
  // Either we see the new head, or the receiver, which stores head before it reads hungry, sees our
  // wish.
  control_.hungry.store(1, std::memory_order_seq_cst);
  return has_room(std::memory_order_seq_cst);
}

void ShmSender::begin(Parcel& parcel) {
  copier_.copy(block_->payload(channel_, claim(parcel.header)), parcel.data, parcel.header.bytes);
  announce();
}

uint64_t ShmSender::claim(const Header& header) {
  *block_->header(channel_, ++claimed_) = header;
  return claimed_;
}

uint64_t ShmSender::announce() {
  control_.tail.store(++announced_, std::memory_order_release);
  peer_->ring();
  return announced_;
}

void ShmSender::show_begun() {
  control_.begun.store(claimed_, std::memory_order_release);
  peer_->ring();
}

ShmReceiver::ShmReceiver(std::shared_ptr<ShmBlock> block, size_t channel,
                         std::shared_ptr<Peer> peer, const Copier& copier)
    : block_(std::move(block)),
      channel_(channel),
      peer_(std::move(peer)),
      control_(block_->control(channel)),
      depth_(block_->channels_[channel].depth),
      copier_(copier) {}

uint64_t ShmReceiver::arrived() {
  const uint64_t tail = checked(control_.tail.load(std::memory_order_acquire), "announced");
  if (tail < seen_) {
    throw Error(Fault::kProtocol, peer_->description() + " took back messages on " +
                                      block_->channels_[channel_].text() +
                                      "; it is not listened to any longer");
  }
  return seen_ = tail;
}

uint64_t ShmReceiver::begun() {
  return checked(control_.begun.load(std::memory_order_acquire), "began");
}

void ShmReceiver::pretend_written(uint64_t sequence) {
  control_.written.store(static_cast<uint32_t>(sequence), std::memory_order_release);
}

// A total that the sender has given. What was taken early may be released before it is announced.
uint64_t ShmReceiver::checked(uint64_t total, const char* what) const {
  // Relaxed: whoever stored it did so before the sender could see `head`, and that before this
  // total.
  const uint64_t released = released_.load(std::memory_order_relaxed);
  if (total > released && total - released > depth_) {
    throw Error(Fault::kProtocol, peer_->description() + " " + what + " " + std::to_string(total) +
                                      " messages on " + block_->channels_[channel_].text() +
                                      " where " + std::to_string(released) + " were taken and " +
                                      std::to_string(depth_) +
                                      " fit; it is not listened to any longer");
  }
  return total;
}

Header ShmReceiver::header(uint64_t sequence) { return *block_->header(channel_, sequence); }

void ShmReceiver::copy_out(uint64_t sequence, void* to, uint64_t bytes, uintptr_t) {
  expect_large_pages(to, bytes);
  copier_.copy(to, block_->payload(channel_, sequence), bytes);
}

// A copy, in memory that was used before: pages of fresh memory are made and cleared at the first
// touch, which takes as long as the copy.
Block ShmReceiver::hand_over(uint64_t sequence, uint64_t bytes) {
  const uint64_t slot_bytes = block_->channels_[channel_].slot_bytes;
  // A short message would keep the memory of a long one.
  if (bytes < kLeastReused || bytes < slot_bytes - slot_bytes / 8) return nullptr;
  if (!blocks_) blocks_ = Blocks::create(slot_bytes, depth_);
  Block memory = blocks_->get();
  if (memory) copier_.copy(memory.get(), block_->payload(channel_, sequence), bytes);
  return memory;
}

void ShmReceiver::release(uint64_t sequence) {
  released_.store(sequence, std::memory_order_relaxed);
  control_.head.store(sequence, std::memory_order_seq_cst);
  if (control_.hungry.load(std::memory_order_seq_cst) != 0) {
    control_.hungry.store(0, std::memory_order_relaxed);
    peer_->send_note(Peer::Note::kCredit, "");
  }
}

}  // namespace dpp
