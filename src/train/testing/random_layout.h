#pragma once

#include <cstdint>

#include "train/setup/settings.h"

namespace tessera::testing {

/// A random small model on a random layout of at most `max_ranks` ranks, of every family of options
/// that layouts meet: a pure function of the seed.
struct RandomLayout {
  Settings settings;
  int64_t num_ranks = 1;
};

RandomLayout draw_layout(uint64_t seed, int64_t max_ranks);

/// Sets train.schedule = "merged", and changes what does not go together with it.
void merge_passes(Settings& settings);

/// As draw_layout, with dynamic context parallelism and what goes together with it.
RandomLayout draw_context_layout(uint64_t seed, int64_t max_ranks);

/// Makes it a run of so many steps on the host, in that folder, on random tokens that are there
/// then.
void prepare_run(RandomLayout& layout, int64_t steps, const std::string& folder);

/// As draw_layout, with gradients that travel as BF16.
RandomLayout draw_compressed_layout(uint64_t seed, int64_t max_ranks);

/// Whether any gradients travel as BF16 there, should they: those between ranks of one
/// optim.reduce_group, and between the copies of hybrid sharding, stay F32.
bool sends_compressed(const RandomLayout& layout);

/// The worst error of gradients is above this where gradients were rounded to BF16, whose unit is
/// 2^-9, and well below it where they were not.
constexpr double kLeastRounding = 0x1.0p-12;

/// "tp 2 cp 1 ...; experts 8 top 2 ...", for messages.
std::string describe(const RandomLayout& layout);

}  // namespace tessera::testing
