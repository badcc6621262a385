"""Training of block drafters: tokens per second and peak memory against the plain reference, side by side in one run.

    OMP_WAIT_POLICY=PASSIVE python tests/bench/bench_block.py [--method dflash dspark] [--anchors 128 256] [--steps 3]
    [--rounds 1]

Both sides train two layers with blocks of 8 slots on the same row of 1024 tokens with the dimensions of SmolLM2-135M (H
576, full vocabulary of 49152), float32, AdamW, two threads; states are random, which costs what real ones cost.
Documents have 130 prompt and 126 generated tokens, as GSM8K with short answers. DFlash drafts from 7 slots of a block;
DSpark from all 8, with a Markov head of rank 256 and a confidence head. The reference is what one writes first: every
block's logits and its teacher's distribution over the whole vocabulary, SDPA with a dense mask over the context and all
blocks, the bias slot by slot, autograd through all of it.

Each side runs in its own process (peak memory is the process's high-water mark less its size before the first step),
interleaved; the best round counts. Operations: *needed* are those of the counted slots, by formula, a position's
teacher and Markov bias counted once; *executed* are counted by torch while a step runs; the peak is a 2048³ product in
the same process.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from bench_eagle3 import (
    ANSWER,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    PROMPT,
    ROW,
    VOCAB,
    make_head,
    peak_operations_per_s,
    resident_bytes,
)
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

LAYERS, TAPS, BLOCK, RANK = 2, 5, 8, 256


def make_drafter(method: str, anchors: int, head: Any) -> Any:
    from spectrain.config.drafter_schema import BlockConfig, DrafterConfig
    from spectrain.data.vocab import full_vocab
    from spectrain.drafters.block.block_drafter import BlockDrafter
    from spectrain.drafters.block.block_shape import BlockShape, MarkovShape
    from spectrain.drafters.layers import LayerShape

    rope = {"rope_type": "default", "rope_theta": 1e5}
    layer = LayerShape("qwen3", HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, 1e-5, rope, 8192)
    spark = method == "dspark"
    shape = BlockShape(
        method=method,
        layer=layer,
        num_layers=LAYERS,
        taps=tuple(range(2, 2 + TAPS)),
        target_vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        block_size=BLOCK,
        mask_token_id=0,
        sample_from_anchor=spark,
        markov=MarkovShape("vanilla", RANK) if spark else None,
        confidence=spark,
        confidence_with_markov=spark,
    )
    drafter = BlockDrafter(shape, full_vocab(VOCAB), DrafterConfig(method=method, block=BlockConfig(anchors=anchors)))
    drafter.attach(head)
    return drafter


def make_batch(head: Any) -> Any:
    from spectrain.data.hidden_states import TargetStates
    from spectrain.data.packing import Draw, pack_batch

    length = PROMPT + ANSWER
    mask = torch.tensor([0] * PROMPT + [1] * ANSWER, dtype=torch.uint8)
    documents = []
    for number in range(ROW // length):
        last, taps = torch.randn(length, HIDDEN), torch.randn(length, TAPS, HIDDEN)
        ids = torch.randint(0, VOCAB, (length,), dtype=torch.int32)
        documents.append(TargetStates(ids, mask, taps, last, head.log_normalizer(last), str(number), "train"))
    return pack_batch(documents, draw=Draw(0, 0, tuple(range(len(documents))), ROW))


def reference_loss(drafter: Any, head: Any, batch: Any) -> torch.Tensor:
    """The plain way: everything of every slot, everything kept."""
    from spectrain.drafters.block.block_training import draw_anchors

    body, shape = drafter.body, drafter.shape
    anchor = draw_anchors(batch, drafter.config.block.anchors)
    r, t = len(anchor), batch.num_tokens
    slots, places = torch.arange(BLOCK), torch.arange(shape.num_drafts)
    context = (torch.arange(t) < anchor[:, None]) & (batch.document_ids_T == batch.document_ids_T[anchor][:, None])
    own = torch.arange(r).repeat_interleave(BLOCK)
    visible = torch.cat([context.repeat_interleave(BLOCK, 0), own[:, None] == own], 1)[None, None]
    fused, cos_sin = body.fuse(batch.taps_TAH), drafter.rotary.cos_sin(batch.position_ids_T)

    def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = zip(body.layers[index].context_kv(fused, cos_sin), (k, v), strict=True)
        key, value = (
            torch.cat([c, o.flatten(0, 1)]).repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1)[None]
            for c, o in parts
        )
        heads = F.scaled_dot_product_attention(q.flatten(0, 1).transpose(0, 1)[None], key, value, attn_mask=visible)
        return heads[0].transpose(0, 1).view_as(q)

    hidden = body(
        body.block_input(batch.input_ids_T[anchor], head),
        drafter.rotary.cos_sin(batch.position_ids_T[anchor][:, None] + slots),
        attend,
    )[:, shape.first_slot :]
    at = anchor[:, None] + places
    valid = ((at + 1 < t) & batch.loss_mask_T[(at + 1).clamp(max=t - 1)]).cumprod(1).bool()
    valid &= batch.document_ids_T[(at + 1).clamp(max=t - 1)] == batch.document_ids_T[anchor][:, None]
    at = at.clamp(max=t - 2)
    logits = hidden @ drafter.lm_head_DH.T
    if body.markov_head is not None:
        embedding = body.markov_head.embed(batch.input_ids_T[at])
        logits = logits + body.markov_head.markov_w2(embedding)
    log_p = F.log_softmax(logits, -1)
    q = torch.softmax(head.hidden_to_logits(batch.last_hidden_TH[at]), -1)
    ce = -log_p.gather(-1, batch.input_ids_T[at + 1][..., None])[..., 0]
    overlap = torch.minimum(log_p.exp(), q).sum(-1)
    loss = 0.1 * ce + 0.9 * (1 - overlap)
    if body.confidence_head is not None:
        said = body.confidence_logits(hidden.detach(), embedding.detach())
        loss = loss + F.binary_cross_entropy_with_logits(said, overlap.detach().clamp(0, 1), reduction="none")
    return (loss * valid * torch.exp(-places / 4.0)).sum()


def needed_operations(drafter: Any, batch: Any) -> float:
    """Multiply-adds × 2 of what counts: forward and two backward products for trained matrices, no weight's for the
    frozen head, forward alone for the teacher; fc's input needs no gradient."""
    from spectrain.drafters.block.block_training import Counted, draw_anchors

    anchor = draw_anchors(batch, drafter.config.block.anchors)
    counted = Counted.build(batch, anchor, drafter.shape.num_drafts)
    students, teachers, rows = len(counted.block_S), len(counted.teacher_U), len(anchor) * BLOCK
    q_size, kv_size = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    fuse = batch.num_tokens * TAPS * HIDDEN * HIDDEN
    context = batch.num_tokens * 2 * HIDDEN * kv_size
    layer = rows * (2 * HIDDEN * q_size + 2 * HIDDEN * kv_size + 3 * HIDDEN * INTERMEDIATE)
    seen = float(batch.position_ids_T[anchor].sum()) * BLOCK + rows * BLOCK
    attention = 2 * q_size * seen
    markov = 3 * teachers * RANK * VOCAB if drafter.body.markov_head is not None else 0
    return 2 * (
        2 * fuse + 3 * LAYERS * (context + layer + attention) + (2 * students + teachers) * VOCAB * HIDDEN + markov
    )


