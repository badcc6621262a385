"""Sources of hidden states that go wrong; in a module of their own, which loader workers import in no time."""

from __future__ import annotations

import os
import signal
import sys

from spectrain.data.hidden_states import StoredHiddenStates, TargetStates

BROKEN = 4


class Breaking(StoredHiddenStates):
    """One of its documents cannot be read."""

    error: Exception = RuntimeError()

    def __getitem__(self, index: int) -> TargetStates:
        if index == BROKEN:
            raise self.error
        return super().__getitem__(index)


class Dying(StoredHiddenStates):
    """Kills the process that reads a certain document."""

    def __getitem__(self, index: int) -> TargetStates:
        if index == BROKEN:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Listing(StoredHiddenStates):
    """Its error names all that the process which reads it has imported."""

    def __getitem__(self, index: int) -> TargetStates:
        raise RuntimeError(" ".join(sys.modules))
