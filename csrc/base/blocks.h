// Private memory for messages: blocks of one size, in large pages where the kernel has some. A
// block may be given away with the message in it; it comes back when its last user lets it go. The
// block that came back last is used first, while it is in the processor's caches.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace dpp {

using Block = std::shared_ptr<std::byte>;

class Blocks : public std::enable_shared_from_this<Blocks> {
 public:
  // Blocks of `bytes` bytes each. At most `most_kept` of those that come back are kept for later.
  static std::shared_ptr<Blocks> create(size_t bytes, size_t most_kept);
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;
  ~Blocks() { keep_none(); }

  // Keeps `count` blocks more whose pages exist: a full machine is an error here and not a kill
  // later. Throws kSetup, with `what` they are for.
  void fill(size_t count, const std::string& what);
  // One that was kept, or a new one; null where there is no room for it.
  Block get();
  // Gives back what was kept, and keeps nothing more.
  void keep_none();

 private:
  Blocks(size_t bytes, size_t most_kept) : bytes_(bytes), most_kept_(most_kept) {}
  Block wrap(std::byte* memory);
  void come_back(std::byte* memory);

  const size_t bytes_;
  std::mutex mutex_;
  size_t most_kept_;              // guarded by mutex_
  std::vector<std::byte*> kept_;  // likewise
};

}  // namespace dpp
