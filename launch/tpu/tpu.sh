#!/usr/bin/env bash
# A TPU slice from creation to deletion: tpu.sh VERB [FLAGS] [ARGUMENTS].
#
#   NAME=n ZONE=us-west4-a TYPE=v5litepod-8 launch/tpu/tpu.sh create
#     --queued       request a queued resource, which waits for capacity where a
#                    plain request would fail
#     --spot         cheaper, but may be preempted at any time
#   tpu.sh copy [FILES]
#                    copies the last commit to all workers (without uncommitted
#                    changes), and FILES into its folder data/
#     --clone=URL    the workers clone this repository instead
#   tpu.sh install   creates or updates .venv there, pinned by requirements.lock
#   tpu.sh run decode --config=configs/embedded.py --prompts=data/IN.jsonl ...
#                    runs `python -m launch.decode ...` on all workers and
#                    waits; repeat the command to resume an interrupted run
#     --detach       returns at once (the output is in results/run.log)
#   tpu.sh fetch [FOLDER]
#                    copies results/ of worker 0, the only one that writes, to
#                    FOLDER (default: ./results-NAME)
#   tpu.sh delete    deletes the slice and its disks. It costs money until then
#     --queued       deletes what create --queued or job.sh made
#     --yes          does not ask
#
# Flags go between the verb and its arguments.
set -euo pipefail
# shellcheck source=launch/tpu/settings.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/settings.sh"

VERB=${1:---help}
[ $# -eq 0 ] || shift
QUEUED=0 URL='' HOW=run
MORE=() # further flags of gcloud

own_flag() {
  case $VERB$1 in
    create--queued | delete--queued) QUEUED=1 ;;
    create--spot) MORE=(--spot) ;;
    copy--clone=*) URL=${1#*=} ;;
    run--detach) HOW=detach ;;
    delete--yes) MORE=(--quiet) ;;
    *) return 1 ;;
  esac
}

vm() {
  run gcloud compute tpus tpu-vm "$1" "${@:2}" "${PLACE[@]}"
}

# Runs one shell line on all workers.
on_all_workers() {
  vm ssh "$NAME" --worker=all "--command=$1"
}

create() {
  choose_runtime
  if [ "$QUEUED" = 0 ]; then
    vm create "$NAME" "--accelerator-type=$TYPE" "--version=$RUNTIME" \
      ${MORE[@]+"${MORE[@]}"}
    return
  fi
  create_queued ${MORE[@]+"${MORE[@]}"}
  echo "It is ready when this prints ACTIVE:" >&2
  echo "  gcloud compute tpus queued-resources describe $NAME" \
    "$(quoted "${PLACE[@]}") '--format=value(state.state)'" >&2
}

copy() {
  local path
  for path in "$@"; do
    [ -e "$path" ] || die "no such file or folder: $path"
  done
  if [ -n "$URL" ]; then
    on_all_workers "rm -rf $FOLDER && $(quoted git clone --depth=1 "$URL" \
      "$FOLDER") && mkdir -p $FOLDER/data"
  else
    archive=$(mktemp -d)
    trap 'rm -rf "$archive"' EXIT
    run git -C "$CHECKOUT" archive --format=tar.gz \
      "--output=$archive/specjax.tar.gz" HEAD
    vm scp "$archive/specjax.tar.gz" "$NAME:" --worker=all
    on_all_workers "mkdir -p $FOLDER/data && tar xzf specjax.tar.gz -C $FOLDER"
  fi
  [ $# -eq 0 ] || vm scp --recurse "$@" "$NAME:$FOLDER/data/" --worker=all
}

fetch() {
  [ $# -le 1 ] || die "expected one folder, got $#"
  local target=${1-results-$NAME}
  run mkdir -p "$target"
  vm scp --recurse "$NAME:$FOLDER/results" "$target" --worker=0
}

delete() {
  if [ "$QUEUED" = 1 ]; then
    delete_queued ${MORE[@]+"${MORE[@]}"}
  else
    vm delete "$NAME" ${MORE[@]+"${MORE[@]}"}
  fi
}

case $VERB in
  -h | --help) help ;;
  create | copy | install | run | fetch | delete) parse "$@" ;;
  *) die "no such verb: '$VERB'; see tpu.sh --help" ;;
esac
case $VERB in
  create | install | delete)
    [ ${#REST[@]} -eq 0 ] || die "unexpected argument '${REST[0]}'"
    ;;
  run) check_command ;;
esac
case $VERB in
  install) on_all_workers "bash $FOLDER/launch/tpu/worker.sh install" ;;
  run)
    on_all_workers \
      "bash $FOLDER/launch/tpu/worker.sh $HOW $(quoted "${REST[@]}")"
    ;;
  *) "$VERB" ${REST[@]+"${REST[@]}"} ;;
esac
