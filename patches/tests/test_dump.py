"""The dump that is compared with stock's must see what bytes cannot show: each mutant moves the right bytes."""

from __future__ import annotations

from typing import Any

import pytest
from dump_descriptors import scheduled, unscheduled
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

CASES = [(unscheduled, ("16/4", 2, 4, True)), (unscheduled, ("8", 4, 2, False)), (scheduled, ("16/4", 1, 2, True))]
compute, register = NixlPullConnectorWorker._compute_desc_ids, NixlPullConnectorWorker.register_kv_caches


def reversed_ids(self: Any, *args: Any, **kwargs: Any) -> Any:
    return compute(self, *args, **kwargs)[::-1]


def on_another_device(self: Any, caches: Any) -> None:
    self.device_id += 1
    register(self, caches)


@pytest.mark.parametrize(("record", "case"), CASES)
def test_two_runs_of_the_same_code_are_equal(record: Any, case: Any) -> None:
    first = record(*case)
    assert first
    assert record(*case) == first


@pytest.mark.parametrize(("record", "case"), CASES)
@pytest.mark.parametrize(("name", "wrong"), [("_compute_desc_ids", reversed_ids), ("register_kv_caches", on_another_device)])
def test_order_and_device_are_seen(record: Any, case: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = record(*case)
    monkeypatch.setattr(NixlPullConnectorWorker, name, wrong)
    mutated = record(*case)
    assert mutated
    assert mutated != right
