#!/usr/bin/env bash
# Compare SRPO's and ScaleRL's resampling with plain GRPO at equal tokens, three seeds each, on questions that come again
# every six steps; the validations are on them.
# Further arguments are those of `seamless-verl compare`, such as --steps 40 --seeds 1,2, or overrides of every arm.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
VENV="$HERE/../../.venv/bin/python"
PYTHON="${PYTHON:-$([ -x "$VENV" ] && echo "$VENV" || echo python)}"
export QUESTIONS="${QUESTIONS:-96}"

ARMS=(grpo:seamless.sampler.name=null srpo:seamless.sampler.name=srpo scalerl:seamless.sampler.threshold=0.9)
exec "$PYTHON" -m seamless_verl.cli compare "$HERE" actor_rollout_ref.rollout.val_kwargs.n=6 \
  "data.val_files=\${oc.env:DATA}/train.parquet" --equal-tokens --validate 12 --steps 36 --seeds 1,2,3 --arms "$(IFS=, && echo "${ARMS[*]}")" "$@"
