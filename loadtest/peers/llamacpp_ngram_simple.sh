#!/usr/bin/env bash
# llama.cpp with its own drafts from n-grams (--spec-type ngram-simple) beside llamacpp.sh's options:
# n-grams of 3, drafts of 8 tokens: its defaults, 12 and 48, are for long texts that repeat.
# LLAMACPP_SPEC_ARGS takes their place.
set -euo pipefail
export LLAMACPP_ARGS="--spec-type ngram-simple ${LLAMACPP_SPEC_ARGS:---spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 8} ${LLAMACPP_ARGS:-}"
exec bash "$(dirname "$0")/llamacpp.sh"
