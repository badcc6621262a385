"""The report page and the terminal table: complete, escaped, self-contained, and content with whatever is missing."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import io
import re
from functools import cache
from html.parser import HTMLParser

import pytest
from rich.console import Console

from spectrain.decoding.acceptance import Round, acceptance
from spectrain.evaluation.records import Conditions, EvaluationRecord, PromptResult, build_record
from spectrain.evaluation.reliability import ConfidenceStats
from spectrain.evaluation.report.html import ExampleText, ReportInputs, ServeCommand, render_report, write_report
from spectrain.evaluation.report.tables import evaluation_table

HOSTILE = '<script>alert("x")</script>&$a_b$\'<b>'


def record(
    method: str, accepted: list[list[int]], seconds: float, with_baseline: bool = True, **conditions: object
) -> EvaluationRecord:
    known = {
        "target": "tiny-target",
        "target_revision": "abc",
        "drafter": "runs/x/drafter" if method == "eagle3" else None,
        "method": method,
        "engine": "hf",
        "engine_version": "5.19",
        "suite": "heldout",
        "num_speculative_tokens": 0 if method == "none" else 3,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "proposal_policy": "greedy",
        "concurrency": 1,
    }
    drafted = 0 if method == "none" else 3
    results = [
        PromptResult(str(i), [Round(j, drafted, k) for j, k in enumerate(row)], range(10), seconds * (1 + 0.1 * i))
        for i, row in enumerate(accepted)
    ]
    plain = [PromptResult(str(i), [], range(10), 2.0 + 0.3 * i) for i in range(len(accepted))]
    simulated = acceptance([r.rounds for r in results]) if method == "eagle3" else None
    return build_record(Conditions(**(known | conditions)), results, plain if with_baseline else None, simulated)


RECORDS = (
    record("none", [[0] * 4, [0] * 4], 2.0, with_baseline=False),
    record("ngram", [[0, 1, 0], [2, 0]], 1.7),
    record("eagle3", [[3, 1, 0], [2, 1]], 1.25),
)
TRAINING = (
    *({"step": step, "loss": 5.0 / step, "lr": 1e-3, "accuracy_per_step": [0.1]} for step in range(1, 21)),
    {
        "step": 10,
        "simulated_acceptance_length": 1.5,
        "simulated_interval": [1.4, 1.6],
        "simulated_acceptance_length_by_n": {"1": 1.3, "2": 1.4, "10": 1.5},
    },
    {
        "step": 20,
        "simulated_acceptance_length": 1.7,
        "simulated_interval": [1.6, 1.8],
        "simulated_acceptance_length_by_n": {"1": 1.3, "2": 1.5, "10": 1.93},
    },
)
FULL = ReportInputs(
    title="my run",
    target="tiny-target",
    created="1 May 2030",
    records=RECORDS,
    training=TRAINING,
    examples=(
        ExampleText(
            "Say hello.", (("Hel", False), ("lo", True), (" world", True), ("!\n", False)), "example one", 1.75
        ),
    ),
    drafter_facts=(("taps", "2, 4, 6"),),
    data_facts=(("coverage", "98.7 %"),),
    serve_commands=(ServeCommand("with vLLM", "vllm serve tiny-target"),),
    config_yaml="drafter:\n  method: eagle3\n",
    versions={"torch": "2.13.0"},
    hardware={"processor": "two cores"},
)


@cache
def full_source() -> str:
    return render_report(FULL)


class Page(HTMLParser):
    """Tags that were opened and closed in order, the text outside figures and inside, and the text of every
    ``mark``.
    """

    VOID = frozenset({"meta", "link", "path", "use", "br", "rect"})

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open = []
        self.tags = []
        self.marks = []
        self.text = ""
        self.drawn = []
        self.attributes = []
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "mark":
            self.marks.append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        if "mark" in self.open:
            self.marks[-1] += data
        if "svg" in self.open:
            self.drawn.append(data)
        else:
            self.text += data


def labels(page: Page) -> list[str]:
    return [value for name, value in page.attributes if name == "aria-label"]


def test_full_page_shows_everything():
    page = Page(full_source())
    text = re.sub(r"\s+", " ", page.text)
    tau = 1 + 7 / 5
    assert f"With this drafter, tiny-target commits {tau:.2f} tokens per pass instead of 1" in text
    assert f"{RECORDS[2].speedup:.2f}×" in text
    assert f"{tau:.3f} → {tau:.3f}" in text
    assert "simulation predicted, the loop measured: equal" in text
    assert "identical, token for token" in text
    for expected in (
        "EAGLE-3 drafter",
        "n-gram",
        "no speculation",
        ".800 .400 .200",
        "2, 4, 6",
        "98.7 %",
        "vllm serve tiny-target",
    ):
        assert expected in text, expected
    for expected in (
        "method: eagle3",
        "2.13.0",
        "two cores",
        "1 May 2030",
        "3 draft tokens",
        "Say hello.",
        "τ 1.75",
        "2 of 4 tokens are accepted drafts",
    ):
        assert expected in text, expected


def test_policies_are_compared_per_batch_and_confidence_is_judged():
    stats = ConfidenceStats(
        50, (0.021, 0.033), (0.122, 0.144), (0.815, None), ((0.25, 0.5, 30), (0.9, 0.85, 20)), ((0.4, 0.5, 50),)
    )
    fixed = record("dspark", [[3, 1], [2, 1]], 1.25, drafter="d", concurrency=8)
    cut = record(
        "dspark", [[1, 1], [2, 1]], 1.0, drafter="d", concurrency=8, draft_policy="threshold", draft_threshold=0.3
    )
    alone = record("dspark", [[1, 1], [2, 1]], 1.0, drafter="d")
    records = [dataclasses.replace(fixed, confidence=stats), cut, alone]
    costs = [("8 at a time", [(8, 20.0), (16, 15.0), (32, 9.5)])]
    page = Page(render_report(ReportInputs(title="t", target="tiny-target", records=records, step_costs=costs)))
    text = re.sub(r"\s+", " ", page.text)
    assert "DSpark drafter, all drafts 8 2.75 3.00" in text
    assert "DSpark drafter, threshold 0.3 8 2.25 3.00" in text
    assert text.count("DSpark drafter, all drafts 1 ") == 0  # alone, nothing else was measured: no comparison
    assert "1 .021 .122 .815 2 .033 .144 –" in text
    spoken = labels(page)
    assert any("Steps per second, 8 at a time: 8: 20.0, 16: 15.0, 32: 9.5" in label for label in spoken)
    assert any(".25 came true .50, .90 came true .85" in label for label in spoken)


def test_accepted_drafts_are_marked_and_nothing_else():
    page = Page(full_source())
    assert page.marks[1:] == ["lo", " world"]  # the first mark is the key
    assert "Hello world!\n" in page.text


def test_figures_carry_the_figures_in_words():
    spoken = labels(Page(full_source()))
    assert len(spoken) == 7
    assert any("EAGLE-3 drafter 2.40" in label and "no speculation 1.00" in label for label in spoken)
    assert any(label.startswith("Conditional") and "EAGLE-3 drafter .80 .50 .50" in label for label in spoken)
    assert any("best 1.70 at step 20" in label for label in spoken)
    assert any(
        label.endswith("1: 1.30, 2: 1.50, 10: 1.93") for label in spoken
    )  # numbers in order, from the best evaluation


def test_page_loads_nothing_and_runs_its_own_script_alone():
    source = full_source()
    page = Page(source)
    assert not {"img", "iframe", "object", "embed"} & set(page.tags)
    (script,) = re.findall(r"<script>(.*?)</script>", source, flags=re.DOTALL)
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{allowed}'" in source and list(page.tags).count("script") == 1
    assert "script" not in Page(render_report(dataclasses.replace(FULL, examples=()))).tags
    for name, value in page.attributes:
        assert not name.startswith("on"), name
        if name in {"href", "src", "xlink:href", "srcset", "action"}:
            assert value.startswith("#") or value == "data:,", (name, value)
    assert "http" not in source.replace("http-equiv", "")
    assert "@import" not in source
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", source))
    assert "default-src 'none'" in html.unescape(source)


def test_figures_follow_the_readers_colours():
    source = full_source()
    figures = re.findall(r"<svg.*?</svg>", source, flags=re.DOTALL)
    drawn = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", " ".join(figures)))
    assert {"var(--accent)", "var(--plain)", "var(--muted)"} <= drawn
    assert all(colour == "none" or colour.startswith("var(--") for colour in drawn), drawn
    defined = set(re.findall(r"(--[a-z-]+):", source))
    assert {colour[4:-1] for colour in drawn if colour != "none"} <= defined


def test_every_text_is_escaped():
    inputs = dataclasses.replace(
        FULL,
        title=HOSTILE,
        target=HOSTILE,
        created=HOSTILE,
        records=[
            dataclasses.replace(RECORDS[1], method=HOSTILE, suite=HOSTILE),
            dataclasses.replace(RECORDS[2], method="x" + HOSTILE, suite=HOSTILE, target=HOSTILE),
        ],
        examples=[ExampleText(HOSTILE, [(HOSTILE, True), (HOSTILE, False)], HOSTILE)],
        drafter_facts=[(HOSTILE, HOSTILE)],
        data_facts=[(HOSTILE, HOSTILE)],
        serve_commands=[ServeCommand(HOSTILE, HOSTILE)],
        config_yaml=HOSTILE,
        versions={HOSTILE: HOSTILE},
        hardware={HOSTILE: HOSTILE},
    )
    page = Page(render_report(inputs))
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert page.text.count(HOSTILE) >= 20  # and each is shown as it was written
    assert page.marks[1:] == [HOSTILE]
    assert HOSTILE in page.drawn


@pytest.mark.parametrize(
    "name",
    [
        "created",
        "records",
        "training",
        "examples",
        "drafter_facts",
        "data_facts",
        "serve_commands",
        "config_yaml",
        "versions",
        "hardware",
    ],
)
def test_each_part_may_be_missing(name):
    # Figures take most of the time: they are drawn only where they are what is missing.
    base = FULL if name in {"records", "training"} else dataclasses.replace(FULL, records=(), training=())
    empty = type(getattr(base, name))()
    without, whole = Page(render_report(dataclasses.replace(base, **{name: empty}))), Page(render_report(base))
    assert len(without.text) < len(whole.text)
    assert "None" not in without.text


def test_bare_page_says_that_nothing_was_measured():
    page = Page(render_report(ReportInputs(title="bare", target="tiny-target")))
    assert "not measured yet" in page.text
    assert page.tags.count("section") == 0


def test_unmeasured_figures_are_dashes_not_numbers():
    bare = dataclasses.replace(
        record("eagle3", [[]], 1.0, with_baseline=False),
        acceptance_length_interval=None,
        simulated_acceptance_length=None,
        drafter="d",
    )
    assert bare.acceptance_length is None
    page = Page(render_report(ReportInputs(title="t", target="tiny-target", records=[bare])))
    assert "nan" not in page.text
    assert "None" not in page.text
    assert "simulated" not in page.text


def test_a_drafter_that_slows_down_or_changes_the_output_is_reported_as_such():
    slow = dataclasses.replace(
        RECORDS[2], speedup=0.8, speedup_interval=(0.7, 0.9), output_identical=False, simulated_acceptance_length=3.0
    )
    text = Page(render_report(dataclasses.replace(FULL, records=[*RECORDS[:2], slow]))).text
    assert "decodes at 0.80 times its own speed" in text
    assert "differs from plain greedy decoding" in text
    assert "-20.0%" in text


def test_resumed_training_draws_each_step_once_and_skips_what_is_not_a_number():
    resumed = [
        {"step": 1, "loss": 9.0},
        {"step": 2, "loss": 8.0},
        {"step": 2, "loss": 3.0},
        {"step": 3, "loss": float("nan")},
        {"lr": 1},
    ]
    (label,) = labels(Page(render_report(ReportInputs(title="t", target="tiny-target", training=resumed))))
    assert label == "Training loss over 2 steps, from 6 to 6"


def test_other_conditions_stay_out_of_the_figures_but_in_the_table():
    sampled = dataclasses.replace(RECORDS[2], temperature=1.0)
    page = Page(render_report(dataclasses.replace(FULL, records=[*RECORDS, sampled])))
    assert "EAGLE-3 drafter, T = 1" in page.text
    assert not any("T = 1" in label for label in labels(page))


def test_written_file_is_the_page_and_the_same_each_time(tmp_path):
    write_report(tmp_path / "new" / "report.html", FULL)
    assert (tmp_path / "new" / "report.html").read_text(encoding="utf-8") == full_source()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["report.html"]


def shown(records, width: int = 130) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(evaluation_table(records))
    return console.file.getvalue()


def test_terminal_table_has_a_row_per_method_and_the_simulation():
    lines = shown(RECORDS).splitlines()
    assert (
        lines[0] == "tiny-target · suite heldout · 2 prompts · 3 draft tokens · greedy · 1 at a time · engine hf (5.19)"
    )
    (plain,) = [line for line in lines if line.strip().startswith("no speculation")]
    assert plain.split()[2:] == ["1.00", "–", f"{RECORDS[0].output_tokens_per_s:.1f}", "–", "–"]
    (drafter,) = [line for line in lines if line.strip().startswith("EAGLE-3 drafter ")]
    for expected in (
        "2.40 (2.33–2.50)",
        ".800 .400 .200",
        f"{RECORDS[2].output_tokens_per_s:.1f}",
        f"{RECORDS[2].speedup:.2f}×",
        "yes",
    ):
        assert expected in drafter
    assert "EAGLE-3 drafter: simulation predicted τ = 2.400, the loop measured τ = 2.400: equal" in lines


def test_terminal_table_says_when_output_differs_and_fits_a_narrow_terminal():
    text = shown([*RECORDS[:2], dataclasses.replace(RECORDS[2], output_identical=False, method="[bold]x")], width=80)
    assert "NO" in text
    assert "[bold]x" in text  # names are text, not markup
    assert max(map(len, text.splitlines())) <= 80
