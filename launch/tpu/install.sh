#!/usr/bin/env bash
# Makes .venv in the checkout of every worker: pip install -e '.[experiments,tpu]',
# with the versions of requirements.lock. Again: brings it up to date.
#
#   launch/tpu/install.sh
set -euo pipefail
# shellcheck source=launch/tpu/settings.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/settings.sh"

parse "$@"
no_more_arguments
on_all_workers "bash $FOLDER/launch/tpu/worker.sh install"
