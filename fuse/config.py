"""``[tool.fuse]`` in the nearest ``pyproject.toml``: defaults for the command line's flags.

[tool.fuse]
device = "h200"
ignore = ["merge_sibling_gemms"]
max-launches = 200
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

from fuse.errors import FuseError

_TYPES: dict[str, tuple[type, ...]] = {
    "device": (str,),
    "select": (list,),
    "ignore": (list,),
    "extend-select": (list,),
    "seed": (int,),
    "atol": (float, int),
    "rtol": (float, int),
    "color": (str,),
    "max-launches": (int,),
}


def defaults(folder: Path) -> dict[str, Any]:
    """The flags that the nearest ``pyproject.toml`` sets, in ``folder`` or above it, by parameter name.

    Raises ``FuseError`` for a file that is not TOML, for a key that is no flag and for a value of the wrong type.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "pyproject.toml").write_text('[tool.fuse]\\nextend-select = ["mine"]')
    >>> defaults(folder)
    {'extend_select': 'mine'}
    """
    path = next((place / "pyproject.toml" for place in _upwards(folder) if (place / "pyproject.toml").is_file()), None)
    if path is None:
        return {}
    try:
        tools = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise FuseError(f"cannot read {path}: {error}") from error
    table = tools.get("fuse", {}) if isinstance(tools, dict) else None
    if not isinstance(table, dict):
        raise FuseError(f"{path} has no table [tool.fuse]; write settings as key = value below that heading")
    return {key.replace("-", "_"): _checked(path, key, value) for key, value in table.items()}


def _upwards(folder: Path) -> tuple[Path, ...]:
    here = folder.resolve()
    return (here, *here.parents)


def _checked(path: Path, key: str, value: object) -> object:
    """The value in the form of a flag: a list becomes names with commas between them."""
    if key not in _TYPES:
        close = difflib.get_close_matches(key, _TYPES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it may hold {', '.join(_TYPES)}"
        raise FuseError(f"{path}: [tool.fuse] has no setting {key!r}; {hint}")
    # A TOML boolean is a Python int as well, and no flag here takes one.
    if not isinstance(value, _TYPES[key]) or isinstance(value, bool):
        expected = " or ".join(kind.__name__ for kind in _TYPES[key])
        raise FuseError(f"{path}: [tool.fuse] {key} must be of type {expected}, not {value!r}")
    if not isinstance(value, list):
        return value
    if not all(isinstance(name, str) for name in value):
        raise FuseError(f"{path}: [tool.fuse] {key} must be a list of names, not {value!r}")
    return ",".join(value)
