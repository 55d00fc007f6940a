#include "base/registry.h"

#include "gtest/gtest.h"

namespace ddp {
namespace {

struct AnimalTag {
  static constexpr absl::string_view kWhat = "animal";
};
using Animals = Registry<int (*)(), AnimalTag>;

const Registration<Animals> kDog(
    "dog", +[] { return 4; });
const Registration<Animals> kBird(
    "bird", +[] { return 2; });

TEST(RegistryTest, FindsWhatIsLinked) { EXPECT_EQ((*Animals::Find("bird"))(), 2); }

TEST(RegistryTest, UnknownIdListsWhatIsLinkedSorted) {
  auto found = Animals::Find("cat");
  EXPECT_EQ(found.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(found.status().message(), "unknown animal 'cat'; linked into this program: bird, dog");
}

TEST(RegistryDeathTest, TwoOfOneIdIsFatal) {
  EXPECT_DEATH(Animals::Add(
                   "dog", +[] { return 5; }),
               "animal 'dog' is registered twice");
}

}  // namespace
}  // namespace ddp
