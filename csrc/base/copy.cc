#include "base/copy.h"

#include <array>
#include <cstring>

namespace dpp {

namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // CRC32C, reflected

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table = {};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) ? kPolynomial : 0);
    table[i] = value;
  }
  return table;
}

constexpr std::array<uint32_t, 256> kTable = make_table();

uint32_t crc32c_portable(uint32_t sum, const unsigned char* data, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) sum = (sum >> 8) ^ kTable[(sum ^ data[i]) & 0xff];
  return sum;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t crc32c_sse42(uint32_t sum, const unsigned char* data,
                                                        size_t bytes) {
  uint64_t wide = sum;
  for (; bytes >= 8; data += 8, bytes -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    wide = __builtin_ia32_crc32di(wide, word);
  }
  return crc32c_portable(static_cast<uint32_t>(wide), data, bytes);
}
#endif

}  // namespace

void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}

uint32_t crc32c(const void* data, size_t bytes) {
  const auto* begin = static_cast<const unsigned char*>(data);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return ~crc32c_sse42(~0u, begin, bytes);
#endif
  return ~crc32c_portable(~0u, begin, bytes);
}

}  // namespace dpp
