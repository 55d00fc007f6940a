#include "backends/gloo/gloo.h"

#include <signal.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "absl/log/absl_log.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "backends/common/interfaces.h"
#include "backends/common/join.h"
#include "backends/gloo/gloo_backend.h"
#include "base/option_error.h"
#include "base/process_limits.h"
#include "base/status.h"

namespace ddp::backends::gloo {
namespace {

using c10d::ProcessGroupGloo;
using Device = std::shared_ptr<::gloo::transport::Device>;
using Devices = std::vector<Device>;

// Device::str() prints "tcp, pci=…, iface=lo, speed=…, addr=[127.0.0.1]".
bool IsLoopback(const Device& device) {
  const std::string text = device->str();
  return absl::StrContains(text, "addr=[127.") || absl::StrContains(text, "addr=[::1]") ||
         absl::StrContains(text, "iface=lo,");
}

// Gloo's threads for each network, as in Python's torch.
constexpr int kThreadsPerDevice = 2;

// Of several interfaces messages are spread over them.
absl::StatusOr<Devices> ForInterfaces(const std::vector<std::string>& names) {
  Devices devices;
  for (const std::string& name : names) {
    if (name.empty()) return absl::InvalidArgumentError("a name between commas is missing");
    DDP_ASSIGN_OR_RETURN(devices.emplace_back(), CatchStatus(absl::StrCat("'", name, "'"), [&] {
                           return ProcessGroupGloo::createDeviceForInterface(name);
                         }));
  }
  return devices;
}

absl::StatusOr<Devices> ForHostname(const std::string& name) {
  return CatchStatus("", [&] { return Devices{ProcessGroupGloo::createDeviceForHostname(name)}; });
}

// The networks that the options or the variable name; empty if they name none.
absl::StatusOr<Devices> Given(const GroupOptions& options, const Environment& env) {
  const std::vector<std::string> names = ChosenInterfaces(options.interface, options.hostname, env);
  if (!names.empty()) {
    absl::StatusOr<Devices> devices = ForInterfaces(names);
    if (devices.ok()) return devices;
    const std::string problem =
        absl::StrCat("is no network interface that can be used: ", devices.status().message(),
                     "; `ip addr` lists this machine's interfaces");
    if (!options.interface.empty()) return OptionError("interface", options.interface, problem);
    return absl::InvalidArgumentError(
        absl::StrCat(env.Describe({kInterfaceVariable}), " ", problem));
  }
  if (options.hostname.empty()) return Devices();
  absl::StatusOr<Devices> devices = ForHostname(options.hostname);
  if (devices.ok()) return devices;
  return OptionError("hostname", options.hostname,
                     absl::StrCat("is no address of this machine: ", devices.status().message()));
}

absl::StatusOr<Devices> ChooseDevices(const BackendOptions& options, const Environment& env) {
  DDP_ASSIGN_OR_RETURN(Devices given, Given(options.group, env));
  if (!given.empty()) return given;
  if (options.rank.local_world_size == options.rank.world_size) return ForHostname("127.0.0.1");

  DDP_ASSIGN_OR_RETURN(Device device, CatchStatus("choosing a network", [] {
                         return ProcessGroupGloo::createDefaultDevice();
                       }));
  if (IsLoopback(device)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", options.rank.rank, " is on node ", options.rank.node_rank, " of a job of ",
        options.rank.world_size, " ranks, ", options.rank.local_world_size,
        " of them here, but this machine's host name resolves to loopback, where no other node "
        "can reach it; set ",
        kInterfaceVariable,
        " (or the option interface) to the network interface that the nodes share"));
  }
  return Devices{device};
}

// Gloo writes to its sockets without MSG_NOSIGNAL, in its own threads and in those of callers. A
// write to a dead peer must be an error, and not end this process. Python ignores SIGPIPE too. A
// handler installed by the program is kept.
void IgnoreSigpipe() {
  struct sigaction action = {};
  if (sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL) {
    signal(SIGPIPE, SIG_IGN);
  }
}

absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> Create(const BackendOptions& options) {
  return CreateGloo(options, Environment::FromProcess());
}

const Registration<BackendRegistry> kGloo("gloo", BackendEntry{.device_types = {"cpu", "cuda"},
                                                               .create = &Create,
                                                               .capabilities = {
                                                                   .shorter_messages_fit = true}});

}  // namespace

absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> CreateGloo(const BackendOptions& options,
                                                             const Environment& env) {
  DDP_ASSIGN_OR_RETURN(const Devices devices, ChooseDevices(options, env));
  if (std::any_of(devices.begin(), devices.end(), IsLoopback) &&
      options.rank.local_world_size != options.rank.world_size) {
    ABSL_LOG(WARNING) << "gloo on rank " << options.rank.rank << " uses loopback, as requested, in "
                      << "a job of several nodes: they must all be this machine";
  }
  // Gloo connects with the timeout of its later messages (transport::Context::getTimeout, which
  // cannot be changed afterwards), so waiting for late ranks is done here.
  DDP_ASSIGN_OR_RETURN(
      const std::vector<std::string> counts,
      GatherFromAllRanks(*options.store, options.rank.rank, options.rank.world_size,
                         absl::StrCat(devices.size()), options.group.join_timeout));
  const auto other =
      std::find_if(counts.begin(), counts.end(), [&](const auto& n) { return n != counts[0]; });
  if (other != counts.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank 0 uses ", counts[0], " network interfaces, and rank ",
                     other - counts.begin(), " uses ", *other, ": list as many on every rank (",
                     kInterfaceVariable, ", or the option interface)"));
  }
  IgnoreSigpipe();
  // If c10d could start some of its threads only, those would end the process (std::terminate).
  const int threads = kThreadsPerDevice * static_cast<int>(devices.size());
  DDP_RETURN_IF_ERROR(TryThreads(threads));
  return CatchStatus("connecting to the other ranks", [&]() -> c10::intrusive_ptr<c10d::Backend> {
    auto gloo_options =
        ProcessGroupGloo::Options::create(absl::ToChronoMilliseconds(options.group.timeout));
    gloo_options->devices = devices;
    gloo_options->threads = threads;
    // Without them, split() of any group but the first of a process reads past an empty vector.
    gloo_options->global_ranks_in_group.resize(options.rank.world_size);
    std::iota(gloo_options->global_ranks_in_group.begin(),
              gloo_options->global_ranks_in_group.end(), 0);
    return c10::make_intrusive<GlooBackend>(options.store, options.rank.rank,
                                            options.rank.world_size, gloo_options,
                                            options.group.join_timeout);
  });
}

}  // namespace ddp::backends::gloo
