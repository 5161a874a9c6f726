#!/usr/bin/env bash
# vLLM's prompt lookup beside vllm.sh's options. VLLMCPU_NGRAM_TOKENS, VLLMCPU_NGRAM_MAX: drafted
# tokens and the longest n-gram looked up.
set -euo pipefail
export VLLMCPU_ARGS="--speculative-config {\"method\":\"ngram\",\"num_speculative_tokens\":${VLLMCPU_NGRAM_TOKENS:-5},\"prompt_lookup_max\":${VLLMCPU_NGRAM_MAX:-4},\"prompt_lookup_min\":2} ${VLLMCPU_ARGS:-}"
exec bash "$(dirname "$0")/vllm.sh"
