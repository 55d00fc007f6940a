// For tests: runs a fuzz target, a function in the form that libFuzzer calls, on files and on
// mutations of them. Offers main(); a target is one source that defines
//
//   extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
//     ddp::checkpoint::CreateFormat("pt").value()->Read(ddp::FuzzedFile(data, size));
//     return 0;
//   }
//
// and is linked with :fuzz_testing instead of gtest_main. Arguments of the program:
//
//   FILE or FOLDER …   the corpus: each file is run as it is, folders with all files below them
//   --runs=N           then N mutations of the corpus; always the same ones for one seed
//   --seconds=S        or as many mutations as fit into S seconds
//   --seed=N           of the mutations; default 1
//   --max_bytes=N      length of the longest mutation; default 65536
//   --keep=FOLDER      stores inputs that reach new code there, for the corpus
//
// A run fails if the target crashes, throws, needs over ten seconds, or, outside of sanitizer
// builds, allocates more in one piece than 1 MiB and 64 times its input. The input is then in
// $TEST_UNDECLARED_OUTPUTS_DIR, else in the current folder, and its path is printed: pass it as the
// only argument to repeat the failure.
//
// With --config=fuzz the readers are compiled with counters of executed branches: mutations that
// reach new code are mutated further. Without it, mutations are of the corpus alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace ddp {

// Path of a file in memory with these bytes, for readers that take a path. The next call replaces
// its contents. Not thread-safe.
std::string FuzzedFile(const uint8_t* data, size_t size);

}  // namespace ddp
