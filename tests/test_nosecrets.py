"""A secret in a recipe, a cluster file or --set is refused by every verb, and no message, hint or dry run repeats it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdlaunch import cluster, recipe
from pdlaunch.errors import RecipeError
from tests.golden_cases import ROOT
from tests.test_launch import launch

VALUE = "verysecret42"
SHAPED = "hf_" + "A1b2C3d4" * 4


@pytest.mark.parametrize("verb", [["check"], ["--dry-run"], ["render", "--out", "OUT"], ["plan"]], ids=lambda v: v[0])
@pytest.mark.parametrize("setting", [f"cluster.engine_env.HF_TOKEN={SHAPED}", f"env.OPENAI_API_KEY={VALUE}", f"env.ANY={SHAPED}"])
def test_no_verb_repeats_a_secret(tmp_path: Path, verb: list[str], setting: str) -> None:
    words = [str(tmp_path / "out") if w == "OUT" else w for w in verb]
    done = launch(*words, "--recipe", "gemma4-p4d8", "--cluster", "example", "--set", setting)
    assert done.returncode == 2, done.stdout
    assert f"--set {setting.split('=')[0]}: this looks like a secret" in done.stderr
    assert VALUE not in done.stdout + done.stderr
    assert SHAPED not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "setting",
    [
        f"env.HFTOKEN={VALUE}",
        f"env={{HF_TOKEN: {VALUE}}}",
        f"env.HF_TOKEN={{a: {VALUE}}}",
        f"env={{HF_TOKEN: {VALUE}",
        f"env=[{SHAPED}",
        f"engines.prefill.env.MY_PASSWORD=[{VALUE}]",
        f"extra_args=[--api-key, {VALUE}]",
        f"extra_args=[--hf-token={VALUE}]",
        f"api_key={VALUE}",
        f"name.token={VALUE}",
        f"nonsense={SHAPED}",
        f"load.x={SHAPED}",
        f"HF_TOKEN {VALUE}",
        SHAPED,
    ],
)
def test_no_refusal_repeats_it(setting: str) -> None:
    with pytest.raises(RecipeError) as e:
        recipe.load(ROOT / "recipes" / "tiny-p1d1.yaml", (setting,))
    assert VALUE not in str(e.value)
    assert SHAPED not in str(e.value)


@pytest.mark.parametrize("line", [f"hf_token: {VALUE}", f"engine_env: {{HF_TOKEN: [{VALUE}]}}", "engine_env: {MY_PASSWORD: 123456}"])
def test_a_file_is_refused_by_its_line(tmp_path: Path, line: str) -> None:
    text = "".join(x for x in (ROOT / "clusters" / "example.yaml").read_text(encoding="utf-8").splitlines(keepends=True)
                   if not x.startswith(("engine_env:", "  UCX", "  NCCL", "  ETCD")))  # fmt: skip
    path = tmp_path / "example.yaml"
    path.write_text(f"{text}{line}\n", encoding="utf-8")
    with pytest.raises(RecipeError, match="looks like a secret") as e:
        cluster.load(path)
    assert str(e.value).startswith(f"{path}:{len(text.splitlines()) + 1} ")
    assert VALUE not in str(e.value)
    assert "123456" not in str(e.value)


@pytest.mark.parametrize(
    "setting",
    [
        "load.0.slos_ms.time_to_first_token=1000",
        "recall.max_tokens=32",
        "extra_args=[--dbo-decode-token-threshold, '32', --no-allow-credentials, --seed-oss]",
        "env.TOKENIZERS_PARALLELISM='true'",
        "description=one token after the other",
    ],
)
def test_what_only_sounds_like_one_is_taken(setting: str) -> None:
    recipe.load(ROOT / "recipes" / "tiny-p1d1.yaml", (setting,))


def test_a_message_about_another_value_still_shows_it() -> None:
    with pytest.raises(RecipeError, match=r"--set recall.max_tokens=2: 2 is too small"):
        recipe.load(ROOT / "recipes" / "tiny-p1d1.yaml", ("recall.max_tokens=2",))
