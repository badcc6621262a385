"""Puts this folder on the import path (``from tiny import …``), keeps torch to one thread, so that tests may run
side by side, and leaves out what needs vLLM where there is none.
"""

import importlib.util
import signal

import pytest
import torch

torch.set_num_threads(1)

# Whoever runs the tests behind nohup or in a shell's background ignores these, and so would every command under test.
for number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))
