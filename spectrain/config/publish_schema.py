"""Typed configuration of ``publish``: the place on the Hub, who may see it, and what the card cannot know by itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from spectrain.config.keys import Section, key, refuse_dash, require

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[\w.-]+)?")
_WORD = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class PublishConfig(Section, name="publish"):
    """A drafter's repository on the Hub, and its card."""

    repo: str = key("", "repository on the Hub", example="my-org/Qwen3-8B-eagle3")
    branch: str = key("main", "branch of the repository that is written to")
    private: bool = key(True, "nobody but its owners sees the repository; false: everybody does")
    gated: Literal["auto", "manual", "open"] | None = key(
        None, "who may download: after agreeing (auto), after being let in (manual), all (open); null: as it is"
    )
    collection: str | None = key(
        None, "slug of a collection that the repository is added to; null: none", example="my-org/drafters-64f9a5"
    )
    base_model: str | None = key(
        None,
        "Hub id of the target, where target.path is a folder of this machine; null: target.path",
        example="Qwen/Qwen3-8B",
    )
    license: str | None = key(
        None,
        "licence of the drafter, by the Hub's names; null: that of the target, where the Hub or its folder says it",
        example="apache-2.0",
    )
    datasets: tuple[str, ...] = key(
        (), "Hub ids of the sets that the prompts come from", example="[HuggingFaceH4/ultrachat_200k]"
    )
    data_licenses: tuple[str, ...] = key(
        (), "licences of the prompts, in the order of data.train, where the card should say them", example="[mit]"
    )
    languages: tuple[str, ...] = key((), "languages of the prompts, as ISO 639 codes", example="[en]")
    report: bool = key(
        False, "add the report, its plots and the evaluation records; without examples, which show prompts"
    )
    unverified: bool = key(
        False, "publish weights for which the parity check has not passed; the card says so in its first lines"
    )
    dry_run: bool = key(False, "write the folder and show its card; ask the Hub nothing and upload nothing")
    out: str | None = key(None, "folder that is written before it is uploaded; null: publish in run.dir")

    def _check(self) -> None:
        for name, value in (("repo", self.repo), ("base_model", self.base_model)):
            refuse_dash(f"publish.{name}", value)
            require(
                not value or _HUB_ID.fullmatch(value),
                f"publish.{name}={value} is no name that the Hub could have: use ORG/NAME",
            )
        for name, values in (("datasets", self.datasets), ("data_licenses", self.data_licenses)):
            for value in values:
                require(
                    "\n" not in value and not value.startswith(("/", "~", ".")),
                    f"publish.{name}: {value} is no name of the Hub: name ids and licences, no files",
                )
        for value in (*self.languages, *(() if self.license is None else (self.license,))):
            require(_WORD.fullmatch(value), f"publish: {value!r} is no code of a language or licence: use en, mit, …")
