"""The register-blocked product keeps its sums in registers, whatever the width of the processor's vectors."""

from __future__ import annotations

import re
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from fuse.runtime.cpu import processor, toolchain

SOURCE = """
void product(float *out, const float *left, const float *packed, int64_t stride, int64_t depth) {{
    fuse_product_block<{rows}, {gates}>(out, stride, 16, left, stride, fuse_packed<float>{{packed, {gates} * 16}},
                                        depth);
}}
"""


def innermost_loop(assembly: str) -> list[str]:
    """The instructions between a label and the jump back to it that multiply most."""
    lines = [line.strip() for line in assembly.splitlines()]
    labels = {line[:-1]: number for number, line in enumerate(lines) if re.fullmatch(r"\.L\w+:", line)}
    loops = [
        lines[labels[jump[1]] : number]
        for number, line in enumerate(lines)
        if (jump := re.fullmatch(r"j\w+\s+(\.L\w+)", line)) and labels.get(jump[1], number) < number
    ]
    return max(loops, key=lambda loop: sum("fmadd" in line for line in loop))


@pytest.mark.skipif(not processor.is_x86() or not toolchain.find().is_gcc, reason="reads what GCC writes for x86")
@pytest.mark.parametrize(
    ("options", "rows", "gates", "multiplications"),
    [
        (["-mavx512f", "-mprefer-vector-width=512"], 6, 4, 24),
        (["-mavx512f", "-mprefer-vector-width=512"], 8, 3, 24),
        (["-mavx2", "-mfma"], 6, 1, 12),
        (["-mavx2", "-mfma"], 4, 1, 8),
    ],
)
def test_sums_stay_in_registers(
    tmp_path: Path, options: list[str], rows: int, gates: int, multiplications: int
) -> None:
    header = files("fuse.kernel.cpu").joinpath("products.h").read_text()
    source = tmp_path / "product.cpp"
    source.write_text(header + SOURCE.format(rows=rows, gates=gates))
    compiler = toolchain.find()
    command = [*compiler.command, *toolchain.REQUIRED_OPTIONS, *options, "-S", "-o", "-", str(source)]
    loop = innermost_loop(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert sum("fmadd" in line for line in loop) == multiplications
    assert not [line for line in loop if "mov" in line and "sp)" in line], "sums go through memory"
