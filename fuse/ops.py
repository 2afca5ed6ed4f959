"""Facts about each operator: the one place that holds lists of operators.

    aten.tanh.default   ->  OpInfo(kind="pointwise", flops="output", weight=10, ...)
    aten.tanh_.default  ->  the same: in-place, ``out=`` and ``_copy`` variants take the facts of the operator they vary
    aten.select.int     ->  OpInfo(kind="view", launches=0): the schema says the result shares memory with an argument
    my_lib.op.default   ->  None: counted once as "other" and listed as unknown

The operator's schema and tags give some facts (views, mutations, randomness, most elementwise operators, batching
rules); the table below gives the rest. A fact holds for every call of an operator: ``fuse.cost.work`` has the flops and
bytes of one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch._ops import OpOverload, OpOverloadPacket

Kind = Literal["gemm", "convolution", "pointwise", "reduction", "movement", "random", "loop", "region", "other", "view"]
REPORTED_KINDS: tuple[Kind, ...] = (
    "gemm", "convolution", "pointwise", "reduction", "movement", "random", "loop", "region", "other",
)  # fmt: skip
"""Kinds in the order reports print them. A view launches nothing and so has no row."""

FlopRule = Literal["none", "output", "input", "contraction", "recurrence"]


@dataclass(frozen=True)
class OpInfo:
    """Facts about one operator.

    ``flops`` names the rule by which a call's arithmetic is counted: nothing, ``weight`` for each element of the result
    (``output``) or of the largest argument (``input``), twice the multiply-adds of a product (``contraction``) or of a
    whole recurrent layer (``recurrence``). ``launches`` is the number of kernels of one dispatch: 1, or 0 where nothing
    runs. ``cheap``: an element costs a few cycles, so that computing it twice beats storing it. ``elementwise``: each
    element of the result depends only on the elements at the same place of the broadcast arguments. ``gathers``: it
    reads only as many elements of its first tensor as it returns. ``batch_rule``: ``torch.vmap`` has a rule for it, so
    that it need not loop over calls.
    """

    kind: Kind
    flops: FlopRule = "none"
    weight: int = 1
    launches: int = 1
    commutative: bool = False
    random: bool = False
    cheap: bool = False
    elementwise: bool = False
    gathers: bool = False
    batch_rule: bool = False


TRANSCENDENTAL_WEIGHT = 10
"""Floating-point operations that one exp, tanh, log or random number counts as: about the length of its polynomial."""

_GEMM = OpInfo("gemm", flops="contraction")
_CONVOLUTION = OpInfo("convolution", flops="contraction")
_RECURRENT_LAYER = OpInfo("loop", flops="recurrence")
_CHEAP = OpInfo("pointwise", flops="output", cheap=True, elementwise=True)
_COSTLY = OpInfo("pointwise", flops="output", weight=TRANSCENDENTAL_WEIGHT, elementwise=True)
_REINDEXING = OpInfo("pointwise", flops="output", weight=TRANSCENDENTAL_WEIGHT)
_REDUCTION = OpInfo("reduction", flops="input")
_COSTLY_REDUCTION = OpInfo("reduction", flops="input", weight=TRANSCENDENTAL_WEIGHT)
_MOVEMENT = OpInfo("movement")
_GATHER = OpInfo("movement", gathers=True)
_MADE_IN_PLACE = OpInfo("movement", launches=0)  # the producers of its pieces write them into it
_ACCUMULATING_MOVEMENT = OpInfo("movement", flops="input")
_RANDOM = OpInfo("random", flops="output", weight=TRANSCENDENTAL_WEIGHT, random=True)
_OTHER = OpInfo("other", flops="input", weight=TRANSCENDENTAL_WEIGHT)
_NOTHING_RUNS = OpInfo("other", launches=0)
_VIEW = OpInfo("view", launches=0, cheap=True)

_LOSSES = frozenset({
    "binary_cross_entropy_with_logits", "multi_margin_loss", "multilabel_margin_loss_forward", "nll_loss_forward",
    "nll_loss2d_forward", "soft_margin_loss",
})  # fmt: skip
"""Losses without a rule in ``torch.vmap``, which PyTorch decomposes into other operators."""

_GROUPS: tuple[tuple[OpInfo, str], ...] = (
    (_GEMM, """
        _addmm_activation _efficient_attention_backward _efficient_attention_forward _flash_attention_backward
        _flash_attention_forward _grouped_mm _int_mm _native_multi_head_attention _scaled_dot_product_cudnn_attention
        _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable _scaled_grouped_mm
        _scaled_grouped_mm_v2 _scaled_mm _scaled_mm_v2 _transformer_encoder_layer_fwd _trilinear _weight_int4pack_mm
        _weight_int4pack_mm_for_cpu _weight_int8pack_mm addbmm addmm addmv addr baddbmm bmm dot linear matmul
        mkldnn_linear mkldnn_linear_backward_input mkldnn_linear_backward_weights mm mv vdot mkl::_mkl_linear
        mkldnn::_linear_pointwise
    """),
    (_CONVOLUTION, """
        _conv_depthwise2d _convolution _slow_conv2d_backward _slow_conv2d_forward conv_depthwise3d conv_tbc convolution
        convolution_backward_overrideable convolution_overrideable cudnn_convolution cudnn_convolution_add_relu
        cudnn_convolution_relu cudnn_convolution_transpose miopen_convolution miopen_convolution_transpose
        miopen_depthwise_convolution mkldnn_convolution slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d
        slow_conv_transpose2d slow_conv_transpose3d mkldnn::_convolution_pointwise
        mkldnn::_convolution_transpose_pointwise
    """),
    (_RECURRENT_LAYER, "_cudnn_rnn miopen_rnn mkldnn_rnn_layer"),
    (_CHEAP, """
        __and__ __lshift__ __or__ __rshift__ __xor__ _add_relu _conj_physical _masked_scale _prelu_kernel abs add
        addcdiv addcmul bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil
        clamp clamp_max clamp_min complex conj_physical copysign deg2rad div elu_backward eq floor floor_divide fmax
        fmin frac frexp ge gt hardshrink hardsigmoid hardswish hardtanh heaviside huber_loss_backward isinf isnan
        isneginf isposinf le leaky_relu lerp logical_and logical_not logical_or logical_xor lt masked_fill maximum
        minimum mse_loss_backward mul nan_to_num native_dropout_backward ne neg rad2deg reciprocal relu round
        rrelu_with_noise_backward rsqrt rsub sgn sigmoid_backward sign signbit smooth_l1_loss_backward softshrink sqrt
        sub tanh_backward threshold trunc where
    """),
    (_COSTLY, """
        binary_cross_entropy_backward log_sigmoid_backward log_sigmoid_forward mish_backward polar silu_backward
        soft_margin_loss_backward softplus_backward
    """),
    (_REINDEXING, """
        _amp_foreach_non_finite_check_and_unscale _amp_update_scale _fake_quantize_learnable_per_channel_affine
        _fake_quantize_learnable_per_tensor_affine _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
        _fused_adagrad _fused_adam _fused_adamw _fused_sgd _thnn_fused_gru_cell _thnn_fused_lstm_cell
        _thnn_fused_lstm_cell_backward_impl _transform_bias_rescale_qkv batch_norm_backward_elemt batch_norm_elemt
        dequantize fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine_cachemask glu
        glu_backward_jvp glu_jvp linalg_cross nll_loss2d_backward nll_loss_backward quantize_per_channel
        quantize_per_tensor
    """),
    (_REDUCTION, """
        _adaptive_avg_pool2d _adaptive_avg_pool3d _aminmax _cdist_backward _cdist_forward _cummax_helper _cummin_helper
        _embedding_bag _embedding_bag_dense_backward _embedding_bag_forward_only
        _embedding_bag_per_sample_weights_backward _euclidean_dist _histogramdd_bin_edges _histogramdd_from_bin_cts
        _histogramdd_from_bin_tensors _is_all_true _is_any_true _nested_sum_backward _pdist_backward _pdist_forward
        _segment_reduce_backward _sparse_sum adaptive_avg_pool3d_backward adaptive_max_pool2d adaptive_max_pool3d all
        allclose amax amin aminmax any argmax argmin avg_pool1d avg_pool2d avg_pool3d bincount count_nonzero cummax
        cummin cumprod cumsum dist equal fractional_max_pool2d fractional_max_pool3d hash_tensor histc histogram
        huber_loss isin linalg__powsum linalg_vector_norm max max_pool2d_backward max_pool2d_with_indices
        max_pool3d_with_indices mean min mkldnn_max_pool2d mkldnn_max_pool3d mse_loss multi_margin_loss
        multilabel_margin_loss_backward multilabel_margin_loss_forward nansum native_norm nll_loss2d_forward
        nll_loss_forward norm prod segment_reduce smooth_l1_loss std std_mean sum trace var var_mean
    """),
    (_COSTLY_REDUCTION, """
        _batch_norm_no_update _batch_norm_with_update _ctc_loss _fused_rms_norm _log_softmax _log_softmax_backward_data
        _logcumsumexp _masked_softmax _native_batch_norm_legit _native_batch_norm_legit_no_training _safe_softmax
        _softmax _softmax_backward_data _unique _unique2 _weight_norm_interface batch_norm_backward
        batch_norm_backward_reduce batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_stats
        batch_norm_update_stats binary_cross_entropy binary_cross_entropy_with_logits cudnn_batch_norm embedding_renorm
        kthvalue logcumsumexp logsumexp median miopen_batch_norm mode nanmedian native_batch_norm native_group_norm
        native_layer_norm renorm soft_margin_loss sort topk unique_consecutive unique_dim unique_dim_consecutive
    """),
    (_MOVEMENT, """
        _chunk_cat _coalesce _copy_from _copy_from_and_resize _foreach_copy _foreach_zero
        _jagged_to_padded_dense_forward _nested_from_padded _nested_tensor_from_mask
        _new_zeros_with_same_feature_meta _pack_padded_sequence _padded_dense_to_jagged_forward _pin_memory
        _resize_output _stack _to_copy _to_dense _to_sparse _upsample_bicubic2d_aa _upsample_bilinear2d_aa
        _upsample_lanczos2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
        affine_grid_generator arange as_strided_scatter bartlett_window blackman_window block_diag cat channel_shuffle
        clone constant_pad_nd copy diag_embed diagonal_backward diagonal_scatter eye fft_fftfreq fft_rfftfreq fill flip
        full full_like grid_sampler_2d_backward grid_sampler_3d_backward hamming_window hann_window im2col index_copy
        index_fill kaiser_window lift linspace logspace lu_unpack masked_scatter max_unpool2d max_unpool3d
        native_channel_shuffle new_full new_ones new_zeros nonzero nonzero_static ones ones_like pixel_shuffle
        pixel_unshuffle put range reflection_pad1d reflection_pad2d reflection_pad3d repeat repeat_interleave
        replication_pad1d replication_pad2d replication_pad3d roll rot90 scalar_tensor scatter select_backward
        select_scatter slice_backward slice_scatter stack to_mkldnn to_padded_tensor tril tril_indices triu
        triu_indices upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
        upsample_nearest3d upsample_trilinear3d zero zeros zeros_like mkldnn::_reorder_convolution_weight
        mkldnn::_reorder_linear_weight mkldnn::_reorder_mkldnn_rnn_layer_weight
    """),
    (_GATHER, """
        _unsafe_index _unsafe_masked_index embedding gather grid_sampler_2d grid_sampler_3d index index_select
        masked_select take
    """),
    (_ACCUMULATING_MOVEMENT, """
        _index_put_impl _unsafe_index_put _unsafe_masked_index_put_accumulate col2im embedding_dense_backward index_add
        index_put index_reduce reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
        replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward scatter_add scatter_reduce
        unfold_backward
    """),
    (_RANDOM, """
        _dirichlet_grad _fused_dropout _sample_dirichlet _standard_gamma bernoulli binomial cauchy exponential
        geometric log_normal multinomial native_dropout normal poisson rand rand_like randint randint_like randn
        randn_like random randperm rrelu_with_noise uniform
    """),
    (_OTHER, """
        _cholesky_solve_helper _compute_linear_combination _fft_c2c _fft_c2r _fft_r2c _linalg_det _linalg_eigh
        _linalg_eigvals _linalg_slogdet _linalg_solve_ex _linalg_svd _standard_gamma_grad bucketize cholesky
        cholesky_inverse cholesky_solve geqrf linalg_cholesky_ex linalg_eig linalg_eigvals linalg_householder_product
        linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor_ex linalg_lu_solve
        linalg_matrix_exp linalg_pinv linalg_qr linalg_solve_triangular ormqr searchsorted triangular_solve
    """),
    (_NOTHING_RUNS, """
        _assert_async _assert_scalar _assert_tensor_metadata _efficientzerotensor _functional_assert_async
        _functional_assert_scalar _functional_sym_constrain_range _functional_sym_constrain_range_for_size
        _has_same_storage_numel _linalg_check_errors _local_scalar_dense _make_dep_token _nnz _print _use_cudnn_ctc_loss
        dense_dim empty empty_like empty_permuted empty_strided is_coalesced is_pinned is_same_size is_set_to new_empty
        new_empty_strided q_scale q_zero_point qscheme record_stream resize resize_as set sparse_dim
        sym_constrain_range sym_constrain_range_for_size sym_is_contiguous sym_numel sym_size sym_storage_offset
        sym_stride
        profiler::_record_function_enter profiler::_record_function_enter_new profiler::_record_function_exit
    """),
    (_VIEW, "_unsafe_view unsafe_split unsafe_split_with_sizes"),
    (_MADE_IN_PLACE, "fuse::assemble"),
    (_CHEAP, "fuse::with_gradient_of"),
)  # fmt: skip

_TABLE: dict[str, OpInfo] = {name: facts for facts, names in _GROUPS for name in names.split()}

_COMMUTATIVE = frozenset([
    "__and__", "__or__", "__xor__", "add", "bitwise_and", "bitwise_or", "bitwise_xor", "dot", "eq", "fmax", "fmin",
    "gcd", "hypot", "lcm", "logaddexp", "logaddexp2", "logical_and", "logical_or", "logical_xor", "maximum", "minimum",
    "mul", "ne",
])  # fmt: skip
_CHECKS = frozenset(["_assert_async", "_linalg_check_errors"])
_DETERMINISTIC_DESPITE_TAG = frozenset(["_scaled_dot_product_flash_attention_for_cpu"])  # it refuses dropout
_HIDDEN_MUTATIONS = {  # operators that write arguments their schema does not mark
    "native_batch_norm": ("running_mean", "running_var"),
    "cudnn_batch_norm": ("running_mean", "running_var"),
    "miopen_batch_norm": ("running_mean", "running_var"),
}
_NUMBERS_ARE_TENSORS = frozenset([  # a number becomes the dtype of the arithmetic, as a tensor of one element does
    "add", "div", "eq", "ge", "gt", "le", "lt", "masked_fill", "mul", "ne", "rsub", "sub", "where",
])  # fmt: skip
_KNOWN_NAMESPACES = frozenset(["aten", "fuse", "mkl", "mkldnn", "profiler"])


def info(op: object) -> OpInfo | None:
    """Facts about an operator, or None if it is unknown (a user's custom operator, ``getitem``).

    This and the functions below take any target of a node; a target that is no operator of PyTorch is unknown.

    >>> info(torch.ops.aten.mm.default).kind
    'gemm'
    >>> info(torch.ops.aten.tanh_.default) == info(torch.ops.aten.tanh.default)
    True
    >>> info(torch.ops.aten.select.int).launches
    0
    >>> info(print) is None
    True
    """
    known = _known.get(id(op))
    if known is None:
        if not isinstance(op, OpOverload):
            return None
        known = _known[id(op)] = op, _facts(op)
    return known[1]


def kind(op: object) -> Kind:
    """The kind under which an operator is counted; ``other`` if it is unknown.

    >>> kind(torch.ops.aten.cat.default)
    'movement'
    """
    facts = info(op)
    return facts.kind if facts else "other"


def is_view(op: object) -> bool:
    """Whether the operator computes nothing: its result is a view of an argument's memory.

    >>> aten = torch.ops.aten
    >>> is_view(aten.permute.default), is_view(aten.transpose_.default), is_view(aten.clone.default)
    (True, True, False)
    """
    known = _known.get(id(op))  # a short cut for the most frequent question of passes
    facts = info(op) if known is None else known[1]
    return facts is not None and facts.kind == "view"


def is_product(op: object) -> bool:
    """Whether the operator multiplies matrices or convolves.

    >>> is_product(torch.ops.aten.mm.default), is_product(torch.ops.aten.mul.Tensor)
    (True, False)
    """
    return kind(op) in ("gemm", "convolution")


def is_pointwise(op: object) -> bool:
    """Whether each element of the result depends only on the elements at the same place of the broadcast arguments.

    >>> is_pointwise(torch.ops.aten.gelu_backward.default), is_pointwise(torch.ops.aten.glu.default)
    (True, False)
    """
    facts = info(op)
    return facts is not None and facts.elementwise


def is_random(op: object) -> bool:
    """Whether the operator draws from a random generator, so that its order and number of calls must not change.

    >>> is_random(torch.ops.aten.bernoulli.p), is_random(torch.ops.aten.mul.Tensor)
    (True, False)
    """
    facts = info(op)
    return facts.random if facts else isinstance(op, OpOverload) and _is_seeded(op)


def is_check(op: object) -> bool:
    """Whether ``op`` returns nothing, and raises for invalid values of its arguments.

    >>> is_check(torch.ops.aten._linalg_check_errors.default), is_check(torch.ops.aten._print.default)
    (True, False)
    """
    return isinstance(op, OpOverload) and _base_name(op) in _CHECKS


def is_commutative(op: object) -> bool:
    """Whether swapping the first two arguments changes no bit of the result (for ``add``: with ``alpha`` left at 1).

    >>> is_commutative(torch.ops.aten.maximum.default), is_commutative(torch.ops.aten.sub.Tensor)
    (True, False)
    """
    facts = info(op)
    return facts is not None and facts.commutative


@cache
def batch_rule(op: OpOverload) -> bool:
    """Whether ``torch.vmap`` has a rule for the operator, and so does not fall back to a loop over the batch.

    >>> batch_rule(torch.ops.aten.mm.default), batch_rule(torch.ops.aten.mkldnn_rnn_layer.default)
    (True, False)
    """
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(_qualified_name(op), key)
        for key in ("FuncTorchBatched", "FuncTorchBatchedDecomposition")
    )


@cache
def parts(op: OpOverload) -> Callable[..., object] | None:
    """PyTorch's decomposition of a loss into other operators; None for other operators, or if it has none.

    >>> parts(torch.ops.aten.nll_loss_forward.default).__name__
    'nll_loss_forward'
    >>> parts(torch.ops.aten.sort.default) is None
    True
    """
    if _base_name(op) not in _LOSSES:
        return None
    from torch._decomp import decomposition_table  # takes long to import

    found: Callable[..., object] | None = decomposition_table.get(op)
    return found


@cache
def is_composite(op: OpOverload) -> bool:
    """Whether the operator only calls others, and so is never itself sent to a device.

    Autograd takes it apart; dispatch modes see it whole in inference mode only.

    >>> is_composite(torch.ops.aten.matmul.default), is_composite(torch.ops.aten.mm.default)
    (True, False)
    """
    implicit, *kernels = (
        torch._C._dispatch_has_kernel_for_dispatch_key(_qualified_name(op), key)
        for key in ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CPU", "CUDA")
    )
    return implicit and not any(kernels)


@cache
def mutated_arguments(op: OpOverload) -> tuple[str, ...]:
    """Names of the arguments that the operator may write, including those its schema does not mark.

    >>> mutated_arguments(torch.ops.aten.add_.Tensor)
    ('self',)
    >>> mutated_arguments(torch.ops.aten.native_batch_norm.default)
    ('running_mean', 'running_var')
    """
    written = (a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return (*written, *_HIDDEN_MUTATIONS.get(op._schema.name.removeprefix("aten::"), ()))


def mutates(op: OpOverload) -> bool:
    """Whether the operator may write one of its arguments.

    >>> mutates(torch.ops.aten.relu_.default), mutates(torch.ops.aten.mm.out), mutates(torch.ops.aten.relu.default)
    (True, True, False)
    """
    return bool(mutated_arguments(op))


FACTORY_ARGUMENTS = [
    *(("dtype", "Optional[int]"), ("layout", "Optional[int]")),
    *(("device", "Optional[Device]"), ("pin_memory", "Optional[bool]")),
]
"""Names and types of the arguments that say what tensor a factory makes."""


@cache
def functional_form(op: OpOverload) -> OpOverload | None:
    """The functional variant of an in-place or ``out=`` operator; None where torch has none.

    It takes the same arguments, less the ``out`` ones, and returns the written values in their order (after what the
    operator already returned, for those with state such as batch norm). A functional operator is its own form. The
    form of a factory also takes the dtype and device of the tensor that it makes.

    >>> functional_form(torch.ops.aten.add_.Tensor)
    <OpOverload(op='aten.add', overload='Tensor')>
    >>> functional_form(torch.ops.aten.mm.out), functional_form(torch.ops.aten.arange.start_out)
    (<OpOverload(op='aten.mm', overload='default')>, <OpOverload(op='aten.arange', overload='start_step')>)
    """
    if not mutates(op):
        return op
    wanted = _argument_types(op, keep_out=False)
    for of_a_factory in ([], FACTORY_ARGUMENTS):
        for packet in _functional_packets(op):
            # Several overloads may take the same arguments: try the one of the same name first.
            for candidate in sorted(_overloads(packet), key=lambda c: c._overloadname != op._overloadname):
                if not mutates(candidate) and _argument_types(candidate, keep_out=True) == wanted + of_a_factory:
                    return candidate
    return None


def is_factory(op: OpOverload) -> bool:
    """Whether ``op`` takes the dtype, layout and device of the tensor that it makes.

    >>> is_factory(torch.ops.aten.arange.default), is_factory(torch.ops.aten.sum.default)
    (True, False)
    """
    return _argument_types(op, keep_out=False)[-len(FACTORY_ARGUMENTS) :] == FACTORY_ARGUMENTS


@cache
def tensor_form(op: OpOverload) -> OpOverload | None:
    """The overload that takes one-element tensors in place of numbers, and gives the same bits.

    An operator that takes a tensor or a number in that place is its own form. None if torch has no such overload.

    >>> tensor_form(torch.ops.aten.gt.Scalar)
    <OpOverload(op='aten.gt', overload='Tensor')>
    >>> tensor_form(torch.ops.aten.mul.Tensor), tensor_form(torch.ops.aten.pow.Tensor_Scalar)
    (<OpOverload(op='aten.mul', overload='Tensor')>, None)
    """
    if op.namespace != "aten" or _base_name(op) not in _NUMBERS_ARE_TENSORS or mutates(op):
        return None
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    for candidate in _overloads(op.overloadpacket):
        having = [(a.name, str(a.type)) for a in candidate._schema.arguments]
        tensors = [name for name, kind in having if kind == "Tensor"]
        fits = having == [(n, "Tensor" if kind == "number" and n in tensors else kind) for n, kind in wanted]
        if fits and ("other" in tensors or "value" in tensors):
            return candidate
    return None


_known: dict[int, tuple[OpOverload, OpInfo | None]] = {}
"""Facts by operator id: torch computes an operator's hash in Python, and passes ask several times for each node."""


def _facts(op: OpOverload) -> OpInfo | None:
    if op.namespace not in _KNOWN_NAMESPACES:
        return None
    facts = _VIEW if _schema_says_view(op) else _listed(op) or _tagged(op)
    if facts is None:
        return None
    return replace(
        facts,
        commutative=_base_name(op) in _COMMUTATIVE and _takes_two_tensors(op) and not mutates(op),
        random=facts.random or _is_seeded(op),
        batch_rule=batch_rule(op),
    )


def _schema_says_view(op: OpOverload) -> bool:
    if torch.Tag.inplace_view in op.tags:
        return _base_name(op) not in _TABLE
    returned = any(result.alias_info is not None for result in op._schema.returns)
    return returned and not any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments)


