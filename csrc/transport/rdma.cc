#include "transport/rdma.h"

#include <time.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/pattern.h"

namespace dpp {

namespace {

constexpr uint64_t kStripedBytes = 4 << 20;
constexpr uint64_t kSmallestPiece = 256 << 10;
constexpr uint64_t kPiecesPerMessage = 4;  // at least, so that copying and sending overlap
constexpr uint32_t kMostSlots =
    1 << 14;  // a quarter of what 16 bits tell apart, so that order shows
constexpr uint64_t kPage = 4096;
constexpr uint64_t kGpuAlignment = 256;
constexpr uint64_t kPatternBytes = 4096;  // every link's pieces are as large

uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

// The number next to `near` whose lower half is `low`.
uint64_t widen(uint16_t low, uint64_t near) {
  const auto distance = static_cast<int16_t>(low - static_cast<uint16_t>(near));
  return near + static_cast<uint64_t>(static_cast<int64_t>(distance));
}

void check_limits(const std::vector<ChannelSpec>& channels) {
  uint64_t deepest = 0;
  for (const ChannelSpec& channel : channels) deepest = std::max<uint64_t>(deepest, channel.depth);
  if (channels.size() > RdmaImmediate::kMostChannels || deepest > kMostSlots) {
    throw Error(Fault::kSetup, std::to_string(channels.size()) + " channels of up to " +
                                   std::to_string(deepest) + " slots on one RDMA link; at most " +
                                   std::to_string(RdmaImmediate::kMostChannels) + " of " +
                                   std::to_string(kMostSlots) + " are possible (" +
                                   setting("slots") + ")");
  }
}

}  // namespace

// ---- layout
// ---------------------------------------------------------------------------------------------------

RdmaLayout::RdmaLayout(const std::vector<ChannelSpec>& channels, bool apart) : apart_(apart) {
  check_limits(channels);
  for (const ChannelSpec& channel : channels) {
    const uint64_t head = apart ? 0 : sizeof(Header);
    const uint64_t stride = round_up(head + channel.slot_bytes, apart ? kGpuAlignment : 64);
    channels_.push_back({total_, stride, channel.depth, num_slots_});
    total_ = round_up(total_ + stride * channel.depth, kPage);
    largest_ = std::max<uint64_t>(largest_, sizeof(Header) + channel.slot_bytes);
    num_slots_ += channel.depth;
  }
}

uint64_t RdmaLayout::header(uint32_t channel, uint64_t sequence) const {
  const Channel& of = channels_[channel];
  if (apart_) return (of.first_slot + slot(of, sequence)) * sizeof(Header);
  return of.first + slot(of, sequence) * of.stride;
}

uint64_t RdmaLayout::payload(uint32_t channel, uint64_t sequence) const {
  const Channel& of = channels_[channel];
  return of.first + slot(of, sequence) * of.stride + (apart_ ? 0 : sizeof(Header));
}

// ---- sender
// ---------------------------------------------------------------------------------------------------

RdmaOutbox::RdmaOutbox(RdmaLink& link, uint32_t channel, const ChannelSpec& spec)
    : link_(link), channel_(channel), spec_(spec), begun_parcels_(spec.depth) {}

bool RdmaOutbox::has_credit() const {
  const uint64_t begun = begun_.load(std::memory_order_relaxed);
  // A receiver can give credit for a message that it does not have yet, whose parcel is needed.
  return begun - released_.load(std::memory_order_acquire) < spec_.depth &&
         begun - num_finished_ < spec_.depth;
}

void RdmaOutbox::begin(const Parcel& parcel) {
  const uint64_t begun = begun_.load(std::memory_order_relaxed);
  begun_parcels_[begun % spec_.depth] = parcel;
  begun_.store(begun + 1, std::memory_order_release);
}

Step RdmaOutbox::finished(PieceCopier& copier) {
  const Parcel& parcel = begun_parcels_[num_finished_ % spec_.depth];
  if (!started_) copier.start(parcel);
  started_ = true;  // without a free buffer there may be no piece yet when we come again
  const bool whole = fill(parcel, copier);
  if (const Step step = send_filled(copier); step != Step::kDone) return step;
  if (!whole) return Step::kAgain;
  // Copied into buffers and posted: the source is free. The device, or an error, does the rest.
  ++num_finished_;
  copied_bytes_ = num_pieces_ = 0;
  started_ = false;
  return Step::kDone;
}

bool RdmaOutbox::fill(const Parcel& parcel, PieceCopier& copier) {
  const uint64_t bytes = parcel.header.bytes, sequence = num_finished_ + 1;
  uint64_t piece = round_up((bytes + kPiecesPerMessage - 1) / kPiecesPerMessage, kPage);
  piece = std::min(link_.piece_bytes_, std::max(piece, kSmallestPiece));
  const uint64_t num_pieces = std::max<uint64_t>(1, (bytes + piece - 1) / piece);
  const uint64_t num_shares =
      bytes < kStripedBytes ? 1 : std::min<uint64_t>(kRdmaRails, num_pieces);
  immediate_ = RdmaImmediate{false, channel_, static_cast<uint32_t>(num_shares),
                             static_cast<uint16_t>(sequence)}
                   .packed();
  for (; num_pieces_ != num_pieces; ++num_pieces_) {
    const int buffer = link_.take_buffer();
    if (buffer < 0) return false;
    RdmaPiece next;
    next.buffer = buffer;
    next.rail = num_pieces_ % num_shares;
    next.bytes = std::min(piece, bytes - copied_bytes_);
    next.payload = link_.peer_slots_.payload(channel_, sequence) + copied_bytes_;
    next.has_header = num_pieces_ == 0;
    next.header = link_.peer_slots_.header(channel_, sequence);
    next.closes = num_pieces_ + num_shares >= num_pieces;
    if (next.has_header) std::memcpy(link_.header_buffer(buffer), &parcel.header, sizeof(Header));
    copier.copy(link_.payload_buffer(buffer),
                static_cast<const std::byte*>(parcel.data) + copied_bytes_, next.bytes, buffer);
    filled_.push_back(next);
    copied_bytes_ += next.bytes;
    // The first piece is on its way while the next one is copied.
    send_filled(copier);
  }
  return true;
}

Step RdmaOutbox::send_filled(PieceCopier& copier) {
  for (; !filled_.empty(); filled_.pop_front()) {
    const RdmaPiece& piece = filled_.front();
    if (!copier.copied(piece.buffer)) return Step::kPoll;
    link_.write(piece, piece.closes ? &immediate_ : nullptr);
  }
  return Step::kDone;
}

void RdmaOutbox::receive_credit(uint16_t low) {
  const uint64_t before = released_.load(std::memory_order_relaxed);
  const uint64_t released = widen(low, before);
  if (released < before || released > begun_.load(std::memory_order_acquire)) {
    link_.refuse("credit for messages never sent on " + spec_.text());
  }
  released_.store(released, std::memory_order_release);
}

void RdmaSender::copy(std::byte* to, const std::byte* from, uint64_t bytes, int) {
  link_->copier_.copy(to, from, bytes);
}

// ---- receiver
// -------------------------------------------------------------------------------------------------

RdmaReceiver::RdmaReceiver(std::shared_ptr<RdmaLink> link, uint32_t channel,
                           const ChannelSpec& spec)
    : link_(std::move(link)), channel_(channel), spec_(spec), slots_(spec.depth) {}

Header RdmaReceiver::header(uint64_t sequence) {
  Header header;
  std::memcpy(&header,
              link_->slot_memory_.mapping.data() + link_->slots_.header(channel_, sequence),
              sizeof(header));
  return header;
}

const std::byte* RdmaReceiver::payload(uint64_t sequence) const {
  return link_->slot_payload(channel_, sequence);
}

void RdmaReceiver::copy_out(uint64_t sequence, void* to, uint64_t bytes, uintptr_t) {
  expect_large_pages(to, bytes);
  link_->copier_.copy(to, payload(sequence), bytes);
}

void RdmaReceiver::release(uint64_t sequence) {
  released_.store(sequence, std::memory_order_release);
  link_->send_credits();
}

bool RdmaReceiver::close_share(uint16_t low, uint32_t num_shares) {
  const uint64_t before = arrived_.load(std::memory_order_relaxed);
  const uint64_t sequence = widen(low, before);
  if (sequence <= before || sequence > released_.load(std::memory_order_acquire) + spec_.depth) {
    link_->refuse("message " + std::to_string(sequence) + " without credit on " + spec_.text());
  }
  Slot& target = slot(sequence);
  if (target.sequence != sequence) target = {sequence, 0, num_shares};
  if (num_shares == 0 || num_shares != target.num_shares || target.closed == num_shares) {
    link_->refuse("a message in parts that do not fit on " + spec_.text());
  }
  ++target.closed;
  uint64_t arrived = before;
  // Shares of several messages may close out of order; messages arrive in order.
  while (arrived - before < slots_.size() && slot(arrived + 1).sequence == arrived + 1 &&
         slot(arrived + 1).closed == slot(arrived + 1).num_shares) {
    ++arrived;
  }
  // Release: the caller's thread that sees the count sees the slot, which the device wrote before
  // the completion that led here.
  if (arrived != before) arrived_.store(arrived, std::memory_order_release);
  return arrived != before;
}

// ---- link: test
// -------------------------------------------------------------------------------------------------------

void RdmaLink::post_pattern(Test test, uint64_t seed) {
  return test == Test::kPath ? post_to_path(seed) : post_to_slots(seed);
}

// Every queue pair writes the same page: each finds a way of its own through the network. A page is
// a full packet, which a switch with a smaller MTU drops. It lies where headers and slots will,
// which nobody reads before a message has come.
void RdmaLink::post_to_path(uint64_t seed) {
  const std::vector<uint64_t> words = pattern(seed, kPage);
  std::memcpy(buffer_memory_.mapping.data(), words.data(), kPage);
  verbs::Piece page = {reinterpret_cast<uintptr_t>(buffer_memory_.mapping.data()), kPage,
                       buffer_region_->lkey};
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t rail = 0; rail < rails_.size(); ++rail) {
    post(rail, kNoBuffer, &page, peer_headers_, nullptr);
  }
}

