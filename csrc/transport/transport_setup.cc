// The set-up half of Transport: peers, slots, links, up to start().
#include <algorithm>

#include "transport/shm.h"
#include "transport/tcp.h"
#include "transport/transport.h"

namespace dpp {

void Transport::add_peer(int rank, std::string description, UniqueFd socket, UniqueFd pidfd,
                         UniqueFd bell) {
  std::optional<Bell> peer_bell;
  if (bell) peer_bell = Bell::adopt(std::move(bell));
  auto peer = std::make_shared<Peer>(rank, std::move(description), std::move(socket),
                                     std::move(pidfd), std::move(peer_bell));
  watch_.add(peer->socket(), {Watch::Source::kSocket, peers_.size()});
  if (peer->pidfd() >= 0) watch_.add(peer->pidfd(), {Watch::Source::kProcess, peers_.size()});
  peers_.push_back(std::move(peer));
}

std::shared_ptr<Peer> Transport::find_peer(int rank) const {
  for (const auto& peer : peers_) {
    if (peer->rank() == rank) return peer;
  }
  throw Error(Fault::kSetup, "rank " + std::to_string(rank) + " is not a peer");
}

int Transport::make_shm_slots(int peer, const std::vector<size_t>& channels) {
  std::vector<ChannelSpec> specs;
  for (const size_t index : channels) specs.push_back(incoming_.at(index).spec);
  auto block = ShmBlock::create(specs);
  for (size_t i = 0; i < channels.size(); ++i) {
    set_receiver(channels[i], peer,
                 std::make_unique<ShmReceiver>(block, i, find_peer(peer), copier_));
  }
  return block->fd();
}

void Transport::use_shm_slots(int peer, const std::vector<size_t>& channels, UniqueFd fd) {
  std::vector<ChannelSpec> specs;
  for (const size_t index : channels) specs.push_back(outgoing_specs_.at(index));
  auto block = ShmBlock::adopt(std::move(fd), specs);
  for (size_t i = 0; i < channels.size(); ++i) {
    set_sender(channels[i], peer, std::make_unique<ShmSender>(block, i, find_peer(peer), copier_));
  }
}

void Transport::set_receiver(size_t channel, int peer, std::unique_ptr<Receiver> receiver) {
  incoming_.at(channel).peer = peer;
  incoming_[channel].receiver = std::move(receiver);
}

void Transport::set_sender(size_t channel, int peer, std::unique_ptr<Sender> sender) {
  outgoing_.at(channel) = std::make_unique<Outgoing>(outgoing_specs_[channel], peer,
                                                     std::move(sender), settings_.max_pending);
}

void Transport::drop_link(int peer) {
  for (Incoming& channel : incoming_) {
    if (channel.peer == peer) channel.receiver.reset();
  }
  for (auto& channel : outgoing_) {
    if (channel && channel->peer() == peer) channel.reset();
  }
  const auto is_peers = [peer](const auto& link) { return link.first == peer; };
  links_.erase(std::remove_if(links_.begin(), links_.end(), is_peers), links_.end());
}

void Transport::add_tcp_link(int peer, const std::vector<size_t>& incoming,
                             const std::vector<size_t>& outgoing, std::vector<UniqueFd> sockets) {
  auto link =
      std::make_shared<TcpLink>(find_peer(peer), &bell_, &watch_, copier_, std::move(sockets));
  for (const size_t index : incoming) {
    set_receiver(index, peer, link->add_receiver(incoming_.at(index).spec));
  }
  for (const size_t index : outgoing) {
    set_sender(index, peer, link->add_sender(outgoing_specs_.at(index)));
  }
  add_link(peer, std::move(link));
}

int Transport::make_board(uint32_t counters, const std::vector<int>& followers,
                          const std::vector<int>& hosts, int leader) {
  const auto lines = static_cast<uint32_t>(1 + followers.size() + hosts.size());
  board_ = Board::create(lines, counters, !hosts.empty() || leader >= 0);
  for (const int follower : followers) board_->connect(find_peer(follower));
  for (const int host : hosts) board_->connect_host(find_peer(host));
  if (leader >= 0) board_->connect_upstream(find_peer(leader));
  return board_->fd();
}

void Transport::use_board(UniqueFd fd, uint32_t index, uint32_t lines, uint32_t counters, int head,
                          bool relayed) {
  board_ = Board::adopt(std::move(fd), index, lines, counters);
  board_->connect(find_peer(head));
  if (relayed) board_->connect_upstream(find_peer(head));
}

void Transport::start() {
  for (const auto& channel : outgoing_) {
    if (!channel) throw Error(Fault::kSetup, "an outgoing channel has no kind");
  }
  for (const Incoming& channel : incoming_) {
    if (!channel.receiver) throw Error(Fault::kSetup, "an incoming channel has no kind");
    if (channel.receiver->settles()) settling_.push_back(channel.receiver.get());
  }
  for (size_t i = 0; i < links_.size(); ++i) {
    const std::vector<int>& descriptors = links_[i].second->descriptors();
    for (size_t j = 0; j < descriptors.size(); ++j) {
      watch_.add(descriptors[j], {Watch::Source::kLink, i, j}, true);
    }
  }
  thread_ = std::make_unique<std::thread>([this] { run(); });
}

}  // namespace dpp