def worker(side: str, method: str, anchors: int, steps: int) -> dict[str, float]:
    torch.manual_seed(0)
    torch.set_num_threads(2)
    head = make_head()
    drafter, batch = make_drafter(method, anchors, head), make_batch(head)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        loss = drafter.train_losses(batch).loss if side == "spectrain" else reference_loss(drafter, head, batch)
        (loss / 1000).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here, not at the making of the data
    before = resident_bytes("VmRSS")
    loss = step()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    peak_bytes = resident_bytes("VmHWM")
    uncounted = {
        torch.ops.mkldnn._linear_pointwise: lambda x, weight, *_, out_val=None, **__: 2 * math.prod(x) * weight[0],
        torch.ops.aten.addmm_: lambda out, a, b, *_, out_val=None, **__: 2 * math.prod(a) * b[1],
    }
    with FlopCounterMode(display=False, custom_mapping=uncounted) as counter:
        step()
    return {
        "loss": loss,
        "tokens_per_s": batch.num_tokens / min(times),
        "peak_bytes": peak_bytes,
        "step_bytes": peak_bytes - before,
        "needed": needed_operations(drafter, batch),
        "executed": float(counter.get_total_flops()),
        "seconds": min(times),
        "peak_operations_per_s": peak_operations_per_s(),
    }


def compare(method: str, anchors: int, steps: int, rounds: int) -> None:
    best: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for side in ("reference", "spectrain"):
            command = [
                sys.executable,
                __file__,
                "--side",
                side,
                "--method",
                method,
                "--anchors",
                str(anchors),
                "--steps",
                str(steps),
            ]
            result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            if side not in best or result["tokens_per_s"] > best[side]["tokens_per_s"]:
                best[side] = result
    print(f"{method}, {anchors} anchors")
    print(
        f"{'':<11}{'tokens/s':>10}{'peak MB':>10}{'step MB':>10}{'needed G':>10}{'executed G':>12}{'needed/peak':>13}{'executed/peak':>15}"  # noqa: E501
        f"{'loss':>12}"
    )
    for side, r in best.items():
        capacity = r["seconds"] * r["peak_operations_per_s"]
        print(
            f"{side:<11}{r['tokens_per_s']:>10.0f}{r['peak_bytes'] / 1e6:>10.0f}{r['step_bytes'] / 1e6:>10.0f}{r['needed'] / 1e9:>10.1f}"  # noqa: E501
            f"{r['executed'] / 1e9:>12.1f}{r['needed'] / capacity:>13.0%}{r['executed'] / capacity:>15.0%}{r['loss']:>12.2f}"  # noqa: E501
        )
    ours, plain = best["spectrain"], best["reference"]
    print(
        f"spectrain / reference: speed {ours['tokens_per_s'] / plain['tokens_per_s']:.2f} x, peak memory "
        f"{ours['peak_bytes'] / plain['peak_bytes']:.2f} x, memory of a step "
        f"{ours['step_bytes'] / plain['step_bytes']:.2f} x\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", nargs="+", choices=("dflash", "dspark"), default=["dflash", "dspark"])
    parser.add_argument("--anchors", nargs="+", type=int, default=[128, 256])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--side", choices=("spectrain", "reference"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(worker(options.side, options.method[0], options.anchors[0], options.steps)))
        return
    print(f"two layers, blocks of {BLOCK}, row of {ROW} tokens, vocabulary {VOCAB}, float32, AdamW, 2 threads")
    for method in options.method:
        for anchors in options.anchors:
            compare(method, anchors, options.steps, options.rounds)


if __name__ == "__main__":
    main()
