"""Results as a notebook shows them: what is printed, as text."""

from __future__ import annotations

import html
import re

import pytest
import torch
from torch import nn

import fuse
from fuse.check.bisecting import bisect
from fuse.check.oracle import check
from fuse.report.explain import explain
from fuse.rewrite.patterns import registry


def results() -> list[object]:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval(), torch.ones(2, 4)
    report = fuse.show(model, (x,), target="<img src=x>", record=True)
    pattern = registry.registered()[0]
    return [report, check(model, (x,)), explain(model, (x,), None, pattern), bisect(model, (x,))]


@pytest.mark.parametrize("one", results(), ids=lambda one: type(one).__name__)
def test_a_notebook_shows_what_is_printed(one: object) -> None:
    shown = one._repr_html_()  # type: ignore[attr-defined]
    assert html.unescape(re.sub(r"</?(pre|b)( style=\"[^\"]*\")?>", "", shown)) == str(one)
    assert "<img" not in shown
