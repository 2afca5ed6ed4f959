"""Write the tables of README.md and docs (measured, mutation, precision, study) from the measured JSON, or check them.

    <!-- figures: lstm -->          | model | eager | ...
    (anything)                ->    | ... from benchmarks/results/lstm.json
    <!-- end -->

``python -m benchmarks.tables`` writes, ``python -m benchmarks.tables --check`` exits with 1 where a table is stale, so
that no figure in a table was ever typed by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys

from benchmarks.common import RESULTS, ROOT
from benchmarks.tables.checks import module_db_table, mutation_table, op_db_table, reads_table
from benchmarks.tables.common import conditions, speed_table
from benchmarks.tables.costs import (
    capture_table,
    compiling_table,
    first_call_table,
    overhead_table,
    pipeline_table,
    viewer_table,
)
from benchmarks.tables.loops import (
    busy_table,
    crf_share_table,
    limit_table,
    recurrent_layers_table,
    recurrent_table,
    scans_table,
    short_recurrent_table,
)
from benchmarks.tables.models import (
    albert_table,
    blocks_table,
    frozen_table,
    memory_table,
    short_speed_table,
    study_launches_table,
    study_table,
)
from benchmarks.tables.precision import narrow_table, precision_table
from benchmarks.tables.sizes import lengths_table, sizes_table
from benchmarks.tables.training import convolutions_table, curves_table, training_steps_table
from benchmarks.tables.zoo import zoo_speeds_table, zoo_table, zoo_world_table

PLACE = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

DOCUMENTS = (
    ROOT / "README.md",
    *(ROOT / "docs" / name for name in ("measured.md", "mutation.md", "pipeline.md", "precision.md", "study.md")),
)

TABLES = {
    "albert": albert_table,
    "blocks": blocks_table,
    "busy": busy_table,
    "capture": capture_table,
    "cells": speed_table,
    "crf_share": crf_share_table,
    "curves": curves_table,
    "first_call": first_call_table,
    "compiling": compiling_table,
    "sizes": sizes_table,
    "lengths": lengths_table,
    "frozen": frozen_table,
    "limit": limit_table,
    "lstm": speed_table,
    "memory": memory_table,
    "viewer": viewer_table,
    "models": speed_table,
    "models_in_short": short_speed_table,
    "module_db": module_db_table,
    "mutation": mutation_table,
    "narrow": narrow_table,
    "op_db": op_db_table,
    "overhead": overhead_table,
    "precision": precision_table,
    "reads": reads_table,
    "pipeline": pipeline_table,
    "recurrent": recurrent_table,
    "recurrent_layers": recurrent_layers_table,
    "study": study_table,
    "study_launches": study_launches_table,
    "recurrent_in_short": short_recurrent_table,
    "scans": scans_table,
    "training": speed_table,
    "training_steps": training_steps_table,
    "convolutions": convolutions_table,
    "zoo": zoo_table,
    "zoo_speeds": zoo_speeds_table,
    "zoo_world": zoo_world_table,
}
"""Each from the results of its name; ``_in_short``, ``_launches`` and ``_speeds`` from those of the whole table."""


def rendered(text: str) -> str:
    """``text`` with every marked table made anew from its JSON file."""

    def table(place: re.Match[str]) -> str:
        path = RESULTS / f"{re.sub('_(in_short|launches|speeds)$', '', place[2])}.json"
        if not path.exists():
            return place[1] + f"Not measured yet: `python -m benchmarks.{path.stem}`.\n" + place[3]
        results = json.loads(path.read_text())
        lines = [*TABLES[place[2]](results), "", conditions(results)]
        return place[1] + "\n".join(lines) + "\n" + place[3]

    return PLACE.sub(table, text)


def main() -> int:
    """Write or check; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where a table is stale")
    check = parser.parse_args().check
    fresh = {document: rendered(document.read_text()) for document in DOCUMENTS}
    stale = [document for document, text in fresh.items() if document.read_text() != text]
    if check and stale:
        names = " and ".join(str(document.relative_to(ROOT)) for document in stale)
        print(f"other figures than benchmarks/results in {names}; run python -m benchmarks.tables", file=sys.stderr)
        return 1
    if not check:
        for document in stale:
            document.write_text(fresh[document])
    return 0


if __name__ == "__main__":
    sys.exit(main())
