#include "base/blocks.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/os.h"

namespace dpp {

namespace {

constexpr size_t kPage = 4096;
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14

// Anonymous pages, which do not exist before they are written; null without address space.
std::byte* map(size_t bytes) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  expect_large_pages(memory, bytes);
  return static_cast<std::byte*>(memory);
}

// The error, or 0. An older kernel does not know how to say that there is no memory.
int populate(std::byte* memory, size_t bytes) {
  while (::madvise(memory, bytes, kPopulateWrite) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL) return errno;
    std::memset(memory, 0, bytes);
    break;
  }
  return 0;
}

}  // namespace

std::shared_ptr<Blocks> Blocks::create(size_t bytes, size_t most_kept) {
  const size_t rounded = (bytes + kPage - 1) / kPage * kPage;
  return std::shared_ptr<Blocks>(new Blocks(rounded == 0 ? kPage : rounded, most_kept));
}

void Blocks::fill(size_t count, const std::string& what) {
  const std::string text = std::to_string(count * bytes_) + " bytes of memory for " + what;
  require_room(count * bytes_, text);
  for (size_t i = 0; i < count; ++i) {
    std::byte* memory = map(bytes_);
    if (memory == nullptr)
      throw Error(Fault::kSetup, with_errno("mapping " + text + " (ulimit -v?)"));
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      kept_.push_back(memory);
    }
    if (const int error = populate(memory, bytes_)) {
      throw Error(Fault::kSetup,
                  with_errno("allocating " + text + " (lower " + setting("slots") + ")", error));
    }
  }
}

Block Blocks::get() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!kept_.empty()) {
      std::byte* memory = kept_.back();
      kept_.pop_back();
      return wrap(memory);
    }
  }
  std::byte* memory = map(bytes_);
  return memory == nullptr ? nullptr : wrap(memory);
}

Block Blocks::wrap(std::byte* memory) {
  return Block(memory, [home = shared_from_this()](std::byte* it) { home->come_back(it); });
}

void Blocks::come_back(std::byte* memory) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (kept_.size() < most_kept_) {
      kept_.push_back(memory);
      return;
    }
  }
  ::munmap(memory, bytes_);
}

void Blocks::keep_none() {
  const std::lock_guard<std::mutex> lock(mutex_);
  most_kept_ = 0;
  for (std::byte* memory : kept_) ::munmap(memory, bytes_);
  kept_.clear();
}

}  // namespace dpp
