#!/usr/bin/env bash
# Deletes the slice and all that is on its disks. It costs money until then.
#
#   launch/tpu/delete.sh
#   launch/tpu/delete.sh --queued    what create.sh --queued or job.sh made
#
#   --queued    delete the queued resource, and the slice with it
#   --yes       do not ask
set -euo pipefail
# shellcheck source=launch/tpu/settings.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/settings.sh"

queued=0
more=()
own_flag() {
  case $1 in
    --queued) queued=1 ;;
    --yes) more+=(--quiet) ;;
    *) return 1 ;;
  esac
}
parse "$@"
no_more_arguments

if [ "$queued" = 1 ]; then
  delete_queued ${more[@]+"${more[@]}"}
else
  run gcloud compute tpus tpu-vm delete "$NAME" "${PLACE[@]}" \
    ${more[@]+"${more[@]}"}
fi
