// Times the state-space scan on a GPU at the sizes of two models' mixers, in BF16, beside a copy
// and a product (operator_bench.h). FLOPs are those of the products that the dual form needs, by
// chunks of 128 tokens.
//   ssd_cuda_bench [part of a name]
#include "operator_bench.h"
#include "ops/ssd_scan/ssd_scan.h"

namespace {

using namespace tessera;

struct Mixer {
  std::string_view name;
  SsdSpec spec;
  int64_t sequences;
  int64_t length;
};

const Mixer kMixers[] = {
    {"granite-4.0-h-small", {128, 1, 64, 128}, 4, 4096},
    {"nemotron-3-nano", {64, 8, 64, 128}, 4, 4096},
    {"one long sequence", {64, 8, 64, 128}, 1, 16384},
};

/// Products of vectors of `size` for each pair of tokens of a chunk, of which one is not later.
double chunk_flops(double tokens, int64_t size) {
  constexpr double kChunk = 128;
  return tokens * (kChunk + 1) * static_cast<double>(size);
}

/// Of the whole scan: C·B of each group and the squares times values, and each state is written
/// and read. Backward states and their gradients are found, give the gradients of x, B and C, and
/// three squares of each head or group are multiplied.
double scan_flops(const Mixer& mixer, bool backward) {
  const SsdSpec& spec = mixer.spec;
  const auto tokens = static_cast<double>(mixer.sequences * mixer.length);
  const double of_groups =
      static_cast<double>(spec.num_groups) * chunk_flops(tokens, spec.state_size);
  const double of_heads = static_cast<double>(spec.num_heads) * chunk_flops(tokens, spec.head_size);
  const double of_states =
      2 * tokens * static_cast<double>(spec.num_heads * spec.head_size * spec.state_size);
  return backward ? 3 * of_groups + 2 * of_heads + 5 * of_states
                  : of_groups + of_heads + 2 * of_states;
}

void run_mixer(const Gpu& gpu, const OperatorBench& bench, const Mixer& mixer) {
  const SsdSpec& spec = mixer.spec;
  const int64_t tokens = mixer.sequences * mixer.length;
  const auto random = [&](int64_t width) { return gpu.random({DType::kBF16, {tokens, width}}); };
  const OwnedTensor x = random(spec.num_heads * spec.head_size);
  const OwnedTensor grad = random(spec.num_heads * spec.head_size);
  const OwnedTensor dt = random(spec.num_heads);
  const OwnedTensor b = random(spec.num_groups * spec.state_size);
  const OwnedTensor c = random(spec.num_groups * spec.state_size);
  const OwnedTensor of_heads = gpu.random({DType::kF32, {spec.num_heads}});
  const OwnedTensor bounds = sequence_bounds(gpu, mixer.sequences, mixer.length);
  fmt::print("{}\n", mixer.name);
  bench.run("ssd_scan", make_ssd_scan(spec), {x, dt, b, c, of_heads, of_heads, of_heads, bounds},
            scan_flops(mixer, false));
  bench.run("ssd_scan_backward", std::make_shared<SsdScanBackward>(spec),
            {x, dt, b, c, of_heads, of_heads, of_heads, bounds, grad}, scan_flops(mixer, true));
}

}  // namespace

int main(int argc, char** argv) {
  const Gpu gpu;
  const OperatorBench bench(gpu, argc > 1 ? argv[1] : "");
  for (const Mixer& mixer : kMixers) run_mixer(gpu, bench, mixer);
  return 0;
}
