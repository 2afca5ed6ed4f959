"""The passes that come with fuse, one a file; importing this package registers them.

Import it as ``fuse.passes``: from the repository's root ``import passes`` would load a second copy.
"""

from fuse.passes import assemble_in_place as assemble_in_place
from fuse.passes import broadcast_starts as broadcast_starts
from fuse.passes import cats_at_once as cats_at_once
from fuse.passes import channels_last as channels_last
from fuse.passes import checks_together as checks_together
from fuse.passes import classes_by_argmax as classes_by_argmax
from fuse.passes import collect_writes as collect_writes
from fuse.passes import common_subexpressions as common_subexpressions
from fuse.passes import constant_folding as constant_folding
from fuse.passes import dead_code as dead_code
from fuse.passes import draw_ahead as draw_ahead
from fuse.passes import draw_apart as draw_apart
from fuse.passes import drop_roundings as drop_roundings
from fuse.passes import expand_lstm_layers as expand_lstm_layers
from fuse.passes import fold_batch_norm as fold_batch_norm
from fuse.passes import forward_pieces as forward_pieces
from fuse.passes import forward_writes as forward_writes
from fuse.passes import fuse_attention as fuse_attention
from fuse.passes import fuse_horizontal as fuse_horizontal
from fuse.passes import fuse_movement as fuse_movement
from fuse.passes import fuse_pointwise as fuse_pointwise
from fuse.passes import fuse_reductions as fuse_reductions
from fuse.passes import gather_steps as gather_steps
from fuse.passes import loop_ends as loop_ends
from fuse.passes import masks_to_where as masks_to_where
from fuse.passes import match_patterns as match_patterns
from fuse.passes import merge_shared_weight_gemms as merge_shared_weight_gemms
from fuse.passes import merge_sibling_gemms as merge_sibling_gemms
from fuse.passes import no_ops as no_ops
from fuse.passes import pack_weights as pack_weights
from fuse.passes import pattern_gradients as pattern_gradients
from fuse.passes import plain_fills as plain_fills
from fuse.passes import product_epilogues as product_epilogues
from fuse.passes import roll_loops as roll_loops
from fuse.passes import roll_whole_loops as roll_whole_loops
from fuse.passes import simplify_casts as simplify_casts
from fuse.passes import start_sums as start_sums
from fuse.passes import step_invariants as step_invariants
from fuse.passes import sum_over_steps as sum_over_steps
from fuse.passes import transposed_convolutions as transposed_convolutions
from fuse.passes import unused_steps as unused_steps
from fuse.passes import view_chains as view_chains
