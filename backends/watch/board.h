// The notice board of a group: one note per rank in the c10d store, and what they all must see.
//
//   Board board(store->clone(), /*size=*/4);
//   board.Post(/*rank=*/0, report);
//   const int64_t alarm = board.Raise();          // asks every rank for a full report
//   board.ReadAll();
//
// Nothing here throws or waits for another rank. Once the store cannot be reached, lost() is true
// and all calls do nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "backends/watch/report.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::backends::watch {

// Thread-compatible: one watchdog has it for itself, connection included.
class Board {
 public:
  Board(c10::intrusive_ptr<c10d::Store> store, int size);

  void Post(int rank, const Report& report);
  // By rank; none for those that have not posted. The last that could be read, when lost.
  const std::vector<std::optional<Report>>& ReadAll();
  const std::vector<std::optional<Report>>& last_read() const { return reports_; }
  // Whether ReadAll has seen every rank.
  bool all_posted() const { return all_posted_; }

  // Alarms are numbered from 1 on.
  int64_t Alarm();
  int64_t Raise();

  // Why the group is given up; the first to say so is right. Returns what stands there in the end.
  std::string Condemn(const std::string& verdict);
  std::optional<std::string> Verdict();

  // True for one rank only: the one to tell of the stall of this collective.
  bool ClaimStall(uint64_t number, int rank);

  bool lost() const { return lost_; }
  // Asks the store no more.
  void Lose() { lost_ = true; }

 private:
  void Try(const std::function<void()>& request);
  // Sets `key` where it is empty; what it holds then.
  std::string SetOnce(const std::string& key, const std::string& value);

  const c10::intrusive_ptr<c10d::Store> store_;
  std::vector<std::string> keys_;
  bool all_posted_ = false;
  int64_t alarm_ = 0;
  std::vector<std::optional<Report>> reports_;
  bool lost_ = false;
};

}  // namespace ddp::backends::watch
