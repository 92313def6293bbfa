"""Command lines and environments of the engines."""

from __future__ import annotations

import json
import re

import pytest

from pdlaunch.node.spec import EngineSpec
from tests.golden_cases import ROOT, build


def engine(name: str, role: str, site: str = "local", *settings: str) -> EngineSpec:
    return build(name, site, settings).spec.engines_of(role)[0]  # type: ignore[arg-type]


def flag(found: EngineSpec, name: str) -> str:
    argv = found.ranks[0].argv
    return argv[argv.index(name) + 1]


def test_kv_transfer_states_role_and_failure_policy() -> None:
    for role, kv_role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        config = json.loads(
            flag(engine("tiny-p1d2", role, "local", "kv_connector_extra_config={kv_lease_duration: 60}"), "--kv-transfer-config")
        )
        assert config == {
            "kv_connector": "NixlConnector",
            "kv_role": kv_role,
            "kv_load_failure_policy": "fail",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"kv_lease_duration": 60},
        }
    assert "kv_buffer_device" not in flag(engine("gemma4-p4d8", "decode", "example"), "--kv-transfer-config")
    assert "--kv-transfer-config" not in engine("tiny-agg", "agg").ranks[0].argv


def test_planes_are_named_and_addresses_are_the_nodes_own() -> None:
    found = engine("tiny-p1d1", "decode")
    assert flag(found, "--event-plane") == "nats"
    assert flag(found, "--request-plane") == "tcp"
    for name in (
        "DYN_SYSTEM_HOST",
        "DYN_TCP_RPC_HOST",
        "DYN_TCP_RESPONSE_STREAM_HOST",
        "DYN_EVENT_PLANE_HOST",
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
    ):
        assert found.env[name] == "%{node_ip}"
    assert found.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "%{side_channel_port}"
    assert found.env["DYN_SYSTEM_PORT"] == "%{system_port}"
    assert found.env["NIXL_PTHR_DELAY_US"] == "10000"
    assert "0.0.0.0" not in json.dumps([found.env, found.ranks[0].argv])


def test_parsers_go_to_decode_only() -> None:
    assert flag(engine("gemma4-p4d8", "decode", "example"), "--dyn-tool-call-parser") == "gemma4"
    assert "--dyn-tool-call-parser" not in engine("gemma4-p4d8", "prefill", "example").ranks[0].argv


def test_control_engine_is_plain_vllm_serve_without_dynamo() -> None:
    found = engine("tiny-p1d2", "control", "local", "engines.control={tensor_parallel: 1}", "agreement={prompts: 2, prompt_tokens: [300]}")
    assert found.kind == "vllm.serve"
    assert found.ranks[0].argv[1:4] == ("-m", "vllm.entrypoints.cli.main", "serve")
    assert flag(found, "--port") == "%{serve_port}"
    assert not [name for name in found.env if name.startswith(("DYN_", "ETCD_END", "NATS"))]
    assert "--kv-transfer-config" not in found.ranks[0].argv


def test_engine_args_become_flags_and_extra_args_come_last() -> None:
    found = engine(
        "tiny-p1d1",
        "decode",
        "local",
        "engines.decode.extra_args=[--max-logprobs, '7']",
        "extra_args=[--enable-log-requests]",
        "engine_args.gpu_memory_utilization=0.5",
        "engine_args.async_scheduling=false",
        "engine_args.seed=3",
    )
    assert found.ranks[0].argv[-3:] == ("--enable-log-requests", "--max-logprobs", "7")
    assert flag(found, "--kv-cache-memory-bytes") == str(128 * 1024 * 1024)
    assert flag(found, "--gpu-memory-utilization") == "0.5"
    for word in ("--no-async-scheduling", "--disable-hybrid-kv-cache-manager", "--no-enable-prefix-caching", "--enforce-eager"):
        assert word in found.ranks[0].argv


def test_environment_of_recipe_and_role_wins_over_the_sites() -> None:
    found = engine("tiny-p1d1", "decode", "local", "env={OMP_NUM_THREADS: '2', A: x}", "engines.decode.env={A: y}")
    assert (found.env["OMP_NUM_THREADS"], found.env["A"], found.env["UCX_NET_DEVICES"]) == ("2", "y", "lo")
    assert engine("tiny-p1d1", "prefill", "local", "engines.decode.env={A: y}").env.get("A") is None


def test_control_plane_keeps_its_data_in_the_jobs_folder() -> None:
    etcd, nats, frontend = build("tiny-p1d1", "local").spec.services
    assert etcd.argv[etcd.argv.index("--data-dir") + 1] == "%{tmp_dir}/etcd"
    assert nats.argv[nats.argv.index("-sd") + 1] == "%{tmp_dir}/nats"
    assert "-js" in nats.argv
    assert "2379" not in " ".join(etcd.argv)
    assert frontend.argv[frontend.argv.index("--router-mode") + 1] == "round-robin"
    assert [s.container for s in build("gemma4-p4d8", "example").spec.services] == [False, False, True]


@pytest.mark.parametrize(
    ("name", "mixed", "per_block"),
    [("tiny-p1d1", False, 11 * 65536), ("tiny-p1d2", True, 6 * 65536), ("tiny-p2d1", True, 11 * 65536)],
)
def test_prediction_and_mixed_heads(name: str, mixed: bool, per_block: int) -> None:
    """At TP1 the five sliding layers hold twice as much. Measured at TP2: 92,798,976 bytes = 2 ranks x 118 blocks x 6 x 65,536."""
    proof = build(name, "local").spec.proof
    assert proof.prediction is not None
    assert set(proof.prediction.groups[0].bytes_per_block_per_decode_rank) == {per_block}
    assert proof.mixed_heads is mixed


def test_log_patterns_fit_the_lines_that_the_patch_logs() -> None:
    """The formats are read from the patch itself, so that a changed log line fails here and not as a missing proof."""
    proof = build("tiny-p1d2", "local").spec.proof
    patch = (ROOT / "patches" / "vllm-0.31.0-nixl-per-region-kv-heads.patch").read_text(encoding="utf-8")
    added = "".join(line[1:] + "\n" for line in patch.splitlines() if line.startswith("+"))
    formats = {name: "".join(re.findall(r'"([^"]*)"', added.split(f"{name} = ")[1].split("\n\n")[0].split("\n_")[0].split("\nPLAN")[0]))
               for name in ("ACTIVE_LOG", "PLAN_LOG")}  # fmt: skip
    active = formats["ACTIVE_LOG"] % (1, 2, 6, "2x5,1x1")
    plan = formats["PLAN_LOG"] % ("engine-7", 1, 2, 1, 6, 5, 1, 393216)
    assert re.search(proof.log_patterns["active_line"], active)
    found = re.search(proof.log_patterns["plan_line"], plan)
    assert found is not None
    assert found.groupdict() == {"engine": "engine-7", "rank": "1/2"}
    assert build("tiny-p1d2-stock", "local").spec.proof.log_patterns == {}


def test_proof_names_hashes_of_patched_and_of_stock_files() -> None:
    patched, stock = (build(name, "local").spec.proof.file_sha256 for name in ("tiny-p1d2", "tiny-p1d2-stock"))
    assert set(patched) == set(stock)
    different = {path for path in patched if patched[path] != stock[path]}
    assert any(path.endswith("nixl/base_worker.py") for path in different)
    assert not any(path.startswith("nixl_cu12") for path in different)
    assert build("mocker-p1d1", "local").spec.proof.text_checked is False
