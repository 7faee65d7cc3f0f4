#!/usr/bin/env bash
# A run that survives preemption, on a spot slice from a queued resource. Every
# worker starts it when it boots; results go to a bucket; when the slice is
# preempted, another is requested, which resumes from the bucket. At the end, or
# if the run fails for good, the slice is deleted.
#
#   BUCKET=gs://my-bucket NAME=n ZONE=us-west4-a TYPE=v5litepod-256 \
#     launch/tpu/job.sh decode --config=configs/embedded.py \
#       --prompts=data/prompts.jsonl --output=results/OUT.jsonl
#
# It waits until the end. If it is stopped, the run continues, but nothing will
# replace or delete the slice: give the same command again.
#
#   BUCKET  --bucket=gs://B/FOLDER    gets NAME/ with the code, results and logs
#   DATA    --data=gs://B/FOLDER      copied to data/ on every worker
#   POLL    --poll=SECONDS            between checks on it; default: 60
#   --on_demand                       not spot: costs more, is never preempted
set -euo pipefail
# shellcheck source=launch/tpu/settings.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/settings.sh"

BUCKET=${BUCKET:-} DATA=${DATA:-} POLL=${POLL:-60}
tier=(--spot)
own_flag() {
  case $1 in
    --bucket=*) BUCKET=${1#*=} ;;
    --data=*) DATA=${1#*=} ;;
    --poll=*) POLL=${1#*=} ;;
    --on_demand) tier=() ;;
    *) return 1 ;;
  esac
}
parse "$@"
check_command
choose_runtime
case $BUCKET in
  gs://?*) store=${BUCKET%/}/$NAME ;;
  *) die "BUCKET must be gs://NAME, got '$BUCKET'" ;;
esac
case $DATA in
  "" | gs://?*) ;;
  *) die "DATA must be gs://NAME, got '$DATA'" ;;
esac
case $POLL in
  "" | *[!0-9]*) die "POLL must be whole seconds, got '$POLL'" ;;
esac

files=$(mktemp -d)
trap 'rm -rf "$files"' EXIT
cat >"$files/startup.sh" <<END
#!/usr/bin/env bash
# Every worker runs this, as root, when it boots.
export HOME=/root
cd /root && mkdir -p $FOLDER
gcloud storage cp $(quoted "$store")/specjax.tar.gz . &&
  tar xzf specjax.tar.gz -C $FOLDER &&
  bash $FOLDER/launch/tpu/worker.sh job $(quoted "$store" "$DATA" "${REST[@]}")
END

create() {
  create_queued ${tier[@]+"${tier[@]}"} \
    "--metadata-from-file=startup-script=$files/startup.sh"
}

# Prints what the bucket says about the run's end: nothing as yet, or its exit
# code.
outcome() {
  gcloud storage cat "$store/exit_code" 2>/dev/null || true
}

# The queued resource's state; NONE if there is none, UNKNOWN if it cannot be
# queried: then there may be a slice, and none is created.
state() {
  if ! gcloud compute tpus queued-resources describe "$NAME" "${PLACE[@]}" \
    '--format=value(state.state)' 2>"$files/error"; then
    if grep -q -i 'not.found' "$files/error"; then
      echo NONE
    else
      echo UNKNOWN
      cat "$files/error" >&2
    fi
  fi
}

if [ "$DRY_RUN" = 0 ]; then
  code=$(outcome)
  if [ -n "$code" ] && [ "$(state)" = NONE ]; then
    die "$NAME has ended already, with exit code $code; to run it again, take" \
      "another NAME or delete $store/exit_code"
  fi
fi
run git -C "$CHECKOUT" archive --format=tar.gz \
  "--output=$files/specjax.tar.gz" HEAD
run gcloud storage cp "$files/specjax.tar.gz" "$store/specjax.tar.gz"
if [ "$DRY_RUN" = 1 ]; then
  create
  echo "# every $POLL s; created anew if it is SUSPENDED or FAILED:"
  run gcloud compute tpus queued-resources describe "$NAME" "${PLACE[@]}" \
    '--format=value(state.state)'
  echo "# the end, once this prints an exit code:"
  run gcloud storage cat "$store/exit_code"
  delete_queued --quiet
  echo "# startup-script:"
  sed 's/^/#   /' "$files/startup.sh"
  exit 0
fi

before=
while :; do
  code=$(outcome)
  now=$(state)
  if [ "$now" != "$before" ]; then
    echo "$(date '+%H:%M:%S') $NAME: $now" >&2
    before=$now
  fi
  if [ -n "$code" ]; then
    [ "$now" = NONE ] || delete_queued --quiet
    break
  fi
  case $now in
    NONE) create ;;
    SUSPENDED | FAILED) delete_queued --quiet && create ;;
  esac
  sleep "$POLL"
done
echo "exit code $code; results: gcloud storage cp --recursive $store/results ." >&2
exit "$code"
