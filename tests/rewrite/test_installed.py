"""Plugins: what is broken is listed, leaves nothing behind and harms no other."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from fuse.rewrite import installed, registry
from fuse.rewrite.registry import broken_plugins

PASS = """
    from fuse.rewrite.registry import register_pass

    @register_pass({order})
    def {name}(graph):
        yield from ()
"""

Plugins = Callable[..., dict[str, str]]


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plugins:
    """``plugins(name="source")``: install modules as plugins of passes; the errors of those that are broken."""
    registry.registered()
    monkeypatch.setattr(registry._installed, "by_name", dict(registry._installed.by_name))
    monkeypatch.setattr(registry._installed, "_broken", None)
    monkeypatch.syspath_prepend(tmp_path)

    def load(**sources: str) -> dict[str, str]:
        for name, source in sources.items():
            (tmp_path / f"{name}_of_a_test.py").write_text(textwrap.dedent(source))
            monkeypatch.delitem(sys.modules, f"{name}_of_a_test", raising=False)
        entries = [metadata.EntryPoint(name, f"{name}_of_a_test", "fuse.passes") for name in sources]
        monkeypatch.setattr(installed, "entry_points", lambda group: entries)
        assert "dead_code" in {info.name for info in registry.registered()}
        return {one.name: one.error for one in broken_plugins()}

    return load


def plugin_passes() -> list[str]:
    return [info.name for info in registry.registered() if info.origin.endswith("_of_a_test")]


def test_a_plugin_that_raises_leaves_nothing_behind(plugins):
    broken = plugins(
        half=PASS.format(name="half", order="") + "    raise ValueError('half of it')",
        missing="import no_such_module_anywhere",
        whole=PASS.format(name="whole", order=""),
    )
    assert broken == {
        "half": "ValueError: half of it",
        "missing": "ModuleNotFoundError: No module named 'no_such_module_anywhere'",
    }
    assert plugin_passes() == ["whole"]


def test_a_plugin_whose_order_does_not_fit_is_broken_and_the_others_run(plugins):
    broken = plugins(
        unknown=PASS.format(name="unknown", order="after='dead_cod'"),
        whole=PASS.format(name="whole", order="after='dead_code'"),
        circle=PASS.format(name="circle", order="stage='fuse', after='fuse_movement', before='fuse_pointwise'"),
    )
    assert list(broken) == ["unknown", "circle"]
    assert broken["unknown"].endswith("names 'dead_cod', which is not a pass (did you mean 'dead_code'?)")
    assert "declare an order that contradicts itself" in broken["circle"]
    assert plugin_passes() == ["whole"]


def test_a_plugin_may_name_the_passes_of_another(plugins):
    assert plugins(early=PASS.format(name="early", order="after='late'"), late=PASS.format(name="late", order="")) == {}
    assert plugin_passes() == ["late", "early"]


def test_a_name_that_is_taken_is_the_later_plugins_fault(plugins):
    broken = plugins(first=PASS.format(name="same", order=""), second=PASS.format(name="same", order=""))
    assert list(broken) == ["second"]
    assert "pass 'same' is registered twice, by first_of_a_test and by second_of_a_test" in broken["second"]
