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

    def as_stored(self, index: int) -> TargetStates:
        if index == BROKEN:
            raise self.error
        return super().as_stored(index)


class Dying(StoredHiddenStates):
    """Kills the process that reads a certain document."""

    def as_stored(self, index: int) -> TargetStates:
        if index == BROKEN:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().as_stored(index)


class Listing(StoredHiddenStates):
    """Its error names all that the process which reads it has imported."""

    def as_stored(self, index: int) -> TargetStates:
        raise RuntimeError(" ".join(sys.modules))
