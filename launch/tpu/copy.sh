#!/usr/bin/env bash
# Puts the checkout on all workers: the last commit, without what is not
# committed. Or clones it there.
#
#   launch/tpu/copy.sh
#   launch/tpu/copy.sh prompts.jsonl weights/    these too, into its folder data/
#   launch/tpu/copy.sh --clone=https://example.com/specjax.git --ref=main
#
#   --clone=URL    the workers clone this repository (nothing is copied)
#   --ref=REF      branch or tag to clone; default: the repository's own
set -euo pipefail
# shellcheck source=launch/tpu/settings.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/settings.sh"

url=
ref=()
own_flag() {
  case $1 in
    --clone=*) url=${1#*=} ;;
    --ref=*) ref=("--branch=${1#*=}") ;;
    *) return 1 ;;
  esac
}
parse "$@"
for path in ${REST[@]+"${REST[@]}"}; do
  [ -e "$path" ] || die "no such file or folder: $path"
done

if [ -n "$url" ]; then
  on_all_workers "rm -rf $FOLDER && $(quoted git clone --depth=1 \
    ${ref[@]+"${ref[@]}"} "$url" "$FOLDER") && mkdir -p $FOLDER/data"
else
  [ ${#ref[@]} -eq 0 ] || die "--ref needs --clone"
  archive=$(mktemp -d)
  trap 'rm -rf "$archive"' EXIT
  run git -C "$CHECKOUT" archive --format=tar.gz \
    "--output=$archive/specjax.tar.gz" HEAD
  run gcloud compute tpus tpu-vm scp "$archive/specjax.tar.gz" "$NAME:" \
    "${PLACE[@]}" --worker=all
  on_all_workers \
    "mkdir -p $FOLDER/data && tar xzf specjax.tar.gz -C $FOLDER"
fi
if [ ${#REST[@]} -gt 0 ]; then
  run gcloud compute tpus tpu-vm scp --recurse "${REST[@]}" \
    "$NAME:$FOLDER/data/" "${PLACE[@]}" --worker=all
fi
