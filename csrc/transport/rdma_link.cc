#include <arpa/inet.h>
#include <fcntl.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "base/error.h"
#include "transport/rdma.h"

namespace dpp {

namespace {

constexpr uint32_t kMostBuffers = 64;
constexpr uint64_t kMostBufferBytes = 64 << 20;  // of a link, unless the fewest need more
constexpr uint32_t kFewestBuffers = 8;
// A header, a payload apart from it, and an immediate apart from both.
constexpr uint32_t kWritesPerBuffer = 3;
// Above, as in NCCL, an immediate goes apart where routing is adaptive.
constexpr uint64_t kMostWithImmediate = 8192;
constexpr int kMostCompletions = 16;

// A receiver is never short of receives, so that is not waited for long.
constexpr uint8_t kRnrRetries = 6, kMinRnrTimer = 12;
constexpr uint8_t kHopLimit = 64;
constexpr uint32_t kPacketMask = 0xffffff;

// Identifiers of requests: how many complete with it, the rail, and a buffer or none.
constexpr int kRailBits = 8;
uint64_t request_id(size_t rail, uint64_t buffer, uint64_t count = 0) {
  return count << (32 + kRailBits) | rail << 32 | buffer;
}
size_t rail_of(uint64_t id) { return id >> 32 & ((1 << kRailBits) - 1); }

constexpr uint64_t kPage = 4096;
uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

template <typename Object>
Object* made(Object* object, const char* what, const RdmaPlace& place) {
  if (object == nullptr) {
    throw Error(Fault::kSetup, with_errno(std::string(what) + " on RDMA device " + place.device));
  }
  return object;
}

void make_nonblocking(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) {
    throw Error(Fault::kSetup, with_errno("setting a descriptor of an RDMA device"));
  }
}

// With its header it is at most what the port carries in one write.
uint64_t chosen_piece(const RdmaPlace& place, const RdmaLayout& peer_slots,
                      const verbs::PortAttributes& port) {
  const uint64_t carried = std::max<uint64_t>(port.max_message_bytes, 2 * kPage);
  const uint64_t largest =
      std::min(round_up(place.piece_bytes, kPage), (carried - sizeof(Header)) / kPage * kPage);
  return std::clamp<uint64_t>(round_up(peer_slots.largest_slot(), kPage), kPage,
                              std::max(largest, kPage));
}

// One for each message in flight, so that small ones need not wait for each other.
uint32_t chosen_buffers(const RdmaLayout& peer_slots, uint64_t piece_bytes) {
  const auto affordable = static_cast<uint32_t>(kMostBufferBytes / piece_bytes);
  return std::clamp(std::min(peer_slots.num_slots(), affordable), kFewestBuffers, kMostBuffers);
}

}  // namespace

// ---- link: set-up
// -----------------------------------------------------------------------------------------------------

RdmaLink::RdmaLink(std::shared_ptr<Peer> peer, Bell* bell, const Copier& copier,
                   const RdmaPlace& place, std::vector<ChannelSpec> incoming,
                   std::vector<ChannelSpec> outgoing, std::shared_ptr<PayloadMemory> payloads)
    : peer_(std::move(peer)),
      bell_(bell),
      copier_(copier),
      place_(place),
      incoming_(std::move(incoming)),
      outgoing_(std::move(outgoing)),
      payloads_(std::move(payloads)),
      slots_(incoming_, payloads_ != nullptr),
      peer_slots_(outgoing_, false),
      api_(verbs::Api::load()),
      context_(verbs::open_device(*api_, place.device)),
      port_(verbs::query_port(*api_, context_.get(), place.port)),
      piece_bytes_(chosen_piece(place, peer_slots_, port_)),
      num_buffers_(chosen_buffers(peer_slots_, piece_bytes_)),
      most_sends_(kWritesPerBuffer * num_buffers_ + 2 * slots_.num_slots() + 1),
      domain_(made(api_->alloc_pd(context_.get()), "a protection domain", place), api_->dealloc_pd),
      slot_memory_(SharedMemory::create("dpp-rdma-slots",
                                        std::max(kPage, round_up(slots_.header_bytes(), kPage)))),
      buffer_memory_(SharedMemory::create(
          "dpp-rdma-buffers",
          outgoing_.empty() ? kPage : round_up(num_buffers_ * buffer_bytes(), kPage))),
      slot_region_(verbs::register_memory(*api_, domain_.get(), slot_memory_.mapping.data(),
                                          slot_memory_.mapping.size(), true)),
      buffer_region_(verbs::register_memory(*api_, domain_.get(), buffer_memory_.mapping.data(),
                                            buffer_memory_.mapping.size(), false)),
      channel_(made(api_->create_comp_channel(context_.get()), "a completion channel", place),
               api_->destroy_comp_channel) {
  // Every message in flight may close a share on every rail, and every message sent may bring one
  // credit.
  const uint32_t num_receives = slots_.num_slots() + peer_slots_.num_slots() + 1;
  make_completions(static_cast<int>(kRdmaRails * (num_receives + most_sends_)));
  if (payloads_) make_payloads();
  describe();
  for (size_t i = 0; i < kRdmaRails; ++i) make_rail(num_receives);
  for (uint32_t i = 0; i < outgoing_.size(); ++i)
    outboxes_.push_back(std::make_unique<RdmaOutbox>(*this, i, outgoing_[i]));
  receivers_.resize(incoming_.size());
  for (uint32_t i = 0; i < num_buffers_; ++i) free_buffers_.push_back(static_cast<int>(i));
}

