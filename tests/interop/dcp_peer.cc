// The C++ side of dcp_interop_test.py:
//
//   dcp_peer read IN OUT           reads a checkpoint of Python's DCP and writes it in format pt
//   dcp_peer part IN PATH BEGIN END OUT
//                                  likewise elements [BEGIN, END) of one tensor
//   dcp_peer write IN OUT          reads a checkpoint of format pt and writes it for Python's DCP
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/status.h"
#include "checkpoint/dcp/writer.h"
#include "checkpoint/format.h"
#include "checkpoint/parts.h"
#include "checkpoint/state.h"

namespace ddp::checkpoint {
namespace {

absl::StatusOr<State> Read(const std::string& format, const std::string& path,
                           const ReadRequest& request = {}) {
  DDP_ASSIGN_OR_RETURN(const std::unique_ptr<Format> reader, CreateFormat(format));
  return reader->Read(path, request);
}

absl::Status WritePt(const State& state, const std::string& path) {
  DDP_ASSIGN_OR_RETURN(const std::unique_ptr<Format> writer, CreateFormat("pt"));
  return writer->Write(state, path);
}

absl::Status Run(const std::vector<std::string>& args) {
  const std::string command = args.empty() ? "" : args[0];
  if (command == "read" && args.size() == 3) {
    DDP_ASSIGN_OR_RETURN(const State state, Read("dcp", args[1]));
    DDP_ASSIGN_OR_RETURN(const std::unique_ptr<Format> format, CreateFormat("dcp"));
    DDP_RETURN_IF_ERROR(format->CheckComplete(args[1]));
    return WritePt(state, args[2]);
  }
  if (command == "part" && args.size() == 6) {
    const FlatRange range{std::atoll(args[3].c_str()), std::atoll(args[4].c_str())};
    DDP_ASSIGN_OR_RETURN(const State read, Read("dcp", args[1], {{{args[2], range}}}));
    State state;
    state.root.insert(args[2], read.sharded.at(args[2]).parts[0].tensor);
    return WritePt(state, args[5]);
  }
  if (command == "write" && args.size() == 3) {
    DDP_ASSIGN_OR_RETURN(const State state, Read("pt", args[1]));
    return dcp::WriteCheckpoint(state, args[2]);
  }
  return absl::InvalidArgumentError("usage: see the head of dcp_peer.cc");
}

}  // namespace
}  // namespace ddp::checkpoint

int main(int argc, char** argv) {
  const absl::Status status = ddp::CatchStatus("dcp_peer", [&] {
    return ddp::checkpoint::Run(std::vector<std::string>(argv + 1, argv + argc));
  });
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
