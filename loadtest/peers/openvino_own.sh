#!/usr/bin/env bash
# OpenVINO GenAI as openvino.sh, in the precisions that OpenVINO chooses itself (--own-precision):
# with the 8-bit model that is what its users run. OPENVINO_MODEL8 takes the place of OPENVINO_MODEL,
# so that both can stand in one comparison.
set -euo pipefail
export OPENVINO_MODEL="${OPENVINO_MODEL8:-${OPENVINO_MODEL:?}}"
export OPENVINO_ARGS="--own-precision ${OPENVINO_ARGS:-}"
exec bash "$(dirname "$0")/openvino.sh"
