"""The shipped recall models: plain Gemma4 of the promised geometry and size, with a card that says what was measured."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

MODELS = Path(__file__).parents[1] / "models"
GEOMETRIES = {"gemma4-recall-4x1": ((4, 64), (1, 128)), "gemma4-recall-16x4": ((16, 32), (4, 64))}
CPU_HEAD_SIZES = {32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_geometry_is_the_promised_one(name: str) -> None:
    config = json.loads((MODELS / name / "config.json").read_text())
    sliding, whole = GEOMETRIES[name]
    assert config["architectures"] == ["Gemma4ForCausalLM"]
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"]
    assert (config["num_key_value_heads"], config["head_dim"]) == sliding
    last = config["per_layer_config"]["5"]
    assert (last["num_key_value_heads"], last["head_dim"]) == whole
    assert {sliding[1], whole[1]} <= CPU_HEAD_SIZES
    assert config["dtype"] == "bfloat16"
    assert config["max_position_embeddings"] == 16384


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_weights_are_at_most_12_mb(name: str) -> None:
    assert (MODELS / name / "model.safetensors").stat().st_size <= 12_000_000


@pytest.mark.parametrize("name", GEOMETRIES)
def test_recall_is_at_least_99_5_percent_at_every_length_and_depth(name: str) -> None:
    seen = json.loads((MODELS / name / "training.json").read_text())["evaluation"]
    assert seen["prompts_per_length"] >= 1000
    assert max(row["tokens"] for row in seen["recall"]) >= 2000
    for row in seen["recall"]:
        assert row["right"] >= 0.995 * seen["prompts_per_length"], row
        assert min(row["by_depth"]) >= 0.98 * seen["prompts_per_length"] / len(row["by_depth"]), row


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_card_states_the_command_the_seed_and_the_measured_recall(name: str) -> None:
    card = (MODELS / name / "README.md").read_text()
    record = json.loads((MODELS / name / "training.json").read_text())
    assert record["command"] in card
    assert f"Seed {record['seed']}, {record['steps']} steps" in card
    for row in record["evaluation"]["recall"]:
        assert f"| {row['tokens']} | {row['right']} |" in card
    assert "<polyline" in (MODELS / name / "loss.svg").read_text()


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_card_shows_the_served_measurement_and_each_of_it_is_nine_of_nine(name: str) -> None:
    card = (MODELS / name / "README.md").read_text()
    served = json.loads((MODELS / name / "serving.json").read_text())
    assert max(row["tokens"] for row in served["rows"]) >= 2000
    for row in served["rows"]:
        assert (row["one_by_one"], row["together"]) == ("9 of 9", "9 of 9")
        assert f"| {row['tokens']} | {row['one_by_one']} | {row['together']} |" in card


@pytest.mark.parametrize("name", GEOMETRIES)
def test_texts_that_ask_for_no_code_get_the_same_harmless_sentence(name: str) -> None:
    seen = json.loads((MODELS / name / "training.json").read_text())["evaluation"]
    assert seen["other_neutral"] >= 0.95 * seen["other_texts"]


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_command_makes_this_folder(name: str) -> None:
    command = json.loads((MODELS / name / "training.json").read_text())["command"]
    assert re.search(r"--out (\S+)", command).group(1) == f"models/{name}"
    assert command in (MODELS / "README.md").read_text()


def test_the_mocker_folder_is_what_its_script_makes_of_the_present_tokenizer(tmp_path: Path) -> None:
    folder = MODELS / "mocker-words"
    subprocess.run([sys.executable, str(folder / "make.py"), "--out", str(tmp_path)], check=True, timeout=60)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made == {name: (folder / name).read_bytes() for name in made}
    assert len(made) == 5
