#!/usr/bin/env bash
# Creates a TPU slice.
#
#   NAME=n ZONE=us-west4-a TYPE=v5litepod-8 launch/tpu/create.sh
#   NAME=n ZONE=us-west4-a TYPE=v5litepod-256 launch/tpu/create.sh --queued --spot
#
#   --queued                 ask for a queued resource: it waits in line, where a
#                            plain request fails if there is no capacity
#   --spot                   cheaper, and may be taken away at any time
#   --startup_script=FILE    what every worker runs, as root, when it boots
set -euo pipefail
# shellcheck source=launch/tpu/settings.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/settings.sh"

queued=0
more=()
own_flag() {
  case $1 in
    --queued) queued=1 ;;
    --spot) more+=(--spot) ;;
    --startup_script=*)
      [ -f "${1#*=}" ] || die "no such startup script: ${1#*=}"
      more+=("--metadata-from-file=startup-script=${1#*=}")
      ;;
    *) return 1 ;;
  esac
}
parse "$@"
no_more_arguments
choose_runtime

if [ "$queued" = 1 ]; then
  create_queued ${more[@]+"${more[@]}"}
  echo "It is ready when this prints ACTIVE:" >&2
  echo "  gcloud compute tpus queued-resources describe $NAME" \
    "$(quoted "${PLACE[@]}") '--format=value(state.state)'" >&2
else
  run gcloud compute tpus tpu-vm create "$NAME" "${PLACE[@]}" \
    "--accelerator-type=$TYPE" "--version=$RUNTIME" ${more[@]+"${more[@]}"}
fi
