"""``python -m fuse``: the command ``fuse``, also where another package's command of that name comes first."""

from fuse.cli import main

if __name__ == "__main__":
    main()
