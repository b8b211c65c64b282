#!/usr/bin/env bash
# Train on the folder of tasks that TASKS names, by RUNNERS processes beside the training, each with SLOTS sandboxes.
# AGENT is the agent's command line, VAL a folder of tasks for validation, MODEL the model; without it one of random
# weights is made. Further arguments are hydra overrides.
set -euo pipefail
RECIPE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
VENV="$RECIPE/../../.venv/bin/python"
PYTHON="${PYTHON:-$([ -x "$VENV" ] && echo "$VENV" || echo python)}"
export RECIPE PYTHON DATA="${DATA:-$PWD/runs/$(basename "$RECIPE")}" TIME_LIMIT_S="${TIME_LIMIT_S:-1800}"
TASKS="${TASKS:-$RECIPE/tasks}"
MAKE=() && [ -n "${MODEL:-}" ] || MAKE=(--make-model "$DATA/model")
export MODEL="${MODEL:-$DATA/model}"
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
FILE="$DATA/checkpoints/trajectories.sqlite.admin.json"

ARGUMENTS=(--config-dir "$RECIPE" --config-name config
  "hydra.searchpath=[pkg://seamless_verl.config]" "hydra.run.dir='$DATA/outputs'" "$@")

runners() { # waits for the run's address, then works until it is stopped
  until [ -f "$FILE" ]; do sleep 1; done
  export PYTHONPATH="$RECIPE/../..${PYTHONPATH:+:$PYTHONPATH}"
  exec "$PYTHON" "$RECIPE/trial.py" --admin-file "$FILE" --slots "${SLOTS:-8}"
}

"$PYTHON" -m seamless_verl.check --unmade "${ARGUMENTS[@]}" # refuse a setting that cannot work before anything else
"$PYTHON" "$RECIPE/data.py" --out "$DATA" --tasks "$TASKS" --val "${VAL:-$TASKS}" --time-limit-s "$TIME_LIMIT_S" "${MAKE[@]}"
rm -f "$FILE" # one that a killed run left names nobody
source "$RECIPE/../beside.sh"
for _ in $(seq "${RUNNERS:-1}"); do
  runners &
  pids+=($!)
done
run_beside "$PYTHON" -m "${MAIN:-seamless_verl.main_ppo}" "${ARGUMENTS[@]}"
