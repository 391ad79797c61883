// Copies and sums of payloads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dpp {

// Copies between memory that does not overlap. Large copies bypass the cache where that is faster
// on this machine: memcpy reads every line of the destination before it overwrites it.
class Copier {
 public:
  // Never bypasses the cache.
  Copier() = default;
  // Measures from which size on bypassing pays, for copies of up to `largest` bytes. Takes up
  // to 0.1 s, and nothing where `largest` is small.
  static Copier measured(uint64_t largest);

  void copy(void* to, const void* from, uint64_t bytes) const;

 private:
  explicit Copier(uint64_t threshold) : threshold_(threshold) {}

  uint64_t threshold_ = UINT64_MAX;  // copies of at least this many bytes bypass the cache
};

// CRC32C (Castagnoli) of `bytes` bytes.
uint32_t crc32c(const void* data, size_t bytes);

}  // namespace dpp
