"""What `import verl` imports through the `verl.plugins` entry point: it registers the platform `cpu`.

verl imports an entry point's target and calls nothing, in every process, so this module stays tiny
and has one effect: a name in verl's platform registry. verl probes platforms in the order of their
registration, so `cpu` is found by itself only when no accelerator answered before it.
"""

from __future__ import annotations

from verl.plugin.platform import PlatformRegistry

from seamless_verl.platform.cpu import PlatformCPU

PlatformRegistry.register(platform="cpu")(PlatformCPU)
