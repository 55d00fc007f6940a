#!/bin/bash
# Builds and runs the programs of this workspace, which depends on the repository and uses
# single targets of it, as a workspace with Bazel 4.2 and as a module with 7; then of own_absl, which
# brings its own Abseil. Arguments are options of Bazel's commands.
#   tests/external_workspace/check.sh [--config=no_registry]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

fail() { echo "external_workspace: $*" >&2; exit 1; }

# docs/using.md is to be copied: it has the lines of these files, but for comments and the path.
for file in MODULE.bazel WORKSPACE; do
  while IFS= read -r line; do
    grep -qxF -- "$line" ../../docs/using.md || fail "docs/using.md lacks a line of $file: $line"
  done < <(grep -vE '^ *(#|$)|^module\(|^workspace\(|^ *path = ' "$file")
done
# The program in docs/configuration.md is own_options.cc, but for comments.
stripped() { sed -E 's,^ +,,; s, *//.*,,; s, +$,,' | grep -v '^$'; }
mapfile -t shown < <(sed -n '/^```cpp$/,/^```$/p' ../../docs/configuration.md | grep -v '^```' | stripped)
((${#shown[@]} >= 8)) || fail "docs/configuration.md shows no program: ${#shown[@]} lines"
for line in "${shown[@]}"; do
  stripped <own_options.cc | grep -qxF -- "$line" || fail "own_options.cc lacks a line of docs/configuration.md: $line"
done
override=$(grep override_repo own_absl/MODULE.bazel) || fail "own_absl overrides no repository"
grep -qxF -- "$override" ../../docs/using.md ||
  fail "docs/using.md lacks own_absl's override_repo"

# Uses the repository's bazelw to find or install Bazel, but the workspace of this folder.
bazel=$(../../bazelw --print_bazel)
# Without the precompiled header, which is the default for such a project, it takes thrice as long:
# .ci/soak.
precompiled=--define=precompiled_header=on
"$bazel" build "$@" "$precompiled" //:own_loop //:own_model //:own_options //:sum_ranks
bin=$("$bazel" info "$@" "$precompiled" bazel-bin)

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

RANK=0 timeout 60 "$bin/own_model" "$scratch/store" >"$scratch/0" &
first=$!
RANK=1 timeout 60 "$bin/own_model" "$scratch/store" >"$scratch/1" || fail "own_model, rank 1"
wait "$first" || fail "own_model, rank 0"
cmp "$scratch/0" "$scratch/1" || fail "own_model's ranks differ"
awk '{ exit !($2 > 2.99 && $2 < 3.01 && $4 > -1.01 && $4 < -0.99) }' "$scratch/0" ||
  fail "own_model did not fit y = 3x - 1: $(cat "$scratch/0")"

timeout 60 "$bin/sum_ranks" --nproc_per_node=3 >"$scratch/sums" || fail "sum_ranks"
for rank in 0 1 2; do
  grep -q "rank $rank of 3: sum 3$" "$scratch/sums" || fail "sum_ranks: $(cat "$scratch/sums")"
done
# 5 steps are an epoch: 7 ends within the second.
timeout 60 "$bin/own_loop" "$scratch/parts" 7 || fail "own_loop, to step 7"
[[ -e $scratch/parts/step_7.pt ]] || fail "own_loop saved nothing at step 7"
timeout 60 "$bin/own_loop" "$scratch/parts" 15 >"$scratch/resumed" || fail "own_loop, from step 7 to 15"
# A run from scratch would end with the same bytes.
grep -qx "from step 7" "$scratch/resumed" || fail "own_loop did not resume: $(cat "$scratch/resumed")"
timeout 60 "$bin/own_loop" "$scratch/whole" 15 || fail "own_loop, 15 steps"
cmp "$scratch/parts/step_15.pt" "$scratch/whole/step_15.pt" || fail "own_loop resumed is another run"
! cmp -s "$scratch/parts/step_7.pt" "$scratch/whole/step_15.pt" || fail "own_loop trained nothing"

# Configured by a file, swept, and submitted as far as the script.
printf 'lr: 0.2\nsteps: 20\nsweep:\n  lr: [0.1, 0.3]\n' >"$scratch/fit.yaml"
mkdir "$scratch/fit"
timeout 60 "$bin/own_options" --config="$scratch/fit.yaml" --log_dir="$scratch/fit" ||
  fail "own_options by a file"
[[ -s $scratch/fit/metrics.jsonl ]] || fail "own_options wrote no metrics"
timeout 60 "$bin/own_options" --config="$scratch/fit.yaml" --log_dir="$scratch/sweep" --multirun \
  --sweep_metric=loss:min >"$scratch/table" || fail "own_options --multirun"
[[ $(awk 'NR > 1 { print $2, $3 }' "$scratch/table") == $'finished 0.3\nfinished 0.1' ]] ||
  fail "own_options' table: $(cat "$scratch/table")"
timeout 60 "$bin/own_options" --launcher=slurm --dry_run lr=0.4 >"$scratch/script" ||
  fail "own_options --launcher=slurm"
grep -q 'command=(.*lr=0.4' "$scratch/script" || fail "own_options' script: $(cat "$scratch/script")"

cd own_absl
"$bazel" build "$@" //:own_absl
bin=$("$bazel" info "$@" bazel-bin)
[[ $("$bin/own_absl" --lr=-1 || true) == INVALID_ARGUMENT ]] || fail "own_absl"
"$bin/own_absl" --lr=1 >"$scratch/own" || fail "own_absl: $(cat "$scratch/own")"
# One Abseil: repositories of modules have long names, but @@com_google_absl or @@_main~…~com_google_absl
# is theirs, and libtorch_ddp's would be a second.
abseils=$("$bazel" query "$@" 'filter("absl/status:status$", deps(//:own_absl))' | sed 's,//.*,,' | sort -u)
[[ $(wc -l <<<"$abseils") == 1 ]] || fail "own_absl links two Abseils: $abseils"

echo "external_workspace: five programs built and ran"
