// The backend through c10d: every rank of an mpirun runs the same tests at once. The conformance
// suite (backends/conformance) tries all collectives, dtypes and sizes; here is what MPI alone has.
#include "backends/mpi/mpi_backend.h"

#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "ATen/ops/arange.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/sparse_coo_tensor.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "backends/process_group.h"
#include "base/environment.h"
#include "base/status.h"
#include "gtest/gtest.h"
#include "launchers/launcher.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

namespace ddp::backends::mpi {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using Tensors = std::vector<at::Tensor>;

const launchers::Rank& ThisRank() {
  static const auto* rank = [] {
    auto launcher = launchers::CreateLauncher("mpi");
    auto detected = (*launcher)->Detect(Environment::FromProcess());
    EXPECT_TRUE(detected.ok()) << detected.status();
    return new launchers::Rank(**detected);
  }();
  return *rank;
}

// Made once, without a word on where rank 0 is.
backends::Group& TheGroup() {
  static auto* group = [] {
    unsetenv("MASTER_ADDR");
    unsetenv("MASTER_PORT");
    auto made = CreateProcessGroup(ThisRank(), {.backend = "mpi"});
    EXPECT_TRUE(made.ok()) << made.status();
    return new backends::Group(*std::move(made));
  }();
  return *group;
}

// Rank 0 serves the store: nobody asks it for anything once the last test is over.
class LeaveTogether : public testing::Environment {
  void TearDown() override {
    TheGroup().process_group->getBackend(c10::kCPU)->barrier({})->wait();
    TheGroup().process_group.reset();
  }
};
const auto* const kLeaveTogether = testing::AddGlobalTestEnvironment(new LeaveTogether);

BackendPtr TheBackend() { return TheGroup().process_group->getBackend(c10::kCPU); }
int Size() { return ThisRank().world_size; }
int Self() { return ThisRank().rank; }

// A group of its own over all ranks, which a test may break.
BackendPtr NewBackend(const std::string& name, absl::Duration timeout = absl::Seconds(60),
                      absl::Duration join_timeout = absl::Seconds(60)) {
  BackendOptions options;
  options.store = c10::make_intrusive<c10d::PrefixStore>(name, TheGroup().store);
  options.rank = ThisRank();
  options.group.timeout = timeout;
  options.group.join_timeout = join_timeout;
  auto backend = CreateMpi(options);
  EXPECT_TRUE(backend.ok()) << backend.status();
  return *backend;
}

std::string ErrorOf(const std::function<void()>& call) {
  const absl::Status status = CatchStatus("", call);
  EXPECT_FALSE(status.ok());
  return std::string(status.message());
}

// Sums what ranks have, in the order of ranks.
at::Tensor SumOverRanks(const std::function<at::Tensor(int rank)>& tensor) {
  at::Tensor sum = tensor(0).clone();
  for (int rank = 1; rank < Size(); ++rank) sum += tensor(rank);
  return sum;
}

at::Tensor Noise(int rank, int64_t n) {
  return at::arange(n, at::kFloat) * 0.37f + 1.0f / (rank + 3);
}

// Ranks that believe to be on nodes of their own: mpirun does not tell them where rank 0 is.
TEST(MpiBackendTest, SeveralNodesMeetWithoutAnAddress) {
  launchers::Rank rank = ThisRank();
  rank.local_rank = 0;
  rank.local_world_size = 1;
  rank.node_rank = rank.rank;
  rank.master_addr = "";
  rank.run_id = "several_nodes";
  auto group = CreateProcessGroup(rank, {.backend = "mpi", .hostname = "127.0.0.1"});
  ASSERT_TRUE(group.ok()) << group.status();
  Tensors tensors = {at::full({2}, 1)};
  group->process_group->getBackend(c10::kCPU)->allreduce(tensors)->wait();
  EXPECT_EQ(tensors[0][1].item<int64_t>(), Size());
  TheBackend()->barrier({})->wait();  // rank 0 serves the store, and leaves last
}

TEST(MpiBackendTest, SumsInTheOrderOfRanks) {
  for (int64_t n : {0, 1, 1000, 1 << 20}) {
    Tensors tensors = {Noise(Self(), n)};
    auto work = TheBackend()->allreduce(tensors);
    EXPECT_TRUE(work->wait());
    EXPECT_TRUE(work->isCompleted() && work->isSuccess());
    EXPECT_TRUE(at::equal(tensors[0], SumOverRanks([n](int rank) { return Noise(rank, n); }))) << n;
  }
}

TEST(MpiBackendTest, FuturesHoldTheOutputs) {
  Tensors tensors = {at::full({3}, Self() + 1)};
  auto future = TheBackend()->allreduce(tensors)->getFuture();
  future->wait();
  EXPECT_TRUE(at::equal(future->value().toTensorVector().at(0), tensors[0]));

  Tensors inputs = {at::full({2}, Self())};
  std::vector<Tensors> outputs(1);
  for (int rank = 0; rank < Size(); ++rank) outputs[0].push_back(at::empty({2}, at::kLong));
  auto work = TheBackend()->allgather(outputs, inputs);
  work->wait();
  for (int rank = 0; rank < Size(); ++rank) {
    EXPECT_TRUE(at::equal(work->result()[rank], at::full({2}, rank)));
  }
}

TEST(MpiBackendTest, StridesAreTheRanksOwnAffair) {
  // The same matrix, stored by row on even ranks and by column on odd ones.
  at::Tensor matrix = at::arange(12).view({3, 4});
  at::Tensor mine = Self() % 2 == 0 ? matrix.clone() : matrix.t().contiguous().t();
  Tensors tensors = {mine};
  TheBackend()->allreduce(tensors)->wait();
  EXPECT_TRUE(at::equal(mine, matrix * Size()));

  at::Tensor wide = at::zeros({5, 2}, at::kLong);
  Tensors column = {wide.select(1, 0)};
  if (Self() == Size() - 1) column[0].copy_(at::arange(5));
  c10d::BroadcastOptions options;
  options.rootRank = Size() - 1;
  TheBackend()->broadcast(column, options)->wait();
  EXPECT_TRUE(at::equal(wide.select(1, 0), at::arange(5)));
  EXPECT_TRUE(at::equal(wide.select(1, 1), at::zeros({5}, at::kLong)));
}

TEST(MpiBackendTest, ParametersThatNeedGradientsAreTaken) {
  for (bool contiguous : {true, false}) {
    at::Tensor storage = at::full({4, 2}, Self() + 1, at::kFloat);
    at::Tensor parameter = (contiguous ? storage : storage.select(1, 0)).detach();
    parameter.requires_grad_();
    Tensors tensors = {parameter};
    TheBackend()->broadcast(tensors, c10d::BroadcastOptions())->wait();
    EXPECT_TRUE(at::equal(parameter.detach(), at::full(parameter.sizes(), 1, at::kFloat)));
  }
}

// Messages come while receives are looked at one after another.
TEST(MpiBackendTest, MessagesOfOneTagKeepTheirOrder) {
  constexpr int kMessages = 300;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<at::Tensor> received;
  const auto message = [](int from, int i) { return at::full({1 + i % 7}, from * 1000.0f + i); };
  for (int i = 0; i < kMessages; ++i) {
    received.push_back(at::zeros({1 + i % 7}));
    std::vector<at::Tensor> in = {received.back()}, out = {message(Self(), i)};
    works.push_back(TheBackend()->recv(in, (Self() + Size() - 1) % Size(), /*tag=*/5));
    works.push_back(TheBackend()->send(out, (Self() + 1) % Size(), /*tag=*/5));
  }
  for (const auto& work : works) work->wait();
  for (int i = 0; i < kMessages; ++i) {
    EXPECT_TRUE(at::equal(received[i], message((Self() + Size() - 1) % Size(), i))) << i;
  }
}

TEST(MpiBackendTest, AllToAllWithUnequalSplits) {
  // Rank s sends s + d + 1 rows to rank d.
  std::vector<int64_t> input_splits, output_splits;
  int64_t rows_in = 0, rows_out = 0;
  for (int peer = 0; peer < Size(); ++peer) {
    input_splits.push_back(Self() + peer + 1);
    output_splits.push_back(peer + Self() + 1);
    rows_in += input_splits.back();
    rows_out += output_splits.back();
  }
  at::Tensor input = at::full({rows_in, 3}, Self()), output = at::empty({rows_out, 3}, at::kLong);
  TheBackend()->all_to_all_single(output, input, output_splits, input_splits, {})->wait();
  int64_t row = 0;
  for (int peer = 0; peer < Size(); ++peer) {
    for (int64_t i = 0; i < output_splits[peer]; ++i, ++row) {
      EXPECT_TRUE(at::equal(output[row], at::full({3}, peer)));
    }
  }
}

TEST(MpiBackendTest, SplitGroupsWorkSideBySide) {
  std::vector<int> members;
  for (int rank = Self() % 2; rank < Size(); rank += 2) members.push_back(rank);
  for (int times = 0; times < 2; ++times) {  // the same again, through the same store
    auto group = TheBackend()->split(TheGroup().store, members, nullptr);
    ASSERT_TRUE(group);
    EXPECT_EQ(group->getSize(), static_cast<int>(members.size()));
    Tensors tensors = {at::full({5}, 1)};
    group->allreduce(tensors)->wait();
    EXPECT_TRUE(at::equal(tensors[0], at::full({5}, static_cast<int64_t>(members.size()))));
  }
  EXPECT_FALSE(TheBackend()->split(TheGroup().store, {(Self() + 1) % Size()}, nullptr));
}

TEST(MpiBackendTest, SplitWaitsAsLongAsJoiningMayTake) {
  const absl::Duration timeout = absl::Minutes(2), join_timeout = absl::Seconds(3);
  TheBackend()->barrier({})->wait();
  BackendPtr group = NewBackend("split", timeout, join_timeout);
  if (Self() == 0) {  // the others never come
    const absl::Time began = absl::Now();
    auto store = c10::make_intrusive<c10d::PrefixStore>("split waits", TheGroup().store);
    const std::string error = ErrorOf([&] { group->split(store, {0, 1}, nullptr); });
    EXPECT_LT(absl::Now() - began, timeout) << error;
    EXPECT_TRUE(absl::StrContains(error, "Timed out after 3s: rank 0 waited")) << error;
    EXPECT_TRUE(absl::StrContains(error, "never came: rank 1")) << error;
  }
  TheBackend()->barrier({})->wait();
}

TEST(MpiBackendTest, JoiningWaitsAsLongAsItMayTake) {
  TheBackend()->barrier({})->wait();
  if (Self() == 0) {  // the others never come
    BackendOptions options;
    options.store = c10::make_intrusive<c10d::PrefixStore>("joining", TheGroup().store);
    options.rank = ThisRank();
    options.group.timeout = absl::Minutes(2);
    options.group.join_timeout = absl::Seconds(3);
    const absl::Time began = absl::Now();
    const absl::Status joined = CreateMpi(options).status();
    EXPECT_LT(absl::Now() - began, options.group.timeout) << joined;
    EXPECT_TRUE(absl::StrContains(joined.message(), "Timed out after 3s: rank 0 waited")) << joined;
    EXPECT_TRUE(absl::StrContains(joined.message(), "never came: rank 1")) << joined;
  }
  TheBackend()->barrier({})->wait();
}

TEST(MpiBackendTest, ThreadsUseGroupsOfTheirOwn) {
  std::vector<BackendPtr> groups = {NewBackend("threads/0"), NewBackend("threads/1")};
  std::vector<std::thread> threads;
  for (const BackendPtr& group : groups) {
    threads.emplace_back([&group] {
      for (int i = 0; i < 100; ++i) {
        Tensors tensors = {at::full({i * 37 + 1}, Self() + i)};
        group->allreduce(tensors)->wait();
        EXPECT_TRUE(at::equal(
            tensors[0], SumOverRanks([i](int rank) { return at::full({i * 37 + 1}, rank + i); })));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(MpiBackendTest, ATimeoutIsAnErrorThatNamesOperationAndRank) {
  BackendPtr group = NewBackend("timeout", absl::Milliseconds(300));
  Tensors tensors = {Noise(Self(), 100)};
  if (Self() == 0) {
    auto work = group->allreduce(tensors);
    const std::string error = ErrorOf([&] { work->wait(); });
    EXPECT_TRUE(absl::StrContains(error, "mpi:all_reduce #1 of 100 x Float")) << error;
    EXPECT_TRUE(absl::StrContains(error, "nothing has come from rank 1")) << error;
    EXPECT_TRUE(work->isCompleted() && !work->isSuccess());
    EXPECT_TRUE(work->getFuture()->hasError());
    EXPECT_EQ(group->getError(), c10d::ErrorType::TIMEOUT);
  }
  EXPECT_EQ(TheBackend()->getError(), c10d::ErrorType::SUCCESS);
  TheBackend()->barrier({})->wait();
  Tensors again = {at::full({1}, 1)};
  NewBackend("after the timeout")->allreduce(again)->wait();
  EXPECT_EQ(again[0].item<int64_t>(), Size());
}

TEST(MpiBackendTest, AShorterTimeoutAppliesToLaterCalls) {
  const absl::Duration before = absl::Minutes(1);
  BackendPtr group = NewBackend("shorter timeout", before);
  group->setTimeout(std::chrono::milliseconds(300));
  Tensors tensors = {Noise(Self(), 100)};
  if (Self() == 0) {
    const absl::Time began = absl::Now();
    const std::string error = ErrorOf([&] { group->allreduce(tensors)->wait(); });
    EXPECT_LT(absl::Now() - began, before) << error;
  }
  TheBackend()->barrier({})->wait();
}

TEST(MpiBackendTest, MonitoredBarrierNamesWhoIsMissing) {
  BackendPtr group = NewBackend("monitored");
  group->monitoredBarrier({}, false);
  group->setTimeout(std::chrono::seconds(3));
  if (Self() != Size() - 1) {
    const std::string error = ErrorOf([&] { group->monitoredBarrier({}, false); });
    EXPECT_TRUE(absl::StrContains(error, absl::StrCat("never came: rank ", Size() - 1))) << error;
  }
  TheBackend()->barrier({})->wait();
}

TEST(MpiBackendTest, AbortAndDestructionWithWorkInFlight) {
  BackendPtr group = NewBackend("abort");
  Tensors tensors = {at::empty({10})};
  auto work = group->recvAnysource(tensors, 3);
  group->abort();
  EXPECT_TRUE(absl::StrContains(ErrorOf([&] { work->wait(); }), "aborted"));
  // Nobody holds this group any more; its work goes on.
  Tensors sum = {at::full({10}, 1)};
  auto orphan = NewBackend("orphan")->allreduce(sum);
  orphan->wait();
  EXPECT_TRUE(at::equal(sum[0], at::full({10}, Size())));
}

TEST(MpiBackendTest, BadArgumentsAreToldAtOnce) {
  Tensors floats = {at::zeros({2})}, none;
  c10d::AllreduceOptions bitwise;
  bitwise.reduceOp = c10d::ReduceOp::BAND;
  EXPECT_NE(ErrorOf([&] { TheBackend()->allreduce(floats, bitwise); }), "");
  EXPECT_TRUE(absl::StrContains(ErrorOf([&] { TheBackend()->allreduce(none); }), "one tensor"));
  EXPECT_TRUE(absl::StrContains(ErrorOf([&] { TheBackend()->send(floats, Size(), 0); }),
                                absl::StrCat("peer rank ", Size(), " given")));
  EXPECT_TRUE(absl::StrContains(ErrorOf([&] { TheBackend()->recv(floats, 0, -1); }), "tag -1"));
}

// The test calls the process group, as DDP's Reducer does.
TEST(MpiBackendTest, SumsAndAveragesSparseTensors) {
  for (const bool average : {false, true}) {
    // Each rank has its own row and the last, which all have.
    at::Tensor indices = at::full({1, 2}, Size(), at::kLong);
    indices[0][0].fill_(Self());
    Tensors tensors = {
        at::sparse_coo_tensor(indices, at::full({2, 3}, Self() + 1.0f), {Size() + 1, 3})};
    c10d::AllreduceOptions options;
    if (average) options.reduceOp = c10d::ReduceOp::AVG;
    TheGroup().process_group->allreduce(tensors, options)->wait();
    at::Tensor expected = at::zeros({Size() + 1, 3});
    for (int rank = 0; rank < Size(); ++rank) {
      expected[rank] += rank + 1;
      expected[Size()] += rank + 1;
    }
    if (average) expected.div_(Size());
    EXPECT_TRUE(at::equal(tensors[0].to_dense(), expected)) << tensors[0];
  }
}

}  // namespace
}  // namespace ddp::backends::mpi
