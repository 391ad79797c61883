// The memory that the control groups of this process (a container's limit) leave it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace dpp {

struct MemoryRoom {
  size_t bytes = SIZE_MAX;  // SIZE_MAX: no limit
  std::string limit;        // text about the tightest limit; empty without one
};

// Bytes of free swap of this machine.
size_t free_swap();

// The least that any group of this process and its parents leaves, in version 1 or 2 of control
// groups, in memory and in free swap. Cached files and, in version 2, caches of the kernel do not
// count as used: the kernel drops them. A file that cannot be read limits nothing. The arguments
// are for tests.
MemoryRoom memory_room(const std::string& groups = "/proc/self/cgroup",
                       const std::string& mount = "/sys/fs/cgroup",
                       size_t free_swap = dpp::free_swap());

}  // namespace dpp
