#!/usr/bin/env bash
# llama.cpp with its own drafts from n-grams (--spec-type ngram-cache) beside llamacpp.sh's options:
# Its statistics are kept in memory, per slot.
set -euo pipefail
export LLAMACPP_ARGS="--spec-type ngram-cache ${LLAMACPP_ARGS:-}"
exec bash "$(dirname "$0")/llamacpp.sh"
