#include "transport/staged.h"

#include <algorithm>

#include "base/error.h"

namespace dpp {

namespace {

constexpr size_t kPage = 4096;
constexpr uint64_t kWidestUsual = 4;  // bytes of an element; wider ones get fewer per chunk

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

std::shared_ptr<StagedBlock> StagedBlock::create(cuda::DevicePtr device,
                                                 std::vector<ChannelSpec> channels,
                                                 uint64_t workload) {
  SharedMemory memory = SharedMemory::create("dpp-staging", total_bytes(channels, workload));
  return std::shared_ptr<StagedBlock>(
      new StagedBlock(std::move(device), std::move(memory), std::move(channels), workload));
}

std::shared_ptr<StagedBlock> StagedBlock::adopt(cuda::DevicePtr device, UniqueFd fd,
                                                std::vector<ChannelSpec> channels,
                                                uint64_t workload) {
  SharedMemory memory = SharedMemory::adopt(std::move(fd), total_bytes(channels, workload));
  return std::shared_ptr<StagedBlock>(
      new StagedBlock(std::move(device), std::move(memory), std::move(channels), workload));
}

StagedBlock::StagedBlock(cuda::DevicePtr device, SharedMemory memory,
                         std::vector<ChannelSpec> channels, uint64_t workload)
    : memory_(std::move(memory)),
      channels_(std::move(channels)),
      workload_(workload),
      buffer_bytes_(buffer_bytes(channels_, workload)),
      pinned_(std::move(device), memory_.mapping.data(), memory_.mapping.size()) {}

size_t StagedBlock::buffer_bytes(const std::vector<ChannelSpec>& channels, uint64_t workload) {
  uint64_t largest = 1;
  for (const ChannelSpec& channel : channels) largest = std::max(largest, channel.slot_bytes);
  return round_up(workload < largest / kWidestUsual ? workload * kWidestUsual : largest, kPage);
}

size_t StagedBlock::total_bytes(const std::vector<ChannelSpec>& channels, uint64_t workload) {
  return channels.size() * (kPage + kBuffers * buffer_bytes(channels, workload));
}

StagedBlock::Control& StagedBlock::control(size_t channel) const {
  return *reinterpret_cast<Control*>(memory_.mapping.data() + channel * kPage);
}

std::byte* StagedBlock::buffer(size_t channel, uint64_t chunk) const {
  const size_t index = channel * kBuffers + (chunk - 1) % kBuffers;
  return memory_.mapping.data() + channels_.size() * kPage + index * buffer_bytes_;
}

size_t StagedBlock::chunk_bytes(const Header& header) const {
  const uint64_t item = kDtypes[header.dtype].bytes;
  return workload_ < buffer_bytes_ / item ? workload_ * item : buffer_bytes_;
}

uint64_t StagedBlock::num_chunks(const Header& header) const {
  const size_t chunk = chunk_bytes(header);
  return std::max<uint64_t>(1, (header.bytes + chunk - 1) / chunk);
}

StagedSender::StagedSender(cuda::DevicePtr device, std::shared_ptr<cuda::Stream> stream,
                           std::shared_ptr<StagedBlock> block, size_t channel,
                           std::unique_ptr<ShmSender> ring, std::shared_ptr<Peer> peer,
                           uint32_t max_pending)
    : DeviceSender(std::move(device), std::move(stream), std::move(ring), max_pending),
      block_(std::move(block)),
      channel_(channel),
      peer_(std::move(peer)),
      control_(block_->control(channel)),
      filled_(device_, StagedBlock::kBuffers),
      begun_(block_->channels_[channel].depth) {}

void StagedSender::begin(Parcel& parcel) {
  ring_->claim(parcel.header);
  begun_[num_begun_++ % begun_.size()] = &parcel;
}

bool StagedSender::has_buffer() const {
  // Acquire: the receiver's copy out of the buffer happened before ours into it.
  const uint64_t in_use = issued_ - control_.consumed.load(std::memory_order_acquire);
  if (in_use > StagedBlock::kBuffers) {
    throw Error(Fault::kProtocol, peer_->description() + " took chunks that were never sent on " +
                                      block_->channels_[channel_].text());
  }
  return in_use < StagedBlock::kBuffers;
}

void StagedSender::fill_next(const Parcel& parcel) {
  const size_t chunk = block_->chunk_bytes(parcel.header);
  const size_t offset = next_chunk_++ * chunk;
  const size_t bytes = std::min<size_t>(chunk, parcel.header.bytes - offset);
  const auto from = reinterpret_cast<cuda::Address>(parcel.data) + offset;
  ++issued_;
  if (bytes != 0) {
    device_->api().check(device_->api().cuMemcpyDtoHAsync(block_->buffer(channel_, issued_), from,
                                                          bytes, stream_->get()),
                         "copying a chunk to host memory from " + device_->name());
  }
  filled_.set(issued_, stream_->get());
}

// Sequentially consistent: either we see that the receiver sleeps, or it sees the chunk before it
// does.
void StagedSender::publish() {
  control_.produced.store(++produced_, std::memory_order_seq_cst);
  if (control_.asleep.load(std::memory_order_seq_cst) == 0) return;
  control_.asleep.store(0, std::memory_order_relaxed);
  peer_->send_note(Peer::Note::kCredit, "");
}

Step StagedSender::finished() {
  const Parcel& parcel = *begun_[num_finished_ % begun_.size()];
  const uint64_t count = block_->num_chunks(parcel.header);
  const cuda::Current current(*device_);
  if (!following_) follow_producer(parcel);
  following_ = true;
  const uint64_t before = issued_ + produced_;
  while (next_chunk_ != count && has_buffer()) fill_next(parcel);
  while (produced_ != issued_ && filled_.passed(produced_ + 1)) publish();
  if (next_chunk_ != count || produced_ != issued_) {
    return issued_ + produced_ != before ? Step::kMoved : Step::kPoll;
  }
  ++num_finished_;
  next_chunk_ = 0;
  following_ = false;
  return Step::kDone;
}

StagedReceiver::StagedReceiver(cuda::DevicePtr device, std::shared_ptr<cuda::Stream> stream,
                               DeviceSlots slots, std::shared_ptr<StagedBlock> block,
                               size_t channel, std::unique_ptr<ShmReceiver> ring,
                               std::shared_ptr<Peer> peer)
    : DeviceReceiver(std::move(device), std::move(slots), std::move(ring)),
      stream_(std::move(stream)),
      block_(std::move(block)),
      channel_(channel),
      peer_(std::move(peer)),
      control_(block_->control(channel)),
      emptied_(device_, StagedBlock::kBuffers) {}

Step StagedReceiver::settle(bool& progressed) {
  const Step freed = DeviceReceiver::settle(progressed);
  const Step moved = move_chunks(progressed);
  return moved == Step::kDone ? freed : moved;
}

bool StagedReceiver::comes_to_rest(uint64_t deadline_ns) {
  return stream_->drain(deadline_ns) && DeviceReceiver::comes_to_rest(deadline_ns);
}

Step StagedReceiver::move_chunks(bool& progressed) {
  const uint64_t before = issued_ + consumed_;
  while (true) {
    // Acquire at least: the sender wrote header and chunk before.
    const uint64_t produced = control_.produced.load(std::memory_order_seq_cst);
    if (produced - consumed_ > StagedBlock::kBuffers || produced < issued_) {
      throw Error(Fault::kProtocol,
                  peer_->description() + " announced " + std::to_string(produced) + " chunks on " +
                      block_->channels_[channel_].text() + " where " + std::to_string(consumed_) +
                      " were taken; it is not listened to any longer");
    }
    while (issued_ != produced) empty_next();
    while (consumed_ != issued_ && emptied_.passed(consumed_ + 1)) {
      if (consume()) progressed = true;
    }
    if (consumed_ != issued_ || next_chunk_ != 0) {
      return issued_ + consumed_ != before ? Step::kMoved : Step::kPoll;
    }
    control_.asleep.store(1, std::memory_order_seq_cst);
    if (control_.produced.load(std::memory_order_seq_cst) == issued_) return Step::kDone;
    control_.asleep.store(0, std::memory_order_relaxed);
  }
}

void StagedReceiver::start_message() {
  header_ = ring_->header(++started_);
  const ChannelSpec& spec = block_->channels_[channel_];
  const std::string fault = header_fault(header_, spec, started_);
  if (!fault.empty()) {
    throw Error(Fault::kProtocol, peer_->description() + " sent a broken header on " + spec.text() +
                                      ": " + fault + "; it is not listened to any longer");
  }
}

void StagedReceiver::empty_next() {
  if (next_chunk_ == 0) start_message();
  const size_t chunk = block_->chunk_bytes(header_);
  const size_t offset = next_chunk_++ * chunk;
  const size_t bytes = std::min<size_t>(chunk, header_.bytes - offset);
  const cuda::Current current(*device_);
  ++issued_;
  if (bytes != 0) {
    device_->api().check(
        device_->api().cuMemcpyHtoDAsync(slots_.of(started_) + offset,
                                         block_->buffer(channel_, issued_), bytes, stream_->get()),
        "copying a chunk from host memory to " + device_->name());
  }
  emptied_.set(issued_, stream_->get());
  const bool last = next_chunk_ == block_->num_chunks(header_);
  ends_message_[issued_ % StagedBlock::kBuffers] = last;
  if (last) next_chunk_ = 0;
}

bool StagedReceiver::consume() {
  const bool complete = ends_message_[++consumed_ % StagedBlock::kBuffers];
  if (complete) arrived_.fetch_add(1, std::memory_order_release);
  control_.consumed.store(consumed_, std::memory_order_release);
  return complete;
}

}  // namespace dpp
