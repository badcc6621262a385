"""Do vLLM and transformers say and see the same? Greedy answers and captured states of one target from both engines,
compared.

    python tests/bench/engines_agree.py --target FOLDER --prompts PROMPTS.jsonl [--count 32] [--new-tokens 96] [--taps
    2,15,27]

Prints how many answers are equal, for each that is not the gap between the two tokens' logits where they part (a tie,
if rounding explains it), and for every tap the largest difference of the states, relative to the tap's largest value
and to its own row. float32.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from spectrain.config.data_schema import DataConfig
from spectrain.config.schema import EngineConfig
from spectrain.config.target_schema import TargetConfig
from spectrain.data.chat import ChatTemplate
from spectrain.data.hidden_states import TargetStates
from spectrain.data.prompts import split_prompts
from spectrain.data.responses import Response, Sampling
from spectrain.engines.hf import HFEngine
from spectrain.engines.vllm.capture_states import VLLMCapture
from spectrain.engines.vllm.engine import VLLMEngine
from spectrain.engines.vllm.open_vllm import open_vllm
from spectrain.target.model import TargetModel
from spectrain.target.resolve import resolve_target
from spectrain.target.spec import TargetSpec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--taps", default="2,15,27")
    options = parser.parse_args()
    target_config = TargetConfig(path=options.target, dtype="float32")
    resolved = resolve_target(target_config)
    spec = TargetSpec.from_folder(resolved.folder, False)
    engine_config = EngineConfig(name="vllm", self_check="off")
    prompts = split_prompts(
        DataConfig(train=(options.prompts,), heldout_fraction=1e-9, max_train=options.count), []
    ).train
    sampling = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=options.new_tokens, seed=0)
    asked = [(conversation, "train") for conversation in prompts]
    taps = tuple(int(tap) for tap in options.taps.split(","))

    model = TargetModel.load(resolved, target_config)
    hf = HFEngine(model, resolved, EngineConfig(), target_config.max_length)
    with tempfile.TemporaryDirectory() as folder:

        def opened(purpose, extra_args):  # type: ignore[no-untyped-def]
            return open_vllm(engine_config, target_config, resolved.folder, Path(folder), purpose, extra_args)

        capturing = VLLMCapture(opened, engine_config, target_config, resolved, spec)
        template = ChatTemplate(model.tokenizer, hf.end_ids)
        served = VLLMEngine(resolved, template, hf.end_ids, target_config.max_length, opened, capturing)
        ours = {response.key: response for response in hf.generate(asked, sampling)}
        theirs = {response.key: response for response in served.generate(asked, sampling)}
        report_answers(model, ours, theirs)
        responses = list(ours.values())
        seen = {states.key: states for states in hf.capture(responses, taps)}
        captured = {states.key: states for states in served.capture(responses, taps)}
    report_states(seen, captured, taps)


def report_answers(model: TargetModel, ours: dict[str, Response], theirs: dict[str, Response]) -> None:
    equal = sum(ours[key].input_ids.tolist() == theirs[key].input_ids.tolist() for key in ours)
    print(f"{equal} of {len(ours)} answers are equal")
    for number, key in enumerate(ours):
        a, b = ours[key].input_ids.tolist(), theirs[key].input_ids.tolist()
        if a != b:
            place = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
            logits_V = model.model(input_ids=torch.tensor([a[:place]]), logits_to_keep=1).logits[0, -1].float()
            gap, spread = float(logits_V[a[place]] - logits_V[b[place]]), float(logits_V.max() - logits_V.min())
            print(f"answer {number} parts at token {place}: logits {gap:.2g} apart, {gap / spread:.1g} of their spread")


def report_states(seen: dict[str, TargetStates], captured: dict[str, TargetStates], taps: tuple[int, ...]) -> None:
    """The last token's states are left out: no drafter reads them, and vLLM is not asked for them."""
    print(f"{sum(len(states.input_ids) for states in seen.values()):,} tokens captured by both")
    for column, tap in [*enumerate(taps), (-1, "last")]:
        worst = worst_row = 0.0
        for key, states in seen.items():
            a, b = (s.last_hidden if column < 0 else s.taps[:, column] for s in (states, captured[key]))
            a, b = a[:-1].float(), b[:-1].float()
            worst = max(worst, float((a - b).abs().max() / a.abs().max()))
            worst_row = max(worst_row, float(((a - b).norm(dim=-1) / a.norm(dim=-1)).max()))
        print(f"tap {tap}: largest difference {worst:.1e} of the largest value, {worst_row:.1e} of a row's length")


if __name__ == "__main__":
    main()
