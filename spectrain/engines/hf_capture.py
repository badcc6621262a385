"""Hidden states of whole documents from the target in this process.

Documents are laid end to end in one row, without padding; masks made from their positions, which restart at 0, keep
them apart. Hybrid targets run one document at a time, because a recurrent state would flow from one document into the
next.

The first batch is checked against the unmodified model before any of it is handed out (``check_states.py``).

Legend: S tokens of one document, T of all documents of a batch, A taps, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.masking_utils import create_masks_for_generate

from spectrain.data.hidden_states import TargetStates, as_stored
from spectrain.data.loss_mask import predicts_generated
from spectrain.data.responses import Response
from spectrain.engines.check_states import check_states
from spectrain.target.cpu_kernels import cpu_attention
from spectrain.target.head import TargetHead
from spectrain.target.model import TargetModel


def capture_states(
    target: TargetModel,
    head: TargetHead,
    responses: Sequence[Response],
    tap_ids: tuple[int, ...],
    batch_tokens: int,
    states_dtype: str,
) -> Iterator[TargetStates]:
    """Yields the hidden states of each response, the longest first: if memory does not suffice, that shows at once."""
    ordered = sorted(responses, key=lambda response: (-len(response.input_ids), response.key))
    for number, batch in enumerate(_batches(ordered, 1 if target.spec.hybrid else batch_tokens)):
        states = _capture_batch(target, head, batch, tap_ids, states_dtype)
        if number == 0:
            check_states(target, head, states)
        yield from states


def _batches(responses: Sequence[Response], batch_tokens: int) -> Iterator[list[Response]]:
    """Neighbours, of ``batch_tokens`` together at most; a longer document is a batch by itself."""
    batch: list[Response] = []
    tokens = 0
    for response in responses:
        if batch and tokens + len(response.input_ids) > batch_tokens:
            yield batch
            batch, tokens = [], 0
        batch.append(response)
        tokens += len(response.input_ids)
    if batch:
        yield batch


def _capture_batch(
    target: TargetModel, head: TargetHead, batch: Sequence[Response], tap_ids: tuple[int, ...], states_dtype: str
) -> list[TargetStates]:
    lengths = [len(response.input_ids) for response in batch]
    ids_T = torch.from_numpy(np.concatenate([response.input_ids for response in batch]))
    loss_mask_T = torch.from_numpy(np.concatenate([response.loss_mask for response in batch]))
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    ids_1T, positions_1T = ids_T[None].long().to(target.device), positions_T[None].to(target.device)
    with cpu_attention(target.model, lengths):
        mask = _masks(target, positions_1T) if len(batch) > 1 else None
        output = target.run(ids_1T, positions_1T, attention_mask=mask, tap_ids=tap_ids)
    needed_T = torch.cat([predicts_generated(mask_S) for mask_S in loss_mask_T.split(lengths)])
    normalizer_T = stored_log_normalizer(head, output.last_hidden_BSH[0], needed_T, states_dtype)
    last_hidden_TH = output.last_hidden_BSH[0].cpu()
    taps_TAH = last_hidden_TH[:, None][:, :0] if output.taps_BSAH is None else output.taps_BSAH[0].cpu()
    states, start = [], 0
    for response, length in zip(batch, lengths, strict=True):
        rows = slice(start, start + length)
        document = (ids_T[rows], loss_mask_T[rows], taps_TAH[rows], last_hidden_TH[rows], normalizer_T[rows])
        states.append(TargetStates(*document, key=response.key, split=response.split))
        start += length
    return states


def _masks(target: TargetModel, positions_1T: Tensor) -> Any:
    """Masks [1, 1, T, T] that keep documents apart, one for each kind of layer; None for kernels that go by the
    positions themselves.

    Made here because some models of transformers (gpt-oss) do not look at the positions when they make their own.
    """
    config = target.model.config.get_text_config(decoder=True)
    like_embeddings = torch.empty(*positions_1T.shape, 0, dtype=target.dtype, device=target.device)
    masks = create_masks_for_generate(
        config, like_embeddings, attention_mask=None, past_key_values=None, position_ids=positions_1T
    )
    return next(iter(masks.values())) if isinstance(masks, dict) and len(masks) == 1 else masks


def stored_log_normalizer(head: TargetHead, last_hidden_TH: Tensor, needed_T: Tensor, states_dtype: str) -> Tensor:
    """Of the last hidden states as they will be stored, at the needed positions; NaN elsewhere."""
    normalizer_T = torch.full(needed_T.shape, torch.nan)
    needed_MH = as_stored(last_hidden_TH[needed_T.to(last_hidden_TH.device)], states_dtype)
    weight = head.lm_head_weight
    normalizer_T[needed_T] = head.log_normalizer(needed_MH.to(weight.device, weight.dtype)).cpu()
    return normalizer_T
