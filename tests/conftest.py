"""Puts this folder on the import path (``from tiny import …``) and keeps torch to one thread, so that tests may run
side by side.
"""

import torch

torch.set_num_threads(1)
