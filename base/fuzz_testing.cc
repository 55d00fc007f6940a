#include "base/fuzz_testing.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define DDP_FUZZ_WITH_SANITIZER 1
#else
#define DDP_FUZZ_WITH_SANITIZER 0
#endif

extern "C" void __sanitizer_set_death_callback(void (*)()) __attribute__((weak));

namespace {

constexpr unsigned kMostSeconds = 10;  // of one input
constexpr size_t kSmallAllocation = size_t{1} << 20;
constexpr size_t kMostPerByte = 64;

// What a signal handler needs; plain data, so that it may be read at any time.
struct Current {
  const uint8_t* data = nullptr;
  size_t size = 0;
  char path[4096] = {};  // where to store it
};
Current current;

thread_local size_t most_allocated = 0;  // in one piece; 0: any amount

// One byte per executed branch, by its address.
uint8_t reached[1 << 16];
bool reached_new = false;

void Say(const char* text) {
  const ssize_t ignored = ::write(STDERR_FILENO, text, std::strlen(text));
  (void)ignored;
}

void StoreCurrent() {
  if (current.data == nullptr) return;
  const int fd = ::open(current.path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return Say("fuzz: cannot store the input\n");
  for (size_t done = 0; done < current.size;) {
    const ssize_t n = ::write(fd, current.data + done, current.size - done);
    if (n <= 0) break;
    done += static_cast<size_t>(n);
  }
  ::close(fd);
  Say("fuzz: the input is in ");
  Say(current.path);
  Say("\n");
  current.data = nullptr;
}

void OnSignal(int signal) {
  if (signal == SIGALRM) Say("fuzz: the input takes too long\n");
  StoreCurrent();
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

[[maybe_unused]] void CheckAllocation(size_t size) {
  if (most_allocated == 0 || size <= most_allocated) return;
  char text[128];
  std::snprintf(text, sizeof(text), "fuzz: allocates %zu bytes, more than %zu\n", size,
                most_allocated);
  most_allocated = 0;
  Say(text);
  std::abort();
}

}  // namespace

#if !DDP_FUZZ_WITH_SANITIZER
// glibc's allocator, with a look at each size.
extern "C" {
void* __libc_malloc(size_t size) noexcept;
void* __libc_calloc(size_t count, size_t size) noexcept;
void* __libc_realloc(void* old, size_t size) noexcept;
void* __libc_memalign(size_t alignment, size_t size) noexcept;

void* malloc(size_t size) noexcept {
  CheckAllocation(size);
  return __libc_malloc(size);
}
void* calloc(size_t count, size_t size) noexcept {
  size_t product;
  CheckAllocation(__builtin_mul_overflow(count, size, &product) ? SIZE_MAX : product);
  return __libc_calloc(count, size);
}
void* realloc(void* old, size_t size) noexcept {
  CheckAllocation(size);
  return __libc_realloc(old, size);
}
void* memalign(size_t alignment, size_t size) noexcept {
  CheckAllocation(size);
  return __libc_memalign(alignment, size);
}
void* aligned_alloc(size_t alignment, size_t size) noexcept { return memalign(alignment, size); }
int posix_memalign(void** memory, size_t alignment, size_t size) noexcept {
  *memory = memalign(alignment, size);
  return *memory == nullptr ? ENOMEM : 0;
}
}
#endif

// Called at each branch of code that is compiled with -fsanitize-coverage=trace-pc.
extern "C" void __sanitizer_cov_trace_pc() {
  const uintptr_t at = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  uint8_t& seen = reached[(at ^ at >> 16) % std::size(reached)];
  if (seen == 0) {
    seen = 1;
    reached_new = true;
  }
}

namespace {

using Bytes = std::vector<uint8_t>;

void RunOne(const Bytes& input) {
  // A copy of exactly this length: sanitizers then see each read beyond its end.
  const Bytes bytes(input.begin(), input.end());
  current.data = bytes.data();
  current.size = bytes.size();
  ::alarm(kMostSeconds);
  most_allocated = kSmallAllocation + kMostPerByte * bytes.size();
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  most_allocated = 0;
  ::alarm(0);
  current.data = nullptr;
}

// Random changes of the kinds that length fields, opcodes and nested containers are sensitive to.
class Mutator {
 public:
  Mutator(const std::vector<Bytes>& corpus, uint64_t seed, size_t max_bytes)
      : corpus_(corpus), random_(seed), max_bytes_(max_bytes) {}

  Bytes Next() {
    // Half of them from the newest inputs, which reached new code.
    const size_t newest = corpus_.size() > 16 && Below(2) == 0 ? 16 : corpus_.size();
    Bytes bytes = corpus_[corpus_.size() - 1 - Below(newest)];
    for (size_t changes = size_t{1} << Below(5); changes > 0; --changes) Change(bytes);
    if (bytes.size() > max_bytes_) bytes.resize(max_bytes_);
    return bytes;
  }

 private:
  size_t Below(size_t limit) { return limit == 0 ? 0 : random_() % limit; }

  void Change(Bytes& bytes) {
    if (bytes.empty()) bytes.push_back(static_cast<uint8_t>(random_()));
    const size_t at = Below(bytes.size());
    const size_t some = 1 + Below(std::min<size_t>(bytes.size() - at, size_t{1} << Below(12)));
    const auto begin = bytes.begin() + static_cast<ptrdiff_t>(at);
    const auto end = begin + static_cast<ptrdiff_t>(some);
    switch (Below(9)) {
      case 0:
        bytes[at] ^= static_cast<uint8_t>(1 << Below(8));
        break;
      case 1:
        bytes[at] = static_cast<uint8_t>(random_());
        break;
      case 2:
        Number(bytes, at);
        break;
      case 3:
        bytes.erase(begin, end);
        break;
      case 4: {
        const Bytes copy(begin, end);
        Insert(bytes, Below(bytes.size() + 1), copy);
        break;
      }
      case 5:
        Insert(bytes, at, Bytes(1 + Below(8), static_cast<uint8_t>(random_())));
        break;
      case 6: {
        const Bytes& other = corpus_[Below(corpus_.size())];
        if (other.empty()) break;
        const size_t from = Below(other.size());
        const size_t size = 1 + Below(std::min<size_t>(other.size() - from, 256));
        const auto start = other.begin() + static_cast<ptrdiff_t>(from);
        const Bytes piece(start, start + static_cast<ptrdiff_t>(size));
        if (Below(2) == 0) {
          Insert(bytes, at, piece);
        } else {
          std::copy_n(piece.begin(), std::min(piece.size(), bytes.size() - at), begin);
        }
        break;
      }
      case 7: {
        // Digits, for formats that are text.
        bytes[at] = static_cast<uint8_t>('0' + Below(10));
        break;
      }
      default:
        if (Below(8) == 0) bytes.resize(at);
        break;
    }
  }

  // Overwrites a little- or big-endian number with one that is special for lengths, or changes it
  // by a little.
  void Number(Bytes& bytes, size_t at) {
    const size_t width = std::min<size_t>(size_t{1} << Below(4), bytes.size() - at);
    uint64_t value = 0;
    const bool big_endian = Below(4) == 0;
    const auto place = [&](size_t i) { return at + (big_endian ? width - 1 - i : i); };
    for (size_t i = 0; i < width; ++i) value |= uint64_t{bytes[place(i)]} << (8 * i);
    constexpr uint64_t kSpecial[] = {0,
                                     1,
                                     0x7f,
                                     0xff,
                                     0x7fff,
                                     0xffff,
                                     0x7fffffff,
                                     0x80000000,
                                     0xffffffff,
                                     uint64_t{1} << 40,
                                     uint64_t{1} << 62,
                                     ~uint64_t{0} >> 1,
                                     uint64_t{1} << 63,
                                     ~uint64_t{0}};
    value = Below(2) == 0 ? kSpecial[Below(std::size(kSpecial))] : value + Below(9) - 4;
    for (size_t i = 0; i < width; ++i) bytes[place(i)] = static_cast<uint8_t>(value >> (8 * i));
  }

  void Insert(Bytes& bytes, size_t at, const Bytes& piece) {
    if (bytes.size() + piece.size() > max_bytes_) return;
    bytes.insert(bytes.begin() + static_cast<ptrdiff_t>(std::min(at, bytes.size())), piece.begin(),
                 piece.end());
  }

  const std::vector<Bytes>& corpus_;
  std::mt19937_64 random_;
  size_t max_bytes_;
};

struct Arguments {
  uint64_t runs = 0;
  double seconds = 0;
  uint64_t seed = 1;
  size_t max_bytes = 65536;
  std::string keep = {};
  std::vector<std::string> files = {};  // sorted
};

bool Parse(int argc, char** argv, Arguments& arguments) {
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    const auto value_of = [&](const char* flag) -> const char* {
      const size_t length = std::strlen(flag);
      return text.compare(0, length, flag) == 0 ? argv[i] + length : nullptr;
    };
    if (const char* runs = value_of("--runs=")) {
      arguments.runs = std::strtoull(runs, nullptr, 10);
    } else if (const char* seconds = value_of("--seconds=")) {
      arguments.seconds = std::strtod(seconds, nullptr);
    } else if (const char* seed = value_of("--seed=")) {
      arguments.seed = std::strtoull(seed, nullptr, 10);
    } else if (const char* max_bytes = value_of("--max_bytes=")) {
      arguments.max_bytes = std::strtoull(max_bytes, nullptr, 10);
    } else if (const char* keep = value_of("--keep=")) {
      arguments.keep = keep;
    } else if (text.compare(0, 1, "-") == 0) {
      std::fprintf(stderr, "fuzz: unknown argument %s; fuzz_testing.h lists all\n", text.c_str());
      return false;
    } else if (std::filesystem::is_directory(text)) {
      for (const auto& entry : std::filesystem::recursive_directory_iterator(text)) {
        if (entry.is_regular_file()) arguments.files.push_back(entry.path().string());
      }
    } else {
      arguments.files.push_back(text);
    }
  }
  std::sort(arguments.files.begin(), arguments.files.end());
  return true;
}

// Names the file that a failing input would be stored in.
void NameCurrent(const std::string& suffix) {
  const char* outputs = std::getenv("TEST_UNDECLARED_OUTPUTS_DIR");
  std::snprintf(current.path, sizeof(current.path), "%s/fuzz-failure-%s",
                outputs == nullptr ? "." : outputs, suffix.c_str());
}

int Run(const Arguments& arguments) {
  std::vector<Bytes> corpus;
  for (const std::string& path : arguments.files) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
      std::fprintf(stderr, "fuzz: cannot read %s\n", path.c_str());
      return 1;
    }
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    NameCurrent(std::filesystem::path(path).filename().string());
    RunOne(corpus.back());
  }
  if (corpus.empty()) {
    std::fprintf(stderr, "fuzz: no corpus; name files or folders\n");
    return 1;
  }
  const size_t given = corpus.size();

