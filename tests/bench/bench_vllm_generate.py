"""Throughput of generation through our engine against vLLM's own offline interface (``LLM.generate``), side by side.

    python tests/bench/bench_vllm_generate.py [--target FOLDER] [--prompts 64] [--new-tokens 64] [--rounds 2]

Both answer the same conversations (one turn of a few words; without --target, by a random target of SmolLM2-135M's
shape) greedily, every answer as long as the limit allows, under the same settings: max_num_seqs, float32, eager, no
prefix cache, the same variables. vLLM's side gets the finished ids in one list, ours makes them from conversations and
keeps vLLM supplied. Times are from the first request to the last response; loading is left out. Each side runs
in a process of its own, in turns; the best of the rounds counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny import smollm2_sized

from spectrain.config.schema import EngineConfig
from spectrain.config.target_schema import TargetConfig
from spectrain.data.chat import ChatTemplate
from spectrain.data.prompts import Conversation
from spectrain.data.responses import Sampling
from spectrain.engines.conversations import Dialogue, Turns
from spectrain.engines.vllm.args import engine_args, environment
from spectrain.engines.vllm.engine import VLLMEngine
from spectrain.engines.vllm.process import VLLMProcess
from spectrain.target.resolve import resolve_target

MAX_LENGTH, SEQUENCES = 1024, 16
WORDS = ("river", "stone", "seven", "letters", "because", "morning", "quickly", "number")


def conversations(count: int) -> list[tuple[Conversation, str]]:
    texts = (" ".join(WORDS[(number * 3 + k) % 8] for k in range(4 + number % 29)) for number in range(count))
    return [(Conversation(id=f"{number}", turns=(f"{text} {number}",)), "train") for number, text in enumerate(texts)]


def settings(folder: str) -> tuple[EngineConfig, TargetConfig]:
    args = {"enable_prefix_caching": False, "kv_cache_dtype": "auto"}
    return EngineConfig(name="vllm", max_num_seqs=SEQUENCES, args=args), TargetConfig(
        path=folder, max_length=MAX_LENGTH
    )


def worker(side: str, folder: str, prompts: int, new_tokens: int) -> dict[str, float]:
    """tokens/s of one side."""
    from transformers import AutoTokenizer

    engine, target = settings(folder)
    template = ChatTemplate(AutoTokenizer.from_pretrained(folder))
    used: list[float] = []
    asked, sampling = conversations(prompts), Sampling(0.0, 1.0, 0, new_tokens, 0)
    args = {**engine_args(engine, target, folder), "skip_tokenizer_init": True}
    if side == "spectrain":
        client = VLLMProcess(engine, args, Path(tempfile.mkdtemp()) / "vllm.log")
        # No end tokens: every answer has its full length.
        ours = VLLMEngine(resolve_target(target), template, (), MAX_LENGTH, lambda purpose, extra: client)
        start, start_cpu_s = time.perf_counter(), cpu_s(client)
        tokens = sum(
            int(response.loss_mask.sum())
            for response in ours.generate(asked, sampling, on_tokens=lambda _: used.append(cpu_s(client)))
        )
        seconds, used_s = time.perf_counter() - start, used[-1] - start_cpu_s
    else:
        from vllm import LLM, SamplingParams

        dialogues = Turns(Dialogue, template, (), sampling, MAX_LENGTH).prepare(asked, [""] * len(asked))
        model = LLM(**args)
        how = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        start, start_cpu_s = time.perf_counter(), time.process_time()
        outputs = model.generate([{"prompt_token_ids": dialogue.ids} for dialogue in dialogues], how, use_tqdm=False)
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        seconds, used_s = time.perf_counter() - start, time.process_time() - start_cpu_s
    return {"tokens": tokens, "tokens_per_s": tokens / seconds, "tokens_per_cpu_s": tokens / used_s}


def cpu_s(client: VLLMProcess) -> float:
    """CPU seconds of this process and of vLLM's so far."""
    fields = Path(f"/proc/{client._process.pid}/stat").read_text().rpartition(")")[2].split()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--side", choices=("spectrain", "vllm"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(worker(options.side, options.target, options.prompts, options.new_tokens)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.target or str(smollm2_sized(Path(scratch) / "target"))
        variables = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environment(settings(folder)[0])}
        best: dict[str, dict[str, float]] = {"vllm": {}, "spectrain": {}}
        for _ in range(options.rounds):
            for side, figures in best.items():
                command = [
                    sys.executable,
                    __file__,
                    "--side",
                    side,
                    "--target",
                    folder,
                    "--prompts",
                    str(options.prompts),
                ]
                command += ["--new-tokens", str(options.new_tokens)]
                shown = subprocess.run(
                    command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=variables
                )
                result = json.loads(shown.stdout.splitlines()[-1])
                best[side] = {name: max(value, figures.get(name, 0.0)) for name, value in result.items()}
    print(f"{options.prompts} prompts, {options.new_tokens} new tokens each, max_num_seqs {SEQUENCES}")
    for side, figures in best.items():
        print(
            f"{side:<10}{figures['tokens_per_s']:>9.1f} tokens/s{figures['tokens_per_cpu_s']:>9.1f} tokens/CPU-second"
        )
    ratios = (best["spectrain"][name] / best["vllm"][name] for name in ("tokens_per_s", "tokens_per_cpu_s"))
    print(
        "spectrain / vLLM: {:.3f} in time, {:.3f} in CPU time (which is what counts where others use the machine)".format(  # noqa: E501
            *ratios
        )
    )


if __name__ == "__main__":
    main()
