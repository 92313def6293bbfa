"""Prometheus text of workers, and counters between two snapshots."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdlaunch.node.metrics import Metrics, moved, parse, read

TEXT = """# HELP vllm:nixl_bytes_transferred Histogram of bytes
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{engine="0",le="1.0"} 0.0
vllm:nixl_bytes_transferred_bucket{engine="0",le="+Inf"} 10.0
vllm:nixl_bytes_transferred_sum{engine="0",worker_id="1551a22a0dd9aa0c"} 9.371648e+07
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 3
vllm:prompt_tokens_by_source_total{engine="1",source="local_compute"} 4 1796001879000
vllm:prompt_tokens_by_source_total{engine="1",source="external_kv_transfer",} 8011.0
odd{text="a \\"quoted\\" {brace}, \\\\ and \\n line"} NaN
plain 2 # {trace_id="x"} 1.0
"""


def test_labels_escapes_exponents_timestamps_and_exemplars() -> None:
    metrics = parse(TEXT)
    assert metrics.total("vllm:nixl_bytes_transferred_sum") == 93_716_480
    assert metrics.total("vllm:prompt_tokens_by_source_total", source="local_compute") == 7
    assert metrics.total("vllm:prompt_tokens_by_source_total", source="local_compute", engine="1") == 4
    assert metrics.total("vllm:prompt_tokens_by_source_total", source="nothing") is None
    assert metrics.labels("odd") == {"text": 'a "quoted" {brace}, \\ and \n line'}
    assert metrics.total("plain") == 2
    assert metrics.values_of("worker_id") == {"1551a22a0dd9aa0c"}
    assert metrics.samples["vllm:nixl_bytes_transferred_sum"][0].line == 5


@pytest.mark.parametrize("text", ["<html>it works</html>", 'a{b="c} 1', "a{b=c} 1", "a", "a one"])
def test_what_is_no_prometheus_text_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        parse(text)


def test_a_missing_empty_or_foreign_file_is_no_snapshot(tmp_path: Path) -> None:
    assert read(tmp_path / "none.prom") is None
    for text in ("", "# only a comment\n", "<html>"):
        (tmp_path / "x.prom").write_text(text)
        assert read(tmp_path / "x.prom") is None


def snapshot(value: float | None, family: str = "vllm:") -> Metrics:
    return parse(f"{family}other 1\n" + ("" if value is None else f'vllm:failed_total{{engine="0"}} {value}\n'))


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [
        (snapshot(2), snapshot(5), 3.0),
        (snapshot(None), snapshot(5), 5.0),  # a labelled counter is absent until it first counts
        (snapshot(None), snapshot(None), 0.0),
        (None, snapshot(5), None),  # no scrape says nothing
        (snapshot(2), None, None),
        (snapshot(5), snapshot(2), None),  # the process was started again in between
        (snapshot(None, "dynamo_"), snapshot(None, "dynamo_"), None),  # another process answered on the port
    ],
)
def test_absent_is_zero_only_in_a_scrape_of_the_engine(before: Metrics | None, after: Metrics | None, difference: float | None) -> None:
    assert moved(before, after, "vllm:failed_total", "vllm:") == difference
