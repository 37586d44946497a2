#!/usr/bin/env bash
# Sets up an environment in the checkout and does the whole job at laptop size: see `openclip-linattn quickstart`.
#   bash scripts/quickstart.sh            ten to fifteen minutes on two cores, after installation
#   bash scripts/quickstart.sh --tiny     a smoke form of a minute or two
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

exec "$PYTHON" -m openclip_linattn.cli quickstart "$@"
