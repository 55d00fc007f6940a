// The C++ blocks of pages in docs/ that no other source has; pages_test.py compares the texts.

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/coordinator.h"
#include "base/option_flags.h"
#include "base/options.h"
#include "base/registry.h"
#include "base/status.h"
#include "checkpoint/manager.h"
#include "checkpoint/module_state.h"
#include "checkpoint/stateful.h"
#include "ddp/data/dataset.h"
#include "ddp/data/sampler.h"
#include "ddp/ddp.h"
#include "ddp/gather/gather_for_metrics.h"
#include "ddp/hooks/comm_hook.h"
#include "ddp/join.h"
#include "ddp/metrics/classification.h"
#include "ddp/metrics/mean.h"
#include "ddp/metrics/metric.h"
#include "ddp/session/session.h"
#include "ddp/trainer/callback.h"
#include "ddp/trainer/trainer.h"
#include "ddp/zero/sharded_state.h"
#include "ddp/zero/zero_redundancy_optimizer.h"
#include "gtest/gtest.h"
#include "optim/state_dict.h"
#include "torch/torch.h"

// docs/gather.md
namespace render {
struct Cameras {
  at::Tensor rotation;             // [n, 3, 3]
  std::vector<std::string> names;  // n
};
constexpr auto FieldsOf(const Cameras&) {
  return ddp::Fields(ddp::Field("rotation", &Cameras::rotation),
                     ddp::Field("names", &Cameras::names));
}
}  // namespace render

// docs/options.md
namespace options_page {
struct MyOptions {
  int64_t width = 32;
  ddp::session::SessionOptions session = {};
};
constexpr auto OptionsOf(const MyOptions&) {
  return ddp::Options(
      ddp::Option("width", &MyOptions::width, "width of the hidden layer").AtLeast(1),
      ddp::Inline(&MyOptions::session));
}

int main(int argc, char** argv) {
  MyOptions options;
  const ddp::OptionList list = ddp::ListOptions(options);
  const auto flags = ddp::OptionFlags::Parse(argc, argv, list);
  if (!flags.ok()) return fprintf(stderr, "%s\n", flags.status().ToString().c_str()), 2;
  if (flags->help) return puts(list.Describe("--").c_str()), 0;
  const absl::Status valid = list.Validate();
  if (!valid.ok()) return fprintf(stderr, "%s\n", flags->Explain(valid, list).c_str()), 2;
  options.session.program_options = &list;  // the ranks compare them
  return ddp::session::Run(
      options.session, argc, argv, [](const ddp::session::Session&) { return absl::OkStatus(); },
      [&](const absl::Status& status) { return flags->Explain(status, list); });
}
}  // namespace options_page

// docs/comm_hooks.md
namespace hooks_page {
class MyHook final : public c10d::CppCommHookInterface<ddp::hooks::GroupPtr> {
 public:
  MyHook(const ddp::hooks::GroupPtr& group, double factor)
      : CppCommHookInterface(group), factor_(factor) {}
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    std::vector<at::Tensor> tensors = {bucket.getBufferRef().mul_(factor_)};
    return state_->allreduce(tensors)->getFuture();
  }

 private:
  const double factor_;
};

struct MyOptions {
  double factor = 1;
};
constexpr auto OptionsOf(const MyOptions&) {
  return ddp::Options(ddp::Option("factor", &MyOptions::factor, "of the sum").Above(0));
}
absl::StatusOr<ddp::hooks::HookPtr> Create(const ddp::hooks::CommHookOptions& options,
                                           const ddp::hooks::GroupPtr& group) {
  return std::make_unique<MyHook>(group, options.implementations.Get<MyOptions>("mine").factor);
}
const ddp::Registration<ddp::hooks::HookRegistry> kMine(
    "mine", ddp::hooks::HookEntry{.create = &Create, .options = &ddp::AnyOptions::Of<MyOptions>});
}  // namespace hooks_page

