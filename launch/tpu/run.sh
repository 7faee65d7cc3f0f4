#!/usr/bin/env bash
# Runs `python -m launch.MAIN ARGUMENTS` on all workers, and waits.
#
#   launch/tpu/run.sh decode --config=configs/embedded.py \
#     --prompts=data/prompts.jsonl --output=results/OUT.jsonl
#
# It runs in the checkout: copy.sh puts files under data/, fetch.sh gets results/.
# What it prints is also in results/run.log of each worker. A run that was cut
# off goes on where it was with the same command.
#
#   --detach    return at once; the run goes on without you (see results/run.log)
set -euo pipefail
# shellcheck source=launch/tpu/settings.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/settings.sh"

how=run
own_flag() {
  case $1 in
    --detach) how=detach ;;
    *) return 1 ;;
  esac
}
parse "$@"
check_main
on_all_workers "bash $FOLDER/launch/tpu/worker.sh $how $(quoted "${REST[@]}")"
