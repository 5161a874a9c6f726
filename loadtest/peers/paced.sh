#!/usr/bin/env bash
# Tailor with an engine whose steps compute nothing: STEPS_PER_S of them (100). The rest is as in
# tailor.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck disable=SC2086
exec "${PYTHON:-python3}" -m loadtest.paced serve --host 127.0.0.1 --port "${PORT:?}" \
  --model "${TAILOR_MODEL:-smollm2-135m-instruct}" ${TAILOR_ARGS:-}