void RdmaLink::make_payloads() {
  if (!incoming_.empty())
    slot_payloads_ = payloads_->make(*api_, domain_.get(), slots_.payload_bytes(), true);
  if (!outgoing_.empty()) {
    buffer_payloads_ = payloads_->make(*api_, domain_.get(), num_buffers_ * piece_bytes_, false);
  }
}

void RdmaLink::make_completions(int count) {
  completions_ = {made(api_->create_cq(context_.get(), count, nullptr, channel_.get(), 0),
                       "a completion queue", place_),
                  api_->destroy_cq};
  make_nonblocking(channel_->fd);
  make_nonblocking(context_->async_fd);
  descriptors_ = {channel_->fd, context_->async_fd};
  context_->calls.notify(completions_.get(), 0);
}

void RdmaLink::describe() {
  verbs::GidEntry own = {};
  if (const int error =
          api_->query_gid(context_.get(), place_.port, place_.gid_index, &own, 0, sizeof(own))) {
    throw Error(Fault::kSetup, with_errno("GID " + std::to_string(place_.gid_index) + " of " +
                                              place_.device + " is gone",
                                          error));
  }
  offer_.gid = verbs::gid_text(own.gid);
  offer_.lid = port_.lid;
  offer_.mtu = port_.active_mtu;
  offer_.address = reinterpret_cast<uintptr_t>(slot_memory_.mapping.data());
  offer_.rkey = slot_region_->rkey;
  offer_.apart = slots_.apart();
  offer_.payload_address = slot_payloads_.address;
  offer_.payload_rkey = slot_payloads_.region ? slot_payloads_.region->rkey : 0;
}

void RdmaLink::make_rail(uint32_t num_receives) {
  verbs::QueuePairSettings settings = {};
  settings.send_queue = settings.receive_queue = completions_.get();
  settings.limits = {most_sends_, num_receives, 1, 1, 0};
  settings.type = verbs::kReliableConnection;
  const size_t rail = rails_.size();
  rails_.push_back(
      {{made(api_->create_qp(domain_.get(), &settings), "a queue pair", place_), api_->destroy_qp},
       0});
  verbs::QueuePairAttributes attributes = {};
  attributes.state = verbs::kStateInit;
  attributes.port = place_.port;
  attributes.pkey_index = place_.pkey_index;
  attributes.access = verbs::kRemoteWrite;
  modify(rail, attributes, verbs::kHasState | verbs::kHasPkey | verbs::kHasPort | verbs::kHasAccess,
         "INIT");
  for (uint32_t i = 0; i < num_receives; ++i) post_receive(rail);
  offer_.queue_pairs.push_back(rails_[rail].pair->number);
  offer_.first_packets.push_back(std::random_device()() & kPacketMask);
}

void RdmaLink::modify(size_t rail, verbs::QueuePairAttributes& attributes, int mask,
                      const char* what) {
  const int error = verbs::modify(*api_, rails_[rail].pair.get(), attributes, mask);
  if (error == 0) return;
  throw Error(Fault::kSetup,
              with_errno(std::string("moving a queue pair to ") + what + " on " + place_.device +
                             " port " + std::to_string(place_.port) + " (GID " +
                             std::to_string(place_.gid_index) + ") for " + peer_->description(),
                         error) +
                  "; are both addresses of " + setting("node_ips") + " in one RDMA network?");
}

