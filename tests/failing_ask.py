"""``spectrain`` with a target that fails for one document on rank 1: ``failing_ask.py KEY COMMAND …`` of a launcher."""

import os
import sys

from spectrain import cli
from spectrain.engines.inprocess_states import InProcessStates
from spectrain.errors import RunError

if __name__ == "__main__":
    key, *arguments = sys.argv[1:]
    asked = InProcessStates.ask

    def ask(self, response):
        if response.key == key:
            raise RunError("the device is gone")
        return asked(self, response)

    if os.environ["RANK"] == "1":
        InProcessStates.ask = ask
    sys.argv[1:] = arguments
    sys.exit(cli.main())
