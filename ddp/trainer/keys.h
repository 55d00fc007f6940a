// The keys of a run's checkpoint, in docs/checkpoint.md's words. No other component may have one of
// them.
#pragma once

#include <algorithm>
#include <array>

#include "absl/strings/string_view.h"

namespace ddp::trainer::keys {

// Components, each with its entries in a dict under its name.
inline constexpr char kModel[] = "model";
inline constexpr char kOptimizer[] = "optimizer";
inline constexpr char kScheduler[] = "scheduler";
inline constexpr char kScaler[] = "scaler";
inline constexpr char kCommHook[] = "comm_hook";
inline constexpr char kBuffers[] = "buffers";
inline constexpr char kGuard[] = "guard";

// Components whose entries stand at the top level: they have a name for messages only.
inline constexpr char kRun[] = "run";
inline constexpr char kBuckets[] = "buckets";
inline constexpr char kGenerators[] = "generators";

// The run has these entries at the top level:
inline constexpr char kTask[] = "task";
inline constexpr char kEpoch[] = "epoch";
inline constexpr char kSample[] = "sample";
inline constexpr char kStep[] = "step";
inline constexpr char kSeed[] = "seed";
inline constexpr char kDatasetSize[] = "dataset_size";
inline constexpr char kValidationSize[] = "validation_size";
inline constexpr char kValidatedStep[] = "validated_step";
inline constexpr char kWorldSize[] = "world_size";
inline constexpr char kLossCounts[] = "loss_counts";
inline constexpr char kOrder[] = "order";
inline constexpr char kFingerprint[] = "data_fingerprint";
inline constexpr char kConfig[] = "config";
inline constexpr char kEvaluated[] = "evaluated_weights";
// The schedule has this one:
inline constexpr char kProgress[] = "progress";
// The model's wrapper has this one:
inline constexpr char kBucketOrder[] = "bucket_order";
// The optimizer, where it reduces gradients:
inline constexpr char kGradientOrder[] = "gradient_order";
// The generators have these, with one value per rank:
inline constexpr char kRng[] = "rng";
inline constexpr char kDeviceRng[] = "device_rng";

// Whether a user's component must not have this name. `per_rank`: checkpoint/stateful.h.
constexpr bool IsTaken(absl::string_view name) {
  constexpr auto kAll = std::to_array<absl::string_view>(
      {kModel,          kBuffers,       kOptimizer,     kScheduler,   kScaler,
       kCommHook,       kRun,           kBuckets,       kGenerators,  kTask,
       kEpoch,          kSample,        kStep,          kSeed,        kDatasetSize,
       kWorldSize,      kConfig,        kProgress,      kBucketOrder, kRng,
       kDeviceRng,      kLossCounts,    kGuard,         kOrder,       kFingerprint,
       kValidationSize, kValidatedStep, kGradientOrder, kEvaluated,   "per_rank"});
  return std::find(kAll.begin(), kAll.end(), name) != kAll.end();
}

}  // namespace ddp::trainer::keys
