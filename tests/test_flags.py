"""extra_args and env: owned, abbreviated, misspelt and unknown ones are refused with the key or the nearest legal flag."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from pdlaunch import flags
from pdlaunch.errors import RecipeError, Where
from tests.envs import engine_python

ROOT = Path(__file__).resolve().parent.parent
WHERE = Where(Path("r.yaml"), 7, "extra_args[0]")


def check(*words: str, program: str = "dynamo.vllm") -> None:
    flags.check_args(program, words, [WHERE] * len(words))


def refused(*words: str, program: str = "dynamo.vllm") -> str:
    with pytest.raises(RecipeError) as e:
        check(*words, program=program)
    assert str(e.value).startswith("r.yaml:7 extra_args[0]: ")
    return str(e.value)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--max-loras", "4"),
        ("--max_loras=4",),
        ("--speculative-config", '{"method":"mtp","num_speculative_tokens":2}'),
        ("--speculative-config.method", "mtp", "--speculative-config.num_speculative_tokens=2"),
        ("-sc", '{"method": "mtp"}'),
        ("--enable-lora", "--max-cpu-loras", "2", "--no-enable-dbo"),
        ("--cudagraph-capture-sizes", "1", "2", "4", "--enable-eplb"),
        ("--long-prefill-token-threshold", "-1"),
    ],
)
def test_legal_flags_pass(words: tuple[str, ...]) -> None:
    check(*words)


@pytest.mark.parametrize(
    "words",
    [
        ("-tp4",),
        ("-tp=4",),
        ("-tp", "4"),
        ("--tensor-parallel-size", "4"),
        ("--tensor-parallel-size=4",),
        ("--tensor_parallel_size=4",),
        ("--tensor-parallel=4",),
        ("--tensor-p", "4"),
        ("--tens=4",),
    ],
)
def test_every_spelling_of_an_owned_flag_names_its_key(words: tuple[str, ...]) -> None:
    message = refused(*words)
    assert "--tensor-parallel-size" in message
    assert "use the key engines.<role>.tensor_parallel" in message


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("--kv-transfer-config.kv_role=kv_both", "kv_connector_extra_config"),
        ("--block-size=16", "engine_args.block_size"),
        ("--no-disable-hybrid-kv-cache-manager", "engine_args.hybrid_kv_cache_manager"),
        ("--device-memory-utilization=0.5", "engine_args.gpu_memory_utilization"),
        ("--nnodes=2", "from the placement"),
        ("-n2", "from the placement"),
        ("--headless", "from the placement"),
        ("--disaggregation-mode=decode", "leave it out"),
        ("--hf-token=x", "leave it out"),
    ],
)
def test_owned_flags(word: str, part: str) -> None:
    message = refused(word)
    assert "which the launcher owns" in message
    assert part in message


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--max-lorsa", "4"), "did you mean '--max-loras'?"),
        (("--enable-loras",), "did you mean '--enable-lora'?"),
        (("--nonsense-flag-of-nobody",), "pdlaunch/data/dynamo.vllm.json lists the legal ones"),
        (("--max-lo", "4"), "could be --max-logprobs, --max-lora-cls-labels, --max-lora-rank, --max-loras"),
        (("--speculative-conf", "{}"), "write --speculative-config"),
        (("--max-loras",), "needs a value"),
        (("--max-loras", "--enable-lora"), "needs a value"),
        (("--enable-lora=true",), "takes no value"),
        (("value",), "is no flag"),
        (("--enable-lora", "value"), "'value' is no flag"),
        (("--max-loras 4",), "unknown flag"),
        (("--kv-offloading-backend", "ntaive"), "one of"),
    ],
)
def test_wrong_flags(words: tuple[str, ...], part: str) -> None:
    assert part in refused(*words)


@pytest.mark.parametrize("program", ["dynamo.vllm", "vllm.serve"])
@pytest.mark.parametrize("words", [("--config=/x",), ("--config", "/x.yaml")])
def test_a_file_of_flags_is_refused_for_what_it_is(program: str, words: tuple[str, ...]) -> None:
    message = refused(*words, program=program)
    assert "file of further flags" in message
    assert "abbreviates" not in message
    assert "unknown flag" in refused(*words, program="dynamo.mocker")


def test_each_program_has_its_own_list() -> None:
    check("--uvicorn-log-level", "info", program="vllm.serve")
    assert "unknown flag" in refused("--uvicorn-log-level", "info")
    check("--decode-speedup-ratio", "2.0", program="dynamo.mocker")
    assert "unknown flag" in refused("--enable-lora", program="dynamo.mocker")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("DYN_VLLM_DISAGGREGATION_MODE", "owned by the launcher"),
        ("DYN_NAMESPACE", "owned by the launcher"),
        ("DYN_SOMETHING_NEW", "owned by the launcher"),
        ("ETCD_ENDPOINTS", "owned by the launcher"),
        ("CUDA_VISIBLE_DEVICES", "owned by the launcher"),
        ("NIXL_PTHR_DELAY_US", "use the key nixl_progress_thread_delay_us"),
        ("VLLM_CPU_KVCACHE_SPACE", "use the key engine_args.kv_cache_memory_mib"),
        ("DYN_TOOL_CALL_PARSER", "owned by the launcher"),
        ("", "is no name of a variable"),
        ("A=B", "is no name of a variable"),
        ("HF_TOKEN", "looks like a secret"),
        ("MY_API_KEY", "looks like a secret"),
    ],
)
def test_owned_variables(name: str, part: str) -> None:
    with pytest.raises(RecipeError) as e:
        flags.check_env(("dynamo.vllm",), {name: "x"}, {name: WHERE})
    assert part in str(e.value)


def test_free_variables_pass() -> None:
    env = {"UCX_TLS": "tcp", "NCCL_DEBUG": "INFO", "DYN_LOG": "debug", "VLLM_LOGGING_LEVEL": "DEBUG", "ETCD_LEASE_TTL": "60"}
    flags.check_env(("dynamo.vllm", "dynamo.frontend"), env, dict.fromkeys(env, WHERE))


def test_every_owned_flag_is_one_of_some_parser() -> None:
    """A flag that vLLM or Dynamo renames must not silently stop being owned."""
    known = {name for program in ("dynamo.vllm", "dynamo.mocker", "vllm.serve") for name in flags.flag_list(program).by_name}
    assert set(flags.OWNED_FLAGS) <= known
    assert known >= flags.LAUNCHER_FLAGS


@pytest.mark.engine
def test_committed_lists_are_what_the_pinned_parsers_say(tmp_path: Path) -> None:
    python = engine_python([])
    subprocess.run([python, ROOT / "tools" / "make_flag_lists.py", tmp_path], check=True, timeout=550, capture_output=True)
    for path in sorted(flags.DATA.glob("*.json")):
        made, committed = (json.loads(p.read_text(encoding="utf-8")) for p in (tmp_path / path.name, path))
        assert made == committed, path.name
