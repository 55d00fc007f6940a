// Options that some implementations of one kind have and others do not, such as the betas of
// optimizers: what is given for one that does not have it would have no effect.
//
//   DDP_RETURN_IF_ERROR(CheckTaken(ListOptions(given), ListOptions(defaults),
//                                  {.name = "sgd", .takes = {"lr", "momentum"}}));
//   // "betas=[0.5, 0.9] is no option of sgd, which has lr, momentum"
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/option_list.h"

namespace ddp::trainer {

struct TakenOptions {
  std::string name;                      // of the implementation
  std::vector<std::string> takes;        // paths of the options that it has, besides NAME.…
  std::vector<std::string> of_all = {};  // further ones, which every implementation has
};

// OptionError for the first option of `given` that has another value than in `defaults`, and that
// the implementation does not have. Thread-safe.
absl::Status CheckTaken(const OptionList& given, const OptionList& defaults,
                        const TakenOptions& taken);

}  // namespace ddp::trainer
