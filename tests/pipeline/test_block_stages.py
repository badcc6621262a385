"""Block drafters through the whole pipeline, and what is said of them before work starts."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from workplace import make

from spectrain import cli
from spectrain.data.hidden_states import StoredHiddenStates
from spectrain.drafters.drafter_folder import load_drafter, read_method
from spectrain.evaluation.records import read_record, read_records

METHODS = {
    "dflash": ["drafter=dflash", "drafter.block.block_size=5"],
    "dspark": ["drafter=dspark", "drafter.block.block_size=4", "drafter.dspark.markov_rank=8"],
    "dflash2": ["drafter=dflash2", "drafter.block.block_size=5", "drafter.draft_vocab_size=null"],
}


_OTHER_BLOCKS = (
    "block.mask_token_id=7",
    "block.sliding_window=4",
    "block.block_size=5",
    "dspark.markov=rnn",
    "dspark.markov_rank=9",
    "dspark.confidence=false",
)


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    return [*make(tmp_path_factory.mktemp("workplace")), "drafter.block.anchors=32", "drafter.num_layers=1"]


@pytest.fixture(scope="module")
def finished(arguments, tmp_path_factory):
    """Run directories of all methods; taps are the same, so states of the first would do, but a run stands alone."""
    folder = tmp_path_factory.mktemp("runs")
    for method, options in METHODS.items():
        assert cli.main(["run", *arguments, *options, f"run.dir={folder / method}"]) == 0
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_a_run_makes_a_drafter_and_measures_it(finished, method):
    run = finished / method
    drafter = load_drafter(run / "drafter")
    assert drafter.method == read_method(run / "drafter") == method
    assert drafter.taps == (1, 2, 4, 5, 6)
    assert (drafter.shape.num_drafts, drafter.shape.owns_head) == (4, method != "dflash2")
    records = {record.method: record for record in read_records(run / "eval")}
    assert set(records) == {"none", "ngram", method}
    assert "1, 2, 4, 5, 6" in (run / "report.html").read_text(encoding="utf-8")
    # The simulation over the same answers is what the loop counted.
    assert records[method].simulated_acceptance_length == pytest.approx(records[method].acceptance_length, abs=1e-6)


def test_it_is_skipped_measured_again_and_gone_on_from(arguments, finished, tmp_path, capsys):
    run, options = finished / "dspark", METHODS["dspark"]
    assert cli.main(["fit", *arguments, *options, f"run.dir={run}"]) == 0
    assert "fit: unchanged, skipped" in capsys.readouterr().err
    assert cli.main(["eval", f"run.dir={run}", "decoding.num_speculative_tokens=2", "suite.max_prompts=2"]) == 0
    more = [f"drafter.path={run / 'drafter'}", "trainer.max_steps=1", f"run.dir={tmp_path / 'more'}"]
    assert cli.main(["fit", *arguments, *options, *more]) == 0
    assert load_drafter(tmp_path / "more" / "drafter").shape == load_drafter(run / "drafter").shape


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU trains with it")
def test_flex_without_a_gpu_is_refused(arguments, tmp_path, capsys):
    assert (
        cli.main(["fit", *arguments, *METHODS["dflash"], "drafter.attention=flex", f"run.dir={tmp_path / 'run'}"]) == 2
    )
    assert "drafter.attention=flex trains on a GPU alone" in capsys.readouterr().err


def test_documents_that_teach_nothing_are_left_out(tmp_path):
    """A prompt as long as a row leaves no answer to train on; alone in its batch it would stop the training."""
    arguments = [
        *make(tmp_path),
        *METHODS["dflash"],
        "trainer.packed_length=150",
        "trainer.epochs=1",
        "target.max_length=512",
    ]
    with (tmp_path / "train.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"turns": ["What is " + "the sun, or " * 30 + "a river?"]}) + "\n")
    assert cli.main(["fit", *arguments, f"run.dir={tmp_path / 'run'}"]) == 0


def test_a_mask_token_of_the_text_is_noted(arguments, finished, tmp_path, capsys):
    shutil.copytree(finished / "dflash", tmp_path / "run")
    states = StoredHiddenStates(tmp_path / "run" / "hidden_states")
    used = int(states[states.indices("train")[0]].input_ids[0])
    for mask, said in ((used, True), (None, False)):
        options = [
            *METHODS["dflash"],
            f"drafter.block.mask_token_id={'null' if mask is None else mask}",
            "trainer.max_steps=1",
        ]
        assert cli.main(["fit", *arguments, *options, f"run.dir={tmp_path / 'run'}"]) == 0
        assert (f"the mask token {mask} occurs" in capsys.readouterr().err) == said


def test_what_cannot_be_is_said_at_once(arguments, finished, tmp_path, capsys):
    cases = [
        (
            "fit",
            [*METHODS["dflash"], "decoding.num_speculative_tokens=5"],
            "gives 4 drafts a round (drafter.block.block_size=5)",
        ),
        (
            "fit",
            ["drafter=dflash", "drafter.autoregressive.ttt_steps=5"],
            "drafter.method=dflash does not read drafter.autoregressive",
        ),
        ("fit", ["drafter=dflash2"], "dflash2 drafts from the whole vocabulary"),
        ("fit", ["drafter=dspark", "drafter.block.mask_token_id=99999"], "outside the target's vocabulary"),
        (
            "fit",
            [f"drafter.path={finished / 'dflash' / 'drafter'}", "drafter=dspark"],
            "holds a dflash drafter: set drafter.method=dflash",
        ),
        (
            "fit",
            ["drafter=dflash", "sampling.max_new_tokens=1", "decoding.num_speculative_tokens=1"],
            "answers have 2 tokens at least",
        ),
        *(
            (
                "fit",
                [f"drafter.path={finished / 'dspark' / 'drafter'}", "drafter=dspark", f"drafter.{setting}"],
                "which stays",
            )
            for setting in _OTHER_BLOCKS
        ),
        (
            "eval",
            [f"drafter.path={finished / 'dflash' / 'drafter'}", "drafter=dflash", "decoding.num_speculative_tokens=5"],
            "gives 4 a round, lower it",
        ),
    ]
    for command, options, message in cases:
        assert cli.main([command, *arguments, *options, f"run.dir={tmp_path / 'run'}"]) == 2
        assert message in capsys.readouterr().err
        assert not Path(tmp_path / "run" / "responses").exists()


def test_one_sweep_takes_drafters_of_several_runs(finished, tmp_path, capsys):
    """Each as its own run measured it; more drafts than a drafter has slots for are left out."""
    run = Path(shutil.copytree(finished / "dflash", tmp_path / "run"))
    command = [
        *("eval", "sweep", f"run.dir={run}", "sweep.num_speculative_tokens=[3,4,6]", "suite.max_new_tokens=12"),
        *("sweep.methods=[none,dflash,dspark,dflash2]", f"sweep.drafters=[{finished / 'dspark'}]"),
    ]
    both = f"sweep.drafters=[{finished / 'dspark'},{finished / 'dflash2' / 'drafter'}]"
    assert cli.main([*command, both]) == 0
    assert capsys.readouterr().err.count("4 drafts a round: it is not measured with more") == 3
    found = {(r.method, r.num_speculative_tokens): r for r in read_records(run / "eval" / "sweep")}
    assert found.keys() == {("none", 0), *((method, n) for method in METHODS for n in (3, 4))}
    for method in METHODS:
        alone = read_record(finished / method / "eval" / f"heldout-hf-{method}-n3-t0.json")
        swept = found[method, 3]
        assert (swept.rounds, swept.accepted_tokens) == (alone.rounds, alone.accepted_tokens)
        assert swept.simulated_acceptance_length == pytest.approx(swept.acceptance_length, abs=1e-6)
        own = run if method == "dflash" else finished / method
        assert swept.drafter == str(own / "drafter") and swept.output_identical is True
    assert cli.main([*command, both]) == 0
    assert "7 cells, 7 of them measured already" in capsys.readouterr().err
    for wrong, named in (
        ([], "sweep.methods: dflash2 is neither"),
        ([f"sweep.drafters=[{finished / 'dflash'}]"], "are both dflash drafters"),
        ([f"sweep.drafters=[{tmp_path}]"], f"sweep.drafters: {tmp_path} holds no drafter"),
        ([both, "sweep.num_speculative_tokens=[5,6]"], "gives 4 a round"),
    ):
        assert cli.main([*command, *wrong]) == 2
        assert named in capsys.readouterr().err
