#!/bin/bash
# Builds and tests this repository with Bazel 7 and modules, where Debian's own Bazel is 4.2: in a
# root of a later Debian, whose bazel-bootstrap is 7. Nothing but Debian's mirror and PyPI is asked.
#
#   tests/bazel7/check.sh            quick tests, //tools:train, and tests/external_workspace as a module
#   tests/bazel7/check.sh //...      these tests instead of the quick ones
#   tests/bazel7/check.sh --short    analyses all targets and tests //base/... only
#
# --launching before the targets: also the launch lines of the README, under the root's Open MPI and SLURM.
#
# As root. The first call makes the root (300 MB to fetch), which lies beside the other caches of this
# repository, with what was built in it. Exit status 77: skipped, as it says, also if the root cannot be
# fetched.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.."

readonly SUITE=forky
readonly QUICK=(//base/... //launchers/... //ddp/config/... //ddp/trainer/logging/... //tools/datasets/...
  //tools/bench:collectives_test //tests/ci/... //tests/docs/... //tests/layering/...
  //tests/readme_example/... //tests/third_party/...)
# A mirror that hangs must not hold up CI.
readonly FETCH_SECONDS=600
cache=${XDG_CACHE_HOME:-$HOME/.cache}/libtorch_ddp
root=$cache/$SUITE

say() { echo "bazel7: $*"; }
fail() { say "FAILED: $*" >&2; exit 1; }
skip() { say "skipped: $*"; exit 77; }

copy_network_settings() {
  local file
  for file in resolv.conf pip.conf hosts; do
    if [[ -e /etc/$file ]]; then cp -L "/etc/$file" "$1/etc/$file"; fi
  done
}

# no_root WHY: with the end of the log of what was tried.
no_root() {
  rm -rf "$root.new"
  skip "$SUITE cannot be fetched: $1: $(tail -n 3 "$root.log" | tr '\n' ' ')"
}

make_root() {
  local mirror new=$root.new
  : >"$root.log"
  if ! command -v debootstrap >/dev/null; then
    say "installing debootstrap from Debian"
    timeout "$FETCH_SECONDS" bash -c '
      apt-get -q -y install --no-install-recommends debootstrap ||
        { apt-get -q update && apt-get -q -y install --no-install-recommends debootstrap; }' \
      >"$root.log" 2>&1 || no_root "debootstrap is not installed"
  fi
  # shellcheck disable=SC2016  # apt expands it
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | awk '!/security/ && !n++')
  [[ -n $mirror ]] || no_root "apt has no lists, which name the mirror: apt-get update"
  say "making $root from $mirror"
  rm -rf "$new"
  # With mounts of its own, so that nothing stays mounted if it is killed. An older debootstrap has no
  # script for a newer suite; all of them are that of sid.
  timeout "$FETCH_SECONDS" unshare --mount --pid --fork --kill-child \
    debootstrap --variant=minbase --include=ca-certificates \
    "$SUITE" "$new" "$mirror" /usr/share/debootstrap/scripts/sid >"$root.log" 2>&1 || no_root debootstrap
  # By apt, since debootstrap knows no package by what another one provides.
  install_in "$new" bazel-bootstrap g++ git python3-pip || no_root "Bazel is not installed"
  rm -rf "$root"
  mv "$new" "$root"
}

# install_in ROOT PACKAGE…: from the mirror that it was made from.
install_in() {
  copy_network_settings "$1"
  # shellcheck disable=SC2016  # the inner bash expands it
  timeout "$FETCH_SECONDS" unshare --mount --pid --fork --kill-child bash -euc '
    mount -t proc proc "$1/proc"
    export DEBIAN_FRONTEND=noninteractive
    install=(chroot "$1" apt-get -q -y install --no-install-recommends "${@:2}")
    "${install[@]}" || { chroot "$1" apt-get -q update && "${install[@]}"; }' \
    in_new "$@" >>"$root.log" 2>&1
}

