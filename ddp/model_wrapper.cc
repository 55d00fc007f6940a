#include "ddp/model_wrapper.h"

#include "absl/strings/str_cat.h"
#include "torch/csrc/distributed/c10d/comm.hpp"

namespace ddp {

absl::Status ModelWrapper::register_comm_hook(std::unique_ptr<c10d::CommHookInterface>,
                                              const std::string& name) {
  return absl::UnimplementedError(
      absl::StrCat("this model wrapper takes no communication hook, but was given ", name));
}

}  // namespace ddp
