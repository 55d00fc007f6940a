#include "backends/watch/recorder.h"

#include <atomic>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace ddp::backends::watch {
namespace {

// A fake Work that counts its references.
struct Handle {
  std::atomic<int> holders{1};
};
void Acquire(void* handle) { ++static_cast<Handle*>(handle)->holders; }
void Release(void* handle) { --static_cast<Handle*>(handle)->holders; }
constexpr Recorder::Handles kHandles = {&Acquire, &Release};

CallRecord Call(uint64_t numel) {
  CallRecord record{.kind = CollectiveKind::kAllReduce, .reduce_op = 0, .dtype = 6};
  record.Add(numel);
  return record;
}

void ReleaseAll(const std::vector<Recorder::Pending>& pending) {
  for (const Recorder::Pending& one : pending) {
    if (one.handle != nullptr) Release(one.handle);
  }
}

TEST(RecorderTest, NumbersFromOneAndKeepsTheNewest) {
  Recorder recorder(kHandles);
  for (uint64_t i = 1; i <= 3 * Recorder::kSlots + 5; ++i) EXPECT_EQ(recorder.Begin(Call(i)), i);
  const std::vector<Recorder::Entry> tail = recorder.Tail(10);
  ASSERT_EQ(tail.size(), 10);
  EXPECT_EQ(tail.front().number, recorder.count() - 9);
  EXPECT_EQ(tail.back().record.numel, recorder.count());
  EXPECT_EQ(recorder.Tail(100000).size(), Recorder::kSlots);
  EXPECT_EQ(recorder.Name(recorder.count()), "#3077 allreduce(sum) float32 [3077]");
  EXPECT_EQ(recorder.Name(3), "#3");
}

TEST(RecorderTest, AHandleIsBorrowedUntilTheEnd) {
  Recorder recorder(kHandles);
  Handle work;
  const uint64_t number = recorder.Begin(Call(1));
  recorder.Attach(number, &work);
  EXPECT_EQ(work.holders, 1);
  std::vector<Recorder::Pending> pending = recorder.NotEnded();
  ASSERT_EQ(pending.size(), 1);
  EXPECT_EQ(pending[0].handle, &work);
  EXPECT_EQ(work.holders, 2);
  ReleaseAll(pending);
  recorder.End(number);
  recorder.End(number);
  EXPECT_TRUE(recorder.NotEnded().empty());
  EXPECT_EQ(work.holders, 1);
}

TEST(RecorderTest, AbandonedHandlesAreReleasedOnce) {
  Handle ended, overwritten, cleared, late;
  {
    Recorder recorder(kHandles);
    const auto begin = [&](Handle& work) {
      const uint64_t number = recorder.Begin(Call(1));
      recorder.Attach(number, &work);
      return number;
    };
    uint64_t number = begin(ended);
    recorder.Abandon(number, &ended);
    EXPECT_EQ(ended.holders, 1);
    recorder.End(number);
    EXPECT_EQ(ended.holders, 0);

    number = begin(late);
    recorder.End(number);
    recorder.Abandon(number, &late);  // has ended before
    EXPECT_EQ(late.holders, 0);

    recorder.Abandon(begin(overwritten), &overwritten);
    for (uint64_t i = 0; i < Recorder::kSlots; ++i) recorder.Begin(Call(1));
    EXPECT_EQ(overwritten.holders, 0);

    recorder.Abandon(begin(cleared), &cleared);
  }
  for (const Handle* work : {&ended, &overwritten, &cleared, &late}) EXPECT_EQ(work->holders, 0);
}

TEST(RecorderTest, ACancelledCallIsNotRecorded) {
  Recorder recorder(kHandles);
  Recorder other(kHandles);
  for (int i = 0; i < 1100; ++i) {
    recorder.Begin(Call(7));
    other.Begin(Call(7));
  }
  EXPECT_TRUE(recorder.Cancel(recorder.Begin(Call(8))));
  EXPECT_EQ(recorder.count(), 1100);
  EXPECT_EQ(recorder.SignatureAt(1100), other.SignatureAt(1100));
  recorder.Begin(Call(9));
  other.Begin(Call(9));
  EXPECT_EQ(recorder.SignatureAt(1101), other.SignatureAt(1101));

  const uint64_t number = recorder.Begin(Call(1));
  recorder.Begin(Call(2));
  EXPECT_FALSE(recorder.Cancel(number));

  Recorder first(kHandles);
  EXPECT_TRUE(first.Cancel(first.Begin(Call(1))));
  EXPECT_EQ(first.SignatureAt(0), 0);
}

TEST(RecorderTest, OldSignaturesAreKeptAtMarks) {
  Recorder recorder(kHandles);
  std::vector<uint64_t> signatures = {0};
  const uint64_t count = (Recorder::kMarks + 3) * Recorder::kMarkEvery + 17;
  for (uint64_t i = 1; i <= count; ++i) {
    recorder.Begin(Call(i));
    signatures.push_back(Extend(signatures.back(), Call(i)));
  }
  for (uint64_t number : {count, count - 1, count - 1023, count - 17, 100 * Recorder::kMarkEvery}) {
    EXPECT_EQ(recorder.SignatureAt(number), signatures[number]) << number;
  }
  EXPECT_EQ(recorder.SignatureAt(count + 1), std::nullopt);
  EXPECT_EQ(recorder.SignatureAt(count - 1100), std::nullopt);          // between two marks
  EXPECT_EQ(recorder.SignatureAt(Recorder::kMarkEvery), std::nullopt);  // too old
}

// Several calling threads and a reader. Run with ThreadSanitizer; also checks that no handle leaks.
TEST(RecorderTest, ThreadsMayCallWhileAWatchdogReads) {
  constexpr int kThreads = 3;
  constexpr int kCalls = 3000;
  std::vector<Handle> works(kThreads * kCalls);
  std::atomic<bool> done = false;
  {
    Recorder recorder(kHandles);
    std::thread reader([&] {
      while (!done) {
        for (const Recorder::Pending& pending : recorder.NotEnded()) {
          if (pending.handle == nullptr) continue;
          recorder.End(pending.number);
          Release(pending.handle);
        }
        recorder.Tail(64);
        recorder.SignatureAt(recorder.count());
        std::this_thread::yield();
      }
    });
    std::vector<std::thread> callers;
    for (int t = 0; t < kThreads; ++t) {
      callers.emplace_back([&, t] {
        for (int i = 0; i < kCalls; ++i) {
          Handle& work = works[t * kCalls + i];
          const uint64_t number = recorder.Begin(Call(i));
          recorder.Attach(number, &work);
          if (i % 3 == 0) {
            recorder.Abandon(number, &work);
          } else {
            recorder.End(number);
            Release(&work);
          }
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
    done = true;
    reader.join();
    EXPECT_EQ(recorder.count(), kThreads * kCalls);
  }
  for (const Handle& work : works) ASSERT_EQ(work.holders, 0);
}

}  // namespace
}  // namespace ddp::backends::watch
