#include "ddp/trainer/run.h"

#include <algorithm>
#include <utility>

#include "base/status.h"
#include "checkpoint/module_state.h"
#include "ddp/collective_status.h"
#include "torch/csrc/autograd/grad_mode.h"

namespace ddp::trainer {
namespace {

int64_t CeilDivide(int64_t a, int64_t b) { return a / b + (a % b != 0); }

}  // namespace

int64_t Run::BatchesFrom(int64_t sample) const {
  const int64_t samples = sampler->max_num_samples(sample);
  return options.drop_last ? samples / options.batch_size : CeilDivide(samples, options.batch_size);
}

int64_t Run::StepsFrom(int64_t sample) const {
  return CeilDivide(BatchesFrom(sample), options.accumulate);
}

int64_t Run::ExamplesIn(int64_t sample, int64_t done, int64_t batches) const {
  int64_t examples = 0;
  for (int rank = 0; rank < world_size(); ++rank) {
    int64_t mine = sampler->num_samples_of(rank, sample);
    if (options.drop_last) mine -= mine % options.batch_size;
    examples +=
        std::clamp<int64_t>(mine - done * options.batch_size, 0, batches * options.batch_size);
  }
  return examples;
}

StepsLeft Run::RemainingSteps() const {
  const int64_t in_epochs =
      StepsFrom(position.sample) + (options.epochs - position.epoch - 1) * StepsFrom(0);
  const int64_t most = position.epoch < options.epochs ? std::max<int64_t>(0, in_epochs) : 0;
  if (options.max_steps == 0) return {most, in_epochs};
  return {std::clamp<int64_t>(options.max_steps - position.step, 0, most), in_epochs};
}

const std::vector<std::string>& Run::Ignored() const {
  const std::vector<std::string>* wrapped =
      task.parallel != nullptr ? task.parallel->ignored() : nullptr;
  return wrapped != nullptr ? *wrapped : options.data_parallel.ignored;
}

absl::Status Run::WithSharedBuffers(const std::function<absl::Status()>& body) const {
  WaitForParameters();
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers;
  if (world_size() > 1) {
    for (const auto& buffer : task.module->named_buffers()) {
      buffers.emplace_back(buffer.value(), buffer.value().detach().clone());
    }
  }
  DDP_RETURN_IF_ERROR(CatchCollective("sharing rank 0's buffers", [&] {
    SyncBuffers();
    return absl::OkStatus();
  }));
  DDP_RETURN_IF_ERROR(body());
  const torch::NoGradGuard no_grad;
  for (auto& [buffer, mine] : buffers) checkpoint::CopyValues(buffer, mine);
  return absl::OkStatus();
}

}  // namespace ddp::trainer
