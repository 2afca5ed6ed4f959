"""The patterns that come with fuse, one theme a file; importing this package registers them.

Patterns that are better than the generic passes are enabled; ``fuse explain`` and ``--patterns NAME`` know the others,
too. docs/patterns/README.md lists all, with the launches with and without each.
"""

from fuse.passes.patterns import activations as activations
from fuse.passes.patterns import attention as attention
from fuse.passes.patterns import cells as cells
from fuse.passes.patterns import cross_entropy as cross_entropy
from fuse.passes.patterns import experts as experts
from fuse.passes.patterns import gated_units as gated_units
from fuse.passes.patterns import images as images
from fuse.passes.patterns import losses as losses
from fuse.passes.patterns import nearest_upsample as nearest_upsample
from fuse.passes.patterns import norms as norms
from fuse.passes.patterns import positions as positions
from fuse.passes.patterns import quantised as quantised
from fuse.passes.patterns import repeated_embedding as repeated_embedding
from fuse.passes.patterns import sequences as sequences
