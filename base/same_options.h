// Checks that all ranks of a job were started with the same options. A launcher of another project
// starts each rank with a command line of its own, and ranks that differ train different models, or
// wait for each other.
//
//   DDP_RETURN_IF_ERROR(RequireSameOptions(session, ListOptions(options)));
//   // rank 0: lr=0.1 is not the same on all ranks: ranks 0, 2 have 0.1, rank 1 has 0.2
//
// What an option may be on other ranks is declared in its line (OptionSpec::MayDiffer,
// OnAllRanksOrNone); by default all ranks have one value. session::Run compares the options that it
// is given, and trainer::Train its own.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/coordinator.h"
#include "base/option_list.h"

namespace ddp {

// Collective: Agree(mine), and then the comparison, with one exchange if nothing differs. Every
// rank returns the error of DifferenceOfOptions.
absl::Status RequireSameOptions(const Coordinator& ranks, const OptionList& list,
                                const absl::Status& mine = absl::OkStatus());

// The parts of it, for ranks that have an exchange already. Thread-safe.

// 32 hexadecimal digits. Equal on two ranks if their options fit.
std::string DigestOfOptions(const OptionList& list);

// Collective, on all ranks, after digests have differed. Returns the error; not OK.
absl::Status ExplainDifference(const Coordinator& ranks, const OptionList& list);

// OptionError for the first option of which the ranks' values do not fit, with the ranks and their
// values, and the paths of other such options. `texts` are TextOfOptions, by rank.
std::string TextOfOptions(const OptionList& list);
absl::Status DifferenceOfOptions(const std::vector<std::string>& texts);

}  // namespace ddp
