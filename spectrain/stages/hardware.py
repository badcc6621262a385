"""What this machine is, in words, for whoever reads a figure that was measured on it.

Of a module that was not imported nothing is asked: importing torch to name a device would take seconds. Stands alone
because the run directory, the report, ``doctor`` and published cards all say it.
"""

from __future__ import annotations

import platform
import sys

from spectrain.processes import available_cores


def cpu_name() -> str:
    """The processor, as its maker calls it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
            return next(names, "") or platform.processor() or "unknown"
    except OSError:
        return platform.processor() or "unknown"


def device_names() -> list[str]:
    """Accelerators that torch sees, if it was imported; empty on a machine without."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def hardware() -> str:
    """``2 cores of AMD EPYC 7763``, or ``8 × AMD Instinct MI300X``."""
    names = device_names()
    if not names:
        return f"{len(available_cores())} cores of {cpu_name()}"
    counted = {name: names.count(name) for name in names}
    return ", ".join(f"{count} × {name}" for name, count in counted.items())
