// The exception type of this project, with the class of its fault. Thrown on the control path; the
// hot calls store the first one and every waiter receives it. The binding maps each kind to a class
// of megatron/dpp/errors.py.
#pragma once

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace dpp {

enum class Fault { kNone, kSetup, kUnavailable, kPeerDead, kTimeout, kProtocol, kForked };

class Error : public std::runtime_error {
 public:
  Error(Fault fault, const std::string& text) : std::runtime_error(text), fault_(fault) {}
  Fault fault() const { return fault_; }

 private:
  Fault fault_;
};

// A setting of DppConfig in a text, as Python writes it; the binding finds it there again.
inline std::string setting(const std::string& name, const std::string& value = "") {
  return "DppConfig(" + name + "=" + (value.empty() ? "..." : "'" + value + "'") + ")";
}

// "mmap of 4096 bytes: Cannot allocate memory (errno 12)"
inline std::string with_errno(const std::string& what, int number = errno) {
  return what + ": " + std::strerror(number) + " (errno " + std::to_string(number) + ")";
}

}  // namespace dpp
