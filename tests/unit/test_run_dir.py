"""The run directory: when a stage runs, what is removed, and what survives a crash."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from spectrain.copies import copy_of
from spectrain.errors import InputError, RunError
from spectrain.files import file_digest, replacing, write_atomically
from spectrain.stages import fit
from spectrain.stages.run_dir import Inputs, RunDir

FIXED = {"target": "t", "drafter.taps": [2, 15, 27]}
GROWING = {"prompts": "10 (aa)"}


@pytest.fixture
def run_dir(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    with run_dir.locked():
        yield run_dir


def finish(run_dir, name, fixed=FIXED, growing=GROWING, output=None):
    with run_dir.running(run_dir.decide(name, Inputs(fixed, growing), lambda: "outputs are missing")) as outputs:
        for file in output or ():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("x")
        outputs["number"] = 1


def decide(run_dir, name="capture", fixed=FIXED, growing=GROWING, whole=True):
    return run_dir.decide(name, Inputs(fixed, growing), lambda: "" if whole else "outputs are missing")


def test_a_finished_stage_with_the_same_inputs_is_skipped(run_dir):
    assert decide(run_dir).action == "start"
    finish(run_dir, "capture")
    decision = decide(run_dir)
    assert decision.skip
    assert str(decision) == "capture: unchanged, skipped"
    assert run_dir.outputs("capture") == {"number": 1}


def test_ranks_other_than_the_first_record_nothing(tmp_path):
    waited = []
    ranks = SimpleNamespace(is_first=False, wait=lambda: waited.append(True))
    other = RunDir(tmp_path / "run")
    other.path.mkdir()
    with fit._recorded(SimpleNamespace(ranks=ranks, run_dir=other), decide(other, "fit")) as outputs:
        outputs["step"] = 1
    assert waited == [True]  # until the first has removed what is stale
    assert list(other.path.iterdir()) == []


def test_tuples_and_lists_are_the_same_input(run_dir):
    finish(run_dir, "capture", fixed={"drafter.taps": (1, 2)})
    assert decide(run_dir, fixed={"drafter.taps": [1, 2]}).skip
    assert decide(run_dir, fixed={"drafter.taps": (1, 2)}).skip


@pytest.mark.parametrize("window", [None, 128])
def test_a_setting_that_older_runs_did_not_have_changes_them_where_it_is_on(run_dir, window):
    finish(run_dir, "fit", growing={})
    later = FIXED | {"drafter.eagle3.sliding_window": window}
    assert decide(run_dir, "fit", later, growing={}).skip == (window is None)
    if window is not None:
        finish(run_dir, "fit", later, growing={})
        assert "sliding_window changed from 128 to null" in str(decide(run_dir, "fit", growing={}))


def test_a_changed_fixed_input_says_what_changed_and_removes_what_came_of_it(run_dir):
    finish(run_dir, "generate", output=[run_dir.responses / "part"])
    finish(run_dir, "capture", output=[run_dir.hidden_states / "shard"])
    finish(run_dir, "fit", growing={}, output=[run_dir.drafter / "config.json", run_dir.metrics])
    finish(run_dir, "eval/heldout-n3-t0", growing={}, output=[run_dir.eval / "a.json", run_dir.report])
    decision = decide(run_dir, fixed=FIXED | {"drafter.taps": [1, 2, 3]})
    assert (
        str(decision) == "capture: drafter.taps changed from [2, 15, 27] to [1, 2, 3]: hidden states are captured again"
    )
    with run_dir.running(decision):
        assert (run_dir.responses / "part").exists()
        assert not any(
            path.exists()
            for path in (run_dir.hidden_states, run_dir.drafter, run_dir.metrics, run_dir.eval, run_dir.report)
        )
    assert set(run_dir.manifest()["stages"]) == {"generate", "capture"}


def test_a_changed_growing_input_keeps_what_is_there(run_dir):
    finish(run_dir, "generate", output=[run_dir.responses / "part"])
    more = {"prompts": "12 (bb)"}
    decision = decide(run_dir, "generate", growing=more, whole=False)
    assert (decision.action, str(decision)) == (
        "resume",
        "generate: prompts changed from 10 (aa) to 12 (bb): what is missing is added",
    )
    with run_dir.running(decision):
        assert (run_dir.responses / "part").exists()
    # Fewer prompts again: nothing is missing, but the manifest must name the new inputs.
    decision = decide(run_dir, "generate", whole=True)
    assert (decision.action, decision.skip) == ("resume", False)


def test_an_interrupted_stage_continues(run_dir):
    with pytest.raises(KeyboardInterrupt), run_dir.running(decide(run_dir)):
        raise KeyboardInterrupt
    decision = decide(run_dir)
    assert (decision.action, str(decision)) == ("resume", "capture: interrupted before, continues")


def test_missing_outputs_are_made_again(run_dir):
    finish(run_dir, "generate")
    assert decide(run_dir, "generate", whole=False).action == "resume"
    finish(run_dir, "fit", growing={}, output=[run_dir.checkpoints / "step"])
    # A drafter cannot be half there: its checkpoints would say that training is over.
    decision = decide(run_dir, "fit", growing={}, whole=False)
    assert decision.action == "restart"
    with run_dir.running(decision):
        assert not run_dir.checkpoints.exists()


def test_a_kill_while_removing_does_not_leave_a_stage_that_looks_whole(run_dir, monkeypatch):
    finish(run_dir, "capture", output=[run_dir.hidden_states / "shard"])
    monkeypatch.setattr("spectrain.stages.run_dir.remove", lambda path: (_ for _ in ()).throw(SystemExit))
    changed = FIXED | {"drafter.taps": [1]}
    with pytest.raises(SystemExit), run_dir.running(decide(run_dir, fixed=changed)):
        pass
    monkeypatch.undo()
    for fixed in (changed, FIXED):
        assert decide(run_dir, fixed=fixed).action == "restart"
    with run_dir.running(decide(run_dir, fixed=changed)):
        assert not run_dir.hidden_states.exists()


def test_parts_of_a_stage_stand_beside_each_other(run_dir):
    finish(run_dir, "eval/heldout-n3-t0", growing={}, output=[run_dir.eval / "n3.json"])
    finish(run_dir, "eval/heldout-n5-t0", growing={}, output=[run_dir.eval / "n5.json"])
    decision = decide(run_dir, "eval/heldout-n5-t0", fixed=FIXED | {"drafter": "other"}, growing={})
    assert decision.reason.endswith("drafter changed from null to other: it is measured again")
    with run_dir.running(decision):
        assert (run_dir.eval / "n3.json").exists()
    assert decide(run_dir, "eval/heldout-n3-t0", growing={}).skip


def test_a_directory_of_another_target_is_refused(run_dir):
    run_dir.set_target({"id": "a", "revision": "1"})
    run_dir.check({"id": "a", "revision": "1"})
    with pytest.raises(InputError, match=r"belongs to another target \(id a, this configuration has b\)"):
        run_dir.check({"id": "b", "revision": "1"})
    with pytest.raises(InputError, match=r"belongs to another target \(revision 1"):
        run_dir.check({"id": "a", "revision": "2"})


def test_a_folder_that_is_no_run_directory_is_refused(tmp_path):
    (tmp_path / "responses").mkdir()
    with pytest.raises(InputError, match=r"holds responses but no manifest\.json"):
        RunDir(tmp_path).check({})
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        RunDir(tmp_path / "file").check({})


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"stages": {}}', '{"schema_version": 1}', '{"schema_version": 99, "stages": {}, "target": null}'],
)
def test_a_broken_manifest_is_named(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(InputError, match=r"manifest\.json"):
        RunDir(tmp_path).check({})


ENTRY = {"status": "done", "inputs": {"fixed": {}, "growing": {}}, "seconds": 1.0, "outputs": {"tokens": 5}}


@pytest.mark.parametrize(
    ("where", "value"),
    [
        *((("target",), 3), (("target",), {"id": "a"}), (("target", "revision"), 1), (("stages",), [])),
        *(
            (("stages", "capture"), []),
            (("stages", "capture", "status"), "gone"),
            (("stages", "capture", "status"), ...),
        ),
        *((("stages", "capture", "inputs"), ...), (("stages", "capture", "inputs", "fixed"), 1)),
        *((("stages", "capture", "inputs", "growing"), ...), (("stages", "capture", "seconds"), "long")),
        *((("stages", "capture", "outputs"), []), (("stages", "capture", "outputs", "tokens"), "5")),
        *(
            (("stages", "eval/a", "outputs", "record"), None),
            (("stages", "eval/a", "outputs", "parity"), {"passed": 1}),
        ),
        *((("schema_version",), "1"), (("schema_version",), True), (("stages",), ...)),
    ],
)
def test_a_field_of_a_manifest_that_is_missing_or_of_another_type_is_named(tmp_path, where, value):
    """Written by an earlier version, without a digest that would tell as well."""
    stages = {"capture": ENTRY, "eval/a": ENTRY | {"outputs": {"record": "eval/a.json"}}}
    manifest = json.loads(json.dumps({"schema_version": 1, "target": {"id": "a", "revision": "1"}, "stages": stages}))
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    RunDir(tmp_path).check({})
    inner = manifest
    for name in where[:-1]:
        inner = inner[name]
    inner[where[-1]] = value
    if value is ...:
        del inner[where[-1]]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=where[-1]) as caught:
        RunDir(tmp_path).check({})
    assert str(tmp_path / "manifest.json") in str(caught.value)


def test_a_manifest_that_was_changed_is_refused_and_one_whose_digest_was_taken_out_is_not(run_dir):
    finish(run_dir, "capture")
    path = run_dir.path / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["stages"]["capture"]["inputs"]["fixed"]["drafter.taps"] = [2, 15, 26]
    path.write_text(json.dumps(manifest))
    assert decide(run_dir).action == "skip"  # by the copy beside it
    copy_of(path).unlink()
    with pytest.raises(InputError, match=r"manifest\.json has changed since it was written"):
        decide(run_dir)
    del manifest["digest"]
    path.write_text(json.dumps(manifest))
    assert decide(run_dir).action == "restart"


@pytest.mark.parametrize("status", ["removing", "running"])
def test_outputs_of_a_stage_that_was_not_finished_are_not_looked_at(run_dir, status):
    finish(run_dir, "capture")
    manifest = run_dir.manifest()
    manifest["stages"]["capture"]["status"] = status
    run_dir._write_manifest(manifest)

    def lacking():
        raise AssertionError("what is there may be anything")

    for fixed in (FIXED, FIXED | {"drafter.taps": [1]}):
        assert not run_dir.decide("capture", Inputs(fixed, GROWING), lacking).skip
    # Of another input the outputs are of no interest either.
    finish(run_dir, "capture")
    assert run_dir.decide("capture", Inputs(FIXED | {"drafter.taps": [1]}, GROWING), lacking).action == "restart"


def test_what_is_lacking_is_said(run_dir):
    finish(run_dir, "fit", growing={})
    decision = run_dir.decide("fit", Inputs(FIXED, {}), lambda: "the drafter's weights are damaged")
    assert str(decision) == "fit: the drafter's weights are damaged, they are made again"


def test_looking_touches_nothing(tmp_path):
    run_dir = RunDir(tmp_path / "none")
    run_dir.check({"id": "a"})
    assert decide(run_dir).action == "start"
    assert list(tmp_path.iterdir()) == []


def test_writing_needs_the_lock(tmp_path):
    run_dir = RunDir(tmp_path)
    with pytest.raises(RunError, match="not this run's to write"), run_dir.running(decide(run_dir)):
        pass


HOLD = "import sys; from spectrain.stages.run_dir import RunDir\nwith RunDir(sys.argv[1]).locked():\n    print('held', flush=True); sys.stdin.read()"  # noqa: E501


def test_two_processes_cannot_work_in_one_directory_and_a_kill_releases_it(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(InputError, match=f"in use by process {holder.pid}"), RunDir(tmp_path).locked():
            pass
        holder.kill()
    with RunDir(tmp_path).locked():
        pass


def test_atomic_writing_leaves_the_old_text_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomically(path, "old")
    monkeypatch.setattr("os.replace", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"


def test_what_could_not_be_written_takes_no_room_and_a_file_can_be_read_by_all_who_may(tmp_path):
    def write(content, error=None):
        with replacing(tmp_path / "a") as partial:
            partial.write_bytes(content)
            partial.chmod(0o600)
            if error:
                raise error

    write(b"whole")
    plain = tmp_path / "b"
    plain.touch()
    assert (tmp_path / "a").stat().st_mode == plain.stat().st_mode
    with pytest.raises(OSError, match="full"):
        write(b"half", OSError("full"))
    assert (tmp_path / "a").read_bytes() == b"whole"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_the_manifest_says_what_results_depend_on(run_dir):
    finish(run_dir, "capture")
    entry = json.loads((run_dir.path / "manifest.json").read_text())["stages"]["capture"]
    assert {"status", "inputs", "digest", "outputs", "versions", "seconds"} <= entry.keys()
    assert {"python", "torch", "transformers", "spectrain"} <= entry["versions"].keys()


def test_file_digest_is_the_one_of_sha256sum(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert file_digest(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
