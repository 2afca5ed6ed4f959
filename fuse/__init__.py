"""fuse (installed as torch-fuse): see, fuse and count the small kernels of a PyTorch model.

Names are resolved on first use, so that ``fuse --help`` answers without importing torch.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuse.rewrite.patterns import services

if TYPE_CHECKING:
    from fuse.graph.capture import capture as capture
    from fuse.graph.precision import Precision as Precision
    from fuse.report.show import show as show
    from fuse.rewrite.patterns.language import const as const
    from fuse.rewrite.patterns.language import either as either
    from fuse.rewrite.patterns.language import many as many
    from fuse.rewrite.patterns.language import optional as optional
    from fuse.rewrite.patterns.language import tensor as tensor
    from fuse.rewrite.patterns.registry import pattern as pattern
    from fuse.rewrite.pipeline import run_passes as run_passes
    from fuse.rewrite.registry import register_pass as register_pass
    from fuse.runtime.module import compile as compile
    from fuse.runtime.pipeline import pipeline as pipeline

_HOME = {
    "Precision": "fuse.graph.precision",
    "capture": "fuse.graph.capture",
    "compile": "fuse.runtime.module",
    "const": "fuse.rewrite.patterns.language",
    "either": "fuse.rewrite.patterns.language",
    "many": "fuse.rewrite.patterns.language",
    "optional": "fuse.rewrite.patterns.language",
    "pattern": "fuse.rewrite.patterns.registry",
    "pipeline": "fuse.runtime.pipeline",
    "register_pass": "fuse.rewrite.registry",
    "run_passes": "fuse.rewrite.pipeline",
    "show": "fuse.report.show",
    "tensor": "fuse.rewrite.patterns.language",
}

__all__ = [
    "Precision",
    "capture",
    "compile",
    "const",
    "either",
    "many",
    "optional",
    "pattern",
    "pipeline",
    "register_pass",
    "run_passes",
    "show",
    "tensor",
]
__version__ = "0.1.0"

# In a clone, passes/ lies beside this package, not in it: add its parent folder so that fuse.passes imports.
_HERE = Path(__file__).parent
if not (_HERE / "passes").is_dir() and (_HERE.parent / "passes").is_dir():
    __path__.append(str(_HERE.parent))


# Lower layers must not import upper ones. They get these two modules by name and import them on first use.
services.register(verifier="fuse.check.trials", disk_cache="fuse.runtime.building.cache")


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in ("passes", "testing"):
        return importlib.import_module(f"fuse.{name}")
    raise AttributeError(f"module 'fuse' has no attribute {name!r}")
