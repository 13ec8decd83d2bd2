#include "cli/tests/cli_testing.h"
#include "data/token_file_writer.h"
#include "train/testing/random_layout.h"

namespace tessera {
namespace {

/// Random models on random layouts (see testing::draw_layout) as processes that mpirun starts.
class CliRandomRanks : public CliTest {
 protected:
  void SetUp() override {
    if (std::system("command -v mpirun > /dev/null 2>&1") != 0) GTEST_SKIP() << "no mpirun";
  }

  void write_tokens(const Settings& settings) const {
    TokenFileWriter writer(settings.data.tokens, settings.model.vocab_size);
    Random random(static_cast<uint64_t>(settings.run.seed), 77);
    const int64_t needed = 2 * (settings.train.global_batch * settings.train.steps + 1) *
                           settings.data.sequence_length;
    while (writer.num_tokens() < needed) {
      std::vector<int32_t> document(1 + random.next_below(40));
      for (int32_t& token : document)
        token = static_cast<int32_t>(
            random.next_below(static_cast<uint64_t>(settings.model.vocab_size)));
      writer.append(document);
      writer.end_document();
    }
    writer.finish();
  }

  std::vector<nlohmann::json> run(Settings settings, const std::string& name,
                                  const Arguments& options) const {
    settings.run.folder = path(name);
    settings.run.report = false;
    write_all(path(name + ".toml"), make_schema(settings).to_toml());
    Arguments all = {"train", path(name + ".toml")};
    all.insert(all.end(), options.begin(), options.end());
    const Finished finished = run_tessera(all);
    EXPECT_EQ(finished.code, 0) << finished.err;
    return read_steps(name);
  }
};

TEST_F(CliRandomRanks, GiveTheLossesOfOneRank) {
  for (uint64_t seed = 2001; seed < 2007; ++seed) {
    testing::RandomLayout layout = testing::draw_layout(seed, 8);
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, testing::describe(layout)));
    Settings& settings = layout.settings;
    settings.train.steps = 3;
    settings.data.tokens = path(fmt::format("tokens{}", seed));
    write_tokens(settings);
    const auto ranks = run(settings, fmt::format("ranks{}", seed),
                           {"--ranks", fmt::format("{}", layout.num_ranks)});
    settings.parallel = {};
    settings.shard = {};
    const auto one = run(settings, fmt::format("one{}", seed), {});
    ASSERT_EQ(one.size(), 3);
    ASSERT_EQ(ranks.size(), one.size());
    for (size_t step = 0; step < one.size(); ++step) {
      for (const char* key : {"loss", "mtp_loss", "balance_loss", "z_loss", "grad_norm"}) {
        ASSERT_EQ(ranks[step].contains(key), one[step].contains(key)) << key;
        if (!one[step].contains(key)) continue;
        const double expected = one[step][key];
        EXPECT_NEAR(ranks[step][key].get<double>(), expected, 1e-4 * std::abs(expected)) << key;
      }
    }
  }
}

}  // namespace
}  // namespace tessera
