// Copies and sums of payloads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dpp {

// memcpy between memory that does not overlap.
void copy_bytes(void* to, const void* from, size_t bytes);

// CRC32C (Castagnoli) of `bytes` bytes.
uint32_t crc32c(const void* data, size_t bytes);

}  // namespace dpp
