#!/usr/bin/env bash
# Prepare the data in $DATA, then train with $PYTHON (.venv of the checkout, or python) on the cluster that start_ray.sh
# made, from its head. Given again, it resumes. Further arguments are hydra overrides:
#   recipes/math_grpo_8b/run.sh cluster=devices_64
# DATA and RUNS are folders that every machine has at the same place. MODEL is a name on the hub, or a folder.
set -euo pipefail
RECIPE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
VENV="$RECIPE/../../.venv/bin/python"
PYTHON="${PYTHON:-$([ -x "$VENV" ] && echo "$VENV" || echo python)}"
RUNS="${RUNS:-$PWD/runs/$(basename "$RECIPE")}"
export RECIPE RUNS DATA="${DATA:-$RUNS/data}"
export RAY_ADDRESS="${RAY_ADDRESS:-auto}"

ARGUMENTS=(--config-dir "$RECIPE" --config-name config
  "hydra.searchpath=[pkg://seamless_verl.config]" "hydra.run.dir='$RUNS/outputs'" "$@")

"$PYTHON" -m seamless_verl.check --unmade "${ARGUMENTS[@]}" # refuse a setting that cannot work before anything else
"$PYTHON" "$RECIPE/data.py" --out "$DATA"
exec "$PYTHON" -m "${MAIN:-seamless_verl.main_ppo}" "${ARGUMENTS[@]}"
