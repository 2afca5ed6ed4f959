"""The study's models train to a lower loss, fused as eager; ``benchmarks/curves.py`` trains them to their end."""

from __future__ import annotations

import pytest

from benchmarks import curves


@pytest.mark.parametrize("name", ["texting", "albert"])
def test_a_few_steps_are_eagers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "LONGEST", 6)
    (task,) = (task for task in curves.TASKS if task.name == name)
    found = curves.case(task)
    assert found["fallbacks"] == []
    assert found["largest_relative_difference"] < 1e-4
    assert found["losses"]["fused"][-1] < found["losses"]["fused"][0]
    assert found["model"] in curves.picture([found])
