#include "transport/message.h"

#include <cstddef>

#include "base/copy.h"

namespace dpp {

namespace {

constexpr uint32_t kMagic = 0x31505044;  // "DPP1"

uint32_t sum_of(const Header& header) { return crc32c(&header, offsetof(Header, header_crc)); }

std::string differs(const char* what, uint64_t got, uint64_t want) {
  return std::string(what) + " is " + std::to_string(got) + ", expected " + std::to_string(want);
}

// The payload's size by dtype and shape; false when it would not fit into `limit`.
bool payload_bytes(const Header& header, uint64_t limit, uint64_t& bytes) {
  uint64_t elements = 1;
  for (int i = 0; i < header.num_dims; ++i) {
    if (header.shape[i] == 0) {
      bytes = 0;
      return true;
    }
  }
  for (int i = 0; i < header.num_dims; ++i) {
    if (header.shape[i] > limit / elements) return false;
    elements *= header.shape[i];
  }
  bytes = elements * kDtypes[header.dtype].bytes;
  return bytes <= limit;
}

}  // namespace

std::string ChannelSpec::text() const {
  return std::string(direction == 0 ? "forward" : "backward") + " of chunk " +
         std::to_string(chunk) + ", rank " + std::to_string(source) + " -> " +
         std::to_string(destination);
}

void seal_header(Header& header, const ChannelSpec& spec, uint64_t sequence) {
  header.magic = kMagic;
  header.abi = kAbiVersion;
  header.chunk = spec.chunk;
  header.direction = spec.direction;
  header.sequence = sequence;
  header.reserved = 0;
  header.header_crc = sum_of(header);
}

std::string header_fault(const Header& header, const ChannelSpec& spec, uint64_t sequence) {
  if (header.magic != kMagic) return differs("magic", header.magic, kMagic);
  if (header.abi != kAbiVersion) return differs("format version", header.abi, kAbiVersion);
  if (header.header_crc != sum_of(header)) return "its checksum is wrong";
  if (header.sequence != sequence) return differs("sequence number", header.sequence, sequence);
  if (header.chunk != spec.chunk || header.direction != spec.direction) {
    return "it names chunk " + std::to_string(header.chunk) + ", direction " +
           std::to_string(header.direction);
  }
  if (header.dtype >= kNumDtypes)
    return differs("number of the dtype", header.dtype, kNumDtypes - 1);
  if (header.num_dims > kMaxDims) return differs("number of dimensions", header.num_dims, kMaxDims);
  if (header.num_parts == 0 || header.part >= header.num_parts) {
    return "part " + std::to_string(header.part) + " of " + std::to_string(header.num_parts);
  }
  uint64_t bytes = 0;
  if (!payload_bytes(header, spec.slot_bytes, bytes)) {
    return "its shape needs more than a slot's " + std::to_string(spec.slot_bytes) + " bytes";
  }
  if (header.bytes != bytes) return differs("byte count", header.bytes, bytes);
  return "";
}

}  // namespace dpp
