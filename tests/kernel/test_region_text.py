"""Texts of graphs without numbers: graphs that compute the same at other sizes have one text."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import GraphModule

from fuse.graph.capture import capture
from fuse.kernel.sizes.region_text import text_and_numbers
from fuse.rewrite.pipeline import run_passes


def rewritten(length: int) -> GraphModule:
    graph = capture(nn.Sequential(nn.LayerNorm(8), nn.GELU()), (torch.ones(length, 8),))
    run_passes(graph)
    return graph


def test_names_of_regions_are_no_part_of_the_text() -> None:
    one, other = rewritten(5), rewritten(7)
    (call,) = other.graph.find_nodes(op="call_module")
    other.add_module("region_9", other.get_submodule(str(call.target)))
    call.target = "region_9"
    assert text_and_numbers(one, lambda node: "")[0] == text_and_numbers(other, lambda node: "")[0]
