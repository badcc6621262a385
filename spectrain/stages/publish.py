"""``spectrain publish``: a run's drafter to the Hub, with a card made of what the run recorded.

First a folder is written (weights, ``config.json`` with the target by its Hub id, README.md, on request the report),
searched for paths of this machine, tokens and prompts, and only then uploaded. A drafter that vLLM was not found to
draft and accept alike is refused: ``eval parity`` is the gate, and its finding is bound to the digest of these files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from huggingface_hub import constants, get_token
from rich.markdown import Markdown

from spectrain.config.schema import SpectrainConfig
from spectrain.console import say, stdout
from spectrain.drafters.drafter_digests import CONFIG, check_drafter_digests, weight_files
from spectrain.drafters.hub_drafters import is_hub_id
from spectrain.drafters.serving_config import ServingConfig, read_serving_config
from spectrain.errors import ConfigError, InputError
from spectrain.evaluation.report.html import ReportInputs, write_report
from spectrain.evaluation.report.plots import Series, standalone, survival_figure
from spectrain.files import read_json_lines, replace_folder
from spectrain.hub.model_card import CardFacts, render_card
from spectrain.hub.published_folder import public_config, published_files, refuse_private, write_config
from spectrain.hub.upload import Repository, upload
from spectrain.reading import read_json
from spectrain.stages.eval_parity import parity_record
from spectrain.stages.publish_facts import Measured, card_facts, measured
from spectrain.stages.run_dir import RunDir, versions

_CARD = "README.md"
_SURVIVAL = "plots/acceptance_by_position.svg"


def publish(config: SpectrainConfig, given: Sequence[str] = (), dry_run: bool = False) -> None:
    """Write the folder and upload it, or show its card (``publish.dry_run``).

    Raises ConfigError or InputError before anything is written; RunError where the Hub refuses or a file holds what
    must not leave this machine.
    """
    dry_run = dry_run or config.publish.dry_run
    run_dir, serving = _checked(config)
    parity = parity_record(run_dir, run_dir.drafter)
    verified = parity is not None and bool(parity["passed"])
    if not verified and not config.publish.unverified:
        found = "was not made" if parity is None else "has not passed"
        raise InputError(
            f"run.dir={run_dir.path}: the parity check {found} for exactly these weights: run `spectrain eval parity "
            f"run.dir={run_dir.path}`, or set publish.unverified=true, which the card will say"
        )
    base_model = _base_model(config, serving, dry_run)
    found_records = measured(run_dir, config.publish.repo)
    facts = card_facts(config, run_dir, serving, base_model, parity, found_records, ask_hub=not dry_run)
    folder = _folder(config, run_dir)
    _write(folder, config, run_dir, facts, found_records)
    refuse_private(folder, _private(config, run_dir, serving), _prompts(run_dir))
    say(f"publish: {folder} holds what goes to {config.publish.repo}: {', '.join(_listing(folder))}")
    if dry_run:
        card = (folder / _CARD).read_text(encoding="utf-8")
        stdout.print(Markdown(card.partition("\n---\n")[2]))
        say("publish: a dry run, nothing was uploaded")
        return
    message = f"{facts.label} drafter for {base_model}"
    commit = upload(folder, _repository(config), message)
    say(f"publish: {constants.ENDPOINT}/{config.publish.repo} at {commit[:12]}")


def _checked(config: SpectrainConfig) -> tuple[RunDir, ServingConfig]:
    """The run directory, with a finished drafter that is whole and that vLLM serves."""
    if not config.publish.repo:
        raise ConfigError("publish.repo is empty: name the repository, publish.repo=ORG/NAME")
    run_dir = RunDir(config.run.dir)
    run_dir.check({})
    folder = run_dir.drafter
    if not folder.is_dir() or not run_dir.outputs("fit"):
        raise InputError(f"run.dir={run_dir.path} holds no finished drafter: run spectrain fit first")
    serving, fields = read_serving_config(str(folder)), read_json(folder / CONFIG)
    ours = serving.replaces_target or "speculators_config" in fields or "target" in (fields.get("spectrain") or {})
    if not ours or not weight_files(folder):
        raise InputError(f"{folder} is not as fit writes it, and nothing else is published: run spectrain fit again")
    check_drafter_digests(folder)
    if not serving.known_to_vllm:
        raise ConfigError(f"run.dir={run_dir.path}: vLLM has no {serving.method} drafters, so nobody could serve it")
    return run_dir, serving


def _base_model(config: SpectrainConfig, serving: ServingConfig, dry_run: bool) -> str | None:
    """The target's Hub id. None: it has none that is known here, which a dry run may leave open."""
    if config.publish.base_model is not None:
        return config.publish.base_model
    for name in (config.target.path, serving.target):
        if name and is_hub_id(name) and not os.path.exists(name):
            return name
    asks = "publish.base_model: the target is a folder of this machine: name its Hub id, publish.base_model=ORG/NAME"
    if not dry_run:
        raise InputError(asks)
    say(f"note: {asks}; the upload will ask for it")
    return None


