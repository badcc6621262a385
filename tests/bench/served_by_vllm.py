"""What vLLM itself reports for a drafter folder: acceptance from its own counters, prompts and ids as `spectrain eval`
uses them.

    python tests/bench/served_by_vllm.py --target TARGET_FOLDER --drafter RUN/drafter --prompts PROMPTS.jsonl
    --max-prompts 64

Runs in an environment that has vLLM; on a CPU start it with VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1
VLLM_CPU_OMP_THREADS_BIND=0-1 OMP_NUM_THREADS=2 and libiomp5.so of intel-openmp in LD_PRELOAD. Greedy decoding, float32.
Rounds that the length limit cut are left out in the second line, as spectrain's own figures leave them out: vLLM counts
drafts accepted beyond the limit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--max-prompts", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    options = parser.parse_args()

    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(options.target)
    lines = Path(options.prompts).read_text(encoding="utf-8").splitlines()[: options.max_prompts]
    chats = [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines]
    prompts = [
        {"prompt_token_ids": tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False)}
        for c in chats
    ]
    model = LLM(
        options.target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=16,
        seed=0,
        disable_log_stats=False,
        per_request_spec_decode_metrics="detailed",
        speculative_config={
            "model": options.drafter,
            "method": "eagle3",
            "num_speculative_tokens": options.num_speculative_tokens,
        },
    )
    outputs = model.generate(prompts, SamplingParams(temperature=0.0, max_tokens=options.max_new_tokens))
    counters = {m.name: m for m in model.get_metrics() if "spec_decode" in m.name}
    drafts = counters["vllm:spec_decode_num_drafts"].value
    accepted = counters["vllm:spec_decode_num_accepted_tokens"].value
    per_position = [value / drafts for value in counters["vllm:spec_decode_num_accepted_tokens_per_pos"].values]
    print(
        json.dumps(
            {"rounds": drafts, "acceptance_length": 1 + accepted / drafts, "acceptance_per_position": per_position}
        )
    )
    n, limit = options.num_speculative_tokens, options.max_new_tokens
    kept = [count for output in outputs for count in complete_rounds(output.outputs[0], n, limit)]
    survival = [sum(count > j for count in kept) / len(kept) for j in range(n)]
    print(
        json.dumps(
            {"complete rounds": len(kept), "acceptance_length": 1 + sum(survival), "acceptance_per_position": survival}
        )
    )


def complete_rounds(answer: Any, n: int, limit: int) -> list[int]:
    """Accepted counts of an answer's rounds, without a last one that the limit cut while all drafts so far had been
    accepted.
    """
    counts, generated = [], 1  # the prefill emits the first token
    for accepted in answer.spec_decode_metrics.per_step_accepted:
        left = limit - generated
        if not (answer.finish_reason == "length" and left < n and accepted >= left):
            counts.append(accepted)
        generated += accepted + 1
    return counts


if __name__ == "__main__":
    main()
