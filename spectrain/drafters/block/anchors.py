"""Where blocks begin in training, and which of their slots count.

An anchor is a generated token whose successor was generated too: what a server drafts behind. Training draws some of
them afresh at each step, uniformly without replacement in every document; the simulation takes them all. The draw is
stateless in (seed, step, document), so neither packing, nor ranks, nor a resumed run changes it.

Draft k (from 0) behind anchor a predicts x_{a+1+k} and asks the teacher at a + k, whatever slot of the
block makes it. It counts while everything from the anchor to the predicted token was generated, without a gap, in one
document.

Legend: T tokens, R blocks, J drafts of a block.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from spectrain.data.packing import PackedBatch


def tokens_ahead(batch: PackedBatch, most: int) -> Tensor:
    """int64 [T]: how many generated tokens follow a generated token without a gap in its document, at most ``most``; 0
    elsewhere.
    """
    t = batch.num_tokens
    ahead_T = torch.zeros(t, dtype=torch.long, device=batch.loss_mask_T.device)
    going_T = batch.loss_mask_T
    for k in range(1, min(most, t - 1) + 1):
        same = batch.document_ids_T[: t - k] == batch.document_ids_T[k:]
        going_T = going_T[: t - k] & batch.loss_mask_T[k:] & same
        ahead_T[: t - k] += going_T
    return ahead_T


def all_anchors(batch: PackedBatch) -> Tensor:
    """Flat positions [R] of every anchor, ascending."""
    return tokens_ahead(batch, 1).nonzero()[:, 0]


def draw_anchors(batch: PackedBatch, per_row: int) -> Tensor:
    """Flat positions [R] of the anchors that this step trains, ascending: ``per_row`` are the anchors of a whole packed
    sequence, of which each document has a share by its length (one at least, and no more than it has). A batch without
    a draw (see ``PackedBatch``) trains all."""
    draw = batch.draw
    if draw is None:
        return all_anchors(batch)
    positions_R = all_anchors(batch).cpu()
    owners_R = batch.document_ids_T.cpu()[positions_R].numpy()
    lengths = batch.lengths()
    bounds = np.searchsorted(owners_R, np.arange(len(lengths) + 1))
    chosen = []
    for index, (length, number) in enumerate(zip(lengths, draw.documents, strict=True)):
        there = int(bounds[index + 1] - bounds[index])
        share = max(1, round(per_row * length / draw.packed_length))
        if there <= share:
            chosen.append(np.arange(there) + bounds[index])
        else:
            rng = np.random.default_rng((draw.seed, draw.step, number))
            chosen.append(np.sort(rng.choice(there, share, replace=False)) + bounds[index])
    return positions_R[torch.from_numpy(np.concatenate(chosen))].to(batch.loss_mask_T.device)