def _folder(config: SpectrainConfig, run_dir: RunDir) -> Path:
    return run_dir.path / "publish" if config.publish.out is None else Path(config.publish.out).expanduser()


def _repository(config: SpectrainConfig) -> Repository:
    own = config.publish
    return Repository(own.repo, own.branch, own.private, own.gated, own.collection)


# --- the folder ----------------------------------------------------------------------------------------------------


def _write(folder: Path, config: SpectrainConfig, run_dir: RunDir, facts: CardFacts, found: Measured) -> None:
    source, files = read_json(run_dir.drafter / CONFIG), published_files(run_dir.drafter)
    if folder.exists() and not (folder / _CARD).is_file():
        raise InputError(f"publish.out={folder} is there, and nothing that publish has written: name another folder")

    def fill(into: Path) -> None:
        for file in files:
            shutil.copyfile(file, into / file.name)
        write_config(public_config(source, facts.base_model or config.target.name, into), into)
        card = facts
        if config.publish.report:
            card = replace(facts, plots=_write_report(into, config, run_dir, facts, found))
        (into / _CARD).write_text(render_card(card), encoding="utf-8")

    replace_folder(folder, fill, "the published folder", sum(file.stat().st_size for file in files))


def _write_report(
    into: Path, config: SpectrainConfig, run_dir: RunDir, facts: CardFacts, found: Measured
) -> list[tuple[str, str]]:
    """The report, the records and a plot. Returns what the card shows of them."""
    ours = [record for record in found.all_records if record.is_drafter]
    inputs = ReportInputs(
        title=facts.repo,
        target=facts.base_model or config.target.name,
        records=[*(record for record in found.all_records if not record.is_drafter), *ours],
        training=read_json_lines(run_dir.metrics),
        drafter_facts=list(facts.shape),
        data_facts=list(facts.training),
        versions=versions(),
        hardware={"measured on": "; ".join(sorted(set(found.hardware.values())))} if found.hardware else {},
    )
    write_report(into / "report.html", inputs)
    for record in found.all_records:
        record.write(into / "eval")
    if not ours or not ours[0].acceptance_per_position:
        return []
    series = [
        Series(f"{record.suite}, {record.engine}, T={record.temperature:g}", record.acceptance_per_position, index == 0)
        for index, record in enumerate(ours)
        if record.draft_policy == "fixed"
    ]
    (into / _SURVIVAL).parent.mkdir()
    (into / _SURVIVAL).write_text(standalone(survival_figure(series)), encoding="utf-8")
    return [(_SURVIVAL, "share of rounds in which so many drafts were accepted")]


def _listing(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# --- what must not be in it ----------------------------------------------------------------------------------------


def _private(config: SpectrainConfig, run_dir: RunDir, serving: ServingConfig) -> dict[str, str]:
    """Texts that no file may have, and what they are."""
    folders = [run_dir.path.resolve(), Path.cwd(), Path.home(), Path(run_dir.config.parent).absolute()]
    named = [config.target.path, serving.target or "", config.drafter.path or "", *config.data.train, config.data.path]
    folders += [
        Path(name).expanduser().resolve() for name in named if name and os.path.exists(os.path.expanduser(name))
    ]
    private = {str(folder): "a path of this machine" for folder in folders if len(folder.parts) > 1}
    token = get_token()
    secrets = [value for value in config.engine.environment.values() if len(str(value)) >= 6]
    return private | {str(value): "a secret" for value in (token, *secrets) if value}


def _prompts(run_dir: RunDir) -> list[str]:
    """Every turn that the target was asked here."""
    from spectrain.data.responses import ResponseStore

    if not run_dir.responses.is_dir():
        return []
    return [turn for response in ResponseStore(run_dir.responses).load() for turn in response.conversation.turns]
