"""The passes that come with fuse, one a file; importing this package registers them.

Import it as ``fuse.passes``: from the repository's root ``import passes`` would load a second copy.
"""

from fuse.passes import dead_code as dead_code
