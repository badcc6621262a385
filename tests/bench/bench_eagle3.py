"""EAGLE-3 training: tokens per second and peak memory against the plain reference, side by side in one run.

    OMP_WAIT_POLICY=PASSIVE python tests/bench/bench_eagle3.py [--draft-vocab 8192] [--steps 5]

Both sides train one layer for three steps on the same row of 1024 tokens with the dimensions of SmolLM2-135M (H 576, V
49152), float32, AdamW, two threads; states are random, which costs what real ones cost. Documents have 130 prompt and
126 generated tokens, as GSM8K with short answers. The reference is what one writes first: every column at every step,
SDPA with a dense mask, the teacher's distribution and the drafter's logits of all steps materialised over whole
vocabularies, autograd through all of it.

Each side runs in its own process (peak memory is the process's high-water mark less its size before the first step),
three rounds, interleaved; the best round counts. Operations: *needed* are those of the counted positions, by formula;
*executed* are counted by torch while a step runs; the peak is a 2048³ product in the same process.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 576, 1536, 9, 3, 64, 49152
ROW, PROMPT, ANSWER, TAPS, STEPS_K = 1024, 130, 126, 3, 3


def make_head() -> Any:
    from transformers import LlamaConfig

    from spectrain.target.families import head_math
    from spectrain.target.head import TargetHead

    config = LlamaConfig(vocab_size=VOCAB, hidden_size=HIDDEN, tie_word_embeddings=True)
    return TargetHead(head_math(config), torch.randn(VOCAB, HIDDEN) * 0.05, torch.ones(HIDDEN), None)


def make_drafter(draft_vocab: int, head: Any) -> Any:
    from spectrain.config.drafter_schema import AutoregressiveConfig, DrafterConfig
    from spectrain.data.vocab import DraftVocab
    from spectrain.drafters.autoregressive.eagle3 import Eagle3, Eagle3Shape
    from spectrain.drafters.layers import LayerShape

    rope = {"rope_type": "default", "rope_theta": 1e5}
    layer = LayerShape("llama", HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, 1e-5, rope, 8192)
    shape = Eagle3Shape(layer, 1, tuple(range(2, 2 + TAPS)), VOCAB, draft_vocab)
    config = DrafterConfig(autoregressive=AutoregressiveConfig(ttt_steps=STEPS_K))
    drafter = Eagle3(shape, DraftVocab(torch.arange(draft_vocab), VOCAB, 1.0), config)
    drafter.attach(head)
    return drafter


def make_batch(head: Any) -> Any:
    from spectrain.data.hidden_states import TargetStates
    from spectrain.data.packing import pack_batch

    length = PROMPT + ANSWER
    mask = torch.tensor([0] * PROMPT + [1] * ANSWER, dtype=torch.uint8)
    documents = []
    for number in range(ROW // length):
        last = torch.randn(length, HIDDEN)
        ids = torch.randint(0, VOCAB, (length,), dtype=torch.int32)
        taps = torch.randn(length, TAPS, HIDDEN)
        documents.append(TargetStates(ids, mask, taps, last, head.log_normalizer(last), str(number), "train"))
    return pack_batch(documents)


def reference_loss(drafter: Any, head: Any, batch: Any) -> torch.Tensor:
    """The plain way: everything at every position, everything kept."""
    body, layer = drafter.body, drafter.body.layers[0]
    t = batch.num_tokens
    columns = torch.arange(t)
    same = batch.document_ids_T[:, None] == batch.document_ids_T[None]
    mask = same & (columns[None] <= columns[:, None])
    diagonal = torch.eye(t, dtype=torch.bool)
    feature = body.fuse(batch.taps_TAH)
    keys, values, total = [], [], torch.zeros(())
    for k in range(STEPS_K):
        ids = batch.input_ids_T[(columns + 1 + k).clamp(max=t - 1)]
        residual, x = layer.attention_input(feature, head.embed_rows(ids))
        cos_sin = drafter.rotary.cos_sin(batch.position_ids_T + k)
        key, value = layer.self_attn.keys_values(x, cos_sin)
        keys.append(key.repeat_interleave(HEADS // KV_HEADS, 1))
        values.append(value.repeat_interleave(HEADS // KV_HEADS, 1))
        q = layer.self_attn.queries(x, cos_sin)
        heads = F.scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in (q, torch.cat(keys), torch.cat(values))),
            attn_mask=torch.cat([mask, *[diagonal] * k], 1)[None, None],
        )
        feature = layer.finish(residual, heads[0].transpose(0, 1))
        log_p = F.log_softmax(body.norm(feature) @ drafter.lm_head_DH.T, -1)
        teacher_at = (columns + 1 + k).clamp(max=t - 1)
        q_all = torch.softmax(head.hidden_to_logits(batch.last_hidden_TH[teacher_at]), -1)
        q_kept = q_all[:, drafter.draft_ids_D]
        label = drafter.target_to_draft_V[batch.input_ids_T[(columns + 2 + k).clamp(max=t - 1)]]
        ce = torch.where(label >= 0, -log_p.gather(-1, label.clamp(min=0)[:, None])[:, 0], 0.0)
        tv = 1 - torch.minimum(log_p.exp(), q_kept).sum(-1)
        valid = torch.zeros(t, dtype=torch.bool)
        reach = t - 2 - k
        valid[:reach] = batch.loss_mask_T[1 : reach + 1] & batch.loss_mask_T[2 + k :]
        valid[:reach] &= batch.document_ids_T[:reach] == batch.document_ids_T[2 + k :]
        total = total + 0.8**k * ((0.1 * ce + 0.9 * tv) * valid).sum()
    return total


def needed_operations(batch: Any, draft_vocab: int, owns_head: bool) -> float:
    """Multiply-adds × 2 of the counted positions: forward and two backward products for trained matrices, forward alone
    for the teacher.
    """
    from spectrain.drafters.autoregressive.unroll import Columns

    valid_K = Columns.build(batch, STEPS_K).valid_KM.sum(-1).tolist()
    columns, students = valid_K[0], sum(valid_K)
    q_size, kv_size = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    fuse = batch.num_tokens * TAPS * HIDDEN * HIDDEN  # fc on every column; its input needs no gradient
    per_key = 2 * 2 * HIDDEN * kv_size  # k, v on every column once
    per_student = 2 * HIDDEN * q_size + q_size * HIDDEN + 3 * HIDDEN * INTERMEDIATE
    own_keys = (students - columns) * 2 * 2 * HIDDEN * kv_size
    attention = sum(valid_K) * 2 * HEADS * HEAD_DIM * (PROMPT + ANSWER / 2)
    head = students * draft_vocab * HIDDEN
    trained = batch.num_tokens * per_key + students * per_student + own_keys + attention
    teacher = columns * draft_vocab * HIDDEN
    return 2 * (2 * fuse + 3 * trained + (3 if owns_head else 2) * head + teacher)


def peak_operations_per_s() -> float:
    a = torch.randn(2048, 2048)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2 * 2048**3 / best


def resident_bytes(field: str) -> int:
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(field))
    return int(line.split()[1]) * 1024


def print_profile(step: Callable[[], None], peak: float, executed: float) -> None:
    """Where the time of a step goes, by torch's profiler, beside what its products would take at the peak."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_cpu_time_total)
    total = sum(row.self_cpu_time_total for row in rows)
    print(f"{total / 1e6:.3f} s, of which products at the peak would take {executed / peak / (total / 1e6):.0%}")
    for row in rows[:16]:
        print(f"{row.self_cpu_time_total / total:>7.1%} {row.count:>6} x {row.key}")


