"""What is wrong with this machine and this environment, before any run: findings, each with its way out.

`gather.py` reads the facts, and nothing else here looks at the machine: each probe is a function of them.
"""

from seamless_verl.tools.doctor.diagnose import PROBES, diagnose
from seamless_verl.tools.doctor.finding import Finding, Level

__all__ = ["PROBES", "Finding", "Level", "diagnose"]
