#!/usr/bin/env bash
# vLLM on CPU, fp32, torch.compile on. VLLM_PYTHON: its virtual environment's python.
# VLLM_MODEL: a safetensors folder. VLLM_KV_GIB: KV memory. VLLM_ARGS: further options.
set -euo pipefail
export VLLM_CPU_KVCACHE_SPACE="${VLLM_KV_GIB:-2}" HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
export DO_NOT_TRACK=1
# shellcheck disable=SC2086
exec "${VLLM_PYTHON:?}" -m vllm.entrypoints.openai.api_server --model "${VLLM_MODEL:?}" \
  --host 127.0.0.1 --port "${PORT:?}" --dtype float32 --max-model-len "${VLLM_MAX_LEN:-4096}" \
  --max-num-seqs 64 --generation-config vllm ${VLLM_ARGS:-}
