"""Puts this folder on the import path (``from tiny import …``), keeps torch to one thread, so that tests may run
side by side, and leaves out what needs vLLM where there is none.
"""

import importlib.util

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))
