#!/usr/bin/env bash
# llama.cpp with its own drafts from n-grams (--spec-type ngram-mod) beside llamacpp.sh's options:
# n-grams of 6, drafts of 2 to 16 tokens: its defaults, 24 and 48 to 64, are for long texts that
# repeat. All slots and requests share its table. LLAMACPP_SPEC_ARGS takes their place.
set -euo pipefail
export LLAMACPP_ARGS="--spec-type ngram-mod ${LLAMACPP_SPEC_ARGS:---spec-ngram-mod-n-match 6 --spec-ngram-mod-n-min 2 --spec-ngram-mod-n-max 16} ${LLAMACPP_ARGS:-}"
exec bash "$(dirname "$0")/llamacpp.sh"
