#include "base/memory_room.h"

#include <fcntl.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "base/os.h"

namespace dpp {

namespace {

// The files of one version of control groups, and the counters of memory that the kernel takes back
// on demand.
struct Version {
  const char* limit;
  const char* used;
  const char* swap_limit;
  const char* swap_used;
  bool swap_has_memory;  // whether the figures of swap count memory too
  const char* reclaimable[3];
};

constexpr Version kFirst = {"memory.limit_in_bytes",
                            "memory.usage_in_bytes",
                            "memory.memsw.limit_in_bytes",
                            "memory.memsw.usage_in_bytes",
                            true,
                            {"total_active_file", "total_inactive_file", ""}};
constexpr Version kSecond = {"memory.max",
                             "memory.current",
                             "memory.swap.max",
                             "memory.swap.current",
                             false,
                             {"active_file", "inactive_file", "slab_reclaimable"}};

// Version 1 writes the largest number of pages where there is no limit.
constexpr size_t kLeastUnlimited = size_t{1} << 62;

std::string text_of(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string text;
  char piece[4096];
  for (ssize_t got = 0; file && (got = ::read(file.get(), piece, sizeof(piece))) > 0;)
    text.append(piece, static_cast<size_t>(got));
  return text;
}

// The number that a text begins with; SIZE_MAX for no limit and for any other text ("max").
size_t number_of(const std::string& text) {
  char* end = nullptr;
  const unsigned long long value = std::strtoull(text.c_str(), &end, 10);
  const bool is_number = end != text.c_str() && text[0] != '-';
  return is_number && value < kLeastUnlimited ? static_cast<size_t>(value) : SIZE_MAX;
}

size_t minus(size_t from, size_t bytes) { return from - std::min(from, bytes); }

size_t reclaimable_bytes(const Version& version, const std::string& statistics) {
  std::istringstream lines(statistics);
  std::string name, value;
  size_t sum = 0;
  while (lines >> name >> value) {
    for (const char* counter : version.reclaimable) {
      if (name == counter && number_of(value) != SIZE_MAX) sum += number_of(value);
    }
  }
  return sum;
}

// One group: lowers swap to the bytes that the group leaves of it, and room to those that it leaves
// in memory and swap together.
void tighten(MemoryRoom& room, size_t& swap, const Version& version, const std::string& group) {
  const auto number_in = [&](const char* file) { return number_of(text_of(group + "/" + file)); };
  const size_t limit = number_in(version.limit);
  const size_t used = number_in(version.used);
  const size_t swap_limit = number_in(version.swap_limit);
  const size_t swap_used = number_in(version.swap_used);
  if (swap_limit != SIZE_MAX && swap_used != SIZE_MAX) {
    const size_t in_memory = version.swap_has_memory ? minus(limit, used) : 0;
    swap = std::min(swap, minus(minus(swap_limit, swap_used), in_memory));
  }
  if (limit == SIZE_MAX || used == SIZE_MAX) return;
  const size_t taken = minus(used, reclaimable_bytes(version, text_of(group + "/memory.stat")));
  const size_t left = minus(limit, taken) + swap;
  if (left > room.bytes) return;
  room.bytes = left;
  room.limit = "the limit of control group " + group + " is " + std::to_string(limit) +
               " bytes, of which " + std::to_string(taken) + " are used, and " +
               std::to_string(swap) + " bytes of swap are free";
}

}  // namespace

size_t free_swap() {
  struct sysinfo facts = {};
  if (::sysinfo(&facts) != 0) return 0;
  return static_cast<size_t>(facts.freeswap) * facts.mem_unit;
}

MemoryRoom memory_room(const std::string& groups, const std::string& mount, size_t free_swap) {
  MemoryRoom room;
  std::istringstream lines(text_of(groups));
  for (std::string line; std::getline(lines, line);) {  // number:controllers:path
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool is_second = controllers == ",,";
    if (!is_second && controllers.find(",memory,") == std::string::npos) continue;
    const Version& version = is_second ? kSecond : kFirst;
    const std::string root = mount + (is_second ? "" : "/memory");
    // In a container the path may be that of the host, where only its last parents exist here.
    std::string path = line.substr(second + 1);
    if (path == "/") path.clear();
    size_t swap = free_swap;
    tighten(room, swap, version, root);
    for (size_t end = 0; end < path.size();) {  // from the parents down: all share their swap
      end = std::min(path.find('/', end + 1), path.size());
      tighten(room, swap, version, root + path.substr(0, end));
    }
  }
  return room;
}

}  // namespace dpp
