#include "tools/datasets/registry.h"

#include "gtest/gtest.h"

namespace ddp::tools::datasets {
namespace {

TEST(DatasetRegistryTest, HasEveryDataset) {
  EXPECT_EQ(DatasetRegistry::Names(), std::vector<std::string>({"csv", "fashion_mnist", "images",
                                                                "synthetic", "tensors", "text"}));
}

TEST(DatasetRegistryTest, UnknownNameListsThem) {
  EXPECT_EQ(
      DatasetRegistry::Find("cifar").status().message(),
      "unknown dataset 'cifar'; linked into this program: csv, fashion_mnist, images, synthetic, "
      "tensors, text");
}

}  // namespace
}  // namespace ddp::tools::datasets
