// One rank that saves, or loads, a model with the state of Adam: tensors of 4 MiB, each with two
// moments. Prints on rank 0 one JSON line. checkpoint.py runs it beside its peers. Task async saves
// a copy on a thread, as checkpoint.async does, while this one multiplies matrices.
//
//   checkpoint_rank --task=save --format=sharded --dir=/tmp/x --mib=1024 --nproc_per_node=2
//
// In format sharded each rank holds a part of the moments, as sharded optimizers do, and asks for
// that; in other formats each rank has all.

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/option_flags.h"
#include "base/options.h"
#include "base/status.h"
#include "checkpoint/folder.h"
#include "checkpoint/manager.h"
#include "checkpoint/staging.h"
#include "checkpoint/state.h"
#include "ddp/session/session.h"
#include "nlohmann/json.hpp"

namespace ddp::tools {
namespace {

using checkpoint::FlatRange;
using checkpoint::State;

constexpr int64_t kSide = 1024;
constexpr int64_t kElements = kSide * kSide;  // of a tensor: 4 MiB
constexpr const char* kMoments[] = {"exp_avg", "exp_avg_sq"};
constexpr absl::Duration kStepsDuringWrite = absl::Seconds(5);

struct ProgramOptions {
  session::SessionOptions session = {.launcher = {.default_nproc_per_node = 2}};
  std::string task = "save";
  std::string format = "sharded";
  std::string dir;
  int64_t mib = 1024;
  bool check = false;
};

constexpr auto OptionsOf(const ProgramOptions&) {
  return Options(
      Inline(&ProgramOptions::session),
      Option("task", &ProgramOptions::task, "save, async or load").OneOf("save", "async", "load"),
      Option("format", &ProgramOptions::format, "of the checkpoint")
          .Lists(&checkpoint::WritableFormats),
      Option("dir", &ProgramOptions::dir, "folder of the checkpoint"),
      Option("mib", &ProgramOptions::mib, "size of the state in MiB, at least").AtLeast(1),
      Option("check", &ProgramOptions::check, "load: compare all that was read"));
}

// Number `kind` (0: the parameter, 1 and 2: its moments) of tensor `index`; exact in float32.
at::Tensor Values(int64_t index, int64_t kind) {
  return (at::arange(kElements, at::kFloat) + static_cast<double>(3 * index + kind))
      .reshape({kSide, kSide});
}

std::string Name(int64_t index) { return absl::StrCat("layers.", index, ".weight"); }

std::string MomentPath(int64_t index, int kind) {
  return absl::StrCat("optimizer/state/", Name(index), "/", kMoments[kind]);
}

// The elements of tensor `index` that belong to a rank, if it holds `1 / ranks` of all elements of
// `count` tensors in a row.
FlatRange RangeOf(int64_t index, int64_t count, int rank, int ranks) {
  const int64_t all = count * kElements;
  const auto within = [&](int64_t at) {
    return std::clamp<int64_t>(at - index * kElements, 0, kElements);
  };
  return {within(all * rank / ranks), within(all * (rank + 1) / ranks)};
}

// A line of /proc/self/FILE: "NAME: NUMBER".
int64_t Proc(const char* file, const std::string& name) {
  std::ifstream stream(absl::StrCat("/proc/self/", file));
  std::string word;
  int64_t number = 0;
  while (stream >> word) {
    if (word == name + ":" && stream >> number) return number;
  }
  return 0;
}

// The largest resident size since the last call, in bytes; where the system does not forget the
// peak, that of the process.
int64_t TakePeak() {
  const int64_t peak = Proc("status", "VmHWM") * 1024;
  std::ofstream("/proc/self/clear_refs") << "5";
  return peak;
}

class Benchmark {
 public:
  Benchmark(const session::Session& session, const ProgramOptions& options)
      : session_(session),
        options_(options),
        count_((options.mib + 11) / 12),
        is_sharded_(options.format == "sharded") {}

  absl::Status Run() {
    const bool saves = options_.task != "load";
    checkpoint::ManagerOptions manager_options = {.directory = options_.dir,
                                                  .format = options_.format};
    manager_options.read_only = !saves;
    if (session_.process_group()) {
      manager_options.broadcast = [this](void* data, size_t size, int from) {
        return CatchStatus("broadcast", [&] {
          std::vector<at::Tensor> bytes = {
              at::from_blob(data, {static_cast<int64_t>(size)}, at::kByte)};
          c10d::BroadcastOptions broadcast;
          broadcast.rootRank = from;
          session_.process_group()->broadcast(bytes, broadcast)->wait();
        });
      };
    }
    DDP_ASSIGN_OR_RETURN(auto manager, checkpoint::Manager::Create(manager_options, session_));
    return saves ? Save(*manager) : Load(*manager);
  }

