from __future__ import annotations

from pdlaunch.node.snapshots import in_flight, sums, take
from tests.fakes.raw_server import answering, raw_server, respond

METRICS = """\
# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="a b"} 2.0
vllm:num_requests_running{engine="1",model_name="a b"} 3.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:num_requests_running_total 99
dynamo_frontend_inflight_requests 0
"""


def test_sums_over_label_sets_of_exactly_the_named_metrics():
    assert sums(METRICS, ("vllm:num_requests_running", "absent", "dynamo_frontend_inflight_requests")) == {
        "vllm:num_requests_running": 5.0,
        "dynamo_frontend_inflight_requests": 0.0,
    }


def test_snapshots_are_kept_as_they_came_and_failures_are_named(tmp_path):
    with raw_server(answering(respond(200, METRICS, "text/plain"))) as good, raw_server(answering(respond(503, ""))) as bad:
        failures = take({"decode-0": good, "prefill-0": bad, "frontend": "http://127.0.0.1:1/metrics"}, "ready", tmp_path / "metrics")
    assert (tmp_path / "metrics" / "decode-0.ready.prom").read_text() == METRICS
    assert sorted(failures) == ["frontend", "prefill-0"]
    assert "answered 503" in failures["prefill-0"]
    assert not (tmp_path / "metrics" / "prefill-0.ready.prom").exists()


def test_requests_in_flight_per_process():
    with raw_server(answering(respond(200, METRICS, "text/plain"))) as url:
        assert in_flight({"decode-0": url, "gone": "http://127.0.0.1:1/"}) == {"decode-0": 5.0}