def _listed(op: OpOverload) -> OpInfo | None:
    name = _base_name(op)
    for listed in (name, name.removesuffix("_backward")):  # a gradient has the facts of its operator, unless listed
        if listed in _TABLE:
            return _TABLE[listed]
    if name.startswith("_foreach_"):
        return _REINDEXING
    if name.endswith("_copy") and hasattr(torch.ops.aten, name.removesuffix("_copy")):
        return _MOVEMENT  # the copying variant of a view operator
    return None


def _tagged(op: OpOverload) -> OpInfo | None:
    """Facts from tags: elementwise operators that the table does not list are special functions, which are costly."""
    if _is_seeded(op):
        return _RANDOM
    functional = getattr(torch.ops.aten, _base_name(op), None)
    siblings = _overloads(functional) if isinstance(functional, OpOverloadPacket) else []
    return _COSTLY if any(torch.Tag.pointwise in sibling.tags for sibling in (op, *siblings)) else None


def _is_seeded(op: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags and _base_name(op) not in _DETERMINISTIC_DESPITE_TAG


def _base_name(op: OpOverload) -> str:
    """``aten::add_`` is ``add``, ``aten::normal_functional`` is ``normal``; other namespaces are kept."""
    name = op._schema.name.removeprefix("aten::").removesuffix("_functional")
    is_dunder = name.endswith("__")
    if is_dunder and name.startswith("__i") and mutates(op):
        return "__" + name.removeprefix("__i")  # __iand__ varies __and__
    return name if is_dunder else name.removesuffix("_")


def _qualified_name(op: OpOverload) -> str:
    overload = op._overloadname
    return op._schema.name if overload == "default" else f"{op._schema.name}.{overload}"


def _overloads(packet: OpOverloadPacket) -> list[OpOverload]:
    return [getattr(packet, name or "default") for name in packet._overload_names]


def _takes_two_tensors(op: OpOverload) -> bool:
    arguments = op._schema.arguments[:2]
    return len(arguments) == 2 and all(str(argument.type) == "Tensor" for argument in arguments)


def _argument_types(op: OpOverload, *, keep_out: bool) -> list[tuple[str, str]]:
    return [
        (argument.name, str(argument.type).replace("Optional[Tensor]", "Tensor"))
        for argument in op._schema.arguments
        if keep_out or not argument.is_out
    ]


def _functional_packets(op: OpOverload) -> Iterator[OpOverloadPacket]:
    """The packets that may hold an operator's functional variant, best first."""
    namespace = getattr(torch.ops, op.namespace)
    full_name = op._schema.name.partition("::")[2]
    base_name = _base_name(op).partition("::")[2] or _base_name(op)
    legit = f"_{base_name}_legit_functional"
    for name in (base_name, f"{base_name}_functional", f"{full_name}_functional", legit):
        packet = getattr(namespace, name, None)
        if isinstance(packet, OpOverloadPacket):
            yield packet


torch.library.define("fuse::assemble", "(Tensor[] pieces, int dim) -> Tensor")


@torch.library.impl("fuse::assemble", "CompositeExplicitAutograd")
def _assemble(pieces: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Concatenate like ``torch.cat``; a compiled program writes each piece directly into its place."""
    return torch.cat(list(pieces), dim)


@torch.library.register_fake("fuse::assemble")  # type: ignore[untyped-decorator]  # torch leaves it untyped
def _assemble_fake(pieces: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.cat(list(pieces), dim)


torch.library.define("fuse::with_gradient_of", "(Tensor self, Tensor earlier) -> Tensor")


@torch.library.impl("fuse::with_gradient_of", "CompositeExplicitAutograd")
def _with_gradient_of(self: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
    """The values of ``self``; its gradient is that of ``earlier`` (:mod:`fuse.graph.backward.unseen_writes`)."""
    return self.clone()


@torch.library.register_fake("fuse::with_gradient_of")  # type: ignore[untyped-decorator]  # torch leaves it untyped
def _with_gradient_of_fake(self: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(self)
