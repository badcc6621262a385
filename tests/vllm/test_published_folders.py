"""What publish uploads and what convert writes, in the real vLLM: the proposals are those of the drafter that went in,
token for token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drafter_tools import Options
from hub_tools import turn_to
from local_hub import local_hub
from parity_tools import DRAFTS, Family, assert_same_rounds, decoded_by_vllm, save, served_job, train
from rounds_process import RoundsProcess
from test_block_parity import trained

from spectrain.config.drafter_schema import BlockConfig, DrafterConfig
from spectrain.drafters.drafter import Drafter
from spectrain.drafters.layout_writers import convert_drafter
from spectrain.evaluation.parity import compare
from spectrain.hub.published_folder import public_config, write_config
from spectrain.hub.upload import Repository, upload
from spectrain.reading import read_json

NAMES = ("published and downloaded", "eagle3 as EAGLE writes it", "dflash as z-lab writes it, in several files")
Bench = tuple[Family, dict[str, Drafter], dict[str, dict[str, Any]]]


def published(folder: Path, scratch: Path) -> Path:
    """Uploaded to a local Hub, and downloaded again."""
    from huggingface_hub import snapshot_download

    out = scratch / "out"
    out.mkdir(parents=True)
    (out / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    write_config(public_config(read_json(folder / "config.json"), "org/target", out), out)
    with local_hub() as hub, pytest.MonkeyPatch.context() as patch:
        turn_to(hub, patch, scratch / "cache")
        upload(out, Repository("org/drafter"), "a drafter")
        return Path(snapshot_download("org/drafter", local_dir=scratch / "downloaded"))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, rounds_process: RoundsProcess) -> Bench:
    folder: Path = tmp_path_factory.mktemp("published")
    family = Family.make("llama", folder / "target")
    dflash = DrafterConfig("dflash", taps=(1, 4, 7), num_layers=2, block=BlockConfig(block_size=DRAFTS + 1))
    eagle, block = train(family, Options(taps=(1, 4, 6), reduced=True)), trained(family, dflash)
    ours = {"eagle3": save(family, eagle, folder / "a"), "dflash": save(family, block, folder / "b")}
    convert_drafter(ours["eagle3"], "eagle", folder / "c", dict)
    convert_drafter(ours["dflash"], "zlab", folder / "d", dict, max_shard_bytes=20_000)
    assert len(list((folder / "d").glob("*.safetensors"))) > 1
    folders = dict(zip(NAMES, (published(ours["eagle3"], folder / "hub"), folder / "c", folder / "d"), strict=True))
    jobs = [served_job(name, family, path) for name, path in folders.items()]
    return family, dict(zip(NAMES, (eagle, eagle, block), strict=True)), rounds_process.run(jobs)


@pytest.mark.parametrize("name", NAMES)
def test_vllm_proposes_what_the_drafter_that_went_in_proposes(bench: Bench, name: str) -> None:
    family, drafters, reports = bench
    theirs = decoded_by_vllm(family, reports[name])
    report = compare(family.model, drafters[name], family.ours(drafters[name]), theirs, DRAFTS)
    assert_same_rounds(report, 40)
