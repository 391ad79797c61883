#include "base/os.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "base/error.h"
#include "base/memory_room.h"

namespace dpp {

namespace {
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr size_t kPage = 4096;
constexpr uintptr_t kLargePage = 2 << 20;
constexpr size_t kPiece = 4 << 20;
// Smaller blocks, as a bell's, are never refused for a control group's limit.
constexpr size_t kLeastRefused = 1 << 20;

// Memory of this machine; the largest number where the kernel does not say.
// By a system call: a stream over /proc/meminfo has given 0 in a build where the value was not 0.
size_t total_memory() {
  struct sysinfo facts = {};
  if (::sysinfo(&facts) != 0 || facts.totalram == 0) return SIZE_MAX;
  return static_cast<size_t>(facts.totalram) * facts.mem_unit;
}

// The error, or 0. A signal may undo what one call has done so far; pieces get there all the same.
int allocate(int fd, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const size_t piece = std::min(bytes - done, kPiece);
    // It returns its error and leaves errno alone.
    const int error = ::posix_fallocate(fd, static_cast<off_t>(done), static_cast<off_t>(piece));
    if (error == EINTR) continue;
    if (error != 0) return error;
    done += piece;
  }
  return 0;
}

}  // namespace

UniqueFd& UniqueFd::operator=(UniqueFd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void UniqueFd::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Mapping::Mapping(int fd, size_t bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    throw Error(Fault::kSetup, with_errno("mapping " + std::to_string(bytes) +
                                          " bytes of shared memory (ulimit -v?)"));
  }
  data_ = static_cast<std::byte*>(data);
  size_ = bytes;
}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  swap(other);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

void Mapping::swap(Mapping& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
}

SharedMemory SharedMemory::create(const std::string& name, size_t bytes) {
  const std::string what = std::to_string(bytes) + " bytes of shared memory for " + name;
  require_room(bytes, what);
  UniqueFd fd(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw Error(Fault::kSetup, with_errno("memfd_create: " + what));
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    throw Error(Fault::kSetup, with_errno("sizing " + what));
  }
  Mapping mapping(fd.get(), bytes);
  if (const int error = allocate(fd.get(), bytes)) {
    throw Error(Fault::kSetup,
                with_errno("allocating " + what + " (lower " + setting("slots") + ")", error));
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) {
    throw Error(Fault::kSetup, with_errno("sealing " + what));
  }
  return {std::move(fd), std::move(mapping)};
}

SharedMemory SharedMemory::adopt(UniqueFd fd, size_t bytes) {
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    throw Error(Fault::kProtocol, "a peer sent a descriptor that is not sealed shared memory");
  }
  struct stat facts = {};
  if (::fstat(fd.get(), &facts) != 0 || static_cast<size_t>(facts.st_size) != bytes) {
    throw Error(Fault::kProtocol, "a peer sent shared memory of " + std::to_string(facts.st_size) +
                                      " bytes, the channels need " + std::to_string(bytes));
  }
  Mapping mapping(fd.get(), bytes);
  return {std::move(fd), std::move(mapping)};
}

ForkGuard::ForkGuard() {
  void* page = ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) throw Error(Fault::kSetup, with_errno("mapping one page"));
  if (::madvise(page, kPage, MADV_WIPEONFORK) != 0) {
    const int error = errno;
    ::munmap(page, kPage);
    throw Error(Fault::kSetup, with_errno("madvise(MADV_WIPEONFORK), Linux 4.14 or later", error));
  }
  alive_ = static_cast<volatile uint32_t*>(page);
  *alive_ = 1;
}

ForkGuard::~ForkGuard() { ::munmap(const_cast<uint32_t*>(alive_), kPage); }

void expect_large_pages(void* memory, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t first = (begin + kLargePage - 1) / kLargePage * kLargePage;
  const uintptr_t end = (begin + bytes) / kLargePage * kLargePage;
  // A hint: refused, everything works as before.
  if (first < end) ::madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}

void require_room(size_t bytes, const std::string& what) {
  if (const size_t total = total_memory(); bytes > total) {
    throw Error(Fault::kSetup, what + ": only " + std::to_string(total) +
                                   " bytes are available (lower " + setting("slots") + ")");
  }
  if (bytes < kLeastRefused) return;
  if (const MemoryRoom room = memory_room(); bytes > room.bytes) {
    throw Error(Fault::kSetup, what + ": only " + std::to_string(room.bytes) +
                                   " bytes are left, as " + room.limit + " (lower " +
                                   setting("slots") + "; docker's option memory)");
  }
}

uint64_t monotonic_ns() {
  timespec now = {};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace dpp
