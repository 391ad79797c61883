#include "base/copy.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <new>

#include "base/blocks.h"
#include "base/os.h"

namespace dpp {

namespace {

constexpr uint64_t kSmallestStream = 1 << 20;  // below, the cache always wins
constexpr uint64_t kLargestTrial = 8 << 20;
constexpr int kTrials = 3;
constexpr int kTrialSlots = 4;                // two directions of two slots each
constexpr uint32_t kPolynomial = 0x82f63b78;  // CRC32C, reflected

#if defined(__x86_64__)

// Both stream whole lines of 64 bytes and leave the ragged ends to memcpy. SSE2 is in every x86-64.
void stream_sse2(std::byte* to, const std::byte* from, uint64_t lines) {
  for (; lines != 0; --lines, to += 64, from += 64) {
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* target = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
}

__attribute__((target("avx2"))) void stream_avx2(std::byte* to, const std::byte* from,
                                                 uint64_t lines) {
  for (; lines != 0; --lines, to += 64, from += 64) {
    const auto* source = reinterpret_cast<const __m256i*>(from);
    const __m256i a = _mm256_loadu_si256(source), b = _mm256_loadu_si256(source + 1);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + 1, b);
  }
}

void stream(void* to, const void* from, uint64_t bytes) {
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  const uint64_t head = std::min<uint64_t>(bytes, -reinterpret_cast<uintptr_t>(to) & 63);
  std::memcpy(target, source, head);
  const uint64_t lines = (bytes - head) / 64;
  if (__builtin_cpu_supports("avx2")) {
    stream_avx2(target + head, source + head, lines);
  } else {
    stream_sse2(target + head, source + head, lines);
  }
  const uint64_t done = head + 64 * lines;
  std::memcpy(target + done, source + done, bytes - done);
  // Streamed stores are not ordered by the release store that announces the message.
  _mm_sfence();
}

constexpr bool kCanStream = true;

#else

void stream(void* to, const void* from, uint64_t bytes) { std::memcpy(to, from, bytes); }

constexpr bool kCanStream = false;

#endif

// Time of messages of `bytes` bytes through all slots in turn, into each and out again. One slot
// that stays in the cache would flatter memcpy.
template <typename Copy>
uint64_t fastest_ns(std::byte* arena, uint64_t bytes, const Copy& copy) {
  uint64_t best = UINT64_MAX;
  for (int trial = 0; trial < kTrials; ++trial) {
    const uint64_t start = monotonic_ns();
    for (int slot = 0; slot < kTrialSlots; ++slot) {
      std::byte* between = arena + (2 + slot) * bytes;
      copy(between, arena, bytes);
      copy(arena + bytes, between, bytes);
    }
    best = std::min(best, monotonic_ns() - start);
  }
  return best;
}

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

Copier Copier::measured(uint64_t largest) {
  if (!kCanStream || largest < kSmallestStream) return Copier();
  const uint64_t room = std::min(largest, kLargestTrial);
  const uint64_t total = (2 + kTrialSlots) * room;
  // Not of the heap, which would keep it: each transport would leave a hole there.
  const Block arena = Blocks::create(total, 0)->get();
  if (!arena) return Copier();
  std::memset(arena.get(), 0, total);
  uint64_t threshold = UINT64_MAX;
  for (uint64_t bytes = room; bytes >= kSmallestStream; bytes /= 2) {
    const uint64_t cached = fastest_ns(arena.get(), bytes, std::memcpy);
    const uint64_t streamed = fastest_ns(arena.get(), bytes, stream);
    if (streamed > cached) break;
    threshold = bytes;
  }
  return Copier(threshold);
}

void Copier::copy(void* to, const void* from, uint64_t bytes) const {
  if (bytes >= threshold_) {
    stream(to, from, bytes);
  } else if (bytes != 0) {
    std::memcpy(to, from, bytes);
  }
}

uint32_t crc32c(const void* data, size_t bytes) {
  const auto* begin = static_cast<const unsigned char*>(data);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return ~crc32c_sse42(~0u, begin, bytes);
#endif
  return ~crc32c_portable(~0u, begin, bytes);
}

}  // namespace dpp
