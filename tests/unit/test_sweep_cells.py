"""What an engine of a sweep can measure, and with how many drafts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.config.engine_schema import EngineConfig
from spectrain.config.schema import SpectrainConfig
from spectrain.config.sweep_schema import SweepConfig
from spectrain.errors import ConfigError
from spectrain.stages.sweep_cells import _counts, _had_by
from spectrain.stages.swept_drafters import SweptDrafter

OWN = SweptDrafter(DrafterConfig(), Path("own"), most_drafts=4, step_by_step=False, known_to_vllm=False)
COUNTS = {"none": (1, 2), "suffix": (1, 2), "ngram": (1, 2), "own": (1, 2)}


def test_what_vllm_lacks_is_refused_alone_and_left_out_beside_others(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # no arctic-inference
    both = SpectrainConfig(sweep=SweepConfig(engines=("hf", "vllm")))
    ours, theirs = both.swept_engines
    assert (ours.name, theirs.name) == ("hf", "vllm")
    assert _had_by(ours, both, COUNTS, {"own": OWN}) == COUNTS
    assert _had_by(theirs, both, COUNTS, {"own": OWN}) == {"none": (1, 2), "ngram": (1, 2)}
    said = " ".join(capsys.readouterr().err.split())
    assert "suffix is left out with engine=vllm" in said and "own is left out with engine=vllm" in said
    alone = SpectrainConfig(engine=EngineConfig(name="vllm"))
    for method, named in (("suffix", "arctic-inference"), ("own", "vLLM has no own drafters")):
        with pytest.raises(ConfigError, match=named):
            _had_by(alone.engine, alone, {method: (1,)}, {"own": OWN})


def test_a_drafter_is_measured_with_as_many_drafts_as_it_gives(capsys):
    assert _counts((1, 4, 8), None) == (1, 4, 8)
    assert _counts((1, 4), OWN) == (1, 4) and not capsys.readouterr().err
    assert _counts((1, 4, 8), OWN) == (1, 4)
    assert "gives 4 drafts a round: it is not measured with more" in " ".join(capsys.readouterr().err.split())
