// Any metrics.jsonl is either refused with a UserError or gives a report, and what was read is the
// same after being written and read again.

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "core/error.h"
#include "train/metrics/jsonl.h"
#include "train/metrics/report.h"

namespace {

/// A file in memory with a path of its own.
struct MemoryFile {
  explicit MemoryFile(std::string_view text)
      : file(memfd_create("metrics", 0)), path("/proc/self/fd/" + std::to_string(file.get())) {
    tessera::AppendFile(path, tessera::AppendFile::Start::kEmpty).append(text);
  }
  tessera::FileDescriptor file;
  std::string path;
};

struct Metrics {
  std::string lines;
  tessera::RunHistory history;
};

Metrics read(std::string_view text) {
  Metrics metrics;
  const auto take = [&](const auto& record) {
    metrics.lines += tessera::to_json_line(record) + '\n';
    metrics.history.add(record);
  };
  tessera::read_metrics(MemoryFile(text).path, {take, take});
  return metrics;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const Metrics metrics = read({reinterpret_cast<const char*>(data), size});
    if (read(metrics.lines).lines != metrics.lines) std::abort();
    tessera::make_report(metrics.history, {});
  } catch (const tessera::UserError&) {
  }
  return 0;
}
