"""What the stages of one command share: the configuration, the run directory, the target and its prompts.

The target's weights are loaded when the first stage needs them, once for all stages; a stage that is skipped never
asks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import yaml

from spectrain.config.commands import Command
from spectrain.config.plan_schema import DEVICES, Device
from spectrain.config.schema import SpectrainConfig
from spectrain.data.asked_documents import Asked
from spectrain.data.chat import ChatTemplate
from spectrain.data.hidden_states import StoreMeta
from spectrain.data.prompt_screening import PromptScreen
from spectrain.data.prompts import PromptSplit
from spectrain.data.responses import Sampling, resolve_sampling, response_key
from spectrain.drafters.drafter_folder import read_shape
from spectrain.drafters.hub_drafters import drafter_name, drafter_path
from spectrain.drafters.registry import find_method
from spectrain.engines.base import Engine
from spectrain.engines.hf import HFEngine
from spectrain.engines.vllm.capture_states import VLLMCapture
from spectrain.engines.vllm.engine import VLLMEngine
from spectrain.engines.vllm.open_vllm import open_vllm
from spectrain.engines.vllm.requests import VLLMClient
from spectrain.errors import InputError, RunError
from spectrain.files import digest_strings, plain, write_atomically
from spectrain.masking import escape_references, private_values
from spectrain.stages.known_prompts import KnownPrompts, remember, target_digest
from spectrain.stages.run_dir import RunDir
from spectrain.stages.select_prompts import DrawnPrompts, planned_prompts, run_prompts
from spectrain.target.folder_files import load_generation_config, load_tokenizer
from spectrain.target.identity import TargetIdentity, identify
from spectrain.target.model import TargetModel, choose_device, choose_dtype
from spectrain.target.resolve import ResolvedTarget, TargetSource, resolve_target, weights_fingerprint
from spectrain.target.spec import TargetSpec, end_token_ids
from spectrain.training.distributed import ALONE, Ranks


@dataclass
class Context:
    """One command at work. ``source`` and ``spec`` are known before anything is written; ``spec`` is None until a
    target that has to be downloaded is there (a dry run may end before that)."""

    config: SpectrainConfig
    command: Command
    run_dir: RunDir
    source: TargetSource
    spec_or_none: TargetSpec | None
    prompts_or_none: PromptSplit | None
    data_dir: RunDir  # has responses and hidden states: run_dir itself, or that of the sweep which this run is a job of
    given: frozenset[str] = frozenset()  # keys that the command line sets, rather than a file or a default
    drawn: DrawnPrompts | None = None  # the prompts, where they come from data sets
    ranks: Ranks = ALONE  # the processes that train together, of which this is one
    lender: Context | None = None  # whose weights this one uses
    known: KnownPrompts | None = None  # what is remembered of the prompts, which are unread then
    screen: PromptScreen | None = None  # what has looked at them, where they are read

    def under(self, **sections: Any) -> Context:
        """The same command under other sections of the configuration. What costs to load is loaded once, here."""
        other = copy.copy(self)
        other.config = replace(self.config, **sections)
        other.lender = self.lender or self
        if "drafter" in sections:
            for name in ("taps", "kv_layers"):  # of the drafter so far
                other.__dict__.pop(name, None)
        return other

    @property
    def spec(self) -> TargetSpec:
        if self.spec_or_none is None:
            raise RunError("the target's configuration is not here yet")
        return self.spec_or_none

    @property
    def prompts(self) -> PromptSplit:
        if self.prompts_or_none is None:
            raise RunError("this command reads no prompts")
        return self.prompts_or_none

    @property
    def prompts_to_plan(self) -> PromptSplit | None:
        """The prompts, or what stands for those that a plan does not read."""
        if self.prompts_or_none is not None or not self.config.data.selects:
            return self.prompts_or_none
        return planned_prompts(self.config.data)

    def keep_prompts(self, prompts: PromptSplit) -> None:
        """Go on with these prompts, which are those so far but for some."""
        self.prompts_or_none, self.known = prompts, None
        for name in ("asked", "splits", "named_prompts"):  # of those so far
            self.__dict__.pop(name, None)

    def use_known(self, known: KnownPrompts) -> None:
        """Go on with what is remembered of the prompts, where that is of this target; else with those that are read."""
        if self.source.folder is not None and known.target == target_digest(self):
            self.prompts_or_none, self.known, self.drawn = known.split(self), known, known.drawn
        else:
            self.prompts_or_none, self.drawn = run_prompts(self.config, self.data_dir.path, planning=False)

    def learn_spec(self) -> None:
        """Fetch the target and read its dimensions."""
        target = self.config.target
        self.spec_or_none = TargetSpec.from_folder(self.target.folder, target.trust_remote_code).served_at(
            target.max_length
        )

    @property
    def measured_drafter(self) -> Path:
        """The folder of the drafter that ``eval`` measures: drafter.path, this run's own, or that of the sweep it
        belongs to.

        ``run`` trains from drafter.path, so what it measures is always what it trained.
        """
        if self.config.drafter.path is not None and self.command.needs_drafter:
            return drafter_path(self.config.drafter)
        own = self.run_dir.drafter
        return own if own.exists() else self.data_dir.drafter

    @property
    def has_drafter(self) -> bool:
        """Whether there is a drafter to measure: methods that need none are measured without one, too."""
        return self.command.needs_drafter or (self.measured_drafter / "config.json").is_file()

    @property
    def measured_drafter_name(self) -> str:
        """What a record calls it."""
        named = self.config.drafter.path is not None and self.command.needs_drafter
        return drafter_name(self.config.drafter) if named else str(self.measured_drafter)

    @cached_property
    def target(self) -> ResolvedTarget:
        """The target on this machine; downloads or converts it the first time."""
        return resolve_target(self.config.target)

    @cached_property
    def identity(self) -> TargetIdentity:
        """The target, to be told from others. What is not on this machine yet has its revision alone."""
        return identify(self.source, self.config.target.path)

    @cached_property
    def model(self) -> TargetModel:
        """The target with its weights."""
        if self.lender is not None:
            return self.lender.model
        return TargetModel.load(self.target, self.config.target)

    @cached_property
    def draft_model(self) -> TargetModel:
        """decoding.draft_model with its weights. Its ids have to mean what the target's do."""
        if self.lender is not None:
            return self.lender.draft_model
        path = self.config.decoding.draft_model or ""
        config = replace(
            self.config.target,
            name="draft_model",
            path=path,
            revision=None,
            bundled_package=None,
            dimensions={},
            device_map=None,  # which names modules of the target
        )
        resolved = resolve_target(config)
        if load_tokenizer(resolved.folder, config.trust_remote_code).get_vocab() != self.tokenizer.get_vocab():
            raise InputError(
                f"decoding.draft_model={path} has another tokenizer than the target: use a model of the target's family"
            )
        return TargetModel.load(resolved, config)

    @cached_property
    def engine(self) -> Engine:
        """Who runs the target for generate and capture."""
        if self.config.engine.name != "hf":
            length = self.config.target.max_length
            return VLLMEngine(self.target, self.template, self.eos_ids, length, self.open_vllm, self.capturing)
        return HFEngine(self.model, self.target, self.config.engine, self.config.target.max_length, self.template)

    @cached_property
    def capturing(self) -> VLLMCapture:
        """How hidden states are captured from a target that vLLM runs."""
        return VLLMCapture(self.open_vllm, self.config.engine, self.config.target, self.target, self.spec)

    def open_vllm(self, purpose: str, extra_args: Mapping[str, Any], record_rounds: bool = False) -> VLLMClient:
        """The target, run by vLLM, for one purpose; see ``engines/vllm/open_vllm.py``. The caller closes it."""
        config = self.config
        return open_vllm(
            config.engine, config.target, self.target.folder, self.logs, purpose, extra_args, record_rounds
        )

    @property
    def logs(self) -> Path:
        """Where the output of other programs goes."""
        return self.run_dir.path / "logs"

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.target.folder, self.config.target.trust_remote_code)

    @cached_property
    def generation_config(self) -> Any:
        """The target's generation_config.json, or transformers' neutral one where it has none."""
        return load_generation_config(self.target.folder)

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        return end_token_ids(self.tokenizer, self.generation_config)

    @cached_property
    def template(self) -> ChatTemplate:
        size = self.spec_or_none.vocab_size if self.spec_or_none else None
        return ChatTemplate(self.tokenizer, self.eos_ids, size, self.config.target.template_kwargs)

    @cached_property
    def sampling(self) -> Sampling:
        return resolve_sampling(self.config.sampling, self.generation_config)

    @cached_property
    def asked(self) -> Asked:
        """The responses that this configuration asks for, in the order of the prompt files."""
        if self.known is not None:
            return self.known.asked
        target, variables = self.target, self.config.target.template_kwargs
        key = partial(response_key, target_id=target.id, target_revision_digest=target.revision)
        train, heldout = (
            (key(conversation, self.sampling, template_kwargs=variables) for conversation in conversations)
            for conversations in (self.prompts.train, self.prompts.heldout)
        )
        return Asked.of(train, heldout)

    @cached_property
    def named_prompts(self) -> dict[str, str]:
        """The prompts of each split by number and digest, for the manifest."""
        if self.known is not None:
            return self.known.named
        sides = {"training prompts": self.prompts.train, "held-out prompts": self.prompts.heldout}
        return {
            name: f"{len(prompts)} ({digest_strings([prompt.prompt_digest() for prompt in prompts])[:8]})"
            for name, prompts in sides.items()
        }

    @cached_property
    def splits(self) -> dict[str, str]:
        """Response key -> ``train`` or ``heldout`` of what is ``asked`` for, for those who work on each."""
        return dict(self.asked.splits())

    @cached_property
    def taps(self) -> tuple[int, ...]:
        """The taps to capture: those of the drafter that is trained on, the configured ones, or the target's
        default.
        """
        if self.config.drafter.path is not None:
            return read_shape(drafter_path(self.config.drafter), self.spec.default_taps()).taps
        return find_method(self.config.drafter.method).taps(self.config.drafter, self.spec)

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        """Layers of the target whose keys and values are captured, beside the taps."""
        return find_method(self.config.drafter.method).kv_layers(self.spec)

    @property
    def kv_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Of ``kv_layers``: layer, key-value heads, size of a head."""
        return tuple((layer, *self.spec.kv_shape(layer)) for layer in self.kv_layers)

    @property
    def target_for_vllm(self) -> str:
        """What a server is told to load: the Hub's id where the weights are the Hub's, else the folder they lie in."""
        return self.config.target.path if self.source.kind in ("hub", "cache") else str(self.target.folder.resolve())

    @property
    def planned_device(self) -> Device | None:
        """The device that is planned for, where it is not this machine's."""
        return DEVICES.get(self.config.plan.device) if self.command.looks_only else None

    @property
    def dtype_name(self) -> str:
        """What the target computes in."""
        if self.planned_device is not None and self.config.target.dtype == "auto":
            return str(self.spec.dtype).removeprefix("torch.")
        return str(
            choose_dtype(self.config.target.dtype, choose_device(self.config.target.device), self.spec)
        ).removeprefix("torch.")

    @property
    def states_dtype(self) -> str:
        if self.config.hidden_states.dtype != "auto":
            return self.config.hidden_states.dtype
        return "bfloat16" if self.dtype_name == "bfloat16" else "float32"  # float16 fits into float32 only

    def store_meta(self) -> StoreMeta:
        return StoreMeta(
            target=self.target.id,
            target_revision=self.target.revision,
            config_digest=self.target.config_digest,
            tokenizer_digest=self.target.tokenizer_digest,
            template_digest=self.template.digest,
            tap_ids=self.taps,
            hidden_size=self.spec.hidden_size,
            num_layers=self.spec.num_layers,
            dtype=self.states_dtype,
            kv_layers=self.kv_shapes,
        )

    def target_inputs(self) -> dict[str, Any]:
        """Fixed inputs of every stage that runs the target."""
        quantization = self.config.engine.quantization if self.config.engine.name != "hf" else None
        return {
            "target": self.target.id,
            "target.revision": self.target.revision,
            "tokenizer": self.target.tokenizer_digest[:16],
            "chat template": self.template.digest[:16],
            "target.dtype": self.dtype_name,
            "target.max_length": self.config.target.max_length,
            # Named only where there is one, so that everything else that was made remains valid.
            **({} if quantization is None else {"engine.quantization": quantization}),
            **{f"target.template_kwargs.{name}": value for name, value in self.config.target.template_kwargs.items()},
        }

    def target_record(self) -> dict[str, str]:
        """What a drafter's folder says of its target beside the name, so that another one can be told from it."""
        return {
            "target_revision": self.target.revision,
            "target_fingerprint": weights_fingerprint(self.target.folder),
            "target_tokenizer": self.target.tokenizer_digest[:16],
        }

    def open_run_dir(self) -> None:
        """Called once the directory is locked: binds it to the target and writes ``config.yaml``."""
        identity = {"id": self.target.id, "revision": self.target.revision}
        self.run_dir.check(identity)
        self.run_dir.set_target(identity)
        # A measurement under other settings must not change what the next `fit` here starts from.
        if not self.command.keeps_config or not self.run_dir.config.exists():
            self._write_config()
        if self.drawn is not None and self.command.needs_prompts:
            self.drawn.store(self.data_dir.path)
        of_the_whole_run = self.data_dir is self.run_dir and self.config.run.tasks == 1
        if of_the_whole_run and self.known is None and self.command.needs_prompts:
            remember(self)

    def _write_config(self) -> None:
        """``config.yaml``, for everybody, and first what it masks, for this user alone."""
        values = asdict(self.config)
        private = private_values(values)
        if private:
            write_atomically(self.run_dir.private, yaml.safe_dump(private, allow_unicode=True), private=True)
        write_atomically(self.run_dir.config, config_yaml(self.config))
        if not private:
            self.run_dir.private.unlink(missing_ok=True)


def config_yaml(config: SpectrainConfig) -> str:
    """The resolved configuration as YAML, in the order of the dataclasses, with secrets masked."""
    return yaml.safe_dump(plain(escape_references(asdict(config))), sort_keys=False, allow_unicode=True)
