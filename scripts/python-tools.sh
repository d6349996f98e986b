#!/usr/bin/env bash
# Brings .venv in step with scripts/requirements.txt. Does nothing when it already is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

requirements=scripts/requirements.txt
stamp=.venv/requirements.sha256

if [[ -f $stamp ]] && sha256sum --check --status "$stamp" && .venv/bin/python -c '' 2>/dev/null; then
  exit 0
fi
rm -rf .venv
python3 -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input \
  --requirement "$requirements"
sha256sum "$requirements" >"$stamp"
