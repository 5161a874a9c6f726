#!/usr/bin/env bash
# Tailor. MODEL: a built-in name, folder or GGUF file. PYTHON: the interpreter that has it installed.
# ARGS: further options of `tailor serve`.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck disable=SC2086
exec "${PYTHON:-python3}" -m server.commands.cli serve --host 127.0.0.1 --port "${PORT:?}" \
  --model "${TAILOR_MODEL:-smollm2-135m-instruct}" ${TAILOR_ARGS:-}
