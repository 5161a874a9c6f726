#!/usr/bin/env bash
# A bare `model.generate` behind the thinnest HTTP server. HF_PYTHON, HF_MODEL (a folder).
set -euo pipefail
export HF_HUB_OFFLINE=1
exec "${HF_PYTHON:-python3}" "$(dirname "$0")/hf_generate.py" --model "${HF_MODEL:?}" \
  --port "${PORT:?}"
