"""Pictures: escaping, formats, and what happens without Graphviz."""

from __future__ import annotations

import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.errors import FuseError
from fuse.report.pictures.dot import dot
from fuse.report.pictures.draw import draw
from fuse.report.pictures.layered import svg
from fuse.report.pictures.palette import colour
from fuse.report.pictures.reading import Mark
from fuse.report.pictures.sketch import Arrow, Box, Sketch
from fuse.report.report import Report

HOSTILE = '</text><script>alert("1")</script> \\N <b>'


class Loop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            x = torch.tanh(x) * x + 1
        return x


@pytest.fixture(scope="module")
def report() -> Report:
    return fuse.show(Loop(), (torch.ones(4),), target=HOSTILE)


def small_sketch(label: str) -> Sketch:
    marks = {
        0: Mark("x", "f32[4]", "input", ""),
        1: Mark("select", "f32[4]", "view", "m.py:1"),
        2: Mark(label, "f32[4]", "pointwise", "m.py:2"),
        3: Mark("mm", "f32[4]", "gemm", "m.py:3", count=3),
    }
    parts = (0, 1, Box("repeat", "x 8", (Box("region", "1 -> 1", (2,)), 3)))
    return Sketch(marks, parts, (Arrow(0, 1, False), Arrow(1, 2, False), Arrow(2, 3, False), Arrow(3, 2, True)))


def without_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)


def test_both_renderers_show_boxes_counts_and_arrows_to_the_next_step() -> None:
    sketches = small_sketch("tanh"), small_sketch("tanh")
    for text in (dot(*sketches, ("before", "after")), svg(*sketches, ("before", "after"))):
        for expected in ("1 -> 1".replace(">", "&gt;"), "x 8", "mm  x 3", "dash"):
            assert expected in text


def test_a_kind_has_the_same_colour_before_and_after_and_in_every_format() -> None:
    sketches = small_sketch("tanh"), small_sketch("tanh")
    fill = colour("pointwise").fill
    assert dot(*sketches, ("", "")).count(f'fillcolor="{fill}"') == 2
    assert svg(*sketches, ("", "")).count(f'fill="{fill}"') == 2


def test_hostile_names_stay_text_in_the_plain_svg() -> None:
    text = svg(small_sketch(HOSTILE), small_sketch("tanh"), (HOSTILE, "after"))
    root = ElementTree.fromstring(text)
    assert not [element for element in root.iter() if element.tag.endswith("script")]
    assert any(element.text == HOSTILE for element in root.iter())


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_hostile_names_stay_text_in_graphviz() -> None:
    text = dot(small_sketch(HOSTILE), small_sketch("tanh"), (HOSTILE, "after"))
    done = subprocess.run(["dot", "-Tsvg"], input=text.encode(), capture_output=True, check=True)
    assert done.stderr == b""
    root = ElementTree.fromstring(done.stdout)
    assert not [element for element in root.iter() if element.tag.endswith("script")]
    assert any(element.text is not None and 'alert("1")' in element.text for element in root.iter())


def test_a_page_is_complete_and_escapes_the_target(report: Report, tmp_path: Path) -> None:
    (path,) = {path for path in draw(report, tmp_path / "out.html").written if path.suffix == ".html"}
    page = path.read_text()
    assert "<script" not in page
    assert "<svg" in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "launches by line" in page


def test_a_dot_file_needs_no_graphviz(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_dot(monkeypatch)
    drawing = draw(report, tmp_path / "out.dot")
    assert drawing.hint is None
    assert (tmp_path / "out.dot").read_text().startswith("digraph")


def test_without_graphviz_a_plain_picture_and_the_dot_file_are_written(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_dot(monkeypatch)
    drawing = draw(report, tmp_path / "out.svg")
    assert drawing.written == (tmp_path / "out.svg", tmp_path / "out.dot")
    assert drawing.hint is not None
    assert "install Graphviz" in drawing.hint
    ElementTree.parse(tmp_path / "out.svg")


def test_a_failing_graphviz_is_no_failure_of_ours(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/false")
    drawing = draw(report, tmp_path / "out.svg")
    assert drawing.hint is not None
    assert "failed with status 1" in drawing.hint
    assert (tmp_path / "out.svg").exists()


def test_another_suffix_is_refused_before_anything_is_written(report: Report, tmp_path: Path) -> None:
    with pytest.raises(FuseError, match=r"must end in \.dot, \.svg or \.html"):
        draw(report, tmp_path / "out.png")
    assert not list(tmp_path.iterdir())
