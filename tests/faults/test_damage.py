"""What a damaged disk, an editor or a kill does to a finished run: what is damaged is named or made again, alone;
nothing goes on with wrong data in silence.
"""

import json
import os

import pytest

from spectrain import cli
from spectrain.data.hidden_states import StoredHiddenStates
from spectrain.data.responses import ResponseStore
from spectrain.drafters.drafter_folder import load_drafter
from spectrain.errors import InputError
from spectrain.evaluation.records import read_records


@pytest.fixture
def spectrain(arguments, run_dir, capsys):
    """Run a command over the copy; returns exit code and what it said."""

    def run(command, *more):
        code = cli.main([command, *arguments, f"run.dir={run_dir}", *more])
        said = capsys.readouterr().err
        assert "unexpected" not in said
        return code, said

    return run


def flip(path, byte=-1):
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def documents(folder):
    store = StoredHiddenStates(folder)
    return {key: store[number].input_ids.tolist() for number, key in enumerate(store.keys)}


def test_of_a_damaged_shard_only_its_documents_are_captured_again(spectrain, run_dir):
    folder = run_dir / "hidden_states"
    before, texts = contents(folder), documents(folder)
    bad = sorted(before)[1]
    assert len(before) >= 3
    flip(folder / bad)
    code, said = spectrain("fit", "trainer.seed=9")
    assert code == 0
    assert f"{folder / bad} does not have the checksum of the index" in said
    after = contents(folder)
    assert {name: after.get(name) for name in before if name != bad} == {
        name: content for name, content in before.items() if name != bad
    }
    assert documents(folder) == texts
    StoredHiddenStates(folder).verify_checksums()


def test_where_there_is_much_a_damaged_shard_is_found_when_it_is_read_and_mended_by_the_next_command(
    spectrain, run_dir
):
    folder = run_dir / "hidden_states"
    before, texts = contents(folder), documents(folder)
    bad = sorted(before)[1]
    flip(folder / bad)
    for path in folder.glob("shard-*"):
        os.utime(path, ns=(1, 1))  # long ago, as after a copy from another disk
    much = ("trainer.seed=9", "hidden_states.verify_at_start_bytes=0", "drafter.init=target")
    code, said = spectrain("fit", *much)
    assert code == 1
    assert f"{folder / bad} has changed since it was written, its checksum is not that of the index" in said
    code, said = spectrain("fit", *much)
    assert code == 0
    assert f"{folder / bad} does not have the checksum of the index: its documents are captured again" in said
    assert documents(folder) == texts
    StoredHiddenStates(folder).verify_checksums()


def test_a_shard_that_is_gone_is_captured_again_by_the_next_command(spectrain, run_dir):
    folder = run_dir / "hidden_states"
    before, texts = contents(folder), documents(folder)
    bad = sorted(before)[0]
    (folder / bad).unlink()
    code, said = spectrain("run")
    assert code == 0 and bad in said
    assert "fit: unchanged, skipped" in said  # the same documents
    assert documents(folder) == texts


def test_damaged_weights_are_not_measured_and_not_taken_for_what_fit_wrote(spectrain, run_dir):
    weights = run_dir / "drafter" / "model.safetensors"
    whole = weights.read_bytes()
    flip(weights)
    for command, more in (("eval", ()), ("eval", ("decoding.num_speculative_tokens=2",)), ("eval", ("parity",))):
        code, said = spectrain(command, *more)
        assert (code, said.count("\n")) == (2, 1)
        assert f"{weights} has changed since it was written" in said
    code, said = spectrain("fit", f"drafter.path={run_dir}/drafter", f"run.dir={run_dir}-on")
    assert code == 2 and "has changed since it was written" in said
    code, said = spectrain("fit")
    assert code == 0
    assert "fit: the drafter's weights are damaged, they are made again" in said
    load_drafter(weights.parent)
    assert weights.read_bytes() == whole


def test_a_drafter_whose_configuration_is_cut_is_made_again_and_a_changed_one_is_said(spectrain, run_dir):
    path = run_dir / "drafter" / "config.json"
    config = json.loads(path.read_text())
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 2
    path.write_text(json.dumps(config))
    code, said = spectrain("fit")
    assert code == 0 and "fit: unchanged, skipped" in said
    assert f"note: {path} has changed since the drafter was written" in said
    path.write_text(path.read_text()[:100])
    code, said = spectrain("fit")
    assert code == 0 and "the drafter's settings are damaged, they are made again" in said
    assert load_drafter(path.parent)