namespace ddp::pages {

using data::Batch;
using trainer::Mean;
using trainer::OptimizerOptions;
using trainer::Outputs;
using trainer::StepContext;
using trainer::StepOf;
using trainer::StepOutput;
using trainer::SumAndCount;
using trainer::Task;
using trainer::TaskOf;

session::Session OneRank() {
  return session::Session(launchers::Rank(), backends::Group(), c10::Device(c10::kCPU));
}

// docs/training_callbacks.md
double Measure(const torch::nn::Module& module) {
  return static_cast<double>(module.parameters().size());
}

class Chat final : public trainer::Callback {
 public:
  std::string name() const override { return "chat"; }
  absl::Status OnStepEnd(trainer::CallbackContext& run, const at::Tensor&) override {
    if (run.is_recorded()) run.Record("train/chat", Measure(run.module()));
    if (run.position().step == 1000) run.RequestStop("enough");
    return absl::OkStatus();
  }
};

// docs/checkpoint.md
class Ema final : public checkpoint::Stateful {
  absl::StatusOr<checkpoint::State> state_dict() override;
  absl::Status CheckStateDict(const checkpoint::State& state) const override;
  absl::Status load_state_dict(const checkpoint::State& state,
                               checkpoint::LoadNotes& notes) override;
};

absl::StatusOr<checkpoint::State> Ema::state_dict() {
  checkpoint::State state;
  state.root.insert("average", at::ones({1}));
  return state;
}

absl::Status Ema::CheckStateDict(const checkpoint::State& state) const {
  return checkpoint::CheckTensor(state.root, "average", at::ones({1}));
}

absl::Status Ema::load_state_dict(const checkpoint::State&, checkpoint::LoadNotes&) {
  return absl::OkStatus();
}

struct Net : torch::nn::Module {
  explicit Net(int64_t classes = 64) : fc(register_module("fc", torch::nn::Linear(256, classes))) {}
  at::Tensor forward(const at::Tensor& x) { return fc->forward(x.view({x.size(0), -1})); }
  torch::nn::Linear fc;
  at::Tensor rotation = register_parameter("rotation", at::zeros({3}));
};

struct Points final : data::Dataset {
  int64_t size() const override { return 8; }
  data::Batch Get(absl::Span<const int64_t> indices) const override {
    const auto n = static_cast<int64_t>(indices.size());
    return {at::ones({n, 256}), at::ones({n}, at::kLong)};
  }
};

// docs/metrics.md
struct Views {
  at::Tensor images;    // [n, 256]
  at::Tensor label;     // [n]
  at::Tensor rotation;  // [n, 3]
};
constexpr auto FieldsOf(const Views&) {
  return Fields(Field("images", &Views::images), Field("label", &Views::label),
                Field("rotation", &Views::rotation));
}

struct Scene final : data::DatasetOf<Views> {
  int64_t size() const override { return 8; }
  Views Get(absl::Span<const int64_t> indices) const override {
    const auto n = static_cast<int64_t>(indices.size());
    return {at::ones({n, 256}), at::ones({n}, at::kLong), at::ones({n, 3})};
  }
};

SumAndCount Loss(const at::Tensor& logits, const Views& batch) {
  return Mean(torch::nn::functional::cross_entropy(logits, batch.label), logits.size(0));
}

trainer::TrainerOptions OneEpoch() {
  trainer::TrainerOptions options;
  options.epochs = 1;
  options.batch_size = 4;
  return options;
}

absl::StatusOr<trainer::Report> TrainWithCallback(trainer::TrainerOptions options) {
  const session::Session session = OneRank();
  auto net = std::make_shared<Net>();
  auto step = [net](Batch& batch, const StepContext&) {
    const at::Tensor loss =
        torch::nn::functional::cross_entropy(net->forward(batch.input), batch.target) +
        net->rotation.sum();
    return StepOutput{.loss = Mean(loss, batch.input.size(0))};
  };
  const Task task = TaskOf<Batch>("points", net, step);
  const Points train, test;
  // docs/training_callbacks.md
  options.callbacks = {std::make_shared<Chat>()};
  DDP_ASSIGN_OR_RETURN(trainer::Report report, trainer::Train(session, task, train, test, options));
  return report;
}

TEST(PageTest, TrainsWithCallbackComponentOptimizerAndSchedule) {
  trainer::TrainerOptions options = OneEpoch();
  Ema ema;
  // docs/checkpoint.md
  options.components = {{.name = "ema", .stateful = &ema}};
  // docs/training_optimizers.md
  options.make_optimizer = [](const OptimizerOptions& options) {
    return optim::FactoryOf<torch::optim::Adagrad>(torch::optim::AdagradOptions(options.lr));
  };
  options.lr_lambda = [](double progress, int64_t /*step*/) { return 1 - progress * progress; };
  const auto report = TrainWithCallback(options);
  EXPECT_TRUE(report.ok()) << report.status();
}

// docs/training.md
TEST(PageTest, Losses) {
  const at::Tensor losses = at::ones({2, 3}), mask = at::ones({2, 3}), loss = losses.mean();
  const int64_t n = 6;
  const auto of_sum = [&] {
    return StepOutput{.loss = SumAndCount((losses * mask).sum(), mask.sum())};
  };
  const auto of_mean = [&] {
    return StepOutput{.loss = Mean(loss, n)};  // of a mean over n things
  };
  EXPECT_EQ(of_sum().loss.sum(), 6);
  EXPECT_EQ(of_mean().loss.sum(), 6);
}

TEST(PageTest, Phases) {
  using Images = at::Tensor;
  const auto judge = [](Images& batch, const StepContext&) {
    return StepOutput{.loss = Mean(batch.mean(), 1)};
  };
  const auto fool = judge;
  Task task;
  task.phases = {{.name = "discriminator",
                  .parameters = "discriminator\\..*",
                  .train_step = StepOf<Images>(judge)},
                 {.name = "generator",
                  .parameters = "generator\\..*",
                  .train_step = StepOf<Images>(fool),
                  .optimizer = OptimizerOptions{.name = "adam", .lr = 1e-4}}};
  EXPECT_EQ(task.phases.size(), 2);
}

// docs/metrics.md
absl::StatusOr<std::map<std::string, double>> Evaluated(const std::shared_ptr<Net>& model,
                                                        const std::vector<Batch>& mine) {
  const session::Session session = OneRank();
  metrics::Accuracy accuracy, top5({.k = 5});
  metrics::Auc auc;
  for (const Batch& batch : mine) {  // of this rank; ranks may have different numbers of batches
    at::Tensor logits = model->forward(batch.input);
    DDP_RETURN_IF_ERROR(accuracy.Update(logits, batch.target));
    DDP_RETURN_IF_ERROR(top5.Update(logits, batch.target));
    DDP_RETURN_IF_ERROR(auc.Update(logits.select(1, 1), batch.target.eq(1)));
  }
  // {"accuracy": …, "accuracy_top5": …, "auc": …}, the same on all ranks
  DDP_ASSIGN_OR_RETURN(auto values,
                       metrics::ReduceMetrics(session.process_group(), {&accuracy, &top5, &auc}));
  return values;
}

TEST(PageTest, MetricsOfBatches) {
  const torch::NoGradGuard no_grad;
  const std::vector<Batch> batches = {{at::randn({2, 256}), at::arange(2)}};
  const auto values = Evaluated(std::make_shared<Net>(), batches);
  ASSERT_TRUE(values.ok()) << values.status();
  EXPECT_EQ(values->size(), 3);
  EXPECT_EQ(values->count("accuracy_top5"), 1);
}

TEST(PageTest, MetricsOfATask) {
  auto net = std::make_shared<Net>(10);
  auto train_step = [net](Views& batch, const StepContext&) {
    const at::Tensor loss = Loss(net->forward(batch.images), batch).value() + net->rotation.sum();
    return StepOutput{.loss = Mean(loss, batch.label.size(0))};
  };
  auto eval_step = [net](Views& batch, const StepContext& context) {
    at::Tensor logits = net->forward(batch.images);
    context.Update("rotation",
                   (net->rotation - batch.rotation).abs());  // of the metric with this name
    return StepOutput{.loss = Loss(logits, batch),
                      .predictions = data::AnyBatch(Outputs{logits, batch.label})};
  };
  Task task = TaskOf<Views>("views", net, train_step, eval_step);
  task.metrics = [] {
    return std::vector<std::shared_ptr<metrics::Metric>>{
        std::make_shared<metrics::F1>(10), std::make_shared<metrics::Mean>("rotation")};
  };
  const Scene scene;
  const auto report = trainer::Train(OneRank(), task, scene, scene, OneEpoch());
  EXPECT_TRUE(report.ok()) << report.status();
}

// docs/ddp.md
absl::Status LoopOfDdp(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                       std::vector<Batch> batches) {
  torch::nn::Linear net(2, 1);
  const auto loss = [](const at::Tensor& a, const at::Tensor& b) { return at::mse_loss(a, b); };
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  DDP_ASSIGN_OR_RETURN(auto model, ddp::Wrap(net, group, {.find_unused_parameters = true}));
  for (auto& batch : batches) {
    model->zero_grad();
    loss(model->forward(batch.input), batch.target).backward();  // averages the gradients
    optimizer.step();
  }
  return absl::OkStatus();
}

absl::Status LoopInJoin(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                        std::vector<Batch> batches) {
  torch::nn::Linear net(2, 1);
  DDP_ASSIGN_OR_RETURN(auto model, ddp::Wrap(net, group));
  DDP_ASSIGN_OR_RETURN(auto zero,
                       zero::ZeroRedundancyOptimizer::Create(
                           net->parameters(), group,
                           optim::FactoryOf<torch::optim::SGD>(torch::optim::SGDOptions(0.1))));
  absl::Status status = ddp::Join({&model->parallel(), zero.get()}, {}, [&] {
    for (auto& batch : batches) {
      zero->zero_grad();
      at::mse_loss(model->forward(batch.input), batch.target).backward();
      zero->step();
    }
    return absl::OkStatus();
  });
  return status;
}

TEST(PageTest, LoopsOfDdp) {
  const std::vector<Batch> batches(2, {at::ones({3, 2}), at::ones({3, 1})});
  EXPECT_EQ(LoopOfDdp(nullptr, batches), absl::OkStatus());
  EXPECT_EQ(LoopInJoin(nullptr, batches), absl::OkStatus());
}

// docs/zero.md
absl::Status LoopOfZero(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  torch::nn::Linear net(4, 2);
  const at::Tensor input = at::ones({3, 4});
  const std::vector<std::string> names = {"weight", "bias"};
  const SingleRank ranks;
  DDP_ASSIGN_OR_RETURN(auto manager, checkpoint::Manager::Create(
                                         {.directory = testing::TempDir() + "/zero"}, ranks));
  // Wrap first: it gives all ranks the same parameters. Stage 2: {.reduce_gradients = false}.
  DDP_ASSIGN_OR_RETURN(auto model, ddp::Wrap(net, group));
  DDP_ASSIGN_OR_RETURN(
      auto optimizer,
      ddp::zero::ZeroRedundancyOptimizer::Create(
          net->parameters(), group,
          ddp::optim::FactoryOf<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3)),
          {.stage = 1}));
  torch::optim::StepLR scheduler(*optimizer, 30);  // it is a torch::optim::Optimizer

  model->forward(input).sum().backward();
  optimizer->clip_grad_norm_(1.0);  // not ddp::clip_grad_norm_: in stage 2 parameters have no .grad
  optimizer->step();
  optimizer->zero_grad();

  checkpoint::State state;
  DDP_RETURN_IF_ERROR(zero::AddShardedState(*optimizer, names, ranks, "optimizer", state));
  DDP_RETURN_IF_ERROR(manager->Save(checkpoint::EpochName(3), state).status());

  checkpoint::ReadRequest request;
  DDP_RETURN_IF_ERROR(zero::RequestShardedState(*optimizer, names, "optimizer", request));
  DDP_ASSIGN_OR_RETURN(std::optional<checkpoint::Loaded> newest, manager->LoadNewest(request));
  DDP_RETURN_IF_ERROR(zero::LoadShardedState(newest->state, names, "optimizer", *optimizer));
  return absl::OkStatus();
}