 private:
  absl::Status Save(checkpoint::Manager& manager) {
    State state;
    c10::impl::GenericDict model = checkpoint::NewTree();
    c10::impl::GenericDict moments = checkpoint::NewTree();
    for (int64_t i = 0; i < count_; ++i) {
      model.insert(Name(i), Values(i, 0));
      c10::impl::GenericDict of_parameter = checkpoint::NewTree();
      for (int kind = 0; kind < 2; ++kind) {
        const at::Tensor values = Values(i, kind + 1);
        if (!is_sharded_) {
          of_parameter.insert(kMoments[kind], values);
          continue;
        }
        const FlatRange range = RangeOf(i, count_, session_.rank(), session_.size());
        checkpoint::ShardedTensor& tensor = state.sharded[MomentPath(i, kind)];
        tensor.global_shape = {kSide, kSide};
        if (range.begin == range.end) continue;
        tensor.parts.push_back({range, values.flatten().slice(0, range.begin, range.end).clone()});
      }
      if (!is_sharded_) moments.insert(Name(i), of_parameter);
    }
    state.root.insert("model", model);
    state.root.insert("epoch", 1);
    if (!is_sharded_) {
      c10::impl::GenericDict optimizer = checkpoint::NewTree();
      optimizer.insert("state", moments);
      state.root.insert("optimizer", optimizer);
    }
    if (options_.task == "async") return SaveAsync(manager, state);
    return Measure([&] { return manager.Save(checkpoint::EpochName(1), state).status(); });
  }

  // Prints how long a run stands still for a save, how long the save takes if the run has steps for
  // kStepsDuringWrite and then waits, and a step without and with one, each of the slowest rank;
  // and what memory it takes beside the copy.
  absl::Status SaveAsync(checkpoint::Manager& manager, const State& state) {
    const at::Tensor a = at::rand({512, 512});
    const auto step_ms = [&] {
      const absl::Time begin = absl::Now();
      for (int i = 0; i < 20; ++i) at::mm(a, a);
      return absl::ToDoubleMilliseconds(absl::Now() - begin);
    };
    step_ms();  // takes its own memory
    TakePeak();
    const int64_t resident = Proc("status", "VmRSS") * 1024;
    checkpoint::Staging staging;
    // As in a run's later saves: the memory of the copy is there.
    DDP_ASSIGN_OR_RETURN(const State first, manager.WhatThisRankWrites(state, {}));
    DDP_RETURN_IF_ERROR(staging.Copy(first).status());
    std::vector<double> alone, during;
    for (int i = 0; i < 20; ++i) alone.push_back(step_ms());
    DDP_RETURN_IF_ERROR(session_.Agree(absl::OkStatus()));
    const absl::Time begin = absl::Now();
    DDP_ASSIGN_OR_RETURN(const State mine, manager.WhatThisRankWrites(state, {}));
    DDP_ASSIGN_OR_RETURN(State copy, staging.Copy(mine));
    absl::Status saved;
    std::atomic<bool> is_done = false;
    std::thread writer([&] {
      // As a run's thread, so that training goes first.
      ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), 19);
      saved = manager.Save(checkpoint::EpochName(1), std::move(copy)).status();
      is_done = true;
    });
    nlohmann::json row;
    row["stall_seconds"] = absl::ToDoubleSeconds(absl::Now() - begin);
    // Where all cores are busy the thread gets next to none of them, and a GiB takes minutes.
    do {
      during.push_back(step_ms());
    } while (!is_done && absl::Now() - begin < kStepsDuringWrite);
    writer.join();
    row["seconds"] = absl::ToDoubleSeconds(absl::Now() - begin);
    row["step_ms"] = Median(alone);
    row["step_ms_during"] = Median(during);
    row["beside_copy_bytes"] = TakePeak() - resident - static_cast<int64_t>(staging.bytes());
    DDP_RETURN_IF_ERROR(session_.Agree(saved));
    return Print(row);
  }

