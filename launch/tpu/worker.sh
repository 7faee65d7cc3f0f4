#!/usr/bin/env bash
# What tpu.sh and job.sh run on every worker, in its checkout.
#
#   worker.sh install                     create or repair .venv
#   worker.sh run MAIN ARGUMENTS          python -m launch.MAIN ARGUMENTS
#   worker.sh detach MAIN ARGUMENTS       the same, in the background
#   worker.sh job STORE DATA MAIN ARGUMENTS
#       prepare; run, and rerun if it dies or is stopped, while worker 0 copies
#       results/ back every minute; leave the exit code in STORE/exit_code
#   worker.sh prepare STORE DATA
#       install; copy gs:// folders DATA to data/ and, on worker 0,
#       STORE/results to results/
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")/../.."

PAUSE=${PAUSE:-60}
TRIES=${TRIES:-5}
SUITABLE='import sys, venv, ensurepip
sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))'

# TPU images have an older Python than specjax needs; uv brings a newer one.
install() {
  if ! .venv/bin/python -c "$SUITABLE" 2>/dev/null; then
    local python=
    for candidate in python3 python3.13 python3.12 python3.11; do
      if "$candidate" -c "$SUITABLE" 2>/dev/null; then
        python=$candidate
        break
      fi
    done
    if [ -n "$python" ]; then
      "$python" -m venv --clear .venv
    else
      python3 -m pip install --quiet --user uv
      python3 -m uv venv --quiet --seed --clear --python=3.12 .venv
    fi
  fi
  .venv/bin/python -m pip install --quiet -c requirements.lock \
    -e '.[experiments,tpu]'
}

run() {
  local main=$1
  shift
  mkdir -p data results
  .venv/bin/python -m "launch.$main" "$@" 2>&1 | tee -a results/run.log
}

prepare() {
  local store=$1 data=$2 said
  mkdir -p data results
  install
  [ -z "$data" ] || gcloud storage rsync --recursive "$data" data
  [ "$(worker_number)" = 0 ] || return 0
  if said=$(gcloud storage ls "$store/results/" 2>&1); then
    gcloud storage rsync --recursive "$store/results" results
  elif [[ $said != *"matched no objects"* ]]; then # not that there are none
    echo "$said" >&2
    return 1
  fi
}

# However it ends, worker 0 leaves an exit code: without one nothing deletes the
# slice. Preparing is a separate process, because its first failure must end it.
job() {
  local store=$1 data=$2 code try ready='' copier='' number
  shift 2
  number=$(worker_number) || number=
  for ((try = 1; try <= TRIES; try++)); do
    if [ -z "$ready" ]; then
      code=1
      if ! bash launch/tpu/worker.sh prepare "$store" "$data"; then
        sleep "$PAUSE"
        continue
      fi
      ready=1
      if [ "$number" = 0 ]; then
        while sleep "$PAUSE"; do save "$store"; done &
        copier=$!
      fi
    fi
    # Another worker's death ends this one too; all then join again. 2 is a
    # mistake in the command, which stays one. 75 is a training run that saved
    # and stopped because a worker is preempted: neither finished nor failed.
    code=0
    run "$@" || code=$?
    case $code in
      0 | 2) break ;;
      75) try=$((try - 1)) ;;
    esac
  done
  if [ "$number" = 0 ]; then
    if [ -n "$copier" ]; then
      kill "$copier" 2>/dev/null || true
      save "$store"
    fi
    until echo "$code" | gcloud storage cp - "$store/exit_code"; do
      sleep "$PAUSE"
    done
  fi
  return "$code"
}

save() {
  gcloud storage rsync --recursive results "$1/results" || true
}

worker_number() {
  curl --silent --fail --retry 9 --header 'Metadata-Flavor: Google' \
    http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number
}

what=${1-}
[ $# -eq 0 ] || shift
case $what in
  install | prepare | job) "$what" "$@" ;;
  run) run "$@" ;;
  detach)
    mkdir -p results
    nohup bash launch/tpu/worker.sh run "$@" </dev/null >/dev/null 2>&1 &
    ;;
  *)
    echo "error: expected install, run, detach or job, got '$what'" >&2
    exit 2
    ;;
esac
