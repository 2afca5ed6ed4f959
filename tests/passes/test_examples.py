"""The examples in the passes' docstrings, run under the name by which users import them."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import fuse.passes

MODULES = [module.name for module in pkgutil.iter_modules(fuse.passes.__path__) if not module.ispkg]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_the_pass_hold(name):
    assert doctest.testmod(importlib.import_module(f"fuse.passes.{name}")).failed == 0


@pytest.mark.parametrize("name", [name for name in MODULES if hasattr(getattr(fuse.passes, name), name)])
def test_every_pass_opens_with_a_drawing(name):
    text = importlib.import_module(f"fuse.passes.{name}").__doc__
    assert "->" in text.partition("\n\n")[2].partition("\n\n")[0]