  absl::Status Load(checkpoint::Manager& manager) {
    checkpoint::ReadRequest request;
    if (is_sharded_) {
      request.parts = {{"model", checkpoint::Whole{}}, {"epoch", checkpoint::Whole{}}};
      for (int64_t i = 0; i < count_; ++i) {
        const FlatRange range = RangeOf(i, count_, session_.rank(), session_.size());
        // Of all, though it may be empty: what ranks ask for together is read once.
        for (int kind = 0; kind < 2; ++kind) request.parts[MomentPath(i, kind)] = range;
      }
    }
    std::optional<checkpoint::Loaded> loaded;
    DDP_RETURN_IF_ERROR(Measure([&]() -> absl::Status {
      DDP_ASSIGN_OR_RETURN(loaded, manager.LoadNewest(request));
      return loaded.has_value() ? absl::OkStatus() : absl::NotFoundError("there is no checkpoint");
    }));
    return options_.check ? session_.Agree(Check(loaded->state)) : absl::OkStatus();
  }

  absl::Status Check(const State& state) const {
    const c10::impl::GenericDict model = state.root.at("model").toGenericDict();
    for (int64_t i = 0; i < count_; ++i) {
      bool is_right = at::equal(model.at(Name(i)).toTensor(), Values(i, 0));
      const FlatRange range = RangeOf(i, count_, session_.rank(), session_.size());
      for (int kind = 0; kind < 2; ++kind) {
        if (!is_sharded_) {
          const c10::impl::GenericDict of_parameter = state.root.at("optimizer")
                                                          .toGenericDict()
                                                          .at("state")
                                                          .toGenericDict()
                                                          .at(Name(i))
                                                          .toGenericDict();
          is_right = is_right &&
                     at::equal(of_parameter.at(kMoments[kind]).toTensor(), Values(i, kind + 1));
        } else {
          is_right =
              is_right && at::equal(state.sharded.at(MomentPath(i, kind)).parts[0].tensor,
                                    Values(i, kind + 1).flatten().slice(0, range.begin, range.end));
        }
      }
      if (!is_right) return absl::DataLossError(absl::StrCat(Name(i), " was read wrongly"));
    }
    return absl::OkStatus();
  }

  // Prints what `work` takes on the slowest and the fullest rank, and what all ranks read.
  template <typename Work>
  absl::Status Measure(const Work& work) {
    DDP_RETURN_IF_ERROR(session_.Agree(absl::OkStatus()));
    TakePeak();
    const int64_t resident = Proc("status", "VmRSS") * 1024;
    const int64_t read = Proc("io", "rchar");
    const absl::Time begin = absl::Now();
    DDP_RETURN_IF_ERROR(work());
    DDP_RETURN_IF_ERROR(session_.Agree(absl::OkStatus()));
    nlohmann::json row;
    row["seconds"] = absl::ToDoubleSeconds(absl::Now() - begin);
    row["read_bytes"] = Proc("io", "rchar") - read;
    row["peak_bytes"] = TakePeak() - resident;
    return Print(row);
  }

  static double Median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  }

  // The largest values of all ranks; of read_bytes the sum.
  absl::Status Print(const nlohmann::json& row) {
    DDP_ASSIGN_OR_RETURN(const std::vector<std::string> all, session_.AllGather(row.dump()));
    if (!session_.is_main()) return absl::OkStatus();
    nlohmann::json total;
    for (const std::string& text : all) {
      const nlohmann::json one = nlohmann::json::parse(text);
      for (const auto& [key, value] : one.items()) {
        nlohmann::json& known = total[key];
        if (known.is_null()) {
          known = value;
        } else if (key == "read_bytes") {
          known = known.get<int64_t>() + value.get<int64_t>();
        } else if (value > known) {
          known = value;
        }
      }
    }
    total["largest_tensor_bytes"] = kElements * static_cast<int64_t>(sizeof(float));
    total["disk_bytes"] = checkpoint::BytesOnDisk(options_.dir);
    std::printf("%s\n", total.dump().c_str());
    std::fflush(stdout);
    return absl::OkStatus();
  }

  const session::Session& session_;
  const ProgramOptions& options_;
  const int64_t count_;  // of parameters
  const bool is_sharded_;
};

int Main(int argc, char** argv) {
  ProgramOptions options;
  const OptionList list = ListOptions(options);
  const absl::StatusOr<OptionFlags> flags = OptionFlags::Parse(argc, argv, list);
  absl::Status status = flags.ok() ? list.Validate() : flags.status();
  if (!status.ok()) {
    std::fprintf(stderr, "error: %s\n", std::string(status.message()).c_str());
    return 2;
  }
  if (flags->help) {
    std::printf("%s", list.Describe("--").c_str());
    return 0;
  }
  return session::Run(
      options.session, argc, argv,
      [&](const session::Session& session) { return Benchmark(session, options).Run(); },
      [&](const absl::Status& error) { return flags->Explain(error, list); });
}

}  // namespace
}  // namespace ddp::tools

int main(int argc, char** argv) { return ddp::tools::Main(argc, argv); }
