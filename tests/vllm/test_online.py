"""Hidden states asked of the real vLLM one by one: those of transformers, and nothing of them stays."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
from test_capture import CHUNKED, Bench, responses_of
from vllm_tools import vllm_engine

from spectrain.data.computed_states import ComputedHiddenStates, KeptInMemory
from spectrain.engines.vllm.online_states import OnlineStates


def test_documents_are_those_of_transformers_and_leave_nothing(llama_folder: Path, tmp_path: Path) -> None:
    bench = Bench(llama_folder, tmp_path, (0, 2, 5), vllm_engine(CHUNKED))
    responses, meta, capturing = responses_of(bench), bench.meta(), bench.capturing
    expected = {states.key: states for states in bench.embedded.capture(responses, bench.taps, "float32")}
    plan = capturing.plan(meta, 0, apart=True)
    with (
        capturing.asking(meta, responses, tmp_path / "run") as client,
        closing(OnlineStates(client, plan, capturing.head_beside(), ahead=4, timeout_s=120.0)) as asker,
    ):
        source = ComputedHiddenStates(responses, asker, KeptInMemory(meta, 0), meta, retries=0)
        source.expect(range(len(source)))
        order = [*range(0, len(source), 2), *range(1, len(source), 2), 3]
        for number in order:
            found, wanted = source[number], expected[source.keys[number]]
            assert found.split == wanted.split
            assert found.input_ids.equal(wanted.input_ids) and found.loss_mask.equal(wanted.loss_mask)
            for ours, theirs in ((found.taps, wanted.taps), (found.last_hidden, wanted.last_hidden)):
                assert (ours[:-1] - theirs[:-1]).abs().max() <= 1e-3 * theirs.abs().max()
            np.testing.assert_allclose(found.log_normalizer, wanted.log_normalizer, rtol=1e-3)
    assert not list((tmp_path / "run").rglob("*.safetensors"))
    assert not (tmp_path / "run" / ".incoming").exists()
