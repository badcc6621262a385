"""What a vLLM is told so that it captures: at its start (``CapturePlan``), and with each document (``Document``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spectrain.data.hidden_states import StoreMeta
from spectrain.data.loss_mask import generated_ranges
from spectrain.data.responses import Response
from spectrain.engines.vllm.adopt_states import PARAMS, Session
from spectrain.engines.vllm.requests import Request


@dataclass(frozen=True)
class CapturePlan:
    """What is captured. ``num_layers``: of the target; the output of its last layer is captured beside the taps.
    ``apart``: each document is asked for a file of its own; vLLM's own connector (``stock``) gives nothing else.
    """

    meta: StoreMeta
    num_layers: int
    shard_bytes: int
    stock: bool = False
    apart: bool = False

    @property
    def layers(self) -> list[int]:
        """Residual stream after so many layers, ascending: in this order vLLM keeps them."""
        return sorted({*self.meta.tap_ids, self.num_layers})

    def engine_args(self, session: Session) -> dict[str, Any]:
        """Engine arguments that make a vLLM capture into ``session``."""
        connector: dict[str, Any] = {"kv_role": "kv_producer"}
        if self.stock:
            connector |= {"kv_connector": "ExampleHiddenStatesConnector"}
            connector["kv_connector_extra_config"] = {"shared_storage_path": str(session.folder)}
        else:
            connector |= {
                "kv_connector": "StatesConnector",
                "kv_connector_module_path": "spectrain.engines.vllm.connector",
            }
            connector["kv_connector_extra_config"] = {
                "incoming": str(session.folder.resolve()),
                "meta": dataclasses.asdict(self.meta),
                "shard_bytes": self.shard_bytes,
            }
        speculation = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": self.layers}},
        }
        return {"speculative_config": speculation, "kv_transfer_config": connector}


@dataclass(frozen=True)
class Document:
    """What is sent through the target. ``generated``: [start, end) of the ids that the target generated."""

    key: str
    split: str
    ids: list[int]
    generated: list[tuple[int, int]]

    @classmethod
    def of(cls, response: Response) -> Document:
        ids, generated = response.input_ids.tolist(), generated_ranges(response.loss_mask)
        return cls(response.key, response.split, ids, generated)

    def request(self, file: str | None = None) -> Request:
        """What asks for its hidden states. ``file``: the name, without ending, of a file for them alone, and of the
        request; None: a shard among others."""
        described = describe(self.key, self.split, self.generated, self.ids[-1], file)
        return Request(file or self.key, self.ids[:-1], max_tokens=1, states=described)


def describe(
    key: str,
    split: str,
    generated: Sequence[tuple[int, int]],
    last_id: int | None = None,
    file: str | None = None,
) -> dict[str, Any]:
    """``Request.states`` of a document: prompt and ``last_id``, or prompt and answer where that is None (one pass).
    ``file``: see ``Document.request``.
    """
    ranges = [list(pair) for pair in generated]
    described = {"key": key, "split": split, "generated": ranges, "last_id": last_id}
    return {PARAMS: described if file is None else {**described, "file": file}}
