#!/bin/bash
# Builds and tests this repository with Bazel 7 and modules, where Debian's own Bazel is 4.2: in a
# root of a later Debian, whose bazel-bootstrap is 7. Nothing but Debian's mirror and PyPI is asked.
#
#   tests/bazel7/check.sh          quick tests, //tools:train, and tests/external_workspace as a module
#   tests/bazel7/check.sh //...    these tests instead of the quick ones
#
# --existing_root before the targets: skips all where no earlier call has made the root.
#
# As root. The first call makes the root (300 MB to fetch), which lies beside the other caches of this
# repository, with what was built in it. Exit status 77: skipped, as it says.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.."

readonly SUITE=forky
readonly QUICK=(//base/... //launchers/... //ddp/config/... //ddp/trainer/logging/... //tools/datasets/...
  //tools/bench:collectives_test //tests/ci/... //tests/docs/... //tests/layering/...
  //tests/readme_example/... //tests/third_party/...)
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

make_root() {
  local mirror new=$root.new
  if ! command -v debootstrap >/dev/null; then
    say "installing debootstrap from Debian"
    apt-get -q -y install --no-install-recommends debootstrap >/dev/null ||
      { apt-get -q update >/dev/null && apt-get -q -y install --no-install-recommends debootstrap >/dev/null; } ||
      fail "debootstrap cannot be installed"
  fi
  # shellcheck disable=SC2016  # apt expands it
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | awk '!/security/ && !n++')
  [[ -n $mirror ]] || fail "apt has no lists, which name the mirror: apt-get update"
  say "making $root from $mirror"
  rm -rf "$new"
  mkdir -p "$cache"
  # An older debootstrap has no script for a newer suite; all of them are that of sid.
  debootstrap --variant=minbase --include=ca-certificates \
    "$SUITE" "$new" "$mirror" /usr/share/debootstrap/scripts/sid >"$root.log" 2>&1 ||
    fail "debootstrap: $(tail -n 5 "$root.log")"
  # By apt, since debootstrap knows no package by what another one provides.
  copy_network_settings "$new"
  # shellcheck disable=SC2016  # the inner bash expands it
  unshare --mount --pid --fork --kill-child bash -euc '
    mount -t proc proc "$1/proc"
    export DEBIAN_FRONTEND=noninteractive
    install=(chroot "$1" apt-get -q -y install --no-install-recommends bazel-bootstrap g++ git python3-pip)
    "${install[@]}" || { chroot "$1" apt-get -q update && "${install[@]}"; }' \
    in_new "$new" >>"$root.log" 2>&1 || fail "installing in $new: $(tail -n 5 "$root.log")"
  rm -rf "$root"
  mv "$new" "$root"
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
    cd /work
    export HOME=/home PATH=/usr/sbin:/usr/bin:/sbin:/bin
    unset BAZEL XDG_CACHE_HOME DDP_DOWNLOAD_CACHE
    exec "$@"' in_root "$root" "$cache" "$@"
}

existing_root=
if [[ ${1:-} == --existing_root ]]; then
  existing_root=yes
  shift
fi
((EUID == 0)) || skip "only root can make a Debian root"
unshare --mount --pid --fork true 2>/dev/null || skip "no namespaces here"
if [[ ! -x $root/usr/bin/bazel ]]; then
  [[ -z $existing_root ]] || skip "no root in $root: tests/bazel7/check.sh makes it"
  make_root
fi
copy_network_settings "$root"
# The tree as it is, without what git ignores: links to another Bazel's outputs.
rm -rf "$root/work"
mkdir "$root/work"
git -c safe.directory='*' ls-files -z --cached --others --exclude-standard |
  tar --create --null --ignore-failed-read --files-from=- | tar --extract --directory="$root/work"

version=$(in_root bazel --version)
[[ $version == "bazel 7."* ]] || skip "$SUITE has $version"
say "$version, $(in_root g++ --version | head -n 1)"

# The repository's own bazelw takes it.
[[ $(in_root ./bazelw --print_bazel) == /usr/bin/bazel ]] || fail "bazelw does not take it"
tests=("$@")
((${#tests[@]})) || tests=("${QUICK[@]}")
in_root ./bazelw test --config=no_registry --noshow_progress --keep_going "${tests[@]}" || fail "${tests[*]}"
say "tests pass: ${tests[*]}"
# As in the README, but for the configuration; --max_steps: it has been trained to the end elsewhere.
in_root ./bazelw run --config=no_registry --noshow_progress //tools:train -- \
  --nproc_per_node=2 --max_steps=20 >"$root/train.log" 2>&1 || fail "//tools:train: $(tail -n 20 "$root/train.log")"
say "//tools:train trains: $(tail -n 1 "$root/train.log")"
in_root tests/external_workspace/check.sh --config=no_registry || fail "the external module"
say "another module takes single targets, also with its own Abseil"
in_root ./bazelw build --noenable_bzlmod --enable_workspace --nobuild --noshow_progress //... ||
  fail "analysis with WORKSPACE"
say "//... analyses in WORKSPACE mode, too"
