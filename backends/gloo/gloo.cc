#include "backends/gloo/gloo.h"

#include <signal.h>

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "absl/log/absl_log.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "backends/common/join.h"
#include "backends/gloo/gloo_backend.h"
#include "base/option_error.h"
#include "base/status.h"

namespace ddp::backends::gloo {
namespace {

using c10d::ProcessGroupGloo;
using Device = std::shared_ptr<::gloo::transport::Device>;

constexpr char kInterfaceVariable[] = "GLOO_SOCKET_IFNAME";

// Device::str() prints "tcp, pci=…, iface=lo, speed=…, addr=[127.0.0.1]".
bool IsLoopback(const Device& device) {
  const std::string text = device->str();
  return absl::StrContains(text, "addr=[127.") || absl::StrContains(text, "addr=[::1]") ||
         absl::StrContains(text, "iface=lo,");
}

absl::StatusOr<Device> ForInterface(const std::string& name) {
  return CatchStatus("", [&] { return ProcessGroupGloo::createDeviceForInterface(name); });
}

absl::StatusOr<Device> ForHostname(const std::string& name) {
  return CatchStatus("", [&] { return ProcessGroupGloo::createDeviceForHostname(name); });
}

std::string BadInterface(const absl::Status& status) {
  return absl::StrCat("is no network interface that can be used: ", status.message(),
                      "; `ip addr` lists this machine's interfaces");
}

// The network that the options name; null if they name none.
absl::StatusOr<Device> FromOptions(const GroupOptions& options) {
  if (!options.interface.empty()) {
    absl::StatusOr<Device> device = ForInterface(options.interface);
    if (device.ok()) return device;
    return OptionError("interface", options.interface, BadInterface(device.status()));
  }
  if (options.hostname.empty()) return nullptr;
  absl::StatusOr<Device> device = ForHostname(options.hostname);
  if (device.ok()) return device;
  return OptionError("hostname", options.hostname,
                     absl::StrCat("is no address of this machine: ", device.status().message()));
}

absl::StatusOr<Device> ChooseDevice(const BackendOptions& options, const Environment& env) {
  DDP_ASSIGN_OR_RETURN(Device given, FromOptions(options.group));
  if (given != nullptr) return given;
  if (std::optional<std::string> name = env.Get(kInterfaceVariable)) {
    absl::StatusOr<Device> device = ForInterface(*name);
    if (device.ok()) return device;
    return absl::InvalidArgumentError(
        absl::StrCat(kInterfaceVariable, "=", *name, " ", BadInterface(device.status())));
  }
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
  return device;
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

const Registration<BackendRegistry> kGloo("gloo", BackendEntry{.device_types = {"cpu"},
                                                               .create = &Create,
                                                               .capabilities = {
                                                                   .shorter_messages_fit = true}});

}  // namespace

absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> CreateGloo(const BackendOptions& options,
                                                             const Environment& env) {
  DDP_ASSIGN_OR_RETURN(Device device, ChooseDevice(options, env));
  if (IsLoopback(device) && options.rank.local_world_size != options.rank.world_size) {
    ABSL_LOG(WARNING) << "gloo on rank " << options.rank.rank << " uses loopback, as requested, in "
                      << "a job of several nodes: they must all be this machine";
  }
  // Gloo connects with the timeout of its later messages (transport::Context::getTimeout, which
  // cannot be changed afterwards), so waiting for late ranks is done here.
  DDP_RETURN_IF_ERROR(WaitForAllRanks(*options.store, options.rank.rank, options.rank.world_size,
                                      options.group.join_timeout));
  IgnoreSigpipe();
  return CatchStatus("connecting to the other ranks", [&]() -> c10::intrusive_ptr<c10d::Backend> {
    auto gloo_options =
        ProcessGroupGloo::Options::create(absl::ToChronoMilliseconds(options.group.timeout));
    gloo_options->devices = {device};
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
