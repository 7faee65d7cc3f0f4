#!/usr/bin/env bash
# Fetches results/ of worker 0, which alone writes (and its run.log).
#
#   launch/tpu/fetch.sh [FOLDER]    default: ./results-NAME
set -euo pipefail
# shellcheck source=launch/tpu/settings.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/settings.sh"

parse "$@"
[ ${#REST[@]} -le 1 ] || die "expected one folder, got ${#REST[@]}"
target=${REST[0]-results-$NAME}
run mkdir -p "$target"
run gcloud compute tpus tpu-vm scp --recurse "$NAME:$FOLDER/results" "$target" \
  "${PLACE[@]}" --worker=0
