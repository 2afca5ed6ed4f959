"""The page of ``fuse show --html`` in a real browser: size, first paint, frames while it is panned, search, a step.

    python -m benchmarks.viewer                   a generated graph, albert at size=base, a loop of 1,024 steps
    python -m benchmarks.viewer --browser PATH    another Chromium than the one that is found

Needs Debian's chromium and playwright. Figures are medians of five pages, each opened in a browser of its own.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fuse
from benchmarks.common import save
from fuse.graph.loading.load import load
from fuse.report.viewing import page, view

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
BUDGETS = {"megabytes": 10.0, "first_paint_s": 2.0, "frame_ms": 33.0, "frame_all_ms": 33.0, "search_ms": 100.0}
"""For 20,000 nodes and 5,000 rewrites on an idle machine."""

FRAMES = """async (zoom) => {
  const { picture } = fuseViewer.shown[0];
  if (zoom) { picture.camera.zoom = zoom; picture.camera.x = picture.layout.width * zoom / 2; picture.camera.y = 0; }
  else picture.fit();
  const times = [];
  let last = await new Promise(requestAnimationFrame);
  for (let i = 0; i < 90; i += 1) {
    picture.panBy(i % 30 < 15 ? 6 : -6, zoom ? 14 : 2);
    const now = await new Promise(requestAnimationFrame);
    times.push(now - last);
    last = now;
  }
  times.sort((a, b) => a - b);
  return [times[Math.floor(times.length * 0.95)], [...picture.frames.slice(-90)].sort((a, b) => a - b)[85]];
}"""
SEARCH = """(text) => {
  const input = document.getElementById("search");
  const started = performance.now();
  input.value = text;
  input.dispatchEvent(new Event("input"));
  return performance.now() - started;
}"""
STEP = """async () => {
  const times = [];
  for (let i = 0; i < 9; i += 1) {
    const started = performance.now();
    document.getElementById("back").click();
    await new Promise(requestAnimationFrame);
    times.push(performance.now() - started);
  }
  return times.sort((a, b) => a - b)[4];
}"""
PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"


def generated(nodes: int, rewrites: int, stages: int = 0) -> dict[str, Any]:
    """The report of a graph that nobody wrote, of so many modules, and rewrites that take two operators each.

    Without modules all operators are in one box, in stretches.
    """
    names = ("aten.mm.default", "aten.add.Tensor", "aten.tanh.default", "aten.mul.Tensor", "aten.sum.dim_IntList")
    kinds = ("gemm", "pointwise", "pointwise", "pointwise", "reduction")
    start: list[dict[str, Any]] = [{"id": 0, "name": "x", "op": "placeholder", "target": "x", "value": "f32[8, 64]"}]
    for node in range(1, nodes - 1):
        sort = (node * 7 + node // 11) % len(names)
        uses = [node - 1] if node % 3 else [node - 1, max(0, node - 2 - node % 5)]
        row = {"id": node, "name": f"{names[sort].split('.')[1]}_{node}", "op": "call_function", "target": names[sort]}
        cost = {"kind": kinds[sort], "launches": 1, "flops": 512 * (node % 9 + 1), "bytes": 4096, "at": node % 400}
        args = {"args": ", ".join(["%"] * len(uses)), "uses": uses, "value": f"f32[8, {64 + node % 7}]"}
        start.append({**row, **args, **cost})
    output = {"id": nodes - 1, "name": "output", "op": "output", "target": "output", "args": "[%]", "uses": [nodes - 2]}
    start.append(output)
    made = []
    for number in range(1, rewrites + 1):
        old = 2 * number + 1
        changed = {"id": old, "args": "%", "uses": [old - 2 if number > 1 else 0], "target": "aten.silu.default"}
        about = {
            "pass": f"pass_{number * 6 // rewrites}",
            "pattern": None,
            "source": f"generated.py:{number % 400 + 1}",
        }
        made.append({"number": number, **about, "launches_saved": 0, "nodes": [old - 1, old], "changed": [changed]})
    places = [
        {
            "source": f"generated.py:{i + 1}",
            "file": "/generated.py",
            "line": i + 1,
            "module": f"stage_{i * stages // 400}" if stages else "",
        }
        for i in range(400)
    ]
    nothing = {"launches": 1, "flops": 0, "bytes": 0}
    lines = [
        {
            "source": one["source"],
            "file": one["file"],
            "text": "",
            "before": nothing,
            "after": nothing,
            "nodes": [],
            "kernels": [],
        }
        for one in places
    ]
    count = {
        "launches": nodes - 2,
        "by_kind": {},
        "small_ops": 0,
        "nodes": nodes,
        "flops": 0,
        "bytes": 0,
        "peak_bytes": 0,
    }
    record = {
        "files": {"/generated.py": "\n".join(f"x = step_{i}(x)" for i in range(400))},
        "places": places,
        "inputs": {"x": "argument"},
        "start": start,
        "rewrites": made,
        "declined": [],
        "kernels": [],
        "lines": lines,
    }
    passes = [f"pass_{i}" for i in range(7)]
    about = {"schema_version": 2, "target": "generated.py", "device": "cpu", "torch": "", "passes": passes}
    return {**about, "before": count, "after": count, "loops": [], "fired": [], "rejected": [], "record": record}


def browser() -> str | None:
    """Where Chromium is, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def opened(path: Path, program: str) -> Iterator[Any]:
    """The page at ``path`` in a browser of its own, once it is ready."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        tab = running.new_page(viewport={"width": 1600, "height": 960})
        tab.goto(path.as_uri())
        tab.wait_for_selector("html[data-ready]")
        yield tab
        running.close()


def measured(path: Path, program: str, word: str) -> dict[str, float]:
    """One page's figures."""
    with opened(path, program) as tab:
        tab.wait_for_timeout(300)
        near, near_work = tab.evaluate(FRAMES, 0.8)
        search, step = tab.evaluate(SEARCH, word), tab.evaluate(STEP)
        tab.keyboard.press("Escape")
        tab.focus("#list")
        tab.keyboard.press("a")  # every box open
        tab.wait_for_timeout(300)
        operators = tab.evaluate("() => fuseViewer.shown[0].picture.layout.shapes.length")
        far, far_work = tab.evaluate(FRAMES, 0)
        return {
            "megabytes": path.stat().st_size / 1e6,
            "first_paint_s": tab.evaluate(PAINT) / 1e3,
            "frame_ms": near,
            "frame_all_ms": far,
            "work_ms": near_work,
            "work_all_ms": far_work,
            "search_ms": search,
            "step_ms": step,
            "step_all_ms": tab.evaluate(STEP),
            "drawn_all": operators,
        }


