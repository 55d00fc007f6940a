// Names of the files of a model that is in several, as transformers and diffusers write them:
// "model-00002-of-00005.safetensors". Free of torch.
//
//   ParseShardName("model-00002-of-00005.safetensors")->number == 2
//   DDP_ASSIGN_OR_RETURN(std::vector<std::string> files, AllShards("downloads/llm"));
//
// Functions are thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ddp::checkpoint::safetensors {

struct ShardName {
  std::string model;  // what stands before the numbers: "model"
  int64_t number = 0;
  int64_t of = 0;
  size_t digits = 0;  // of `number`, with leading zeros

  // The name of another one of the same model.
  std::string FileOf(int64_t other) const;
  bool IsOfSameModel(const ShardName& other) const;
};

// nullopt for any other name.
std::optional<ShardName> ParseShardName(absl::string_view file);

// Names of the files in `folder` that have such names, sorted. Empty if it cannot be read.
std::vector<std::string> ShardsIn(const std::string& folder);

// The same, if they are all of one model's; empty if there are none. DataLoss names those that are
// missing; FailedPrecondition names two that are not of one model.
absl::StatusOr<std::vector<std::string>> AllShards(const std::string& folder);

}  // namespace ddp::checkpoint::safetensors
