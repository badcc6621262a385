"""The stages over one run directory: what is written, what is skipped, what a changed input brings about."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from tiny import tiny_target
from workplace import write_prompts

from spectrain import cli
from spectrain.data.hidden_states import StoredHiddenStates
from spectrain.data.responses import ResponseStore
from spectrain.drafters.drafter_folder import load_drafter, save_drafter
from spectrain.evaluation.records import read_records


@pytest.fixture
def spectrain(arguments, run_dir, capsys):
    """Run a command over the copy; returns the lines it said."""

    def run(command, *more, base=True):
        code = cli.main([command, *(arguments if base else ()), f"run.dir={run_dir}", *more])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        run.out = captured.out
        return captured.err.splitlines()

    return run


def times(folder):
    # The latter two say what was read, not what is there.
    unimportant = (".lock", "verified.json", "known_prompts.arrow")
    return {
        path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name not in unimportant
    }


def test_a_run_writes_what_the_design_says(finished):
    names = {path.name for path in finished.iterdir()}
    assert {
        "config.yaml",
        "manifest.json",
        "responses",
        "hidden_states",
        "checkpoints",
        "drafter",
        "metrics.jsonl",
        "eval",
        "report.html",
    } <= names
    responses = ResponseStore(finished / "responses").load()
    assert len(responses) == 22
    assert sorted(response.split for response in responses).count("heldout") == 6
    store = StoredHiddenStates(finished / "hidden_states")
    assert store.meta.tap_ids == (2, 3, 4)
    assert sorted(store.keys) == sorted(response.key for response in responses)
    for response in responses:
        states = store[store.keys.index(response.key)]
        assert states.input_ids.tolist() == response.input_ids.tolist()
        assert states.split == response.split
    assert load_drafter(finished / "drafter").vocab.ids_D.shape == (100,)
    steps = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert any("simulated_acceptance_length" in step for step in steps)


def test_the_simulation_is_kept(finished):
    none, ngram, drafter = read_records(finished / "eval")
    assert [record.method for record in (none, ngram, drafter)] == ["none", "ngram", "eagle3"]
    assert ngram.output_identical and drafter.output_identical
    assert none.acceptance_length is None or none.acceptance_length == 1.0
    assert drafter.simulated_acceptance_length == drafter.acceptance_length
    assert drafter.simulated_rounds == drafter.rounds
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert page.lstrip().startswith("<!")
    assert (
        "held-out prompts of the same kind as the 16 prompts it was trained on" in page
    )  # and they are not shipped ones
    assert "data=jsonl" not in page.partition("<section>")[0]


def test_an_unchanged_run_does_nothing_and_says_so(spectrain, run_dir):
    before = times(run_dir)
    lines = spectrain("run")
    assert lines == [
        f"{stage}: unchanged, skipped" for stage in ("generate", "capture", "fit", "eval/heldout-hf-n3-t0")
    ]
    assert "EAGLE-3" in spectrain.out  # the table is shown again
    changed = {path.name for path, time in times(run_dir).items() if before.get(path) != time}
    assert changed <= {"config.yaml"}


def test_the_run_directory_remembers_its_configuration(spectrain, run_dir):
    lines = spectrain("fit", base=False)
    assert lines[0] == f"configuration: {run_dir}/config.yaml, and what was given"
    assert lines[1:] == [f"{stage}: unchanged, skipped" for stage in ("generate", "capture", "fit")]


def test_changed_taps_capture_and_train_again_but_do_not_generate(spectrain, run_dir):
    before = times(run_dir / "responses")
    lines = spectrain("fit", "drafter.taps=[1,5]")
    assert lines[0] == "generate: unchanged, skipped"
    assert lines[1] == "capture: drafter.taps changed from [2, 3, 4] to [1, 5]: hidden states are captured again"
    assert StoredHiddenStates(run_dir / "hidden_states").meta.tap_ids == (1, 5)
    assert load_drafter(run_dir / "drafter").taps == (1, 5)
    assert times(run_dir / "responses") == before
    assert not (run_dir / "eval").exists()  # measured on a drafter that is gone


def test_a_changed_learning_rate_only_trains_again(spectrain, run_dir):
    before = times(run_dir / "hidden_states") | times(run_dir / "responses")
    weights = (run_dir / "drafter/model.safetensors").read_bytes()
    lines = spectrain("fit", "trainer.learning_rate=0.02")
    assert lines[:2] == ["generate: unchanged, skipped", "capture: unchanged, skipped"]
    why = (
        "fit: trainer.learning_rate changed from 0.01 to 0.02: "
        "the drafter is trained again and replaced (another run.dir keeps it)"
    )
    assert why in lines
    assert times(run_dir / "hidden_states") | times(run_dir / "responses") == before
    assert (run_dir / "drafter/model.safetensors").read_bytes() != weights


def test_more_prompts_keep_what_is_there(spectrain, run_dir, tmp_path):
    write_prompts(tmp_path / "more.jsonl", range(30, 34))
    kept = times(run_dir / "responses") | times(run_dir / "hidden_states")
    for index in ("index.json", "index.copy.json"):
        del kept[run_dir / "hidden_states" / index]
    train = next(argument for argument in make_arguments(run_dir) if argument.startswith("data.train"))
    path = train.removeprefix("data.train=")
    lines = spectrain("capture", f"data.train=[{path},{tmp_path / 'more.jsonl'}]")
    assert lines[0].startswith("generate: training prompts changed from 16 (")
    assert lines[0].endswith(": what is missing is added")
    assert len(StoredHiddenStates(run_dir / "hidden_states")) == 26
    now = times(run_dir)
    assert all(now[file] == time for file, time in kept.items())
    rows = [pq.ParquetFile(part).metadata.num_rows for part in sorted((run_dir / "responses").glob("*.parquet"))]
    assert (sum(rows), rows[-1]) == (26, 4)


def make_arguments(run_dir):
    import yaml

    data = yaml.safe_load((run_dir / "config.yaml").read_text())["data"]
    return [f"data.train={data['train'][0]}"]


def test_fewer_prompts_need_no_work_on_the_target(spectrain, run_dir):
    before = times(run_dir / "hidden_states") | times(run_dir / "responses")
    lines = spectrain("fit", "data.max_train=8")
    assert any(line.startswith("fit: 8 documents") for line in lines)
    assert times(run_dir / "hidden_states") | times(run_dir / "responses") == before


def test_measurements_stand_beside_each_other(spectrain, run_dir):
    spectrain("eval", "decoding.num_speculative_tokens=2", base=False)
    drafters = [record for record in read_records(run_dir / "eval") if record.is_drafter]
    assert [record.num_speculative_tokens for record in drafters] == [2, 3]
    # What was measured must not change what the next fit starts from.
    assert spectrain("fit", base=False)[1:] == [
        f"{stage}: unchanged, skipped" for stage in ("generate", "capture", "fit")
    ]


def test_a_drafter_that_was_deleted_is_trained_again(spectrain, run_dir):
    weights = (run_dir / "drafter/model.safetensors").read_bytes()
    shutil.rmtree(run_dir / "drafter")
    lines = spectrain("fit")
    assert "fit: outputs are missing, they are made again" in lines
    assert (run_dir / "drafter/model.safetensors").read_bytes() == weights


def test_eval_of_a_folder_without_a_run(arguments, finished, tmp_path, capsys):
    target = next(argument for argument in arguments if argument.startswith("target.path="))
    write_prompts(tmp_path / "suite.jsonl", range(50, 53))
    more = [
        "suite=jsonl",
        f"suite.prompts={tmp_path / 'suite.jsonl'}",
        "suite.concurrency=2",
        "sampling.max_new_tokens=12",
        "target.max_length=256",
    ]
    assert (
        cli.main(["eval", f"drafter.path={finished / 'drafter'}", target, *more, f"run.dir={tmp_path / 'out'}"]) == 0
    ), capsys.readouterr().err
    records = read_records(tmp_path / "out/eval")
    assert [record.method for record in records] == ["none", "ngram", "eagle3"]
    assert records[-1].output_identical
    assert records[-1].concurrency == 2
    assert records[-1].simulated_acceptance_length is None  # no stored text to simulate on


def test_a_sweep_shares_responses_and_states(arguments, tmp_path, capsys):
    sweep = tmp_path / "sweep"
    code = cli.main(["fit", "-m", *arguments, f"run.dir={sweep}", "trainer.learning_rate=0.01,0.02"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    jobs = [sweep / f"trainer.learning_rate={rate}" for rate in (0.01, 0.02)]
    assert all((job / "drafter/model.safetensors").is_file() and not (job / "hidden_states").exists() for job in jobs)
    assert (jobs[0] / "drafter/model.safetensors").read_bytes() != (jobs[1] / "drafter/model.safetensors").read_bytes()
    (line,) = [line for line in captured.err.splitlines() if line.startswith("capture: hidden states of 22 documents")]
    size = sum(path.stat().st_size for path in (sweep / "hidden_states").glob("*.safetensors"))
    assert line.endswith(f" {size / 1000:,.0f} kB")
    assert captured.err.count("capture: unchanged, skipped") == 2


def test_a_run_directory_of_another_target_is_refused(arguments, run_dir, tmp_path, capsys):
    other = tiny_target("llama", tmp_path / "target", seed=1, num_hidden_layers=7)
    before = times(run_dir)
    code = cli.main(["run", *arguments, f"run.dir={run_dir}", f"target.path={other}"])
    assert (code, times(run_dir)) == (2, before)
    assert "belongs to another target" in capsys.readouterr().err


def test_training_goes_on_from_a_folder(arguments, finished, tmp_path, capsys):
    """Its shape, taps and vocabulary stand; loss and steps are the configuration's; what it starts from is
    what it was.
    """
    first = load_drafter(finished / "drafter")
    half = tmp_path / "half"
    save_drafter(
        first.bfloat16(), half, target="t", target_architectures=("LlamaForCausalLM",), num_speculative_tokens=3
    )
    edit(half / "config.json", lambda config: config.update(eagle_aux_hidden_state_layer_ids=[1, 4, 5]))
    more = [
        f"drafter.path={half}",
        "drafter.autoregressive.ttt_steps=2",
        "drafter.loss.weights.kl=1",
        "drafter.draft_vocab_size=7",
        "trainer.max_steps=1",
    ]
    run_dir = tmp_path / "run"
    assert cli.main(["fit", *arguments, f"run.dir={run_dir}", *more, "trainer.learning_rate=1e-30"]) == 0, (
        capsys.readouterr().err
    )
    assert "closed-form initialisation" not in capsys.readouterr().err
    assert StoredHiddenStates(run_dir / "hidden_states").meta.tap_ids == (1, 4, 5)
    then = load_drafter(run_dir / "drafter")
    assert (then.taps, then.training_steps, len(then.vocab.ids_D)) == ((1, 4, 5), 2, 100)
    for name, tensor in then.body.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, first.body.state_dict()[name].float()), name
    losses = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(next(line["kl_per_step"] for line in losses if "loss" in line)) == 2


def edit(file, change):
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def test_the_drafter_names_a_target_that_a_server_can_load_from_anywhere(arguments, finished):
    target = next(argument for argument in arguments if argument.startswith("target.path=")).removeprefix(
        "target.path="
    )
    config = json.loads((finished / "drafter/config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(Path(target).resolve())
    assert f"vllm serve {Path(target).resolve()}" in (finished / "report.html").read_text(encoding="utf-8")


def test_serve_goes_by_what_was_evaluated(spectrain, run_dir):
    lines = spectrain("serve", "--print", base=False)  # the configuration is the run's
    (record,) = [record for record in read_records(run_dir / "eval") if record.is_drafter]
    number = int(spectrain.out.partition('"num_speculative_tokens": ')[2].partition("}")[0])
    assert 1 <= number <= record.num_speculative_tokens
    assert any(
        f"serve: {number} drafts a round: " in line and f"suite {record.suite}, engine hf" in line for line in lines
    )
    assert f'"model": "{run_dir / "drafter"}", "method": "eagle3"' in spectrain.out


def test_jobs_of_a_sweep_may_differ_in_precision(arguments, tmp_path, capsys):
    sweep = tmp_path / "sweep"
    more = [
        "trainer.precision=float32,bfloat16",
        "trainer.max_steps=1",
        "drafter.init=target",
        "hidden_states.shard_bytes=1099511627776",
    ]
    assert cli.main(["fit", "-m", *arguments, f"run.dir={sweep}", *more]) == 0, capsys.readouterr().err
    losses = [
        json.loads((job / "metrics.jsonl").read_text().splitlines()[1])["loss"]
        for job in sorted(sweep.glob("trainer*"))
    ]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_a_prompt_without_room_is_found_before_anything_is_measured(spectrain, arguments, run_dir, tmp_path, capsys):
    (tmp_path / "long.jsonl").write_text(
        json.dumps({"turns": ["a short one"]}) + "\n" + json.dumps({"turns": ["many words " * 200]}) + "\n"
    )
    before = times(run_dir)
    code = cli.main(
        ["eval", *arguments, f"run.dir={run_dir}", "suite=jsonl", f"suite.prompts={tmp_path / 'long.jsonl'}"]
    )
    err = capsys.readouterr().err
    assert (code, err.count("\n"), times(run_dir)) == (2, 1, before)
    assert "long.jsonl:2: the prompt of" in err


def test_states_that_changed_on_disk_cost_no_drafter(arguments, run_dir, capsys):
    for name in ("index.json", "index.copy.json"):
        index = run_dir / "hidden_states" / name
        index.write_text(index.read_text().replace('"dtype": "float32"', '"dtype": "float33"'))
    before = times(run_dir / "drafter")
    assert cli.main(["fit", *arguments, f"run.dir={run_dir}", "trainer.learning_rate=0.02"]) == 2
    assert (
        "index.json has changed since it was written, its digest differs: remove the folder" in capsys.readouterr().err
    )
    assert times(run_dir / "drafter") == before
    shutil.rmtree(run_dir / "hidden_states")  # as the message says
    assert cli.main(["fit", *arguments, f"run.dir={run_dir}", "trainer.learning_rate=0.02"]) == 0, (
        capsys.readouterr().err
    )


def test_a_record_that_was_deleted_is_measured_again(spectrain, run_dir):
    record = run_dir / "eval/heldout-hf-eagle3-n3-t0.json"
    record.unlink()
    assert "eval/heldout-hf-n3-t0: outputs are missing, they are made again" in spectrain("eval")
    assert record.is_file()


def test_inspect_shows_documents(run_dir, capsys):
    assert cli.main(["inspect", "responses", f"run.dir={run_dir}", "--limit", "2", "--split", "heldout"]) == 0
    out = capsys.readouterr().out
    assert out.count("· heldout ·") == 2
    assert "2 of 6 heldout responses shown" in out
    assert "<|im_start|>user" in out