void RdmaLink::post_receive(size_t rail) {
  verbs::ReceiveRequest request = {request_id(rail, kNoBuffer), nullptr, nullptr, 0};
  verbs::ReceiveRequest* bad = nullptr;
  if (const int error = context_->calls.post_receive(rails_[rail].pair.get(), &request, &bad)) {
    throw Error(Fault::kSetup, with_errno("posting a receive on " + place_.device, error));
  }
}

void RdmaLink::connect(const RdmaOffer& peer) {
  if (peer.queue_pairs.size() != kRdmaRails || peer.first_packets.size() != kRdmaRails) {
    refuse("an offer of " + std::to_string(peer.queue_pairs.size()) + " queue pairs");
  }
  peer_headers_ = {peer.address, peer.rkey};
  peer_slots_ = RdmaLayout(outgoing_, peer.apart);
  peer_payloads_ = peer.apart ? Target{peer.payload_address, peer.payload_rkey} : peer_headers_;
  for (size_t rail = 0; rail < kRdmaRails; ++rail) connect_rail(rail, peer);
}

// Within one InfiniBand subnet the LID is enough unless the port asks for more; RoCE and other
// subnets need the GID. A router between subnets that gives ports a LID to forward to (FLID) has it
// in their GIDs.
verbs::Path RdmaLink::path_to(const RdmaOffer& peer) const {
  const verbs::Gid own_gid = verbs::gid_from(offer_.gid), peer_gid = verbs::gid_from(peer.gid);
  const bool one_subnet = verbs::same_subnet(own_gid, peer_gid);
  const uint16_t forwarded = one_subnet ? 0 : verbs::forwarding_lid(peer_gid);
  verbs::Path path = {};
  path.port = place_.port;
  path.service_level = place_.service_level;
  path.route.gid = peer_gid;
  path.route.source_gid_index = static_cast<uint8_t>(place_.gid_index);
  path.route.hop_limit = kHopLimit;
  path.route.traffic_class = place_.traffic_class;
  path.has_route = 1;
  if (port_.link_layer == verbs::kLinkEthernet) return path;
  path.lid = forwarded != 0 ? forwarded : peer.lid;
  path.has_route = (port_.flags & verbs::kNeedsRoute) != 0 || !one_subnet || peer.lid == 0;
  return path;
}

void RdmaLink::connect_rail(size_t rail, const RdmaOffer& peer) {
  using namespace verbs;
  QueuePairAttributes attributes = {};
  attributes.state = kStateReadyToReceive;
  attributes.mtu = std::min(peer.mtu, offer_.mtu);
  attributes.peer_number = peer.queue_pairs[rail];
  attributes.receive_psn = peer.first_packets[rail] & kPacketMask;
  attributes.max_peer_reads = 1;
  attributes.min_rnr_timer = kMinRnrTimer;
  attributes.path = path_to(peer);
  modify(rail, attributes,
         kHasState | kHasPath | kHasMtu | kHasPeer | kHasReceivePsn | kHasMaxPeerReads |
             kHasMinRnrTimer,
         "ready to receive");
  attributes = {};
  attributes.state = kStateReadyToSend;
  attributes.timeout = place_.timeout;
  attributes.retries = place_.retries;
  attributes.rnr_retries = kRnrRetries;
  attributes.send_psn = offer_.first_packets[rail];
  attributes.max_reads = 1;
  modify(rail, attributes,
         kHasState | kHasTimeout | kHasRetries | kHasRnrRetries | kHasSendPsn | kHasMaxReads,
         "ready to send");
}

verbs::QueuePairAttributes RdmaLink::attributes() const {
  using namespace verbs;
  QueuePairAttributes found = {};
  QueuePairSettings settings = {};
  const int mask = kHasState | kHasPkey | kHasPath | kHasTimeout | kHasRetries;
  if (const int error = api_->query_qp(rails_.front().pair.get(), &found, mask, &settings)) {
    throw Error(Fault::kSetup, with_errno("querying a queue pair of " + place_.device, error));
  }
  return found;
}

std::unique_ptr<Sender> RdmaLink::make_sender(uint32_t channel) {
  return std::make_unique<RdmaSender>(shared_from_this(), outbox(channel));
}

std::unique_ptr<Receiver> RdmaLink::make_receiver(uint32_t channel) {
  auto receiver =
      std::make_unique<RdmaReceiver>(shared_from_this(), channel, incoming_.at(channel));
  set_receiver(channel, receiver.get());
  return receiver;
}

