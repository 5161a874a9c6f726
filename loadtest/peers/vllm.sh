#!/usr/bin/env bash
# vLLM on CPU, fp32, torch.compile on, all cores. VLLMCPU_PYTHON: its virtual environment's python.
# VLLMCPU_MODEL: a safetensors folder. VLLMCPU_KV_GIB: KV memory. VLLMCPU_ARGS: further options.
# VLLMCPU_BIND: cores of its OpenMP threads; "auto" is vLLM's own choice, which keeps one core for
# the API and so leaves a 2-core machine one thread.
set -euo pipefail
export VLLM_CPU_KVCACHE_SPACE="${VLLMCPU_KV_GIB:-2}" HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
export DO_NOT_TRACK=1
export VLLM_CPU_OMP_THREADS_BIND="${VLLMCPU_BIND:-0-$(($(nproc) - 1))}"
# vLLM's documentation asks for Intel's OpenMP; its package brings it along.
iomp="$(dirname "${VLLMCPU_PYTHON:?}")/../lib/libiomp5.so"
if [ -e "$iomp" ]; then
  export LD_PRELOAD="$iomp${LD_PRELOAD:+:$LD_PRELOAD}"
fi
# shellcheck disable=SC2086
exec "${VLLMCPU_PYTHON:?}" -m vllm.entrypoints.openai.api_server --model "${VLLMCPU_MODEL:?}" \
  --host 127.0.0.1 --port "${PORT:?}" --dtype float32 --max-model-len "${VLLMCPU_MAX_LEN:-4096}" \
  --max-num-seqs 64 --generation-config vllm ${VLLMCPU_ARGS:-}
