#!/usr/bin/env bash
# llama.cpp's llama-server. LLAMACPP_BIN: the llama-server binary. LLAMACPP_MODEL: a GGUF file.
# LLAMACPP_THREADS (default: all cores), LLAMACPP_SLOTS (concurrent requests), LLAMACPP_ARGS.
set -euo pipefail
slots="${LLAMACPP_SLOTS:-32}"
# One KV memory shared by all slots: a slot may use what the others do not.
# shellcheck disable=SC2086
exec "${LLAMACPP_BIN:?}" --model "${LLAMACPP_MODEL:?}" --host 127.0.0.1 --port "${PORT:?}" \
  --threads "${LLAMACPP_THREADS:-$(nproc)}" --parallel "$slots" --kv-unified \
  --ctx-size "${LLAMACPP_CTX:-16384}" --cache-type-k f32 --cache-type-v f32 --no-webui \
  ${LLAMACPP_ARGS:-}
