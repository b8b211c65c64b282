"""The `verl.plugins` entry point: registers the platform `cpu` when `import verl` imports this module.

verl imports an entry point's target in every process, and calls nothing. So this module stays tiny and has one effect:
a name in verl's platform registry. verl probes platforms in the order of their registration, so it selects `cpu` only
when no accelerator was found before it.
"""

from __future__ import annotations

from verl.plugin.platform import PlatformRegistry

from seamless_verl.platform.cpu import PlatformCPU

PlatformRegistry.register(platform="cpu")(PlatformCPU)
