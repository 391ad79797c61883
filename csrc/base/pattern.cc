#include "base/pattern.h"

#include <algorithm>

namespace dpp {

// splitmix64.
std::vector<uint64_t> pattern(uint64_t seed, size_t bytes) {
  std::vector<uint64_t> words((bytes + 7) / 8);
  for (size_t i = 0; i < words.size(); ++i) {
    uint64_t z = seed + (i + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    words[i] = z ^ (z >> 31);
  }
  return words;
}

std::string pattern_fault(const std::vector<uint64_t>& found, uint64_t seed, size_t bytes) {
  const std::vector<uint64_t> expected = pattern(seed, bytes);
  const auto end = found.begin() + static_cast<std::ptrdiff_t>(bytes / 8);
  const auto first = std::mismatch(found.begin(), end, expected.begin()).first;
  if (first == end) return "";
  return "byte " + std::to_string(8 * (first - found.begin())) + " of " + std::to_string(bytes) +
         " arrived wrong";
}

}  // namespace dpp