def worker(side: str, draft_vocab: int, steps: int, threads: int = 2, profiles: bool = False) -> dict[str, float]:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    head = make_head()
    drafter, batch = make_drafter(draft_vocab, head), make_batch(head)
    if side == "reference":
        batch.log_normalizer_T = None
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss = drafter.train_losses(batch).loss if side == "spectrain" else reference_loss(drafter, head, batch)
        (loss / 1000).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here, not at the making of the data
    before = resident_bytes("VmRSS")
    step()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    peak_bytes = resident_bytes("VmHWM")
    onednn = {
        torch.ops.mkldnn._linear_pointwise: lambda x, weight, *_, out_val=None, **__: 2 * math.prod(x) * weight[0]
    }
    with FlopCounterMode(display=False, custom_mapping=onednn) as counter:
        step()
    if profiles:
        print_profile(step, peak_operations_per_s(), float(counter.get_total_flops()))
    return {
        "tokens_per_s": batch.num_tokens / min(times),
        "peak_bytes": peak_bytes,
        "step_bytes": peak_bytes - before,
        "needed": needed_operations(batch, draft_vocab, drafter.shape.owns_head),
        "executed": float(counter.get_total_flops()),
        "seconds": min(times),
        "peak_operations_per_s": peak_operations_per_s(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="where the time goes, of our side alone, on one thread")
    parser.add_argument("--side", choices=("spectrain", "reference"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(worker(options.side, options.draft_vocab, options.steps)))
        return
    if options.profile:
        worker("spectrain", options.draft_vocab, options.steps, threads=1, profiles=True)
        return
    best: dict[str, dict[str, float]] = {}
    for _ in range(options.rounds):
        for side in ("reference", "spectrain"):
            command = [
                sys.executable,
                __file__,
                "--side",
                side,
                "--draft-vocab",
                str(options.draft_vocab),
                "--steps",
                str(options.steps),
            ]
            result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            if side not in best or result["tokens_per_s"] > best[side]["tokens_per_s"]:
                best[side] = result
    print(
        f"one layer, {STEPS_K} steps, row of {ROW} tokens, draft vocabulary {options.draft_vocab} of {VOCAB}, "
        f"float32, AdamW, 2 threads"
    )
    print(
        f"{'':<11}{'tokens/s':>10}{'peak MB':>10}{'step MB':>10}{'needed G':>10}{'executed G':>12}{'needed/peak':>13}{'executed/peak':>15}"  # noqa: E501
    )
    for side, r in best.items():
        capacity = r["seconds"] * r["peak_operations_per_s"]
        print(
            f"{side:<11}{r['tokens_per_s']:>10.0f}{r['peak_bytes'] / 1e6:>10.0f}{r['step_bytes'] / 1e6:>10.0f}{r['needed'] / 1e9:>10.1f}"  # noqa: E501
            f"{r['executed'] / 1e9:>12.1f}{r['needed'] / capacity:>13.0%}{r['executed'] / capacity:>15.0%}"
        )
    ours, plain = best["spectrain"], best["reference"]
    print(
        f"spectrain / reference: speed {ours['tokens_per_s'] / plain['tokens_per_s']:.2f} x, peak memory "
        f"{ours['peak_bytes'] / plain['peak_bytes']:.2f} x, memory of a step "
        f"{ours['step_bytes'] / plain['step_bytes']:.2f} x"
    )


if __name__ == "__main__":
    main()
