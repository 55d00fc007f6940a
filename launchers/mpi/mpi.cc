// Launcher `mpi`: ranks started by mpirun, detected by the variables of Open MPI or of the process
// management interfaces PMI (MPICH, Intel MPI) and PMIx. Needs no MPI library.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "launchers/detect.h"
#include "launchers/launcher.h"

namespace ddp::launchers {
namespace {

constexpr absl::string_view kHowToStart = "mpirun -np N PROGRAM [ARGUMENT…]";

// PyTorch's default port, for an mpirun that gives no job id in the environment (MPICH's hydra).
constexpr int kDefaultPort = 29500;

// Names of the variables in one family of mpirun; of several names the first that is set is used.
struct VariableNames {
  std::vector<std::string> rank;
  std::vector<std::string> size;
  std::vector<std::string> local_rank;
  std::vector<std::string> local_size;
};

const VariableNames& OpenMpi() {
  // Not OMPI_COMM_WORLD_NODE_RANK: that is the index of this process on its node, not of the node.
  static const auto* names = new VariableNames{{"OMPI_COMM_WORLD_RANK"},
                                               {"OMPI_COMM_WORLD_SIZE"},
                                               {"OMPI_COMM_WORLD_LOCAL_RANK"},
                                               {"OMPI_COMM_WORLD_LOCAL_SIZE"}};
  return *names;
}

const VariableNames& Pmi() {
  // PMIx has a variable for the rank only; the others must come from PMI.
  static const auto* names = new VariableNames{{"PMI_RANK", "PMIX_RANK"},
                                               {"PMI_SIZE"},
                                               {"MPI_LOCALRANKID", "PMI_LOCAL_RANK"},
                                               {"MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"}};
  return *names;
}

bool AnySet(const Environment& env, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    if (env.Has(name)) return true;
  }
  return false;
}

bool AnyVariableSet(const Environment& env, const VariableNames& names) {
  return AnySet(env, names.rank) || AnySet(env, names.size) || AnySet(env, names.local_rank) ||
         AnySet(env, names.local_size);
}

// `srun --mpi=pmi2` and `--mpi=pmix` set some of PMI's variables; SLURM's own are more complete. An
// mpirun that uses srun to reach other nodes also sets MPI_LOCALNRANKS.
bool IsSrunsPmi(const Environment& env) {
  return env.Has("SLURM_STEP_ID") && !env.Has("MPI_LOCALNRANKS");
}

// Of Open MPI 4: addresses of mpirun, and of the daemon of this rank's node, which on mpirun's node
// is mpirun itself: "510197760.0;tcp://10.77.0.1,192.0.2.2:39623;tcp6://[fd00::2]:48487".
constexpr char kMpirunUri[] = "OMPI_MCA_orte_hnp_uri";
constexpr char kDaemonUri[] = "OMPI_MCA_orte_local_daemon_uri";

// Of Open MPI 5, whose job has mpirun's host name and process id in its own,
// "prterun-node0-4711@1". The server of a rank's node is mpirun itself if it is
// "prterun-node0-4711@0.0;tcp4://…".
constexpr char kNamespace[] = "PMIX_NAMESPACE";
constexpr char kServerUri[] = "PMIX_SERVER_URI4";

// mpirun's job id, the same in all ranks.
std::optional<std::string> JobId(const Environment& env) {
  for (absl::string_view name : {kNamespace, "OMPI_MCA_ess_base_jobid", "PMI_JOBID"}) {
    if (std::optional<std::string> job = env.Get(name)) return job;
  }
  return std::nullopt;
}

// The name of mpirun's host; empty if `job` is none of Open MPI 5.
std::string HostOfMpirun(absl::string_view job) {
  // prte: a daemon, which takes jobs of prun.
  if (!absl::ConsumePrefix(&job, "prterun-") && !absl::ConsumePrefix(&job, "prte-")) return "";
  const size_t end = job.substr(0, job.rfind('@')).rfind('-');
  return end == absl::string_view::npos ? "" : std::string(job.substr(0, end));
}

// The address of rank 0's node; empty if it is unknown. mpirun places rank 0 on its own node unless
// it is told otherwise. If it was, rank 0 knows, and ends the job by the lack of an address.
std::string AddressOfMpirun(const Environment& env, const Rank& rank) {
  const std::string job = env.Get(kNamespace).value_or("");
  if (std::string host = HostOfMpirun(job); !host.empty()) {
    const std::string mpirun = absl::StrCat(job.substr(0, job.rfind('@')), "@0.0;");
    const bool is_here = absl::StartsWith(env.Get(kServerUri).value_or(""), mpirun);
    return rank.rank == 0 && !is_here ? "" : host;
  }
  const std::string uri = env.Get(kMpirunUri).value_or("");
  const bool is_here = env.Get(kDaemonUri) == uri;
  if (rank.rank == 0 && !is_here) return "";
  constexpr absl::string_view kScheme = ";tcp://";
  const size_t begin = uri.find(kScheme);
  if (begin == std::string::npos) return "";
  const absl::string_view addresses = absl::string_view(uri).substr(begin + kScheme.size());
  return std::string(addresses.substr(0, addresses.find_first_of(",:;")));
}

absl::Status ReadJob(const Environment& env, Rank& rank) {
  if (std::optional<std::string> address = env.Get("MASTER_ADDR")) {
    rank.master_addr = *address;
  } else if (rank.local_world_size != rank.world_size) {
    rank.master_addr = AddressOfMpirun(env, rank);
  }
  DDP_ASSIGN_OR_RETURN(std::optional<int> port, FirstInt(env, {"MASTER_PORT"}, 65535));
  const std::optional<std::string> job = JobId(env);
  rank.master_port = port.value_or(job ? PortFromName(*job) : kDefaultPort);
  if (job) rank.run_id = absl::StrCat("mpi-", *job);
  return absl::OkStatus();
}

absl::StatusOr<Rank> ReadRank(const Environment& env, const VariableNames& variables) {
  Rank rank;
  const std::pair<const std::vector<std::string>*, int*> required[] = {
      {&variables.rank, &rank.rank},
      {&variables.size, &rank.world_size},
      {&variables.local_rank, &rank.local_rank},
      {&variables.local_size, &rank.local_world_size},
  };
  for (const auto& [names, field] : required) {
    DDP_ASSIGN_OR_RETURN(std::optional<int> value, FirstInt(env, *names));
    if (!value) return absl::InvalidArgumentError(absl::StrCat(names->front(), " is missing"));
    *field = *value;
  }
  // See Rank::node_rank. A size of 0 is CheckRank's to report.
  if (rank.local_world_size > 0 && rank.rank >= rank.local_rank) {
    rank.node_rank = (rank.rank - rank.local_rank) / rank.local_world_size;
  }
  DDP_RETURN_IF_ERROR(ReadJob(env, rank));
  return rank;
}

class MpiLauncher : public Launcher {
 public:
  absl::string_view name() const override { return "mpi"; }