def written(folder: Path) -> Iterator[tuple[str, Path, str]]:
    """The pages that are measured: a name, where each is, and a word to search in it."""

    def of_model(name: str, target: str, *settings: str) -> Path:
        loaded = load(target, settings=settings, real=False)
        report = fuse.show(loaded.model, loaded.args, loaded.kwargs, target=target, record=True)
        view(report.to_dict(), folder / f"{name}.html")
        return folder / f"{name}.html"

    for name, stages in (("20,000 nodes, 5,000 rewrites", 0), ("the same in modules", 4)):
        path = folder / f"generated_{stages}.html"
        sheet = {"name": "forward", "report": generated(20_000, 5_000, stages)}
        path.write_text(page("generated", [sheet], "cpu"), encoding="utf-8")
        yield name, path, "tanh_19"
    yield "models/albert.py size=base", of_model("albert", "models/albert.py", "size=base"), "softmax"
    yield "models/ligru.py, 1,024 steps", of_model("ligru", "models/ligru.py"), "relu"


def median_of(runs: int, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    all_runs = [measure() for _ in range(runs)]
    return {name: statistics.median(one[name] for one in all_runs) for name in all_runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--browser", default=browser())
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    if options.browser is None:
        parser.error("no chromium found; install it, or name one with --browser")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, path, word in written(Path(folder)):
            figures = median_of(options.runs, lambda path=path, word=word: measured(path, options.browser, word))
            rows.append({"page": name, **figures})
            print(name, {key: round(value, 2) for key, value in figures.items()}, flush=True)
    save("viewer", rows)
    over = [(key, rows[0][key]) for key, most in BUDGETS.items() if rows[0][key] > most]
    print("within the budgets" if not over else f"over the budgets: {over}")


if __name__ == "__main__":
    main()
