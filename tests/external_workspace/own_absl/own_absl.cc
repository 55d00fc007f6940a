// A status that libtorch_ddp made, read with this project's own Abseil: own_absl --lr=-1
#include <cstdio>

#include "absl/functional/overload.h"
#include "absl/status/status.h"
#include "base/option_flags.h"
#include "base/options.h"

#ifndef THEIR_ABSL
#error "this is not the Abseil of this project"
#endif

struct OwnOptions {
  double lr = 0.1;
};
constexpr auto OptionsOf(const OwnOptions&) {
  return ddp::Options(ddp::Option("lr", &OwnOptions::lr, "learning rate").Above(0));
}

int main(int argc, char** argv) {
  OwnOptions options;
  const auto list = ddp::ListOptions(options);
  const auto flags = ddp::OptionFlags::Parse(argc, argv, list);
  const absl::Status status = flags.ok() ? list.Validate() : flags.status();
  std::printf("%s\n", absl::StatusCodeToString(status.code()).c_str());
  return status.ok() ? 0 : 2;
}
