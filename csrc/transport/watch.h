// The set of descriptors that a progress thread sleeps on: of peers, of links, and one to wake it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/os.h"

namespace dpp {

class Watch {
 public:
  enum class Source : uint8_t { kKick, kSocket, kProcess, kLink };
  // A descriptor that is ready: of which peer (kSocket, kProcess) or link, and which of a link's.
  struct Ready {
    Source source = Source::kKick;
    size_t owner = 0;
    size_t index = 0;
  };

  Watch();  // throws kSetup
  // The descriptor stays the caller's. once: only when it becomes ready, and for writing too.
  void add(int fd, const Ready& as, bool once = false);  // throws kSetup
  void remove(int fd);
  void kick();                                       // any thread
  const std::vector<Ready>& wait(int milliseconds);  // -1: without end; kicks are left out
  void close();

 private:
  UniqueFd epoll_;
  UniqueFd kick_;
  std::vector<Ready> ready_;
};

}  // namespace dpp
