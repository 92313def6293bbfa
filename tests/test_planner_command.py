"""The plan verb's functions: plan, levers, emitted values, search, JSON, tables, picture."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from rich.console import Console

from pdlaunch import verb_plan
from pdlaunch.errors import PlanError
from pdlaunch.planner import command
from pdlaunch.planner.emit import capture_sizes, captured
from pdlaunch.planner.roleplan import Plan
from pdlaunch.planner.shape import MemoryFacts, RoleShape
from pdlaunch.planner.svg import ladder_parts, request_parts
from pdlaunch.planner.topology import shapes
from tests.planner.models import GEMMA4, QWEN_POST, model

MEMORY = MemoryFacts(non_torch_gib=0.7, peak_activation_gib=1.0, graph_estimate_gib=1.5, graph_actual_gib=1.0, cuda_context_gib=2.5)
GEMMA = RoleShape(max_model_len=9216, block_size=64, gpu_memory_gib=139.8, memory=MEMORY)


@pytest.fixture(scope="module")
def gemma() -> Plan:
    roles = {"prefill": GEMMA.with_changes(tensor_parallel=4), "decode": GEMMA.with_changes(tensor_parallel=8)}
    return command.plan(model("gemma-4-31b-it"), roles, concurrency=64)


def qwen(**changes: object) -> Plan:
    shape = RoleShape().with_changes(**QWEN_POST, tensor_parallel=8, kv_cache_memory_bytes=83 << 30, **changes)
    return command.plan(model("qwen3.8-2.4t"), {"decode": shape}, tokens=10240)


def text_of(result: command.Result) -> str:
    out = io.StringIO()
    command.render(result, Console(file=out, width=200))
    return out.getvalue()


def test_parts_of_a_request_add_up_to_its_price(gemma: Plan) -> None:
    for role in [*gemma.roles.values(), *qwen(speculative_tokens=3).roles.values()]:
        assert sum(kind.admission_bytes for kind in role.kinds) == role.admission.bytes
        assert sum(kind.steady_bytes for kind in role.kinds) == role.steady.bytes


def test_copied_heads_have_their_price(gemma: Plan) -> None:
    """At TP8 every global head is on two ranks: half of 180 of the 286.25 MiB that a request holds."""
    decode = gemma.roles["decode"]
    assert decode.copied_share == pytest.approx(90 / 286.25)
    assert decode.copied_requests is not None
    assert decode.copied_requests > 0
    assert gemma.roles["prefill"].copied_share == 0


def test_mtp_cost() -> None:
    cost = qwen(speculative_tokens=3).roles["decode"].mtp
    assert cost is not None
    assert (cost.block_before, cost.block_after) == (1056, 1088)
    assert cost.bytes_after / cost.bytes_before > 1.7
    assert cost.concurrency_after == pytest.approx(303, abs=0.1)
    assert qwen().roles["decode"].mtp is None


def test_levers_are_priced_in_requests(gemma: Plan) -> None:
    levers = {lever.change: lever for lever in gemma.roles["decode"].levers}
    off = levers["hybrid_kv_cache_manager: false"]
    assert off.held is not None
    assert off.held < -100
    assert off.price_percent == pytest.approx(277.3, abs=0.1)
    refused = {lever.change: lever.refused for lever in qwen().roles["decode"].levers if lever.refused}
    assert "cannot run" in refused["hybrid_kv_cache_manager: false"]


def test_emitted_values_apply_to_a_recipe(gemma: Plan) -> None:
    assert gemma.emitted is not None
    patch = yaml.safe_load(gemma.emitted.yaml())
    assert patch == gemma.emitted.patch()
    assert patch["engine_args"] == {"block_size": 64}
    assert patch["engines"]["decode"]["engine_args"] == {"max_num_seqs": 80, "max_num_batched_tokens": 96}
    assert patch["engines"]["decode"]["extra_args"] == ["--max-cudagraph-capture-size", "80"]
    assert patch["engines"]["prefill"]["engine_args"] == {"max_num_batched_tokens": 18432}


def test_emitted_sequences_never_exceed_what_fits() -> None:
    small = GEMMA.with_changes(gpu_memory_gib=20.0, tensor_parallel=8)
    plan = command.plan(model("gemma-4-31b-it"), {"prefill": small, "decode": small}, concurrency=4096)
    assert plan.emitted is not None
    decode = plan.roles["decode"]
    assert decode.capacity is not None
    assert plan.emitted.roles["decode"]["max_num_seqs"][0] == decode.capacity.requests(9216, held=True)
    assert "concurrency-above-capacity" in [finding.code for finding in plan.findings]


def test_one_block_size_is_emitted_for_unequal_roles() -> None:
    base = RoleShape().with_changes(**QWEN_POST, speculative_tokens=3)
    roles = {"prefill": base.with_changes(tensor_parallel=4), "decode": base.with_changes(tensor_parallel=8)}
    plan = command.plan(model("qwen3.8-2.4t"), roles)
    assert plan.emitted is not None
    assert plan.emitted.shared["block_size"] == (2176, "one size on both roles; vLLM alone: (2176, 1088)")


@pytest.mark.parametrize(("largest", "sizes"), [(1, (1,)), (5, (1, 2, 4)), (24, (1, 2, 4, 8, 16, 24)), (272, None), (4, (1, 2, 4))])
def test_capture_sizes(largest: int, sizes: tuple[int, ...] | None) -> None:
    found = capture_sizes(largest)
    if sizes is None:
        assert found[-3:] == (248, 256, 272)
    else:
        assert found == sizes


@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (3, 4), (5, 8), (65, 72), (257, 272), (656, 656), (5000, 1024)])
def test_captured_batch_holds_every_sequence(tokens: int, size: int) -> None:
    assert captured(tokens) == size
    assert capture_sizes(size)[-1] == size


def test_tables_say_what_surprises(gemma: Plan) -> None:
    text = text_of(gemma)
    for words in (
        "16,384 tokens in flight",
        "inside the part outside the share",
        "copies of KV heads",
        "Maximum concurrency for 9,216 tokens per request",
        "over-reserved by 0.50 GiB",
        "stock vLLM refuses this pair",
        "times too few requests",
        "max_num_seqs: 80",
    ):
        assert words in text, words
    hybrid = text_of(qwen(speculative_tokens=3))
    assert "so the block is 1,088 tokens" in hybrid
    assert "block 1056 -> 1088" in hybrid


def test_json_of_a_plan(gemma: Plan) -> None:
    found = json.loads(json.dumps(command.to_json(gemma)))
    assert found["roles"]["decode"]["capacity"]["line"].startswith("KV cache size: ")
    assert found["roles"]["decode"]["steady"]["mib"] == 286.25
    assert found["findings"][0]["code"] == "mixed-heads"
    assert found["transfer"]["total_bytes"] == found["transfer"]["bytes_per_rank"] * 8
    assert found["recipe_patch"]["engines"]["decode"]["engine_args"]["max_num_seqs"] == 80


def test_picture_is_valid_and_its_ladder_closes(gemma: Plan) -> None:
    root = ElementTree.fromstring(command.picture(gemma))
    assert root.tag.endswith("svg")
    words = " ".join(root.itertext())
    assert "KV cache" in words
    assert "sliding(1024) 16 x 256" in words
    for role in gemma.roles.values():
        assert sum(value for _, value in ladder_parts(role)) == pytest.approx(139.8, abs=1e-6)
        assert sum(value for _, value in request_parts(role, held=True)) == pytest.approx(role.steady.mib)


def test_unknown_memory_is_said_not_guessed() -> None:
    plan = command.plan(model("gemma-4-31b-it"), {"decode": RoleShape(max_model_len=9216)})
    role = plan.roles["decode"]
    assert role.book is None
    assert role.capacity is None
    assert all(lever.held is None for lever in role.levers)
    upper = command.plan(model("gemma-4-31b-it"), {"decode": RoleShape(max_model_len=9216, gpu_memory_gib=139.8)})
    assert "upper bound" in text_of(upper)


def test_a_role_that_does_not_fit_says_what_would() -> None:
    tiny = GEMMA.with_changes(gpu_memory_gib=None, kv_cache_memory_bytes=1 << 30)
    plan = command.plan(model("gemma-4-31b-it"), {"decode": tiny})
    assert "max_model_len of at most" in plan.roles["decode"].refused
    assert "does not start" in text_of(plan)


def test_search_ranks_by_requests_per_gpu_and_by_concurrency() -> None:
    base = GEMMA.with_changes(memory=MemoryFacts(None, 0.7, 1.0, 1.5))
    roles = {"prefill": base, "decode": base}
    found = command.find(model("gemma-4-31b-it"), roles, 16, tokens=9216)
    scores = [item.held_per_gpu for item in found.roles["decode"] if not item.refused]
    assert scores == sorted(scores, reverse=True)
    assert all(item.gpus <= 16 for item in found.roles["decode"])
    by_size = command.find(model("gemma-4-31b-it"), {"decode": base}, 16, tokens=9216, by="concurrency").roles["decode"]
    assert by_size[0].engine_held == max(item.engine_held for item in by_size)
    assert all(pair.gpus <= 16 for pair in found.pairs)
    assert found.pairs == sorted(found.pairs, key=lambda pair: (bool(pair.errors), -pair.held_per_gpu, pair.gpus))
    assert "requests of 9,216 tokens, up to 16 GPUs" in text_of(found)
    assert json.loads(json.dumps(command.to_json(found)))["pairs"]


def test_search_covers_expert_parallelism_where_there_are_experts() -> None:
    names = [shape.expert_parallel for shape in shapes(RoleShape(), 8, experts=True)]
    assert names.count(True) == len(names) // 2
    base = RoleShape(max_model_len=9216, gpu_memory_gib=79.1)
    found = command.find(model("qwen3-next-80b-a3b"), {"decode": base}, 8, tokens=9216).roles["decode"]
    assert any(item.name.endswith("+EP") for item in found)
    assert found[-1].refused  # one GPU cannot hold the weights


def test_search_without_memory_is_refused() -> None:
    with pytest.raises(PlanError, match="GPU memory is unknown"):
        command.find(model("gemma-4-31b-it"), {"decode": RoleShape()}, 8)


def test_gpu_names_and_checkpoints(tmp_path: Path) -> None:
    assert command.gpu_memory("GB300") == 276.62
    assert command.gpu_memory("NVIDIA H200") == command.gpu_memory("h200")
    with pytest.raises(PlanError, match="known: "):
        command.gpu_memory("H900")
    assert command.checkpoint_bytes(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"x" * 10)
    assert command.checkpoint_bytes(tmp_path) == 10
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 99}}))
    assert command.checkpoint_bytes(tmp_path) == 99


def test_what_is_given_of_memory_is_laid_over_the_rest() -> None:
    assert command.with_memory(GEMMA, None, MemoryFacts()) == GEMMA
    changed = command.with_memory(GEMMA, 80.0, MemoryFacts(graph_actual_gib=9.0))
    assert (changed.gpu_memory_gib, changed.memory.graph_actual_gib, changed.memory.non_torch_gib) == (80.0, 9.0, 0.7)


def test_the_checkpoint_beside_the_config_sizes_the_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(GEMMA4.read_text())
    counted = command.model_of(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 7 << 30}}))
    plan = command.plan(command.model_of(tmp_path), {"decode": GEMMA})
    book = plan.roles["decode"].book
    assert counted.checkpoint_bytes is None
    assert book is not None
    assert {row.name: row for row in book.rows}["weights"].gib == pytest.approx(-7)
    assert "checkpoint" in {row.name: row for row in book.rows}["weights"].note


def test_planning_imports_neither_vllm_nor_rich_nor_torch() -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom pdlaunch.planner import command\n"
        f"from pdlaunch.planner.shape import RoleShape\nm = command.model_of(Path({str(GEMMA4)!r}))\n"
        "command.to_json(command.plan(m, {'decode': RoleShape(max_model_len=9216)}))\n"
        "print(sorted({'vllm', 'torch', 'rich', 'yaml', 'click'} & set(sys.modules)))\n"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


CONFIG = str(verb_plan.ROOT / "models" / "configs" / "gemma-4-31b-it.json")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--tp", "-4"),
        ("--tp", "0"),
        ("--decode-tp", "0"),
        ("--pp", "0"),
        ("--dp", "-1"),
        ("--max-model-len", "0"),
        ("--max-num-batched-tokens", "0"),
        ("--max-num-seqs", "0"),
        ("--block-size", "0"),
        ("--mtp", "-1"),
        ("--gpu-memory-gib", "-3"),
        ("--gpu-memory-gib", "0"),
        ("--gpu-memory-gib", "nan"),
        ("--gpu-memory-gib", "inf"),
        ("--gpu-memory-utilization", "7"),
        ("--gpu-memory-utilization", "0"),
        ("--gpu-memory-utilization", "nan"),
        ("--weights-gib", "-1"),
        ("--tokens", "-5"),
        ("--tokens", "0"),
        ("--tokens", "9" * 30),
        ("--concurrency", "-1"),
        ("--search", "0"),
    ],
)
def test_a_number_that_cannot_be_is_refused(option: str, value: str) -> None:
    done = CliRunner().invoke(verb_plan.plan, ["--config", CONFIG, option, value])
    assert done.exit_code == 2
    assert done.output.count("Error:") == 1
    assert option in done.output


@pytest.mark.parametrize(
    "changes",
    [
        {"tensor_parallel": 0},
        {"data_parallel": -1},
        {"block_size": 0},
        {"max_num_seqs": 0},
        {"speculative_tokens": -1},
        {"gpu_memory_utilization": 7.0},
        {"gpu_memory_utilization": float("nan")},
        {"gpu_memory_gib": -3.0},
        {"gpu_memory_gib": float("inf")},
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(PlanError, match=f"{next(iter(changes))} is"):
        GEMMA.with_changes(**changes)


def test_a_plan_of_no_tokens_or_no_gpus_is_refused() -> None:
    roles = {"decode": GEMMA}
    with pytest.raises(PlanError, match="tokens is 0"):
        command.plan(model("gemma-4-31b-it"), roles, tokens=0)
    with pytest.raises(PlanError, match="concurrency is -1"):
        command.plan(model("gemma-4-31b-it"), roles, concurrency=-1)
    with pytest.raises(PlanError, match="gpus is 0"):
        command.find(model("gemma-4-31b-it"), roles, 0)


def test_the_headline_names_the_dtype_that_is_served(gemma: Plan) -> None:
    assert "60 layers, bfloat16" in text_of(gemma).splitlines()[0]
    served = command.plan(model("gemma-4-31b-it"), {"decode": RoleShape(max_model_len=9216, dtype="float32")})
    assert "60 layers, float32" in text_of(served).splitlines()[0]


def test_every_column_of_a_search_has_a_name() -> None:
    found = command.find(model("gemma-4-31b-it"), {"decode": GEMMA}, 2)
    assert "refused because" in text_of(found)


@pytest.mark.parametrize("option", ["--svg", "--patch"])
def test_a_plan_replaces_no_file(tmp_path: Path, option: str) -> None:
    kept = tmp_path / "recipe.yaml"
    kept.write_text("mine", encoding="utf-8")
    done = CliRunner().invoke(verb_plan.plan, ["--config", CONFIG, option, str(kept)])
    assert isinstance(done.exception, PlanError)
    assert "is there already" in str(done.exception)
    assert kept.read_text(encoding="utf-8") == "mine"


def test_the_mocker_has_no_cache_to_price() -> None:
    done = CliRunner().invoke(verb_plan.plan, ["--recipe", "mocker-p1d1"])
    assert isinstance(done.exception, PlanError)
    assert "no cache to price" in str(done.exception)
