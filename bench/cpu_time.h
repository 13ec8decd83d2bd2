#pragma once

#include <omp.h>
#include <time.h>

#include <functional>

/// Times of work on the CPU.
namespace tessera {

/// Time in seconds: with one thread that of the CPU, which other processes change less.
inline double cpu_now() {
  timespec time{};
  clock_gettime(omp_get_max_threads() == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

inline double cpu_seconds(const std::function<void()>& work) {
  const double start = cpu_now();
  work();
  return cpu_now() - start;
}

}  // namespace tessera
