// The first failure of a transport, wherever it happens: kept once, for every thread to see.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>

#include "base/error.h"

namespace dpp {

class FirstFailure {
 public:
  // False when there was one already: that one stays.
  bool keep(const Error& error) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error_) return false;
    error_ = error;
    happened_.store(true, std::memory_order_release);
    return true;
  }
  // Acquire: who sees that it happened sees the error.
  bool happened() const { return happened_.load(std::memory_order_acquire); }
  const Error& error() const { return *error_; }  // once it has happened

 private:
  std::mutex mutex_;
  std::optional<Error> error_;
  std::atomic<bool> happened_{false};
};

}  // namespace dpp
