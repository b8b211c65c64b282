# Sourced by the scripts: makes .venv from the lock file, once. Afterwards $PYTHON runs everything.
# A second call finds a stamp for the same lock file and setup, and installs nothing.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
VENV="$ROOT/.venv"
PYTHON="$VENV/bin/python"
LOCK="$ROOT/requirements/cpu.lock"

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }

die() { printf '%s\n' "$*" >&2; exit 2; }

find_python() {
  local candidate
  for candidate in "${SEAMLESS_PYTHON:-}" python3.11 python3; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "SEAMLESS_PYTHON=${SEAMLESS_PYTHON:-}: the lock file is for Python 3.11 and none was found. Install it, or set SEAMLESS_PYTHON to its command."
}

stamp_of() { cat "$LOCK" "$ROOT/setup.py" "$ROOT/scripts/lib/environment.sh" | sha256sum | cut -c1-16; }

# uv installs the same lock in a tenth of pip's time; where it cannot, pip does.
install_lock() {
  export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}" UV_LINK_MODE="${UV_LINK_MODE:-copy}"
  if "$PYTHON" -m pip install --quiet uv==0.13.8 &&
    "$VENV/bin/uv" pip install --python "$PYTHON" --no-deps -r "$LOCK"; then
    return
  fi
  say "uv failed; installing with pip"
  "$PYTHON" -m pip install --no-deps --progress-bar on -r "$LOCK" || die \
    "requirements/cpu.lock: could not be installed. torch 2.13.0+cpu is among it: set PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL to where PyTorch's CPU builds are."
}

ensure_environment() {
  local stamp
  stamp="$VENV/.seamless-$(stamp_of)"
  [ -e "$stamp" ] && return
  say "[1/4] Python environment in .venv"
  [ -x "$PYTHON" ] || "$(find_python)" -m venv "$VENV"
  say "[2/4] The stack: verl, Megatron-core, vLLM for the CPU, Ray, TransferQueue ($(wc -l <"$LOCK") packages)"
  install_lock
  say "[3/4] This package"
  "$PYTHON" -m pip install --quiet --no-deps --no-build-isolation --editable "$ROOT"
  "$PYTHON" -m seamless_verl.platform.vllm_alias
  say "[4/4] Bytecode"
  # A start-up is nearly all imports, in a dozen processes. Without bytecode they take twice as long.
  env -u PYTHONDONTWRITEBYTECODE "$PYTHON" -m compileall -q -j 2 "$VENV/lib" >/dev/null 2>&1 || true
  rm -f "$VENV"/.seamless-*
  touch "$stamp"
}
