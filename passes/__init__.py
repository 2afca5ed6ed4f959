"""The passes that come with fuse, one a file; importing this package registers them.

Import it as ``fuse.passes``: from the repository's root ``import passes`` would load a second copy.
"""

from fuse.passes import common_subexpressions as common_subexpressions
from fuse.passes import constant_folding as constant_folding
from fuse.passes import dead_code as dead_code
from fuse.passes import merge_shared_weight_gemms as merge_shared_weight_gemms
from fuse.passes import merge_sibling_gemms as merge_sibling_gemms
from fuse.passes import no_ops as no_ops
from fuse.passes import view_chains as view_chains
