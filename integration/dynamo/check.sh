#!/usr/bin/env bash
# Feeds Dynamo's own indexer by our publisher. Installs it first, 75 MB, into target/dynamo-env.
#
#   integration/dynamo/check.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export DYNAMO_ENV="$PWD/target/dynamo-env"
stamp="$DYNAMO_ENV/requirements.sha256"
wanted="$(sha256sum integration/dynamo/requirements.txt)"
if [[ $(cat "$stamp" 2>/dev/null) != "$wanted" ]]; then
  rm -rf "$DYNAMO_ENV"
  .venv/bin/python -m venv "$DYNAMO_ENV"
  "$DYNAMO_ENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps \
    --only-binary :all: --requirement integration/dynamo/requirements.txt
  printf '%s\n' "$wanted" >"$stamp"
fi
exec .venv/bin/python -m pytest --quiet -p no:cacheprovider integration/dynamo
