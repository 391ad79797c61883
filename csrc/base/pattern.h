// Words that depend on their place and a seed, so that neither old data nor a shifted copy passes:
// what new links are tested with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace dpp {

std::vector<uint64_t> pattern(uint64_t seed, size_t bytes);  // rounded up to whole words
// Empty when the whole words in `bytes` are the pattern's, else "byte 8 of 4096 arrived wrong".
std::string pattern_fault(const std::vector<uint64_t>& found, uint64_t seed, size_t bytes);

}  // namespace dpp
