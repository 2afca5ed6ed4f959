"""How ``forward`` uses sizes: its comparisons and arithmetic, recorded while it runs on symbolic sizes."""
