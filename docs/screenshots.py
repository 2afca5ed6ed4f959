"""Take the pictures of pages that the documents show: ``python docs/screenshots.py`` (needs chromium, playwright)."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import fuse  # noqa: E402  # found beside this folder
from benchmarks.viewer import browser, opened  # noqa: E402
from fuse.graph.loading.load import load  # noqa: E402
from fuse.report.aligned import diff_page  # noqa: E402
from fuse.report.tracing.profiling import silent  # noqa: E402
from fuse.report.tracing.trace_page import trace_page  # noqa: E402
from fuse.report.tracing.trace_report import TraceReport, trace  # noqa: E402
from fuse.report.viewing import view  # noqa: E402

IMAGES = ROOT / "docs" / "images"
SIZE = {"width": 1360, "height": 820}


def recorded(target: str, fuel: int | None = None) -> dict[str, object]:
    """The report of one model file, with every rewrite."""
    loaded = load(str(ROOT / target), real=False)
    report = fuse.show(loaded.model, loaded.args, loaded.kwargs, target=target, record=True, fuel=fuel)
    values: dict[str, object] = json.loads(json.dumps(report.to_dict()))
    return values


def profiled(target: str, folder: Path) -> list[TraceReport]:
    """The traces of one call of a model file, eager and fused."""
    loaded = load(str(ROOT / target), real=True)
    fused = fuse.compile(loaded.model)
    read = []
    with torch.no_grad():
        for name, model in (("eager", loaded.model), ("fused", fused)):
            calls = []
            for call in range(9):  # the one that other programs disturbed least is shown
                path = folder / f"{name}_{call}.json"
                with silent(), profile(activities=[ProfilerActivity.CPU]) as recording:
                    model(*loaded.args, **loaded.kwargs)
                with silent():
                    recording.export_chrome_trace(str(path))
                calls.append((trace(path).span, path))
            path = min(calls)[1]
            report = trace(path, load(str(ROOT / target), real=False), target)
            read.append(replace(report, name=f"{name}.json"))
    return read


def take(path: Path, name: str, *keys: str) -> None:
    """One page, after some keys, as ``docs/images/NAME.png``."""
    program = browser()
    if program is None:
        sys.exit("no chromium found; install it first")
    with opened(path, program) as tab:
        tab.set_viewport_size(SIZE)
        tab.wait_for_timeout(300)
        for key in ("f", *keys):
            tab.keyboard.press(key)
        tab.wait_for_timeout(500)
        tab.screenshot(path=IMAGES / f"{name}.png")
    print(f"wrote docs/images/{name}.png")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        view(recorded("models/lstm_loop.py"), page)
        take(page, "viewer", *"nnnnnnnn")
        old, new = recorded("models/crf.py", fuel=0), recorded("models/crf.py")
        diff_page(old, new, ("before.json", "after.json"), page)
        take(page, "viewer_diff")
        eager, fused = profiled("models/lstm_loop.py", Path(folder))
        trace_page(eager, page, fused)
        take(page, "trace")


if __name__ == "__main__":
    main()