def test_damaged_responses_are_kept_aside_and_only_theirs_are_asked_again(spectrain, run_dir):
    (part,) = (run_dir / "responses").glob("part-*")
    store = {response.key: response.input_ids.tolist() for response in ResponseStore(part.parent).load()}
    flip(part, 200)
    code, said = spectrain("run")
    assert code == 0 and f"{part} is damaged: its prompts are answered again" in said
    assert "capture: unchanged, skipped" in said  # the same answers
    assert part.with_name(f"{part.name}.damaged").is_file()
    assert {response.key: response.input_ids.tolist() for response in ResponseStore(part.parent).load()} == store


def test_responses_of_another_version_are_not_taken_for_damaged(spectrain, run_dir, monkeypatch):
    monkeypatch.setattr("spectrain.data.response_parts.SCHEMA_VERSION", "2")
    code, said = spectrain("generate")
    assert (code, said.count("\n")) == (2, 1) and "schema version 1" in said
    with pytest.raises(InputError, match="schema version 1"):
        ResponseStore(run_dir / "responses").set_aside_damaged()
    assert len(list((run_dir / "responses").glob("part-*.parquet"))) == 1


@pytest.mark.parametrize("name", ["manifest.json", "hidden_states/index.json"])
@pytest.mark.parametrize("how", ["flipped", "cut short", "empty"])
def test_of_the_manifest_and_the_index_there_is_a_copy(spectrain, run_dir, name, how, monkeypatch):
    monkeypatch.setattr("spectrain.copies._said", set())
    path = run_dir / name
    copy, whole = path.with_name(f"{path.stem}.copy.json"), path.read_bytes()
    assert copy.read_bytes() == whole
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    path.write_bytes({"flipped": flipped, "cut short": whole[: len(whole) // 2], "empty": b""}[how])
    code, said = spectrain("fit")
    assert code == 0 and f"{path} is damaged: its copy, {copy.name}, is used" in said
    assert "fit: unchanged, skipped" in said
    path.write_bytes(b"{")
    copy.write_bytes(b"{")
    code, said = spectrain("capture")
    assert (code, said.count("\n")) == (2, 1) and str(path) in said


def test_a_baselines_record_that_is_gone_or_damaged_is_made_again(spectrain, run_dir):
    before = {path.name for path in (run_dir / "eval").glob("*.json")}
    (baseline,) = (run_dir / "eval").glob("*-none-*.json")
    (ngram,) = (run_dir / "eval").glob("*-ngram-*.json")
    ngram.write_text(ngram.read_text().replace("ngram", "mgram", 1))
    code, said = spectrain("eval", "--dry-run")
    assert code == 0
    baseline.unlink()
    code, said = spectrain("eval")
    assert code == 0 and "outputs are missing, they are made again" in said
    assert {path.name for path in (run_dir / "eval").glob("*.json")} == before
    assert [record.method for record in read_records(run_dir / "eval")] == ["none", "ngram", "eagle3"]
    assert "unchanged, skipped" in spectrain("eval")[1]
    ngram.write_text(ngram.read_text()[:-40])
    code, said = spectrain("eval", "suite.max_prompts=1", "suite.baselines=[ngram]")
    assert code == 0 and str(ngram) not in said


def test_a_damaged_record_of_another_measurement_is_named_before_the_work(spectrain, run_dir):
    (record,) = (run_dir / "eval").glob("*-eagle3-n3-*.json")
    record.write_text(record.read_text()[:-40])
    more = ("decoding.num_speculative_tokens=2",)
    code, said = spectrain("eval", *more)
    assert (code, said.count("\n")) == (2, 1)
    assert str(record) in said
    assert not list((run_dir / "eval").glob("*-n2-*"))


def test_a_line_of_the_metrics_that_was_cut_short_costs_no_evaluation(spectrain, run_dir):
    metrics = run_dir / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-20])
    code, _ = spectrain("eval", "decoding.num_speculative_tokens=2", "suite.baselines=[]")
    assert code == 0 and (run_dir / "report.html").is_file()


def test_a_full_disk_refuses_nothing_that_is_captured_already(spectrain, run_dir, monkeypatch):
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    code, said = spectrain("run")
    assert code == 0 and "capture: unchanged, skipped" in said
    # Other states need room, and that of those they replace is theirs.
    assert spectrain("capture", "hidden_states.dtype=bfloat16", "--dry-run")[0] == 0
    (shard, *_) = sorted((run_dir / "hidden_states").glob("shard-*"))
    shard.unlink()
    Usage.free = 10
    code, said = spectrain("capture")
    assert code == 2 and "the hidden states of " in said and "22 documents" not in said