TEST(PageTest, LoopOfZeroSavesAndLoads) { EXPECT_EQ(LoopOfZero(nullptr), absl::OkStatus()); }

// docs/gather.md
namespace gather {

using render::Cameras;

Cameras Predict(const std::vector<int64_t>& indices) {
  Cameras cameras;
  for (int64_t index : indices) cameras.names.push_back(std::to_string(index));
  cameras.rotation = at::eye(3).expand({static_cast<int64_t>(indices.size()), 3, 3});
  return cameras;
}

absl::StatusOr<Cameras> Gather(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                               const data::AnyDataset& test) {
  DDP_ASSIGN_OR_RETURN(
      auto sampler, ddp::data::EvaluationSampler::Create(
                        test.size(), {.num_replicas = group->getSize(), .rank = group->getRank()}));
  Cameras mine = Predict(sampler.Indices());  // [n, 3, 3] and n names; n differs by rank
  DDP_ASSIGN_OR_RETURN(Cameras all, ddp::GatherForMetrics(group, sampler.Indices(), mine));
  return all;
}

}  // namespace gather

TEST(PageTest, GathersFromAGroup) {
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(/*rank=*/0, /*size=*/1);
  const auto all = gather::Gather(group, Points());
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->names.size(), 8);
}

// docs/checkpoint.md
namespace checkpoints {

using checkpoint::Box;
using checkpoint::EpochName;
using checkpoint::FlatRange;
using checkpoint::Loaded;
using checkpoint::LoadModuleState;
using checkpoint::Manager;
using checkpoint::ModuleState;
using checkpoint::State;
using checkpoint::Whole;

absl::StatusOr<State> SaveAndLoad(const Coordinator& ranks, const std::shared_ptr<Net>& model,
                                  torch::optim::Optimizer& optimizer) {
  DDP_ASSIGN_OR_RETURN(auto manager, Manager::Create({.directory = "runs/a"}, ranks));

  State state;
  state.root.insert("model", ModuleState(*model));
  DDP_ASSIGN_OR_RETURN(auto optimizer_state, optim::OptimizerState(optimizer));
  state.root.insert("optimizer", optimizer_state);
  DDP_RETURN_IF_ERROR(manager->Save(EpochName(3), state).status());

  DDP_ASSIGN_OR_RETURN(std::optional<Loaded> newest, manager->LoadNewest());
  if (newest.has_value()) {
    DDP_RETURN_IF_ERROR(LoadModuleState(*model, newest->state.root.at("model")));
    DDP_RETURN_IF_ERROR(optim::LoadOptimizerState(optimizer, newest->state.root.at("optimizer")));
  }
  return state;
}

absl::Status KeepBest(const Coordinator& ranks, const State& state) {
  DDP_ASSIGN_OR_RETURN(
      auto manager,
      Manager::Create({.directory = "runs/a", .keep_last = 3, .keep_best = "test/accuracy:max"},
                      ranks));
  DDP_RETURN_IF_ERROR(
      manager->Save(EpochName(3), state, {.metrics = {{"test/accuracy", 0.91}}}).status());
  DDP_ASSIGN_OR_RETURN(std::optional<Loaded> best, manager->LoadBest());
  DDP_RETURN_IF_ERROR(Manager::FolderAt("runs/a").Pin("epoch_3.pt"));
  return best.has_value() ? absl::OkStatus() : absl::NotFoundError("best");
}

absl::StatusOr<State> LoadParts() {
  DDP_ASSIGN_OR_RETURN(
      State mine,
      Manager::Load("runs/a/epoch_3.pt",
                    {.parts = {{"epoch", Whole{}},
                               {"optimizer/param_groups", Whole{}},  // all below it
                               {"optimizer/state/0/exp_avg",
                                FlatRange{4096, 8192}},  // elements of the flattened tensor
                               {"model/fc.weight", Box{{0, 128}, {64, 128}}}}}));  // offset, sizes
  return mine;
}

absl::StatusOr<State> LoadDcp() {
  DDP_ASSIGN_OR_RETURN(State all, Manager::Load("runs/fsdp/step-100"));
  DDP_ASSIGN_OR_RETURN(State mine,
                       Manager::Load("runs/fsdp/step-100",
                                     {.parts = {{"model/fc.weight", Box{{0, 128}, {64, 128}}}}}));
  return mine;
}

}  // namespace checkpoints

