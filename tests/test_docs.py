"""What the documents show is what happens: examples run, transcripts are current, links lead somewhere."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fuse.rewrite import registry

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


@pytest.fixture
def _passes_of_this_test():
    before = {info.name for info in registry.registered()}
    yield
    for info in registry.registered():
        if info.name not in before:
            registry.unregister(info.name)


@pytest.mark.usefixtures("_passes_of_this_test", "registered")
@each_document
def test_python_examples_run_in_the_order_in_which_they_are_read(document, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = document.read_text()
    names = {"__name__": "example"}
    for block in EXAMPLE.finditer(text):
        line = text.count("\n", 0, block.start(1))
        if ">>>" in block[1]:
            example = doctest.DocTestParser().get_doctest(block[1], names, document.name, str(document), line)
            outcome = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, clear_globs=False)
            assert outcome.failed == 0
            names.update(example.globs)
        else:
            exec(compile("\n" * line + block[1], str(document), "exec"), names)


@each_document
def test_links_lead_to_files_of_the_repository(document):
    missing = [link for link in LINK.findall(document.read_text()) if not (document.parent / link).exists()]
    assert missing == []


def test_the_readme_is_read_in_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_every_page_is_listed():
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= set(LINK.findall((ROOT / "docs" / "README.md").read_text()))


def test_figures_are_those_of_the_results():
    checked = subprocess.run(
        [sys.executable, "-m", "benchmarks.tables", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr


def test_transcripts_are_what_the_commands_print():
    checked = subprocess.run(
        [sys.executable, "docs/transcripts.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr


def test_every_pattern_has_its_page_and_picture():
    checked = subprocess.run(
        [sys.executable, "docs/pattern_pages.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr


def test_notebooks_show_what_their_cells_give():
    checked = subprocess.run([sys.executable, "docs/notebooks.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
