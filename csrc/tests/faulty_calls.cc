// Calls of the C library and the kernel that are slow, interrupted, or short of something on
// demand. LD_PRELOAD puts them in front of the real ones; tests/transport/faulty_worker.py asks for
// faults.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace {

volatile int slow_sends_ms, shortages, endless, interrupts, old_kernel, kept_us, yields;
std::string groups_below;
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, of Linux 5.14

template <typename Call>
Call real(const char* name) {
  return reinterpret_cast<Call>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

void fault(const char* name, int value) {
  for (auto [known, place] :
       {std::pair<const char*, volatile int*>{"slow-sends-ms", &slow_sends_ms},
        {"shortages", &shortages},
        {"endless", &endless},
        {"interrupts", &interrupts},
        {"old-kernel", &old_kernel},
        {"kept-us", &kept_us},
        {"yields", &yields}})
    if (std::strcmp(name, known) == 0) *place = value;
}

int fault_left(const char* name) { return std::strcmp(name, "yields") == 0 ? yields : shortages; }

// Files about control groups are looked for below this folder.
void groups_are_below(const char* folder) { groups_below = folder; }

ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  static const auto call = real<ssize_t (*)(int, const msghdr*, int)>("sendmsg");
  size_t bytes = 0;
  for (size_t i = 0; i < message->msg_iovlen; ++i) bytes += message->msg_iov[i].iov_len;
  if (bytes > 256 << 10) usleep(1000 * slow_sends_ms);
  return call(fd, message, flags);
}

ssize_t recv(int fd, void* to, size_t bytes, int flags) {
  static const auto call = real<ssize_t (*)(int, void*, size_t, int)>("recv");
  if (!endless || bytes != 4096) return call(fd, to, bytes, flags);
  for (int i = 0; i < 4095; ++i) static_cast<char*>(to)[i] = i % 3 == 2;  // credit for nothing
  return 4095;
}

ssize_t send(int fd, const void* data, size_t bytes, int flags) {
  static const auto call = real<ssize_t (*)(int, const void*, size_t, int)>("send");
  if (shortages <= 0) return call(fd, data, bytes, flags);
  shortages = shortages - 1;
  errno = ENOBUFS;
  return -1;
}

int sched_yield() {
  yields = yields + 1;
  return kept_us ? usleep(kept_us) : 0;
}

int posix_fallocate(int fd, off_t from, off_t bytes) {
  if (interrupts <= 0) return fallocate(fd, 0, from, bytes) == 0 ? 0 : errno;
  interrupts = interrupts - 1;
  return EINTR;
}

int madvise(void* memory, size_t bytes, int advice) noexcept {
  if (old_kernel && advice == kPopulateWrite) return errno = EINVAL, -1;
  return static_cast<int>(syscall(SYS_madvise, memory, bytes, advice));
}

int open(const char* path, int flags, ...) {
  std::string found = path;
  if (!groups_below.empty() &&
      (found == "/proc/self/cgroup" || found.rfind("/sys/fs/cgroup/", 0) == 0))
    found = groups_below + found;
  return static_cast<int>(syscall(SYS_openat, AT_FDCWD, found.c_str(), flags, 0666));
}

}  // extern "C"
