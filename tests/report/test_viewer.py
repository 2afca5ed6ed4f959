"""The page of ``fuse show --html`` in a real browser: no network, by mouse and by keyboard alone, names as text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuse
from benchmarks.viewer import FLAGS, browser, generated
from fuse.errors import FuseError
from fuse.graph.loading.load import load
from fuse.report.aligned import diff_page
from fuse.report.report import TorchCompiled
from fuse.report.tracing.trace_page import trace_page
from fuse.report.tracing.trace_report import trace
from fuse.report.viewing import embedded, page, view

PROGRAM = browser()
HOSTILE = "</script><script>document.title = 'taken'</script><img src=x onerror=alert(1)>\u2028"


class Cell(nn.Module):
    """A loop of equal steps, and two products that could have been one."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(8, 8)
        self.left, self.right = nn.Linear(8, 64), nn.Linear(8, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(4, 8)
        for t in range(6):
            h = torch.tanh(self.step(h) + x[t]) + h.detach().exp()
        return self.left(h) * self.right(h).relu()


def report() -> fuse.report.report.Report:
    torch.manual_seed(0)
    return fuse.show(Cell().eval(), (torch.ones(6, 4, 8),), target="cell.py", record=True)


@pytest.fixture(scope="module")
def running() -> Iterator[Any]:
    if PROGRAM is None:
        pytest.skip("no chromium is installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        program = started.chromium.launch(executable_path=PROGRAM, args=list(FLAGS))
        yield program
        program.close()


@pytest.fixture(scope="module")
def shown() -> fuse.report.report.Report:
    return report()


@pytest.fixture(scope="module")
def path(shown: fuse.report.report.Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "cell.html"
    view(shown.to_dict(), path)
    return path


class Opened:
    """A page, what it asked the network for, and what it complained of."""

    def __init__(self, running: Any, path: Path, address: str = "") -> None:
        self.tab = running.new_page(viewport={"width": 1400, "height": 900})
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.on("console", lambda message: self._complained(message.text))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("dialog", lambda dialog: self.complaints.append("a dialog"))
        self.tab.goto(path.as_uri() + address)
        self.tab.wait_for_selector("html[data-ready]")

    def _complained(self, text: str) -> None:
        if "willReadFrequently" not in text:  # these tests read the canvas, the page does not
            self.complaints.append(text)

    def until(self, expression: str) -> None:
        """Wait for an expression to hold. The page's policy lets nobody evaluate text inside it."""
        for _ in range(200):
            if self.ask(f"() => Boolean({expression})"):
                return
            self.tab.wait_for_timeout(25)
        raise AssertionError(f"never: {expression}")

    def press(self, *keys: str) -> None:
        for key in keys:
            self.tab.keyboard.press(key)

    def text(self, selector: str) -> str:
        return " ".join(self.tab.inner_text(selector).split())

    def ask(self, expression: str, given: Any = None) -> Any:
        return self.tab.evaluate(expression, given)


@pytest.fixture
def opened(running: Any, path: Path) -> Iterator[Opened]:
    one = Opened(running, path)
    yield one
    assert one.complaints == []
    assert [url for url in one.requests if not url.startswith(("file:", "data:"))] == []
    one.tab.close()


NAMES = "() => fuseViewer.sheet.replay.sorted(0).map((id) => fuseViewer.sheet.replay.rows.get(id).name)"


def test_a_page_opens_from_disk_with_one_request_and_no_complaint(opened: Opened) -> None:
    assert len(opened.requests) == 1
    assert opened.text("h1") == "cell.py"
    assert "launches" in opened.text("#summary")
    assert opened.ask("() => fuseViewer.shown[0].picture.layout.shapes.length") > 5
    assert opened.ask("() => document.documentElement.scrollWidth <= innerWidth")


def test_stepping_shows_the_graph_that_fuel_gives(opened: Opened, shown: fuse.report.report.Report) -> None:
    recording = shown.ledger.recording
    assert recording is not None
    last = len(shown.ledger.rewrites)
    for step in (last, 0, 1, last // 2, last - 1, last):
        opened.ask("(step) => { const slider = document.getElementById('slider'); slider.value = step; }", step)
        opened.tab.dispatch_event("#slider", "input")
        opened.until(f"fuseViewer.step === {step}")
        state = recording.after(step)
        assert opened.ask(NAMES) == [state.rows[node].name for node in state.nodes(0)]
        assert f"--fuel {step}" in opened.text("#where")
    opened.press("ArrowLeft")
    assert f"rewrite {last - 1} of {last}" in opened.text("#where")
    opened.press("ArrowRight")
    assert f"rewrite {last} of {last}" in opened.text("#where")


def test_what_a_rewrite_changed_is_marked_and_the_graph_before_it_can_be_seen(opened: Opened) -> None:
    assert opened.ask("() => fuseViewer.shown[0].picture.layout.shapes.some((item) => item.news)")
    after = opened.ask(NAMES)
    opened.press("b")
    assert opened.tab.get_attribute("#before", "aria-pressed") == "true"
    assert opened.ask(NAMES) != after
    assert opened.ask("() => fuseViewer.shown[0].picture.layout.shapes.some((item) => item.news === 'erased')")
    opened.press("b")
    assert opened.ask(NAMES) == after


MARKED = "() => fuseViewer.shown[0].picture.layout.shapes.filter((item) => item.marked).length"


def test_line_operator_and_kernel_lead_to_each_other(opened: Opened, shown: fuse.report.report.Report) -> None:
    assert shown.record is not None
    kernel = shown.record["kernels"][0]
    line = kernel["lines"][0]
    number = int(line.rpartition(":")[2])
    opened.tab.click(f"#source .line[data-number='{number}']")
    assert opened.text("#details h2") == line
    assert opened.ask(MARKED) > 0
    opened.tab.click(f"#details >> text='{kernel['name']}'")
    assert opened.text("#details h2") == kernel["name"]
    marked = opened.tab.locator("#source .line.marked").evaluate_all(
        "all => all.map(one => Number(one.dataset.number))"
    )
    assert marked == sorted({int(one.rpartition(":")[2]) for one in kernel["lines"]})
    opened.tab.locator("#code .line", has_text=line).first.click()
    assert opened.text("#details h2") == line
    opened.tab.locator("#details dd .link").last.click()
    assert opened.tab.locator("#source .line.marked").count() == 1


@pytest.mark.parametrize("every_box", [False, True])
def test_steps_that_keep_what_did_not_change_lead_to_the_picture_of_a_page_opened_there(
    running: Any, path: Path, tmp_path: Path, every_box: bool
) -> None:
    large = tmp_path / "large.html"
    sheet = {"name": "forward", "report": generated(2_000, 300)}
    large.write_text(page("generated", [sheet], "cpu"), encoding="utf-8")
    shapes = """() => {
      const { layout, tree } = fuseViewer.shown[0].picture;
      const edges = [...layout.inner].flatMap(([box, some]) => some.map(({ a, b }) => a.key + b.key)).sort();
      const look = (one) => [one.key, one.label, one.count, one.left, one.top, one.w, one.h, one.open, one.ids.length];
      return [layout.shapes.map(look), edges];
    }"""
    for one in (path, large):
        stepped = Opened(running, one, "#all=1" if every_box else "")
        for keys in (("ArrowLeft",) * 5, ("ArrowRight",) * 2, ("ArrowLeft", "ArrowLeft", "b", "b")):
            stepped.press(*keys)
            step = stepped.ask("() => fuseViewer.step")
            fresh = Opened(running, one, f"#step={step}" + ("&all=1" if every_box else ""))
            assert fresh.ask(shapes) == stepped.ask(shapes)
            fresh.tab.close()
        assert stepped.complaints == []
        stepped.tab.close()


def test_boxes_open_and_close(opened: Opened) -> None:
    count = "() => fuseViewer.shown[0].picture.layout.shapes.length"
    opened.press("ArrowLeft")
    opened.ask(
        """() => {
          const view = fuseViewer.shown[0], box = view.picture.layout.shapes.find((item) => item.open);
          const { camera, canvas } = view.picture, place = canvas.getBoundingClientRect();
          const at = { bubbles: true, pointerId: 1 };
          at.clientX = place.left + (box.left + 12) * camera.zoom - camera.x;
          at.clientY = place.top + (box.top + 14) * camera.zoom - camera.y;
          window.before = view.picture.layout.shapes.length;
          canvas.setPointerCapture = () => {};
          for (const kind of ["pointerdown", "pointerup"]) canvas.dispatchEvent(new PointerEvent(kind, at));
        }"""
    )
    assert opened.ask(count) < opened.ask("() => window.before")
    opened.until("location.hash.includes('close=')")


def test_search_finds_operators_lines_kernels_and_reasons(opened: Opened, shown: fuse.report.report.Report) -> None:
    assert shown.record is not None
    reason = shown.record["declined"][0]["reason"]
    for word, sort in (
        ("relu", "operator"),
        ("torch.tanh", "line"),
        (shown.record["kernels"][0]["name"], "kernel"),
        (reason, "reason"),
    ):
        opened.press("/")
        opened.tab.fill("#search", word)
        assert sort in opened.tab.locator("#results .sort").all_inner_texts()
        opened.press("Escape")
    opened.press("/")
    opened.tab.keyboard.type("relu")
    opened.press("ArrowDown", "ArrowUp", "Enter")
    assert opened.text("#details h2")
    assert opened.ask(MARKED) > 0


def test_a_reason_is_four_actions_away_and_names_the_command(opened: Opened, shown: fuse.report.report.Report) -> None:
    """One to the list, one to the reason, one to the candidate."""
    assert shown.record is not None
    declined = shown.record["declined"][0]
    opened.tab.click("#tab-declined")
    opened.tab.locator("#list .row", has_text=declined["reason"]).first.click()
    opened.tab.locator("#list .row.inner").first.click()
    assert declined["reason"] in opened.text("#details")
    assert "fuse explain cell.py" in opened.text("#details .command")
    assert opened.ask(MARKED) > 0


def test_from_a_line_and_from_an_operator_a_reason_is_two_actions_away(
    opened: Opened, shown: fuse.report.report.Report
) -> None:
    """One to the operator, in the source or in the picture, and one to why it stays out of its neighbour's kernel."""
    assert shown.record is not None
    declined = shown.record["declined"][0]
    source = next(one["source"] for one in declined["candidates"] if one["source"])
    opened.tab.click(f"#source .line[data-number='{source.rpartition(':')[2]}']")
    opened.tab.locator("#details .link", has_text=declined["reason"]).first.click()
    assert opened.text("#details h2") == declined["reason"]
    opened.press("Escape")
    place = opened.ask(
        """(ids) => {
          const { tree, picture } = fuseViewer.shown[0], { camera, canvas } = picture;
          const item = ids.map((id) => tree.drawn.get(id)).find((one) => one && one.row);
          picture.reveal(item);
          const at = canvas.getBoundingClientRect(), x = item.left + item.w / 2, y = item.top + 8;
          return [at.left + x * camera.zoom - camera.x, at.top + y * camera.zoom - camera.y];
        }""",
        sorted({node for one in declined["candidates"] for node in one["nodes"]}),
    )
    opened.tab.mouse.click(*place)
    opened.tab.locator("#details .link", has_text=declined["reason"]).first.click()
    assert opened.text("#details h2") == declined["reason"]


def test_everything_is_reached_by_the_keyboard(opened: Opened) -> None:
    opened.press("n", "n")
    assert opened.ask(MARKED) > 0
    opened.press("Escape")
    assert opened.ask(MARKED) == 0
    opened.tab.focus("#list")
    step = opened.ask("() => fuseViewer.step")
    opened.press("ArrowUp")
    assert opened.ask("() => fuseViewer.step") < step
    opened.press("2")
    assert opened.tab.input_value("#layer") == "launches"
    opened.press("?")
    assert opened.tab.is_visible("#keys")
    opened.press("Escape")
    focusable = opened.ask(
        """() => [...document.querySelectorAll('button, input, select, canvas, .list, .code')]
          .filter((one) => one.tabIndex < 0).length"""
    )
    assert focusable == 0


@pytest.mark.parametrize("layer", ["launches", "bytes", "flops", "time", "memory", "declined"])
def test_layers_put_figures_on_the_graph(opened: Opened, layer: str) -> None:
    opened.ask("() => document.getElementById('slider').focus()")
    opened.ask("() => { const s = document.getElementById('slider'); s.value = 0; }")
    opened.tab.dispatch_event("#slider", "input")
    opened.until("fuseViewer.step === 0")
    opened.tab.select_option("#layer", layer)
    assert opened.ask("() => fuseViewer.shown[0].picture.layout.shapes.some((item) => item.badge)")


def test_launches_on_the_picture_are_those_of_the_report(opened: Opened, shown: fuse.report.report.Report) -> None:
    opened.tab.select_option("#layer", "launches")
    total = "() => fuseViewer.shown[0].tree.root.items.reduce((sum, item) => sum + item.amount, 0)"
    assert opened.ask(total) == shown.after.launches


def test_the_address_holds_what_is_shown(running: Any, path: Path) -> None:
    first = Opened(running, path)
    first.press("ArrowLeft", "3", "n")
    first.until("location.hash.includes('select=')")
    state = "() => [fuseViewer.step, fuseViewer.layer, fuseViewer.selection.id]"
    address, said = re.sub(r"^[^#]*", "", first.tab.url), first.ask(state)
    second = Opened(running, path, address)
    assert second.ask(state) == said
    assert second.complaints == first.complaints == []
    for one in (first, second):
        one.tab.close()


def test_dark_and_printed_pages_are_drawn(opened: Opened) -> None:
    pixel = """() => {
      const { canvas } = fuseViewer.shown[0].picture;
      return [...canvas.getContext('2d').getImageData(2, canvas.height - 3, 1, 1).data].slice(0, 3);
    }"""
    opened.tab.wait_for_timeout(100)
    light = opened.ask(pixel)
    opened.tab.click("#theme")
    opened.tab.wait_for_timeout(100)
    dark = opened.ask(pixel)
    assert sum(light) > 700
    assert sum(dark) < 120
    assert opened.tab.pdf()[:4] == b"%PDF"


def test_the_picture_is_not_blank(opened: Opened) -> None:
    """Coarsely: paper, ink, and the fill of a product are there."""
    opened.tab.wait_for_timeout(100)
    colours = opened.ask(
        """() => {
          const { canvas, looks } = fuseViewer.shown[0].picture;
          const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
          const seen = new Set();
          const hex = (n) => n.toString(16).padStart(2, '0');
          for (let i = 0; i < data.length; i += 4) seen.add('#' + [...data.slice(i, i + 3)].map(hex).join(''));
          return [seen.size, seen.has(looks.gemm.fill), seen.has(looks.pointwise.fill)];
        }"""
    )
    assert colours[0] > 30
    assert colours[1:] == [True, True]


def test_names_of_the_model_are_text(running: Any, tmp_path: Path) -> None:
    values = json.loads(json.dumps(report().to_dict()))
    record = values["record"]
    values["target"] = HOSTILE
    for row in record["start"]:
        row["name"] += HOSTILE
        row["value"] = HOSTILE + row.get("value", "")
    for place in record["places"]:
        place["module"] = HOSTILE.replace(".", "")
    record["files"] = {path: text + HOSTILE for path, text in record["files"].items()}
    for group in record["declined"]:
        group["reason"] += HOSTILE
    for kernel in record["kernels"]:
        kernel["name"] += HOSTILE
        kernel["code"] += "\n// " + HOSTILE
    path = tmp_path / "hostile.html"
    view(values, path)
    assert path.read_text(encoding="utf-8").count("</script") == 2
    one = Opened(running, path)
    for tab in ("#tab-declined", "#tab-rewrites"):
        one.tab.click(tab)
    one.press("n", "/")
    one.tab.keyboard.type("script")
    one.tab.wait_for_timeout(200)
    assert one.tab.title() == HOSTILE.strip("\u2028") or one.tab.title().startswith("</script>")
    assert one.tab.locator("img").count() == 0
    assert one.tab.locator("script").count() == 2
    assert one.complaints == []
    assert len(one.requests) == 1
    one.tab.close()


def test_training_has_a_page_for_each_pass(running: Any, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    path = tmp_path / "train.html"
    view(fuse.show(model, (torch.ones(3, 4),), train=True, target="m.py", record=True).to_dict(), path)
    one = Opened(running, path)
    assert one.tab.locator("#sheet option").all_inner_texts() == ["forward", "backward"]
    names = one.ask(NAMES)
    one.tab.select_option("#sheet", "1")
    assert one.ask(NAMES) != names
    assert one.complaints == []
    one.tab.close()


def test_two_reports_share_one_selection(running: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    old = fuse.show(Cell().eval(), (torch.ones(6, 4, 8),), target="cell.py", record=True, fuel=0).to_dict()
    path = tmp_path / "diff.html"
    diff_page(old, report().to_dict(), ("old.json", "new.json"), path)
    one = Opened(running, path)
    assert one.ask("() => fuseViewer.shown.length") == 2
    marked = (
        "(side) => fuseViewer.shown[side].picture.layout.shapes.filter((item) => item.marked).map((item) => item.label)"
    )
    one.press("n", "n")
    assert one.ask(marked, 0)
    one.tab.locator("#list .row:not(.head)").first.click()
    assert one.ask(marked, 0) or one.ask(marked, 1)
    one.tab.locator("#source .line.known", has_text="torch.tanh").click()
    assert one.ask(marked, 0)
    assert one.ask(marked, 1)
    assert one.ask("() => fuseViewer.shown[1].picture.layout.shapes.some((item) => item.news === 'made')")
    one.press("/")
    one.tab.keyboard.type("relu")
    one.press("Enter")
    assert one.complaints == []
    assert len(one.requests) == 1
    one.tab.close()


def test_a_frame_of_a_large_graph_takes_not_much_longer_than_one_of_a_small_graph(running: Any, tmp_path: Path) -> None:
    paint = """() => {
      const { picture } = fuseViewer.shown[0], times = [];
      picture.camera.zoom = 0.8;
      picture.camera.x = picture.layout.width * 0.4 - 300;
      for (let i = 0; i < 60; i += 1) {
        picture.camera.y = (picture.layout.height * 0.8 - 800) * i / 60;
        const started = performance.now();
        for (let k = 0; k < 5; k += 1) picture.paint();
        times.push(performance.now() - started);
      }
      return times.sort((a, b) => a - b)[30];
    }"""
    took = []
    for nodes in (1_000, 20_000):
        path = tmp_path / f"{nodes}.html"
        sheet = {"name": "forward", "report": generated(nodes, nodes // 4)}
        path.write_text(page("generated", [sheet], "cpu"), encoding="utf-8")
        assert path.stat().st_size < 10e6
        one = Opened(running, path)
        took.append(min(one.ask(paint) for _ in range(3)))
        one.tab.close()
    assert took[1] <= 3 * took[0] + 1


TRACES = Path(__file__).parent / "traces"


@pytest.fixture(scope="module")
def lstm() -> Any:
    return load(str(Path(__file__).parents[2] / "models" / "lstm_loop.py"), settings=["seq_length=8"])


def test_a_trace_opens_in_the_same_page(running: Any, tmp_path: Path, lstm: Any) -> None:
    report = trace(TRACES / "lstm_eager_torch_2.13.json.gz", lstm, "lstm_loop.py")
    path = tmp_path / "trace.html"
    trace_page(report, path)
    one = Opened(running, path)
    assert "99 launches" in one.text("#summary")
    assert one.ask("() => fuseViewer.shown[0].picture.layout.shapes.some((item) => item.kind === 'repeat')")
    assert one.tab.locator("#layer option").all_inner_texts() == [
        "kind", "launches", "time, measured", "pause before it",
    ]  # fmt: skip
    one.tab.locator("#list .row", has_text="lstm_loop.py:40").first.click()
    assert one.text("#details h2") == "lstm_loop.py:40"
    assert one.ask(MARKED) > 0
    assert one.tab.locator("#source .line.marked").count() == 1
    one.tab.select_option("#layer", "measured")
    total = one.ask("() => fuseViewer.shown[0].tree.root.items.reduce((sum, item) => sum + item.amount, 0)")
    assert total == pytest.approx(report.busy, rel=1e-3)
    assert one.complaints == []
    one.tab.close()


def test_two_traces_share_one_selection(running: Any, tmp_path: Path, lstm: Any) -> None:
    eager, fused = (trace(TRACES / f"lstm_{which}_torch_2.13.json.gz", lstm) for which in ("eager", "fused"))
    path = tmp_path / "traces.html"
    trace_page(eager, path, fused)
    one = Opened(running, path)
    assert "99 → 1 launches" in one.text("#summary")
    one.tab.locator("#list .row", has_text="pointwise").first.click()
    assert one.ask(MARKED) > 0
    one.tab.locator("#list .row", has_text="lstm_loop.py:38").first.click()
    marked = "() => fuseViewer.shown.map((view) => view.picture.layout.shapes.some((item) => item.marked))"
    assert one.ask(marked) == [True, True]
    assert one.complaints == []
    one.tab.close()


def test_measured_times_are_a_layer(running: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shown = fuse.show(Cell().eval(), (torch.ones(6, 4, 8),), target="cell.py", measure=True)
    assert shown.measured is not None
    path = tmp_path / "measured.html"
    view(shown.to_dict(), path)
    one = Opened(running, path)
    one.tab.select_option("#layer", "measured")
    total = "() => fuseViewer.shown[0].tree.root.items.reduce((sum, item) => sum + item.amount, 0)"
    assert one.ask(total) == pytest.approx(sum(time for _, time in shown.measured.after.rows), rel=1e-3)
    assert "µs" in one.text("#source")
    one.tab.focus("#list")
    one.press("Home")
    one.ask("() => { const slider = document.getElementById('slider'); slider.value = 0; }")
    one.tab.dispatch_event("#slider", "input")
    one.until("fuseViewer.step === 0")
    assert one.ask(total) == pytest.approx(sum(time for _, time in shown.measured.before.rows), rel=1e-3)
    assert one.complaints == []
    one.tab.close()


def test_what_torch_compile_did_is_a_list(running: Any, tmp_path: Path) -> None:
    values = json.loads(json.dumps(report().to_dict()))
    line = values["record"]["lines"][0]["source"]
    refusal = {"reason": "node2 is extern or nop", "count": 3, "lines": [line]}
    kernel = {"name": "cpp_fused_tanh_0", "launches": 1, "lines": [line], "operators": ["aten.tanh"]}
    made = TorchCompiled(1, 1, (), (), (), 1.0, {line: 1}).to_dict() | {"refusals": [refusal], "kernels": [kernel]}
    path = tmp_path / "against.html"
    view({**values, "against": {"compile": made}}, path)
    one = Opened(running, path)
    one.tab.click("#tab-compile")
    one.tab.locator("#list .row", has_text="node2 is extern or nop").click()
    assert one.text("#details h2") == line
    assert "1 launch" in one.text("#details")
    assert one.complaints == []
    one.tab.close()


def test_json_inside_a_page_ends_nothing() -> None:
    text = embedded({HOSTILE: [HOSTILE, "<!--", "\u2029"]})
    assert not {"<", "\u2028", "\u2029"} & set(text)
    assert json.loads(text) == {HOSTILE: [HOSTILE, "<!--", "\u2029"]}


def test_a_report_without_its_record_says_how_to_have_one(tmp_path: Path) -> None:
    values = fuse.show(nn.Tanh(), (torch.ones(3),)).to_dict()
    with pytest.raises(FuseError, match="record=True"):
        view(values, tmp_path / "x.html")
    with pytest.raises(FuseError, match=r"must end in \.html"):
        view(values, tmp_path / "x.svg")
