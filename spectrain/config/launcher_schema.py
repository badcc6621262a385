"""Configuration of the processes that spectrain starts (group ``launcher``)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from spectrain.config.keys import Section, key, require

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class LauncherConfig(Section, name="launcher"):
    """What a machine asks of the processes that work on it (group ``launcher``)."""

    environment: dict[str, str] = key(
        make=dict,
        help="environment variables of this process and of all that it starts, such as ranks and vLLM; those that are "
        "set already stay. Ranks that srun or torchrun start read theirs before: export them there",
        example="{NCCL_SOCKET_IFNAME: eth0}",
    )

    def _check(self) -> None:
        for name in self.environment:
            require(
                VARIABLE.fullmatch(name),
                f"launcher.environment.{name} is no name of a variable: use letters and digits",
            )