  absl::StatusOr<std::optional<Rank>> Detect(const Environment& env) const override {
    const VariableNames* names = nullptr;
    if (AnyVariableSet(env, OpenMpi())) {
      names = &OpenMpi();
    } else if (AnyVariableSet(env, Pmi()) && !IsSrunsPmi(env)) {
      names = &Pmi();
    } else {
      return std::nullopt;
    }
    const std::string remedy = absl::StrCat("start with: ", kHowToStart);
    absl::StatusOr<Rank> rank = ReadRank(env, *names);
    if (!rank.ok()) return BadEnvironment(rank.status().message(), env, Variables(), remedy);
    DDP_RETURN_IF_ERROR(CheckRank(*rank, env, Variables(), remedy));
    return *std::move(rank);
  }

  std::vector<std::string> Variables() const override {
    return {"OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
            "PMI_RANK",
            "PMI_SIZE",
            "PMIX_RANK",
            "MPI_LOCALRANKID",
            "PMI_LOCAL_RANK",
            "MPI_LOCALNRANKS",
            "PMI_LOCAL_SIZE",
            kNamespace,
            kServerUri,
            "OMPI_MCA_ess_base_jobid",
            kMpirunUri,
            kDaemonUri,
            "PMI_JOBID",
            "SLURM_STEP_ID",
            "MASTER_ADDR",
            "MASTER_PORT"};
  }

  std::string HowToStart() const override { return std::string(kHowToStart); }
};

const Registration<LauncherRegistry> kMpi("mpi", LauncherEntry{
                                                     .create = +[]() -> std::unique_ptr<Launcher> {
                                                       return std::make_unique<MpiLauncher>();
                                                     },
                                                     .detect_order = kDetectMpi});

}  // namespace
}  // namespace ddp::launchers
