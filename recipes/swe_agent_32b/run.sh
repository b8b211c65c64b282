#!/usr/bin/env bash
# Prepare the data in $DATA, then train with $PYTHON (.venv of the checkout, or python) on the cluster that start_ray.sh
# made, from its head. Given again, it resumes. Further arguments are hydra overrides:
#   recipes/swe_agent_32b/run.sh cluster=devices_64
# TASKS is a file of tasks, one a line of JSON (README.md). DATA, RUNS and AGENT_ENV, the agents' environment, are folders
# that every machine has at the same place. MODEL is a name on the hub, or a folder.
set -euo pipefail
RECIPE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
VENV="$RECIPE/../../.venv/bin/python"
PYTHON="${PYTHON:-$([ -x "$VENV" ] && echo "$VENV" || echo python)}"
RUNS="${RUNS:-$PWD/runs/$(basename "$RECIPE")}"
export RECIPE RUNS DATA="${DATA:-$RUNS/data}"
export AGENT_ENV="${AGENT_ENV:-$RUNS/agent-venv}" PYTHON
export RAY_ADDRESS="${RAY_ADDRESS:-auto}"

ARGUMENTS=(--config-dir "$RECIPE" --config-name config
  "hydra.searchpath=[pkg://seamless_verl.config]" "hydra.run.dir='$RUNS/outputs'" "$@")

"$PYTHON" -m seamless_verl.check --unmade "${ARGUMENTS[@]}" # refuse a setting that cannot work before anything else
"$RECIPE/../swe_agent/setup.sh" "$AGENT_ENV"
"$PYTHON" "$RECIPE/data.py" --tasks "${TASKS:?name a file of tasks, as in README.md}" --out "$DATA"
exec "$PYTHON" -m "${MAIN:-seamless_verl.main_ppo}" "${ARGUMENTS[@]}"
