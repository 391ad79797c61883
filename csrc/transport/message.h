// The header that travels with every payload, and its validation by the receiver.
#pragma once

#include <cstdint>
#include <string>

namespace dpp {

constexpr uint32_t kAbiVersion = 6;  // raise with every change of what two processes share
constexpr int kMaxDims = 8;

// One channel as both sides know it; transport/base.py has the same fields.
struct ChannelSpec {
  int32_t source = 0;
  int32_t destination = 0;
  int32_t chunk = 0;
  int32_t direction = 0;  // as in direction.py: 0 forward, 1 backward
  uint64_t slot_bytes = 0;
  uint32_t depth = 0;

  std::string text() const;  // "forward of chunk 1, rank 0 -> 2"
};

struct alignas(64) Header {
  uint32_t magic = 0;
  uint16_t abi = 0;
  uint8_t dtype = 0;
  uint8_t num_dims = 0;
  int32_t chunk = 0;
  int32_t direction = 0;
  int64_t iteration = 0;
  int64_t microbatch = 0;
  uint32_t part = 0;
  uint32_t num_parts = 0;
  uint64_t sequence = 0;  // 1 for the first message of a channel
  uint64_t bytes = 0;
  uint64_t sent_ns = 0;
  uint64_t shape[kMaxDims] = {};
  uint32_t has_payload_crc = 0;
  uint32_t payload_crc = 0;
  uint32_t reserved = 0;
  uint32_t header_crc = 0;  // of everything before it
};
static_assert(sizeof(Header) == 192);

struct DtypeInfo {
  const char* name;  // torch's
  uint32_t bytes;
};
constexpr DtypeInfo kDtypes[] = {
    {"float32", 4},     {"float16", 2},         {"bfloat16", 2},
    {"float64", 8},     {"uint8", 1},           {"int8", 1},
    {"int16", 2},       {"int32", 4},           {"int64", 8},
    {"bool", 1},        {"float8_e4m3fn", 1},   {"float8_e5m2", 1},
    {"complex64", 8},   {"float8_e4m3fnuz", 1}, {"float8_e5m2fnuz", 1},
    {"complex128", 16},
};
constexpr uint8_t kNumDtypes = sizeof(kDtypes) / sizeof(kDtypes[0]);

// Fills in magic, version, channel, sequence and the header's own sum.
void seal_header(Header& header, const ChannelSpec& spec, uint64_t sequence);

// Empty when `header`, a private copy, is the message number `sequence` of the channel; else what
// is wrong with it.
std::string header_fault(const Header& header, const ChannelSpec& spec, uint64_t sequence);

}  // namespace dpp
