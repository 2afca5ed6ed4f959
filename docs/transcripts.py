"""Keep the commands shown in the documents true: run them and write, or compare, what they print.

    ```console
    $ fuse passes             ->      the same block with what the command prints today
    (anything)
    ```

``python docs/transcripts.py`` writes, ``python docs/transcripts.py --check`` exits with 1 where a document shows
something else. Times differ from run to run and are not compared.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import re
import shlex
import sys
from pathlib import Path

from fuse import cli

ROOT = Path(__file__).parent.parent
DOCUMENTS = (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))
TRANSCRIPT = re.compile(r"(```console\n\$ fuse ([^\n]*)\n)(.*?)(```)", re.DOTALL)
SECONDS = re.compile(r"\d+\.\d+ s\b")


def refreshed(text: str) -> str:
    """``text`` with every transcript whose output, times apart, is no longer that shown."""

    def transcript(block: re.Match[str]) -> str:
        printed = output(block[2])
        same = SECONDS.sub("", printed) == SECONDS.sub("", block[3])
        return block[0] if same else block[1] + printed + block[4]

    return TRANSCRIPT.sub(transcript, text)


def output(arguments: str) -> str:
    """What ``fuse`` prints on stdout, run in the repository's root."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.chdir(ROOT):
        cli.run([*shlex.split(arguments), "--quiet"])
    return printed.getvalue()


def main() -> int:
    """Write or check; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where a transcript is stale")
    check = parser.parse_args().check
    stale = False
    for document in DOCUMENTS:
        text = document.read_text()
        fresh = refreshed(text)
        if fresh == text:
            continue
        if not check:
            document.write_text(fresh)
            continue
        stale = True
        name = str(document.relative_to(ROOT))
        lines = difflib.unified_diff(text.splitlines(), fresh.splitlines(), name, "printed today", n=0, lineterm="")
        print("\n".join(lines), "run python docs/transcripts.py to take this over", sep="\n", file=sys.stderr)
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
