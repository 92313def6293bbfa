from __future__ import annotations

import pytest

from pdlaunch.node.redact import REDACTED, Redactor, plain
from pdlaunch.node.spec import Spec

KEYS = Spec.__dataclass_fields__["redact_keys"].default
PLANTED = "planted-5f3a9c"
ENV = {"HF_TOKEN": PLANTED, "AWS_SECRET_ACCESS_KEY": "aws-" + PLANTED, "WANDB_API_KEY": "w-" + PLANTED, "PATH": "/bin", "SHORT_TOKEN": "on"}


@pytest.fixture
def redactor():
    return Redactor(KEYS, ENV)


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "hf_token",
        "MY_SECRETS",
        "ETCD_AUTH_PASSWORD",
        "OPENAI_API_KEY",
        "OPENAI_APIKEY",
        "AUTH",
        "PROXY_AUTHORIZATION",
        "AWS_SECRET_ACCESS_KEY",
        "SESSION_COOKIE",
        "DB_PASSWD",
        "GOOGLE_CREDENTIALS",
    ],
)
def test_names_that_mean_a_secret(redactor, name):
    assert redactor.is_secret(name)


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "MAX_TOKENS_PER_STEP", "AUTHOR", "PATH", "UCX_TLS", "SECRETARY", "HF_TOKEN_PATH"]
)
def test_names_that_do_not(redactor, name):
    assert not redactor.is_secret(name)


@pytest.mark.parametrize(
    "line",
    [
        f"loading with {PLANTED} from the hub",
        f"env HF_TOKEN={PLANTED}",
        "MY_TOKEN=short1",
        "ETCD_PASSWORD='a b c'",
        'api_key="abcd1234"',
        "'api_key': 'abcd1234'",
        "--api-key=abcd1234",
        "Authorization: Bearer abcdefgh12345678",
        "http://user:hunter22@proxy:3128/",
        "hf_ABCDEFGHIJKLMNOPQRST",
        "sk-abcdefghijklmnopqrstuv",
        "ghp_abcdefghijklmnopqrstuvwx",
        "AKIAABCDEFGHIJKLMNOP",
    ],
)
def test_secrets_in_a_line_are_removed(redactor, line):
    cleaned = redactor.text(line)
    assert REDACTED in cleaned
    for secret in (PLANTED, "short1", "a b c", "abcd1234", "abcdefgh12345678", "hunter22", "ABCDEFGHIJKLMNOPQRST", "abcdefghijklmnop"):
        assert secret not in cleaned


@pytest.mark.parametrize(
    "line",
    [
        "max_tokens=24 prompt_tokens: 810",
        "eos_token_id=1, bos_token='<bos>'",
        'vllm:prompt_tokens_by_source_total{source="external"} 7421.0',
        "SPLIT region 5: remote P KV block_len 131072 must equal local 131072 * remote_heads 4",
        "the option is on",
        "http://127.0.0.1:20000/live",
    ],
)
def test_ordinary_lines_stay_as_they_are(redactor, line):
    assert redactor.text(line) == line


def test_environment_and_argv(redactor):
    assert redactor.environment({"HF_TOKEN": "x", "EMPTY_TOKEN": "", "A": f"b {PLANTED}"}) == {
        "A": f"b {REDACTED}",
        "EMPTY_TOKEN": "",
        "HF_TOKEN": REDACTED,
    }
    assert redactor.argv(["serve", "--api-key", "k", "--hf-token=abcdef", "--max-tokens", "5", PLANTED]) == [
        "serve",
        "--api-key",
        REDACTED,
        f"--hf-token={REDACTED}",
        "--max-tokens",
        "5",
        REDACTED,
    ]


def test_escape_sequences_and_carriage_returns_are_removed():
    assert plain("\x1b[32mINFO\x1b[0m \x1b]0;title\x07up\r") == "INFO up"
