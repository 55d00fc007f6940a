// The part of a group's c10d store that the watchdogs of its ranks share: one report per rank, the
// number of the latest status request, and the reason why the group was aborted.
//
//   ReportStore store(group_store->clone(), /*size=*/4);
//   store.Publish(/*rank=*/0, report);
//   const int64_t request = store.RequestStatus();   // asks every rank for a full report
//   store.ReadAll();
//
// No call throws or waits for another rank. Once the c10d store cannot be reached, unreachable() is
// true and all calls do nothing.
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

// Not thread-safe. Must be the only user of the store's connection.
class ReportStore {
 public:
  ReportStore(c10::intrusive_ptr<c10d::Store> store, int size);

  void Publish(int rank, const RankReport& report);
  // All ranks' reports, by rank; none for a rank that has not published. If the store is
  // unreachable, those read last.
  const std::vector<std::optional<RankReport>>& ReadAll();
  const std::vector<std::optional<RankReport>>& last_read() const { return reports_; }
  // The report of one rank, likewise.
  const std::optional<RankReport>& Read(int rank);
  // Whether ReadAll has found a report of every rank.
  bool all_published() const { return all_published_; }

  // Status requests are numbered from 1; 0: there was none.
  int64_t LatestRequest();
  // Makes a new status request. Returns its number.
  int64_t RequestStatus();

  // Sets the reason why the group is aborted, unless another rank has already set one, and makes a
  // status request, so that all ranks see it. Returns the reason that is stored then.
  std::string SetAbortReason(const std::string& reason);
  std::optional<std::string> AbortReason();

  // True for the first rank that asks: it reports the stall of this collective. The store keeps the
  // last such key of each rank only.
  bool ClaimStallReport(uint64_t number, int rank);

  bool unreachable() const { return unreachable_; }
  // Does not use the store any more.
  void MarkUnreachable() { unreachable_ = true; }

 private:
  void Try(const std::function<void()>& request);
  // An empty text is no report.
  void Keep(int rank, const std::vector<uint8_t>& text);
  // Sets `key` if it is empty. Returns its value then.
  std::string SetOnce(const std::string& key, const std::string& value);

  const c10::intrusive_ptr<c10d::Store> store_;
  std::vector<std::string> keys_;
  bool all_published_ = false;
  int64_t latest_request_ = 0;
  std::vector<std::optional<RankReport>> reports_;
  bool unreachable_ = false;
  std::string claimed_;  // the key of the stall that this rank has reported last
};

}  // namespace ddp::backends::watch
