#!/usr/bin/env bash
# OpenVINO GenAI with prompt lookup behind openvino_serve.py. OPENVINO_PYTHON: its virtual
# environment's python. OPENVINO_MODEL: a folder of `optimum-cli export openvino --weight-format
# fp32`. OPENVINO_THREADS (default: all cores), OPENVINO_ARGS.
set -euo pipefail
# shellcheck disable=SC2086
exec "${OPENVINO_PYTHON:?}" "$(dirname "$0")/openvino_serve.py" --model "${OPENVINO_MODEL:?}" \
  --port "${PORT:?}" --threads "${OPENVINO_THREADS:-$(nproc)}" ${OPENVINO_ARGS:-}