# in_root COMMAND…: there, with mounts and processes of its own, so that nothing is left behind.
# pivot_root and not chroot: in a chroot Bazel's sandbox may not unshare.
in_root() {
  # shellcheck disable=SC2016  # the inner bash expands it
  unshare --mount --pid --fork --kill-child --ipc bash -euc '
    root=$1 cache=$2
    shift 2
    mount --make-rprivate /
    mount --bind "$root" "$root"
    mkdir -p "$root/home/.cache/libtorch_ddp" "$root/old"
    mount -t proc proc "$root/proc"
    mount --rbind /sys "$root/sys"
    mount --rbind /dev "$root/dev"
    for folder in sha256 bazel apt; do
      mkdir -p "$cache/$folder" "$root/home/.cache/libtorch_ddp/$folder"
      mount --bind "$cache/$folder" "$root/home/.cache/libtorch_ddp/$folder"
    done
    cd "$root"
    pivot_root . old
    umount -l /old
    cd /repository
    export HOME=/home PATH=/usr/sbin:/usr/bin:/sbin:/bin
    unset BAZEL XDG_CACHE_HOME DDP_DOWNLOAD_CACHE
    exec "$@"' in_root "$root" "$cache" "$@"
}

short='' launching=''
while [[ ${1:-} == --* ]]; do
  case $1 in
    --short) short=yes ;;
    --launching) launching=yes ;;
    *) fail "no option $1" ;;
  esac
  shift
done
((EUID == 0)) || skip "only root can make a Debian root"
unshare --mount --pid --fork true 2>/dev/null || skip "no namespaces here"
mkdir -p "$cache"
exec {lock}>"$cache/$SUITE.lock"
flock --wait 1800 "$lock" || skip "another check has used $root for half an hour"
[[ -x $root/usr/bin/bazel ]] || make_root
copy_network_settings "$root"
# The tree as it is, without what git ignores: links to another Bazel's outputs.
rm -rf "$root/repository"
mkdir "$root/repository"
git -c safe.directory='*' ls-files -z --cached --others --exclude-standard |
  tar --create --null --ignore-failed-read --files-from=- | tar --extract --directory="$root/repository"

version=$(in_root bazel --version)
[[ $version == "bazel 7."* ]] || skip "$SUITE has $version"
say "$version, $(in_root g++ --version | head -n 1)"

# Debian's Bazel has the rules for Python, which it would fetch otherwise, as a module only. This
# repository names no archive of a code host: what cannot be downloaded is another of Bazel's own.
analyse_as_workspace() {
  local log=$root/workspace.log
  in_root ./bazelw build --noenable_bzlmod --enable_workspace --nobuild --noshow_progress \
    --override_repository=rules_python=/usr/share/bazel/rules/python //... >"$log" 2>&1 || {
    tail -n 20 "$log"
    ! grep -q "Error downloading" "$log" || skip "$SUITE's Bazel lacks what it needs for WORKSPACE mode"
    fail "analysis with WORKSPACE"
  }
  say "//... analyses in WORKSPACE mode, too"
}

# The repository's own bazelw takes it.
[[ $(in_root ./bazelw --print_bazel) == /usr/bin/bazel ]] || fail "bazelw does not take it"
tests=("$@") options=()
if [[ -n $short ]]; then
  in_root ./bazelw build --config=no_registry --nobuild --noshow_progress //... || fail "analysis with modules"
  say "//... analyses with modules"
  tests=(//base/...)
  # Compiles in half the time. The suite's compiler changes, and may warn of more than Debian 12's, which
  # is not what CI is to fail for.
  options=(--compilation_mode=fastbuild "--per_file_copt=.*@-Wno-error")
fi
((${#tests[@]})) || tests=("${QUICK[@]}")
in_root ./bazelw test --config=no_registry --noshow_progress --keep_going "${options[@]}" "${tests[@]}" || fail "${tests[*]}"
say "tests pass: ${tests[*]}"
if [[ -n $short ]]; then
  analyse_as_workspace
  exit
fi
# As in the README, but for the configuration; --max_steps: it has been trained to the end elsewhere.
in_root ./bazelw run --config=no_registry --noshow_progress //tools:train -- \
  --nproc_per_node=2 --max_steps=20 >"$root/train.log" 2>&1 || fail "//tools:train: $(tail -n 20 "$root/train.log")"
say "//tools:train trains: $(tail -n 1 "$root/train.log")"
if [[ -n $launching ]]; then
  install_in "$root" openmpi-bin slurm-wlm munge python3-torch || no_root "its launchers"
  in_root env USE_LIBUV=0 TORCHRUN="python3 tests/bazel7/torchrun_without_libuv.py" \
    TRAIN=/repository/bazel-bin/tools/train tests/e2e/readme_launch.sh || fail "the README's launch lines"
  say "the README's launch lines train"
fi
in_root tests/external_workspace/check.sh --config=no_registry || fail "the external module"
say "another module takes single targets, also with its own Abseil"
analyse_as_workspace
