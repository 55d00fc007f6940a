#include "ddp/data/example_dataset.h"
#include "ddp/session/session.h"
#include "ddp/trainer/trainer.h"
#include "torch/torch.h"

using ddp::trainer::StepContext;
using ddp::trainer::StepOutput;
using ddp::trainer::SumAndCount;

constexpr int64_t kTokens = 11;

// A batch of sentences of different lengths.
struct Sentences {
  torch::Tensor tokens;  // [n, longest], int64, padded with 0
  torch::Tensor mask;    // [n, longest], float: 1 for a token that is to be predicted
};
constexpr auto FieldsOf(const Sentences&) {
  return ddp::Fields(ddp::Field("tokens", &Sentences::tokens),
                     ddp::Field("mask", &Sentences::mask));
}

// 3 5 7 9 0 2 …: each sentence counts in steps of its own, which its first two tokens show.
struct Counting : ddp::data::ExampleDatasetOf<torch::Tensor, Sentences> {
  Counting(int64_t first, int64_t n) : first(first), n(n) {}
  int64_t size() const override { return n; }
  torch::Tensor Get(int64_t index) const override {
    const int64_t i = first + index;
    return (torch::arange(4 + i % 9) * (i % 7 + 1) + i).remainder(kTokens);
  }
  Sentences Collate(std::vector<torch::Tensor> examples,
                    absl::Span<const int64_t> /*indices*/) const override {
    std::vector<torch::Tensor> masks;
    for (const torch::Tensor& tokens : examples) {
      masks.push_back(torch::arange(tokens.size(0)).ge(2).to(torch::kFloat));
    }
    return {torch::nn::utils::rnn::pad_sequence(examples, /*batch_first=*/true),
            torch::nn::utils::rnn::pad_sequence(masks, /*batch_first=*/true)};
  }
  const int64_t first, n;
};

struct Net : torch::nn::Module {
  torch::nn::Embedding embedding{register_module("embedding", torch::nn::Embedding(kTokens, 32))};
  torch::nn::GRU gru{
      register_module("gru", torch::nn::GRU(torch::nn::GRUOptions(32, 64).batch_first(true)))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(64, kTokens))};
  torch::Tensor forward(const torch::Tensor& tokens) {
    return out(std::get<0>(gru(embedding(tokens))));
  }
};

int main(int argc, char** argv) {
  return ddp::session::Run(
      {.launcher = {.default_nproc_per_node = 2}}, argc, argv, [](const auto& session) {
        torch::manual_seed(1);
        auto net = std::make_shared<Net>();
        auto step = [net](Sentences& batch, const StepContext&) {
          torch::Tensor logits = net->forward(batch.tokens.slice(1, 0, -1));
          torch::Tensor next = batch.tokens.slice(1, 1), mask = batch.mask.slice(1, 1);
          torch::Tensor losses = torch::nn::functional::cross_entropy(
              logits.transpose(1, 2), next,
              torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone));
          torch::Tensor correct = (logits.argmax(2).eq(next) * mask).sum(), count = mask.sum();
          return StepOutput{.loss = SumAndCount((losses * mask).sum(), count),
                            .metrics = {{"accuracy", SumAndCount(correct, count)}}};
        };
        ddp::trainer::TrainerOptions options;
        options.epochs = 10;
        options.optimizer = {.name = "adam", .lr = 0.01};
        auto task = ddp::trainer::TaskOf<Sentences>("counting", net, step);
        auto report =
            ddp::trainer::Train(session, task, Counting(0, 2000), Counting(2000, 301), options);
        if (report.ok() && session.is_main()) puts(ddp::trainer::Summary(*report, 0).c_str());
        return report.status();
      });
}
