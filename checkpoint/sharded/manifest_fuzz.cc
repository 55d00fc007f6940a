// Fuzz target of the reader of manifests (fuzz_testing.h). Inputs get a checksum that is right, so
// that what stands behind it is reached.
#include <cstdlib>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/fuzz_testing.h"
#include "base/xxh3.h"
#include "checkpoint/sharded/manifest.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using ddp::checkpoint::sharded::DecodeManifest;
  absl::string_view body(reinterpret_cast<const char*>(data), size);
  (void)DecodeManifest(body);
  constexpr absl::string_view kBegin = "{\"manifest\": ";
  if (absl::ConsumePrefix(&body, kBegin)) body = body.substr(0, body.rfind(",\n\"xxh3\""));
  const std::string text = absl::StrCat(kBegin, body);
  const auto manifest =
      DecodeManifest(absl::StrCat(text, ",\n\"xxh3\": \"", ddp::HexOf(ddp::Xxh3(text)), "\"}\n"));
  // What is read can be written and is the same.
  if (manifest.ok() && !DecodeManifest(EncodeManifest(*manifest)).ok()) std::abort();
  return 0;
}
