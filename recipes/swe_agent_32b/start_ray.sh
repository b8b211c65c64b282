#!/usr/bin/env bash
# Start Ray on this machine, once on each: first on the head, then on the others with its address.
#   start_ray.sh                  the head; prints the address
#   start_ray.sh 10.0.0.1:6379    another machine
# Labels of this machine, for `labels` of seamless.resources: LABELS=zone=b
# Every process of a run inherits the environment of this command: set NCCL's variables and HF_HOME here.
set -euo pipefail
ADDRESS="${1:-}"
PORT="${RAY_PORT:-6379}"

export NCCL_DEBUG="${NCCL_DEBUG:-WARN}" TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}" # as Megatron's tensor parallelism asks for

ARGUMENTS=(--disable-usage-stats)
[ -z "${LABELS:-}" ] || ARGUMENTS+=(--labels "$LABELS")
if [ -z "$ADDRESS" ]; then
  ray start --head --port "$PORT" "${ARGUMENTS[@]}"
else
  ray start --address "$ADDRESS" "${ARGUMENTS[@]}"
fi
