#!/usr/bin/env bash
# llama.cpp with its own drafts from n-grams (--spec-type ngram-mod) beside llamacpp.sh's options.
set -euo pipefail
export LLAMACPP_ARGS="--spec-type ngram-mod ${LLAMACPP_ARGS:-}"
exec bash "$(dirname "$0")/llamacpp.sh"