// ---- link: sending
// ----------------------------------------------------------------------------------------------------

std::byte* RdmaLink::header_buffer(int index) const {
  return buffer_memory_.mapping.data() + static_cast<uint64_t>(index) * buffer_bytes();
}

std::byte* RdmaLink::payload_buffer(int index) const {
  if (!payloads_) return header_buffer(index) + sizeof(Header);
  return reinterpret_cast<std::byte*>(buffer_payloads_.address) +
         static_cast<uint64_t>(index) * piece_bytes_;
}

const std::byte* RdmaLink::slot_payload(uint32_t channel, uint64_t sequence) const {
  const std::byte* first = payloads_ ? reinterpret_cast<const std::byte*>(slot_payloads_.address)
                                     : slot_memory_.mapping.data();
  return first + slots_.payload(channel, sequence);
}

int RdmaLink::take_buffer() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (free_buffers_.empty()) return -1;
  const int index = free_buffers_.back();
  free_buffers_.pop_back();
  return index;
}

void RdmaLink::write(const RdmaPiece& piece, const uint32_t* immediate) {
  const auto address = [](const std::byte* of) { return reinterpret_cast<uintptr_t>(of); };
  const auto buffer = static_cast<uint64_t>(piece.buffer);
  const Target header_to = {peer_headers_.address + piece.header, peer_headers_.rkey};
  const Target payload_to = {peer_payloads_.address + piece.payload, peer_payloads_.rkey};
  verbs::Piece header = {address(header_buffer(piece.buffer)), sizeof(Header),
                         buffer_region_->lkey};
  verbs::Piece payload = {address(payload_buffer(piece.buffer)), static_cast<uint32_t>(piece.bytes),
                          payloads_ ? buffer_payloads_.region->lkey : buffer_region_->lkey};
  const bool apart =
      immediate != nullptr && place_.adaptive_routing && piece.bytes > kMostWithImmediate;
  const uint64_t done = apart ? kMore : buffer;
  const uint32_t* with_data = apart ? nullptr : immediate;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (piece.has_header && (side_by_side() || piece.bytes == 0)) {
    header.bytes += payload.bytes;
    post(piece.rail, done, &header, header_to, with_data);
  } else {
    if (piece.has_header) post(piece.rail, kMore, &header, header_to, nullptr);
    post(piece.rail, done, &payload, payload_to, with_data);
  }
  if (apart) post(piece.rail, buffer, nullptr, peer_headers_, immediate);
}

void RdmaLink::post(size_t rail, uint64_t done, verbs::Piece* from, const Target& to,
                    const uint32_t* immediate) {
  Rail& on = rails_[rail];
  verbs::SendRequest request = {};
  request.id = request_id(rail, done, on.unreported + 1);
  request.pieces = from;
  request.num_pieces = from != nullptr ? 1 : 0;
  request.remote.address = to.address;
  request.remote.rkey = to.rkey;
  request.opcode = immediate != nullptr ? verbs::kWriteWithImmediate : verbs::kWrite;
  request.flags = done == kMore ? 0 : verbs::kSignaled;
  if (immediate != nullptr) request.immediate = htonl(*immediate);
  verbs::SendRequest* bad = nullptr;
  if (const int error = context_->calls.post_send(on.pair.get(), &request, &bad)) {
    throw Error(Fault::kPeerDead,
                with_errno("sending to " + peer_->description() + " on " + place_.device, error));
  }
  ++on.in_flight;
  on.unreported = done == kMore ? on.unreported + 1 : 0;
}

void RdmaLink::send_credits() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (uint32_t channel = 0; channel < receivers_.size(); ++channel) {
    RdmaReceiver& receiver = *receivers_[channel];
    const uint64_t released = receiver.released_.load(std::memory_order_acquire);
    // The rest follows when a send has completed.
    if (released == receiver.credited_ ||
        rails_[0].in_flight + kWritesPerBuffer * num_buffers_ >= most_sends_) {
      continue;
    }
    const uint32_t immediate =
        RdmaImmediate{true, channel, 0, static_cast<uint16_t>(released)}.packed();
    post(0, kNoBuffer, nullptr, peer_headers_, &immediate);
    receiver.credited_ = released;
  }
}

// ---- link: completions
// --------------------------------------------------------------------------------------------------

