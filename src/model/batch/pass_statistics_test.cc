#include "model/batch/pass_statistics.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

StatisticsSizes sizes_of(int64_t layers, int64_t experts, int64_t losses) {
  return {.moe_layers = layers,
          .num_experts = experts,
          .num_losses = losses,
          .logit_layers = layers,
          .num_heads = 3};
}

void write(const PassStatistics& statistics, int64_t num_layers, int64_t num_losses, float value) {
  for (int64_t idx = 0; idx < num_layers; ++idx) {
    const LayerStatistics layer = statistics.layer(idx);
    *layer.balance_loss.as<float>() = value++;
    *layer.z_loss.as<float>() = value++;
    for (float& x : layer.score_means.span<float>()) x = value++;
    for (float& x : layer.counts.span<float>()) x = value++;
    *layer.dropped.as<int64_t>() = static_cast<int64_t>(value++);
    for (float& x : statistics.max_logits(idx).span<float>()) x = value++;
  }
  for (int64_t idx = 0; idx < num_losses; ++idx) *statistics.loss(idx).as<float>() = value++;
}

void expect_taken(const PassStatistics& statistics, int64_t num_layers, int64_t num_losses,
                  float value) {
  for (int64_t idx = 0; idx < num_layers; ++idx) {
    const LayerStatistics layer = statistics.taken_layer(idx);
    EXPECT_EQ(*layer.balance_loss.as<float>(), value++);
    EXPECT_EQ(*layer.z_loss.as<float>(), value++);
    for (const float x : layer.score_means.span<float>()) EXPECT_EQ(x, value++);
    for (const float x : layer.counts.span<float>()) EXPECT_EQ(x, value++);
    EXPECT_EQ(*layer.dropped.as<int64_t>(), static_cast<int64_t>(value++));
    for (const float x : statistics.taken_max_logits(idx).span<float>()) EXPECT_EQ(x, value++);
  }
  for (int64_t idx = 0; idx < num_losses; ++idx) EXPECT_EQ(statistics.taken_loss(idx), value++);
}

TEST(PassStatistics, GivesWhatWasPublishedInItsOrder) {
  for (const auto& [layers, experts, losses] :
       {std::tuple(0, 0, 1), std::tuple(1, 1, 0), std::tuple(3, 17, 2), std::tuple(2, 64, 1)}) {
    PassStatistics statistics(sizes_of(layers, experts, losses), host_device());
    float value = 1;
    for (int step = 0; step < 3; ++step) {
      std::vector<float> published;
      for (int i = 0; i <= step; ++i) {
        write(statistics, layers, losses, value);
        statistics.publish();
        published.push_back(value);
        value += 1000;
      }
      for (const float first : published) {
        statistics.take();
        expect_taken(statistics, layers, losses, first);
      }
      EXPECT_THROW(statistics.take(), InternalError);
    }
    expect_taken(statistics, layers, losses, value - 1000);
    statistics.publish();
    statistics.clear();
    EXPECT_THROW(statistics.take(), InternalError);
  }
}

TEST(PassStatistics, ReadsWhatIsThereNow) {
  PassStatistics statistics(sizes_of(2, 5, 1), host_device());
  for (const float value : {1.0F, 100.0F}) {
    write(statistics, 2, 1, value);
    statistics.read();
    EXPECT_EQ(*statistics.current_layer(0).balance_loss.as<float>(), value);
    EXPECT_EQ(statistics.current_layer(1).counts.span<float>()[4],
              statistics.layer(1).counts.span<float>()[4]);
  }
}

}  // namespace
}  // namespace tessera
