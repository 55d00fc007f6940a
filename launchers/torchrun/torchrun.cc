// Launcher `torchrun`: ranks started by torchrun or anything that sets its variables, such as
// Kubernetes' PyTorchJob and Accelerate.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launchers/launcher.h"
#include "launchers/variables.h"

namespace ddp::launchers {
namespace {

class TorchrunLauncher : public Launcher {
 public:
  absl::string_view name() const override { return "torchrun"; }

  absl::StatusOr<std::optional<Rank>> Detect(const Environment& env) const override {
    return RankFromVariables(env, Variables());
  }

  // Not where nodes join or leave.
  bool CountsRestarts() const override { return false; }

  std::vector<std::string> Variables() const override {
    std::vector<std::string> variables = TorchrunVariables();
    variables.push_back(kMasterListenFd);
    return variables;
  }

  std::string HowToStart() const override {
    return "torchrun --no-python --nproc_per_node=N PROGRAM [ARGUMENT…]";
  }
};

const Registration<LauncherRegistry> kTorchrun("torchrun",
                                               LauncherEntry{
                                                   .create = +[]() -> std::unique_ptr<Launcher> {
                                                     return std::make_unique<TorchrunLauncher>();
                                                   },
                                                   .detect_order = kDetectTorchrun});

}  // namespace
}  // namespace ddp::launchers
