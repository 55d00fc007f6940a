// Checks that the wrappers override every virtual function of c10d's Backend and Work, by comparing
// LibTorch's headers with ours. There are about 90, and most defaults throw: a missing override
// would break its caller only at run time.

#include <regex>
#include <set>
#include <string>

#include "base/file.h"
#include "base/runfiles.h"
#include "gtest/gtest.h"

namespace ddp::backends::watch {
namespace {

std::string Read(const std::string& path) {
  const absl::StatusOr<std::string> file = Runfile(path);
  if (!file.ok()) {
    ADD_FAILURE() << file.status();
    return "";
  }
  return ReadFile(*file).value();
}

// Names of functions declared "virtual".
std::set<std::string> VirtualFunctions(const std::string& text) {
  std::set<std::string> names;
  const std::regex declaration(R"(\bvirtual\s+[^(;{}~]*?\b(\w+)\s*\()");
  for (std::sregex_iterator match(text.begin(), text.end(), declaration), end; match != end;
       ++match) {
    names.insert((*match)[1]);
  }
  return names;
}

std::set<std::string> Overridden(const std::string& source) {
  std::set<std::string> names;
  // Comments and preprocessor lines, which may have parentheses, are removed.
  const std::string text = std::regex_replace(source, std::regex(R"(//[^\n]*|\n#[^\n]*)"), "");
  const std::regex declaration(R"((?:^|[^\w~])(\w+)\s*\([^;{}]*\)\s*(?:const\s+)?override\b)");
  for (std::sregex_iterator match(text.begin(), text.end(), declaration), end; match != end;
       ++match) {
    names.insert((*match)[1]);
  }
  return names;
}

const std::set<std::string> kNotForwarded = {
    // Deprecated names: c10d's own implementation calls the new name, which is the wrapper's.
    "_allgather_base", "_reduce_scatter_base", "allgather_into_tensor_coalesced", "alltoall_base",
    "gather_into_tensor", "reduce_scatter_tensor_coalesced",
    // A function of Backend::Options.
    "clone",
    // Refused: see forwarding.h.
    "supportsReconfigure", "get_reconfigure_handle", "reconfigure"};

void ExpectAllForwarded(const std::string& theirs, const std::string& ours, size_t at_least) {
  const std::set<std::string> functions =
      VirtualFunctions(Read("libtorch/torch/include/torch/csrc/distributed/c10d/" + theirs));
  // Fails if the pattern does not fit the header any more.
  EXPECT_GE(functions.size(), at_least) << theirs;
  const std::set<std::string> overridden =
      Overridden(Read("libtorch_ddp/backends/watch/" + ours) +
                 Read("libtorch_ddp/third_party/libtorch/forwarding.h"));
  for (const std::string& name : functions) {
    if (kNotForwarded.count(name) > 0) continue;
    EXPECT_EQ(overridden.count(name), 1)
        << theirs << " has a virtual " << name << ", but " << ours << " does not forward it";
  }
}

TEST(ForwardingTest, EveryVirtualFunctionOfBackend) {
  ExpectAllForwarded("Backend.hpp", "watched_backend.h", 46);
}

TEST(ForwardingTest, EveryVirtualFunctionOfWork) { ExpectAllForwarded("Work.hpp", "work.h", 13); }

TEST(ForwardingTest, ThePatternsFindDeclarations) {
  const std::set<std::string> expected = {"name", "broadcast", "abort"};
  EXPECT_EQ(VirtualFunctions("virtual ~A(); virtual const std::string name() const {\n"
                             "virtual c10::intrusive_ptr<Work> broadcast(\n std::vector<T>& x) {\n"
                             "int other(); virtual void abort() {}"),
            expected);
  EXPECT_EQ(Overridden("~A() override; const std::string name() const override { return n(); }\n"
                       "P broadcast(std::vector<T>& x,\n const O& o) override;\n"
                       "int other();\n void abort() override;"),
            expected);
}

}  // namespace
}  // namespace ddp::backends::watch
