#!/usr/bin/env bash
# `transformers serve`, fp32. TRANSFORMERS_BIN: the `transformers` command. TRANSFORMERS_MODEL: a
# folder. TRANSFORMERS_ARGS: e.g. --continuous-batching.
set -euo pipefail
export HF_HUB_OFFLINE=1
# shellcheck disable=SC2086
exec "${TRANSFORMERS_BIN:-transformers}" serve "${TRANSFORMERS_MODEL:?}" --host 127.0.0.1 \
  --port "${PORT:?}" --device cpu --dtype float32 ${TRANSFORMERS_ARGS:-}