  Mutator mutator(corpus, arguments.seed, arguments.max_bytes);
  const auto start = std::chrono::steady_clock::now();
  const auto end = start + std::chrono::duration<double>(arguments.seconds);
  uint64_t run = 0;
  for (; run < arguments.runs || std::chrono::steady_clock::now() < end; ++run) {
    Bytes input = mutator.Next();
    if (run % 1024 == 0) {
      NameCurrent(std::to_string(arguments.seed) + "-" + std::to_string(run));
    }
    reached_new = false;
    RunOne(input);
    if (!reached_new) continue;
    if (!arguments.keep.empty()) {
      std::ofstream(
          arguments.keep + "/" + std::to_string(arguments.seed) + "-" + std::to_string(run),
          std::ios::binary)
          .write(reinterpret_cast<const char*>(input.data()),
                 static_cast<std::streamsize>(input.size()));
    }
    corpus.push_back(std::move(input));
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf("fuzz: %zu files, %llu mutations in %.1f s, seed %llu; %zu reached new code\n", given,
              static_cast<unsigned long long>(run), seconds,
              static_cast<unsigned long long>(arguments.seed), corpus.size() - given);
  return 0;
}

}  // namespace

namespace ddp {

std::string FuzzedFile(const uint8_t* data, size_t size) {
  static const int fd = ::memfd_create("fuzzed", MFD_CLOEXEC);
  bool ok = fd >= 0 && ::ftruncate(fd, 0) == 0;
  for (size_t done = 0; ok && done < size;) {
    const ssize_t n = ::pwrite(fd, data + done, size - done, static_cast<off_t>(done));
    ok = n > 0;
    if (ok) done += static_cast<size_t>(n);
  }
  if (!ok) {
    std::perror("fuzz: cannot make a file in memory");
    std::abort();
  }
  return "/proc/self/fd/" + std::to_string(fd);
}

}  // namespace ddp

int main(int argc, char** argv) {
  Arguments arguments;
  if (!Parse(argc, argv, arguments)) return 2;
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(&StoreCurrent);
  for (int signal : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL, SIGALRM}) {
    // Sanitizers report these themselves.
    if (!DDP_FUZZ_WITH_SANITIZER || signal == SIGALRM || signal == SIGABRT) {
      ::signal(signal, &OnSignal);
    }
  }
  return Run(arguments);
}
