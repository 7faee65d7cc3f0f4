# shellcheck shell=bash
# Sourced by tpu.sh and job.sh: settings, flags, --dry_run. Not a command.
#
# Settings, each an environment variable or a flag (the flag wins):
#   NAME     --name=NAME        of the TPU slice (and of its queued resource)
#   ZONE     --zone=ZONE        such as us-west4-a
#   TYPE     --type=TYPE        accelerator type, such as v5litepod-8
#   PROJECT  --project=PROJECT  default: gcloud's own
#   RUNTIME  --runtime=VERSION  default: Google's choice for TYPE
#   FOLDER   --folder=FOLDER    the checkout on the workers, under the home
#                               folder; default: specjax
#   --dry_run                   print every command, run none
#   --help                      print this

NAME=${NAME:-} ZONE=${ZONE:-} TYPE=${TYPE:-} PROJECT=${PROJECT:-}
RUNTIME=${RUNTIME:-} FOLDER=${FOLDER:-specjax}
DRY_RUN=0
HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
CHECKOUT=$(cd -- "$HERE/../.." && pwd)
# The arguments that are left after the flags.
REST=()

die() {
  echo "error: $*" >&2
  exit 2
}

# The comment at the top of the script, and the settings.
help() {
  sed -n '2,${/^#/!q;s/^# \{0,1\}//;p;}' "$0"
  echo
  sed -n '/^# Settings/,/^$/s/^# \{0,1\}//p' "$HERE/settings.sh"
  exit 0
}

# Parses the shared flags; every other flag goes to own_flag, which returns 1 if
# it is unknown. Stops at the first word that is not a flag, or after --.
parse() {
  while [ $# -gt 0 ]; do
    case $1 in
      --name=*) NAME=${1#*=} ;;
      --zone=*) ZONE=${1#*=} ;;
      --type=*) TYPE=${1#*=} ;;
      --project=*) PROJECT=${1#*=} ;;
      --runtime=*) RUNTIME=${1#*=} ;;
      --folder=*) FOLDER=${1#*=} ;;
      --dry_run) DRY_RUN=1 ;;
      --help | -h) help ;;
      --)
        shift
        break
        ;;
      -*) own_flag "$1" || die "unknown flag $1; see $(basename "$0") --help" ;;
      *) break ;;
    esac
    shift
  done
  REST=("$@")
  [ -n "$NAME" ] || die "NAME is missing: NAME=my-tpu or --name=my-tpu"
  [ -n "$ZONE" ] || die "ZONE is missing: ZONE=us-west4-a or --zone=us-west4-a"
  case $FOLDER in
    *[!A-Za-z0-9._/-]* | "" | /* | *..*)
      die "FOLDER must be a plain path under the home folder, got '$FOLDER'"
      ;;
  esac
  PLACE=("--zone=$ZONE")
  [ -z "$PROJECT" ] || PLACE+=("--project=$PROJECT")
  [ "$DRY_RUN" = 1 ] || command -v gcloud >/dev/null ||
    die "gcloud is not installed: see https://cloud.google.com/sdk"
}

# Words as a shell would read them back.
quoted() {
  local word text=
  for word in "$@"; do
    case $word in
      "" | *[!A-Za-z0-9_./:=,@%+-]*)
        word="'$(printf '%s' "$word" | sed "s/'/'\\\\''/g")'"
        ;;
    esac
    text="$text $word"
  done
  printf '%s' "${text# }"
}

# Runs a command and shows it on stderr; with --dry_run, prints it on stdout.
run() {
  if [ "$DRY_RUN" = 1 ]; then
    printf '%s\n' "$(quoted "$@")"
  else
    printf '+ %s\n' "$(quoted "$@")" >&2
    "$@"
  fi
}

# Fails unless REST is a command of launch/ and its arguments.
check_command() {
  [ ${#REST[@]} -gt 0 ] || die "which command? As in: $(basename "$0") ... decode"
  [[ ${REST[0]} != *[/.]* && -f "$CHECKOUT/launch/${REST[0]}.py" ]] ||
    die "no such command: launch/${REST[0]}.py"
}

# Sets RUNTIME for TYPE, unless it was given.
choose_runtime() {
  [ -n "$TYPE" ] || die "TYPE is missing: TYPE=v5litepod-8 or --type=v5litepod-8"
  [ -z "$RUNTIME" ] || return 0
  case $TYPE in
    v5litepod-*) RUNTIME=v2-alpha-tpuv5-lite ;;
    v5p-*) RUNTIME=v2-alpha-tpuv5 ;;
    v6e-*) RUNTIME=v2-alpha-tpuv6e ;;
    v2-* | v3-* | v4-*) RUNTIME=tpu-ubuntu2204-base ;;
    tpu7x* | v7x*) die "$TYPE comes through GKE only; see launch/tpu/README.md" ;;
    *) die "no runtime version is known for TYPE $TYPE: give RUNTIME" ;;
  esac
}

# Requests a queued resource; further arguments go to gcloud.
create_queued() {
  run gcloud compute tpus queued-resources create "$NAME" "--node-id=$NAME" \
    "${PLACE[@]}" "--accelerator-type=$TYPE" "--runtime-version=$RUNTIME" "$@"
}

delete_queued() {
  run gcloud compute tpus queued-resources delete "$NAME" "${PLACE[@]}" \
    --force "$@"
}
