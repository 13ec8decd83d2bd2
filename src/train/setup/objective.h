#pragma once

#include <cstdint>
#include <string>

namespace tessera {

/// What a run's steps lower.
enum class Objective : uint8_t {
  kNextToken,  ///< cross-entropy of the data's tokens
  kDpo,        ///< direct preference optimization: of a prompt's two answers one is to be likelier
  kGrpo,       ///< group relative policy optimization: rewards of the model's own answers
};

/// Direct preference optimization (Rafailov et al., 2023, equation 7).
struct DpoSettings {
  std::string pairs;  ///< JSON lines of {"prompt", "chosen", "rejected"}
  double beta = 0.1;
};

/// What an answer's reward is compared with.
enum class AdvantageKind : uint8_t {
  kGrpo,    ///< (reward - mean of the group) / (standard deviation + 1e-6) (Shao et al., 2024)
  kDrGrpo,  ///< reward - mean of the group (Liu et al., Understanding R1-Zero, 2025)
};

/// How losses of tokens are averaged.
enum class LossAverage : uint8_t {
  kTokens,     ///< over all tokens of the step (DAPO: Yu et al., 2025)
  kSequences,  ///< over each answer, then over answers (GRPO: Shao et al., 2024)
};

/// What a run does where it could not hand its weights over.
enum class ExportFailure : uint8_t { kStop, kGoOn };

/// Weights for an engine outside, while they are trained.
struct WeightExportSettings {
  std::string folder;               ///< of versions; empty: none
  std::string like;                 ///< a folder of Hugging Face, or a checkpoint made from one
  int64_t interval = 1;             ///< steps
  int64_t keep_last = 2;            ///< versions that stay
  std::string vllm_url;             ///< of a server that is told of each version; empty: none
  std::string vllm_way = "reload";  ///< how it is told: train/tune/vllm_server.h
  std::string vllm_pause = "wait";  ///< vLLM's name for what becomes of requests under way
  double vllm_timeout = 300;        ///< seconds of a request
  ExportFailure on_failure = ExportFailure::kStop;
};

/// Group relative policy optimization.
struct RlSettings {
  std::string task = "arithmetic";  ///< of rl_tasks(); or
  std::string prompts;              ///< JSON lines of {"prompt", ...}, for reward_command
  std::string reward_command;       ///< run by the shell; empty: the task's own reward
  double reward_timeout = 60;       ///< seconds
  int64_t group_size = 8;           ///< answers to each prompt
  int64_t max_tokens = 32;          ///< of an answer
  double temperature = 1.0;
  double clip_low = 0.2;
  double clip_high = 0.2;
  double kl_coefficient = 0;
  int64_t updates = 1;  ///< steps on each rollout (mu of GRPO)
  AdvantageKind advantage = AdvantageKind::kGrpo;
  LossAverage average = LossAverage::kTokens;
  bool router_replay = false;
  WeightExportSettings exports;
};

}  // namespace tessera
