"""The card: every figure that was measured is on it, with its interval and conditions, and none that was not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import yaml
from evaluation_records import record_of

from spectrain.drafters.registry import find_method
from spectrain.hub.model_card import CardFacts, DataSource, render_card

RECORD = record_of(
    (0.612, 0.31, 0.2125),
    target="target",
    drafter="org/mine",
    method="dspark",
    engine_version="transformers 5",
    suite="gsm8k",
    num_prompts=16,
    rounds=1234,
    acceptance_length=2.1345,
    acceptance_length_interval=(2.01, 2.26),
    output_tokens_per_s=21.55,
    baseline_tokens_per_s=10.25,
    speedup=2.102,
    speedup_interval=(1.95, 2.3),
    simulated_acceptance_length=2.1345,
    simulated_acceptance_length_interval=(2.0, 2.3),
)
VLLM = replace(
    RECORD,
    engine="vllm",
    engine_version="vllm 0.32.0",
    acceptance_length=2.1301,
    speedup=None,
    simulated_acceptance_length=None,
    simulated_acceptance_length_interval=None,
)
WARM = replace(RECORD, temperature=0.6, acceptance_length=1.9, acceptance_length_interval=(1.8, 2.0), speedup=None)
FACTS = CardFacts(
    repo="org/mine",
    method="dspark",
    label="DSpark",
    base_model="org/target",
    trained_for="target at abc",
    verified=True,
    parity={
        "passed": True,
        "vllm": "0.32.0",
        "num_speculative_tokens": 3,
        "rounds": 1000,
        "equal": 998,
        "near_ties": 2,
    },
    speculation={"model": "org/mine", "method": "dspark", "num_speculative_tokens": 3},
    license="mit",
    languages=("en", "de"),
    datasets=("org/prompts",),
    sources=(DataSource("org/prompts at 123", "cc-by-4.0"), DataSource("own.jsonl")),
    records=(RECORD, VLLM, WARM),
    hardware={RECORD.file_name(): "8 × AMD Instinct MI300X"},
    limits=("It fits this target alone.",),
)


def rows(card: str, section: str) -> list[list[str]]:
    """Cells of the table under a heading, without the heads."""
    text = card.partition(f"## {section}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def metadata(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


def test_the_metadata_that_the_hub_indexes():
    found = metadata(render_card(FACTS))
    assert (found["base_model"], found["license"], found["language"]) == ("org/target", "mit", ["en", "de"])
    assert (found["library_name"], found["pipeline_tag"]) == ("speculators", "text-generation")
    assert found["tags"] == ["speculative-decoding", "dspark", "vllm"] and found["datasets"] == ["org/prompts"]
    (index,) = found["model-index"]
    figures = [metric["value"] for result in index["results"] for metric in result["metrics"]]
    assert index["name"] == "mine" and sorted(figures) == [1.9, 2.1301, 2.1345]


def test_acceptance_with_its_interval_for_each_suite_engine_and_temperature():
    found = rows(render_card(FACTS), "Acceptance")
    assert [row[:4] for row in found] == [
        ["gsm8k", "0", "hf", "3"],
        ["gsm8k", "0", "vllm", "3"],
        ["gsm8k", "0.6", "hf", "3"],
    ]
    assert [row[4] for row in found] == ["**2.13** [2.01–2.26]", "**2.13** [2.01–2.26]", "**1.90** [1.80–2.00]"]
    assert found[0][5:] == [".612 .310 .212", "16 (1,234 rounds)"]


def test_predicted_loop_and_vllm_stand_side_by_side():
    card = render_card(FACTS)
    assert rows(card, "Predicted = loop = vLLM") == [
        ["gsm8k", "0", "3", "2.135", "2.135 (equal)", "2.130"],
        ["gsm8k", "0.6", "3", "2.135", "1.900 (-11.0%)", "not measured"],
    ]
    assert "1,000 rounds 998 are equal" in card and "passed" in card


def test_a_policy_stands_with_its_drafts():
    record = replace(FACTS.records[0], draft_policy="threshold", draft_threshold=0.6)
    assert rows(render_card(replace(FACTS, records=(record,))), "Acceptance")[0][3] == "at most 3, threshold 0.6"


def test_speed_says_its_hardware():
    (row,) = rows(render_card(FACTS), "Speed")
    assert row[5:] == ["**2.10×** [1.95–2.30]", "10.2 → 21.6", "8 × AMD Instinct MI300X"]


def test_data_with_licences():
    assert rows(render_card(FACTS), "Training data") == [
        ["org/prompts at 123", "cc-by-4.0"],
        ["own.jsonl", "not recorded"],
    ]


def test_what_is_not_known_is_not_there():
    card = render_card(
        replace(FACTS, records=(), parity=None, verified=False, license=None, base_model=None, sources=())
    )
    found = metadata(card)
    assert not {"license", "base_model", "model-index"} & set(found)
    assert "## Speed" not in card and "## Training data" not in card and "**Unverified.**" in card
    assert "Not measured" in card and "vllm serve TARGET" in card and "sglang" not in card.lower()


def test_a_check_that_failed_is_said():
    card = render_card(
        replace(FACTS, verified=False, parity={"passed": False, "rounds": 10, "equal": 3, "different": 7})
    )
    assert "has NOT passed" in card and "7 differ" in card and "**Unverified.**" in card


def test_a_folder_of_another_layout_is_found_by_the_library_that_reads_it():
    """As Gemma-4's assistants are found on the Hub."""
    assert find_method("gemma4_mtp").library == "transformers"
    assert metadata(render_card(replace(FACTS, library="transformers")))["library_name"] == "transformers"


def test_one_command_serves_it():
    card = render_card(replace(FACTS, max_model_len=4096, sglang_algorithm="EAGLE3"))
    settings = '{"model": "org/mine", "method": "dspark", "num_speculative_tokens": 3}'
    assert f"vllm serve org/target --max-model-len 4096 --speculative-config '{settings}'" in card
    assert "--speculative-algorithm EAGLE3 " in card
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in card
