"""The fixtures of ``finished_runs.py``."""

from finished_runs import arguments, finished, run_dir

__all__ = ["arguments", "finished", "run_dir"]
