#!/usr/bin/env bash
# Train on the environment of verifiers that ENVIRONMENT names, with TASKS of its tasks, by RUNNERS processes beside the
# training. MODEL is the model; without it one of random weights is made. CLIENT=train takes verifiers' training client.
# Further arguments are hydra overrides.
set -euo pipefail
RECIPE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
VENV="$RECIPE/../../.venv/bin/python"
PYTHON="${PYTHON:-$([ -x "$VENV" ] && echo "$VENV" || echo python)}"
export RECIPE PYTHON DATA="${DATA:-$PWD/runs/$(basename "$RECIPE")}"
export ENVIRONMENT="${ENVIRONMENT:-$RECIPE/environments/sums.toml}"
[ -f "$ENVIRONMENT" ] || {
  echo "ENVIRONMENT='$ENVIRONMENT': is no file. Set it to an environment's TOML file, as in $RECIPE/environments" >&2
  exit 2
}
MAKE=() && [ -n "${MODEL:-}" ] || MAKE=(--make-model "$DATA/model")
export MODEL="${MODEL:-$DATA/model}"
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
VERIFIERS="${VERIFIERS:-$DATA/verifiers}" # the folder of the environment of packages
FILE="$DATA/checkpoints/trajectories.sqlite.admin.json"

ARGUMENTS=(--config-dir "$RECIPE" --config-name config
  "hydra.searchpath=[pkg://seamless_verl.config]" "hydra.run.dir='$DATA/outputs'" "$@")

with_packages() { # in a subshell, whose process it becomes
  export PATH="$VERIFIERS/bin:$PATH" PYTHONPATH="$RECIPE/../..${PYTHONPATH:+:$PYTHONPATH}"
  exec "$VERIFIERS/bin/python" "$@"
}
runners() { # waits for the run's address, then works until it is stopped
  until [ -f "$FILE" ]; do sleep 1; done
  with_packages -m seamless_verl.cli runner --admin-file "$FILE" --slots "${SLOTS:-16}" \
    --agent "verifiers=$RECIPE/environment.py:run"
}

"$PYTHON" -m seamless_verl.check --unmade "${ARGUMENTS[@]}" # refuse a setting that cannot work before anything else
"$RECIPE/setup.sh" "$VERIFIERS"
mkdir -p "$DATA"
(with_packages "$RECIPE/environment.py" "${TASKS:-256}") >"$DATA/tasks.jsonl"
"$PYTHON" "$RECIPE/data.py" --out "$DATA" "${MAKE[@]}" --val "${VAL:-64}" <"$DATA/tasks.jsonl"
rm -f "$FILE" # one that a killed run left names nobody
source "$RECIPE/../beside.sh"
for _ in $(seq "${RUNNERS:-1}"); do
  runners &
  pids+=($!)
done
run_beside "$PYTHON" -m "${MAIN:-seamless_verl.main_ppo}" "${ARGUMENTS[@]}"
