// Owners of what the operating system lends: descriptors, mappings, sealed shared memory.
// Move-only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace dpp {

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept;
  ~UniqueFd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

// A shared mapping of a descriptor, unmapped at the end of its life.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, size_t bytes);  // read and write; throws kSetup
  Mapping(Mapping&& other) noexcept { swap(other); }
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void swap(Mapping& other) noexcept;

  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Anonymous memory that can be passed to another process and has no name. Its size is sealed, so
// neither side can make the other's accesses fault by truncating it; its pages are allocated now,
// so a full machine is an error here and not a SIGBUS later.
struct SharedMemory {
  UniqueFd fd;
  Mapping mapping;

  static SharedMemory create(const std::string& name, size_t bytes);  // throws kSetup
  // Takes what a peer sent. Throws kProtocol when it is not sealed or not exactly `bytes` long.
  static SharedMemory adopt(UniqueFd fd, size_t bytes);
};

// A page that reads as zero in a forked child, so that a child is told apart without a system call.
class ForkGuard {
 public:
  ForkGuard();
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;
  ~ForkGuard();
  bool forked() const { return *alive_ == 0; }

 private:
  volatile uint32_t* alive_ = nullptr;
};

// Memory that is about to be written for the first time gets large pages where it holds any and the
// kernel has some: one fault then stands for 512, and in a virtual machine faults cost more than
// the copy itself.
void expect_large_pages(void* memory, size_t bytes);

// Throws kSetup, with `what` the memory is for, where this machine or a control group of this
// process has less left. Asking first: an allocation of more than there is ends in the kernel
// killing some process.
void require_room(size_t bytes, const std::string& what);

uint64_t monotonic_ns();

}  // namespace dpp