// Patterns go into the first slot of the first channel and into the last slot of the last one.
std::vector<RdmaLink::TestSlot> RdmaLink::test_slots(const std::vector<ChannelSpec>& channels) {
  if (channels.empty()) return {};
  const auto last = static_cast<uint32_t>(channels.size() - 1);
  std::vector<TestSlot> slots = {{0, 1, 0}, {last, channels[last].depth, 0}};
  for (TestSlot& slot : slots)
    slot.bytes = std::min(channels[slot.channel].slot_bytes, kPatternBytes);
  return slots;
}

void RdmaLink::post_to_slots(uint64_t seed) {
  for (const auto& [channel, sequence, bytes] : test_slots(outgoing_)) {
    const std::vector<uint64_t> words = pattern(seed + sequence, bytes);
    RdmaPiece piece;
    piece.buffer = take_buffer();
    piece.bytes = bytes;
    piece.payload = peer_slots_.payload(channel, sequence);
    std::byte* to = payload_buffer(piece.buffer);
    if (payloads_) {
      payloads_->fill(reinterpret_cast<uintptr_t>(to), words.data(), bytes);
    } else {
      std::memcpy(to, words.data(), bytes);
    }
    write(piece, nullptr);
  }
}

bool RdmaLink::await_pattern(uint64_t deadline_ns) {
  const timespec nap = {0, 50'000};
  while (!all_acknowledged()) {
    handle_completions();
    if (monotonic_ns() >= deadline_ns) return all_acknowledged();
    ::nanosleep(&nap, nullptr);
  }
  return true;
}

bool RdmaLink::all_acknowledged() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::all_of(rails_.begin(), rails_.end(),
                     [](const Rail& rail) { return rail.in_flight == 0; });
}

std::string RdmaLink::pattern_fault(Test test, uint64_t seed) {
  if (test == Test::kSlots) return slots_fault(seed);
  std::vector<uint64_t> found(kPage / sizeof(uint64_t));
  std::memcpy(found.data(), slot_memory_.mapping.data(), kPage);
  return dpp::pattern_fault(found, seed, kPage);
}

std::string RdmaLink::slots_fault(uint64_t seed) {
  for (const auto& [channel, sequence, bytes] : test_slots(incoming_)) {
    std::vector<uint64_t> found((bytes + 7) / 8);
    const std::byte* from = slot_payload(channel, sequence);
    if (payloads_) {
      payloads_->fetch(found.data(), reinterpret_cast<uintptr_t>(from), bytes);
    } else {
      std::memcpy(found.data(), from, bytes);
    }
    const std::string fault = dpp::pattern_fault(found, seed + sequence, bytes);
    if (!fault.empty()) return fault;
  }
  return "";
}

}  // namespace dpp
