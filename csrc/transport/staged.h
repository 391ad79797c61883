// Kind "staged": GPUs of one host without peer access. A message goes in chunks through pinned
// shared host memory:
//
//   source GPU -(D2H)-> [buffer 0|1|2|3] -(H2D)-> slot on the destination GPU -(take())-> tensor
//
// Two buffers are being filled while two are being emptied, so both copies go on at once. Both
// progress threads move chunks by themselves; a message has arrived when its last chunk is in the
// slot. Chunks carry no description: their sizes follow from the header, which the receiver
// validates before the first of them moves.
#pragma once

#include "transport/device.h"

namespace dpp {

class StagedBlock {
 public:
  static constexpr uint64_t kBuffers = 4;

  // workload: elements per chunk.
  static std::shared_ptr<StagedBlock> create(cuda::DevicePtr device,
                                             std::vector<ChannelSpec> channels, uint64_t workload);
  static std::shared_ptr<StagedBlock> adopt(cuda::DevicePtr device, UniqueFd fd,
                                            std::vector<ChannelSpec> channels, uint64_t workload);

  int fd() const { return memory_.fd.get(); }

 private:
  friend class StagedSender;
  friend class StagedReceiver;

  struct Control {
    alignas(64) std::atomic<uint64_t> produced;  // chunks in buffers; written by the sender
    alignas(64) std::atomic<uint64_t> consumed;  // chunks taken out; written by the receiver
    alignas(64) std::atomic<uint32_t> asleep;  // 1: the receiver's progress thread wants a note for
                                               // the next chunk
  };

  StagedBlock(cuda::DevicePtr device, SharedMemory memory, std::vector<ChannelSpec> channels,
              uint64_t workload);
  static size_t buffer_bytes(const std::vector<ChannelSpec>& channels, uint64_t workload);
  static size_t total_bytes(const std::vector<ChannelSpec>& channels, uint64_t workload);
  Control& control(size_t channel) const;
  std::byte* buffer(size_t channel, uint64_t chunk) const;  // chunks count from 1
  size_t chunk_bytes(const Header& header) const;
  uint64_t num_chunks(const Header& header) const;  // at least one, also for an empty message

  SharedMemory memory_;
  const std::vector<ChannelSpec> channels_;
  const uint64_t workload_;
  const size_t buffer_bytes_;
  cuda::Pinned pinned_;
};

class StagedSender : public DeviceSender {
 public:
  StagedSender(cuda::DevicePtr device, std::shared_ptr<cuda::Stream> stream,
               std::shared_ptr<StagedBlock> block, size_t channel, std::unique_ptr<ShmSender> ring,
               std::shared_ptr<Peer> peer, uint32_t max_pending);
  void begin(Parcel& parcel) override;
  Step finished() override;

 private:
  bool has_buffer() const;
  void fill_next(const Parcel& parcel);
  void publish();

  const std::shared_ptr<StagedBlock> block_;
  const size_t channel_;
  const std::shared_ptr<Peer> peer_;
  StagedBlock::Control& control_;
  Marks filled_;

  // Owner only.
  std::vector<Parcel*> begun_;  // ring of the messages under way
  uint64_t num_begun_ = 0;
  uint64_t num_finished_ = 0;
  bool following_ = false;   // our stream waits for the oldest one's producer
  uint64_t next_chunk_ = 0;  // of the oldest one
  uint64_t issued_ = 0;
  uint64_t produced_ = 0;
};

class StagedReceiver : public DeviceReceiver {
 public:
  StagedReceiver(cuda::DevicePtr device, std::shared_ptr<cuda::Stream> stream, DeviceSlots slots,
                 std::shared_ptr<StagedBlock> block, size_t channel,
                 std::unique_ptr<ShmReceiver> ring, std::shared_ptr<Peer> peer);
  uint64_t arrived() override { return arrived_.load(std::memory_order_acquire); }
  Step settle(bool& progressed) override;
  bool comes_to_rest(uint64_t deadline_ns) override;

 private:
  Step move_chunks(bool& progressed);
  void start_message();
  void empty_next();
  bool consume();  // whether that was the last chunk of a message

  const std::shared_ptr<cuda::Stream> stream_;
  const std::shared_ptr<StagedBlock> block_;
  const size_t channel_;
  const std::shared_ptr<Peer> peer_;
  StagedBlock::Control& control_;
  Marks emptied_;

  // Progress thread only.
  Header header_;  // of the message whose chunks come now
  uint64_t started_ = 0;
  uint64_t next_chunk_ = 0;
  uint64_t issued_ = 0;
  uint64_t consumed_ = 0;
  bool ends_message_[StagedBlock::kBuffers] = {};

  // Written by the progress thread with release once the last chunk's copy has happened.
  std::atomic<uint64_t> arrived_{0};
};

}  // namespace dpp
