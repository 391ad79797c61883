#include "base/memory_room.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "base/os.h"

namespace dpp {

namespace {

// The files of one version of control groups, and the counters of files that are cached.
struct Version {
  const char* limit;
  const char* used;
  const char* cached[2];
};

constexpr Version kFirst = {
    "memory.limit_in_bytes", "memory.usage_in_bytes", {"total_active_file", "total_inactive_file"}};
constexpr Version kSecond = {"memory.max", "memory.current", {"active_file", "inactive_file"}};

std::string text_of(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string text;
  char piece[4096];
  for (ssize_t got = 0; file && (got = ::read(file.get(), piece, sizeof(piece))) > 0;)
    text.append(piece, static_cast<size_t>(got));
  return text;
}

// The number that a text begins with; SIZE_MAX for any other text ("max").
size_t number_of(const std::string& text) {
  char* end = nullptr;
  const unsigned long long value = std::strtoull(text.c_str(), &end, 10);
  return end == text.c_str() || text[0] == '-' ? SIZE_MAX : static_cast<size_t>(value);
}

size_t cached_bytes(const Version& version, const std::string& statistics) {
  std::istringstream lines(statistics);
  std::string name, value;
  size_t sum = 0;
  while (lines >> name >> value) {
    for (const char* counter : version.cached) {
      if (name == counter && number_of(value) != SIZE_MAX) sum += number_of(value);
    }
  }
  return sum;
}

void tighten(MemoryRoom& room, const Version& version, const std::string& group) {
  const size_t limit = number_of(text_of(group + "/" + version.limit));
  const size_t used = number_of(text_of(group + "/" + version.used));
  if (limit == SIZE_MAX || used == SIZE_MAX) return;
  const size_t cached = cached_bytes(version, text_of(group + "/memory.stat"));
  const size_t taken = used - std::min(used, cached);
  const size_t left = limit - std::min(limit, taken);
  if (left >= room.bytes) return;
  room.bytes = left;
  room.limit = "the limit of control group " + group + " is " + std::to_string(limit) +
               " bytes, of which " + std::to_string(taken) + " are used";
}

}  // namespace

MemoryRoom memory_room(const std::string& groups, const std::string& mount) {
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
    while (true) {
      tighten(room, version, root + path);
      if (path.empty()) break;
      path.erase(path.rfind('/'));
    }
  }
  return room;
}

}  // namespace dpp
