#!/usr/bin/env bash
# vLLM's suffix decoding beside vllm.sh's options. VLLMCPU_ARCTIC: a folder that holds
# arctic_inference/suffix_decoding, where its environment has no arctic-inference.
# VLLMCPU_SUFFIX_TOKENS: most drafted tokens. Its tree of earlier outputs grows with every request.
set -euo pipefail
export PYTHONPATH="${VLLMCPU_ARCTIC:-}${PYTHONPATH:+:$PYTHONPATH}"
export VLLMCPU_ARGS="--speculative-config {\"method\":\"suffix\",\"num_speculative_tokens\":${VLLMCPU_SUFFIX_TOKENS:-16}} ${VLLMCPU_ARGS:-}"
exec bash "$(dirname "$0")/vllm.sh"