bool RdmaLink::on_ready(size_t index) {
  if (index == 1) {
    handle_device_events();
    return true;
  }
  unsigned count = 0;
  verbs::CompletionQueue* queue = nullptr;
  void* user = nullptr;
  while (api_->get_cq_event(channel_.get(), &queue, &user) == 0) ++count;
  if (count != 0) api_->ack_cq_events(completions_.get(), count);
  // Before the queue is emptied, so that what comes later raises the next event.
  context_->calls.notify(completions_.get(), 0);
  handle_completions();
  return true;
}

void RdmaLink::handle_completions() {
  verbs::Completion found[kMostCompletions];
  while (true) {
    const int count = context_->calls.poll(completions_.get(), kMostCompletions, found);
    if (count < 0) throw Error(Fault::kSetup, "polling the completions of " + place_.device);
    if (count == 0) return;
    for (int i = 0; i < count; ++i) handle(found[i]);
    send_credits();
  }
}

void RdmaLink::handle(const verbs::Completion& completion) {
  const size_t rail = rail_of(completion.id);
  const uint64_t index = completion.id & UINT32_MAX;
  // The fields other than id are undefined in a failed completion.
  if (completion.status != 0) {
    if (!peer_->departed()) report(completion);
    return;
  }
  if (completion.opcode == verbs::kReceivedImmediate) {
    post_receive(rail);
    return handle_immediate(ntohl(completion.immediate));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  rails_[rail].in_flight -= static_cast<uint32_t>(completion.id >> (32 + kRailBits));
  if (index != kNoBuffer) free_buffers_.push_back(static_cast<int>(index));
}

void RdmaLink::handle_immediate(uint32_t value) {
  const auto [credit, channel, num_shares, low] = RdmaImmediate::unpacked(value);
  if (channel >= (credit ? outboxes_.size() : receivers_.size())) {
    refuse((credit ? "credit for" : "a message on") +
           (" unknown channel " + std::to_string(channel)));
  }
  if (credit) return outboxes_[channel]->receive_credit(low);
  if (receivers_[channel]->close_share(low, num_shares)) bell_->ring();
}

void RdmaLink::handle_device_events() {
  verbs::AsyncEvent event = {};
  while (api_->get_async_event(context_.get(), &event) == 0) {
    const int type = event.type;
    if (type == verbs::kPortErrorEvent) port_down_ = true;
    if (type == verbs::kPortActiveEvent) port_down_ = false;
    api_->ack_async_event(&event);
    if (type == verbs::kDeviceFatalEvent) {
      throw Error(Fault::kSetup, "RDMA device " + place_.device +
                                     " has failed (see dmesg); the link to " +
                                     peer_->description() + " is gone");
    }
  }
}

void RdmaLink::report(const verbs::Completion& completion) const {
  const int status = completion.status;
  const std::string what = std::string(api_->wc_status_str(status)) + " (status " +
                           std::to_string(status) + ", vendor error " +
                           std::to_string(completion.vendor_error) + ") on " + place_.device +
                           " port " + std::to_string(place_.port) +
                           (port_down_ ? ", which is down: cable or switch" : "");
  const bool unreachable = port_down_ || status == verbs::kRetriesExceeded ||
                           status == verbs::kResponseTimeout ||
                           status == verbs::kReceiverNotReady || status == verbs::kFlushed;
  if (unreachable) {
    throw Error(Fault::kPeerDead,
                peer_->description() + " cannot be reached over RDMA any more: " + what);
  }
  const bool refused = status == verbs::kRemoteInvalid || status == verbs::kRemoteAccess ||
                       status == verbs::kRemoteOperation;
  throw Error(refused ? Fault::kProtocol : Fault::kSetup,
              refused ? peer_->description() + " refused an RDMA write: " + what
                      : "an RDMA write to " + peer_->description() + " failed: " + what);
}

void RdmaLink::refuse(const std::string& why) const {
  throw Error(Fault::kProtocol,
              peer_->description() + " sent " + why + "; it is not listened to any longer");
}

void RdmaLink::on_credit(std::string_view note) {
  refuse("a credit note of " + std::to_string(note.size()) + " bytes on an RDMA link");
}

// What was posted lies in our buffers: they must stay until the device has sent them.
void RdmaLink::drain(uint64_t deadline_ns) {
  const auto all_sent = [this] {
    const std::lock_guard<std::mutex> lock(mutex_);
    return free_buffers_.size() == num_buffers_;
  };
  const timespec nap = {0, 50'000};
  while (!all_sent() && !peer_->departed() && monotonic_ns() < deadline_ns) {
    handle_completions();
    ::nanosleep(&nap, nullptr);
  }
}

}  // namespace dpp