TEST(PageTest, CheckpointsOfALoop) {
  ASSERT_EQ(chdir(testing::TempDir().c_str()), 0);
  const SingleRank ranks;
  const auto net = std::make_shared<Net>();
  torch::optim::Adam optimizer({net->fc->weight, net->fc->bias}, torch::optim::AdamOptions(1e-3));
  net->forward(at::ones({1, 256})).sum().backward();
  optimizer.step();
  auto state = checkpoints::SaveAndLoad(ranks, net, optimizer);
  ASSERT_TRUE(state.ok()) << state.status();
  state->root.insert("epoch", 3);
  EXPECT_EQ(checkpoints::KeepBest(ranks, *state), absl::OkStatus());
  const auto parts = checkpoints::LoadParts();
  EXPECT_TRUE(parts.ok()) << parts.status();
  EXPECT_FALSE(checkpoints::LoadDcp().ok());  // there is none
}

TEST(PageTest, OptionsOfAProgram) {
  std::string program = "program", help = "--help", wrong = "--width=0";
  char* helps[] = {program.data(), help.data(), nullptr};
  EXPECT_EQ(options_page::main(2, helps), 0);
  char* fails[] = {program.data(), wrong.data(), nullptr};
  EXPECT_EQ(options_page::main(2, fails), 2);
}

TEST(PageTest, AHookOfTheProgramsOwnIsListed) {
  EXPECT_EQ(hooks::Validate({.name = "mine"}), absl::OkStatus());
}

}  // namespace ddp::pages
