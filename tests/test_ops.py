"""The operator table: what it says of operators that real models dispatch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from fuse import ops

aten = torch.ops.aten

KINDS = {
    "gemm": [aten.mm.default, aten.addmm.default, aten.bmm.out, aten.mv.default, aten.dot.default,
             aten._scaled_dot_product_flash_attention_for_cpu.default],
    "convolution": [aten.convolution.default, aten.convolution_backward.default, aten.mkldnn_convolution.default],
    "pointwise": [aten.add_.Tensor, aten.tanh.default, aten.sigmoid_.default, aten.where.self, aten.masked_fill_.Scalar,
                  aten.threshold_backward.default, aten.gelu_backward.default, aten.hardswish.default,
                  aten.__iand__.Tensor, aten.clamp.out, aten.pow.Tensor_Scalar, aten._foreach_add_.List],
    "reduction": [aten.sum.dim_IntList, aten._softmax.default, aten.native_layer_norm.default, aten.max.dim,
                  aten.cumsum.default, aten.topk.default, aten.native_batch_norm.default, aten.argmax.default,
                  aten._softmax_backward_data.default, aten.native_layer_norm_backward.default,
                  aten.max_pool2d_with_indices_backward.default, aten.nll_loss_forward.default],
    "movement": [aten.cat.default, aten.stack.default, aten.clone.default, aten.copy_.default, aten._to_copy.default,
                 aten.embedding.default, aten.index_put_.default, aten.zeros.default, aten.constant_pad_nd.default,
                 aten.slice_scatter.default, aten.tril.default, aten.new_zeros.default, aten.expand_copy.default,
                 aten.slice_backward.default, aten.embedding_dense_backward.default],
    "random": [aten.bernoulli_.float, aten.native_dropout.default, aten.randn.default, aten.normal_.default,
               aten.multinomial.default, aten.rand_like.default],
    "loop": [aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default],
    "view": [aten.view.default, aten._unsafe_view.default, aten.select.int, aten.split.Tensor, aten.unbind.int,
             aten.t_.default, aten.squeeze_.dim, aten.detach.default, aten.as_strided.default, aten.unfold.default,
             aten.view_as_real.default, aten.lift_fresh.default, aten.diagonal.default],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "op"), [(kind, op) for kind, members in KINDS.items() for op in members], ids=str)
def test_operators_are_of_their_kind(kind: ops.Kind, op: OpOverload) -> None:
    assert ops.kind(op) == kind


@pytest.mark.parametrize("op", [*KINDS["view"], aten.empty.memory_format, aten._assert_async.msg, aten.resize_.default])
def test_what_runs_no_kernel_has_no_launch(op: OpOverload) -> None:
    facts = ops.info(op)
    assert facts is not None
    assert facts.launches == 0


def test_nearly_every_operator_with_a_cpu_kernel_is_known() -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    packets = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and has_kernel(name, "CPU") and "." not in name
    }
    unknown = {name for name in packets if ops.info(getattr(aten, name).default) is None}
    unknown = {name for name in unknown if not any(word in name for word in NOT_FOR_DENSE_MODELS)}
    assert len(packets) > 500
    assert sorted(unknown) == []


NOT_FOR_DENSE_MODELS = (
    "sparse", "spdiags", "_coo", "quantize", "int4", "4bit", "fq_helper", "nested", "test", "foobar", "from_file",
    "affine",
)  # fmt: skip


def test_a_custom_operator_is_unknown_whatever_its_schema_says() -> None:
    with torch.library._scoped_library("ops_test", "DEF") as library:
        library.define("look(Tensor(a) x) -> Tensor(a)")
        op = torch.ops.ops_test.look.default
        assert ops.info(op) is None
        assert ops.kind(op) == "other"
        assert not ops.is_view(op)


def test_elementwise_means_same_place_of_broadcast_arguments() -> None:
    assert all(map(ops.is_pointwise, [aten.add.Tensor, aten.tanh_backward.default, aten.where.self, aten.lerp.Tensor]))
    assert not any(
        map(ops.is_pointwise, [aten.glu.default, aten._foreach_add.List, aten.clone.default, aten.equal.default])
    )


@pytest.mark.parametrize("op", [op for op in KINDS["pointwise"] if ops.mutates(op)], ids=str)
def test_in_place_facts_are_the_functional_ones(op: OpOverload) -> None:
    functional = ops.functional_form(op)
    assert functional is not None
    ours, theirs = ops.info(op), ops.info(functional)
    assert ours is not None
    assert theirs is not None
    # Swapping would change what is written; whether vmap has a rule is registered for each form.
    assert dataclasses.replace(theirs, commutative=False, batch_rule=ours.batch_rule) == ours


@pytest.mark.parametrize(
    "op", [aten.add.Tensor, aten.mul.Tensor, aten.eq.Tensor, aten.maximum.default, aten.logaddexp.default], ids=str
)
def test_commutative_operators_give_the_same_bits_swapped(op: OpOverload) -> None:
    assert ops.is_commutative(op)
    a, b = torch.randn(64), torch.randn(64).half()
    assert torch.equal(op(a, b), op(b, a))


@pytest.mark.parametrize(
    "op", [aten.sub.Tensor, aten.div.Tensor, aten.add.Scalar, aten.mm.default, aten.atan2.default], ids=str
)
def test_what_cannot_be_swapped_is_not_commutative(op: OpOverload) -> None:
    assert not ops.is_commutative(op)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (aten.relu_.default, aten.relu.default),
        (aten.bernoulli_.float, aten.bernoulli.p),
        (aten.normal_.default, aten.normal_functional.default),
        (aten.native_layer_norm.out, aten.native_layer_norm.default),
        (aten.sort.values, aten.sort.default),
        (aten.__iand__.Tensor, aten.__and__.Tensor),
        (aten.index_put_.default, aten.index_put.default),
        (aten.native_batch_norm.default, aten._native_batch_norm_legit_functional.default),
        (aten.mm.default, aten.mm.default),
        (aten.arange.out, aten.arange.default),
    ],
    ids=str,
)
def test_functional_form(op: OpOverload, expected: OpOverload) -> None:
    assert ops.functional_form(op) is expected


def test_functional_forms_write_nothing_and_keep_the_arguments() -> None:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    found = 0
    for name in names:
        packet, _, overload = name.removeprefix("aten::").partition(".")
        try:
            op = getattr(getattr(aten, packet), overload or "default")
        except (AttributeError, RuntimeError):
            continue  # not visible from Python
        functional = ops.functional_form(op)
        if functional is not None and functional is not op:
            found += 1
            assert not ops.mutates(functional), name
            kept = [argument.name for argument in op._schema.arguments if not argument.is_out]
            if ops.is_factory(functional) and "dtype" not in kept:
                kept += ["dtype", "layout", "device", "pin_memory"]
            assert [argument.name for argument in functional._schema.arguments] == kept, name
    assert found > 1000


def test_a_batch_rule_is_what_vmap_has() -> None:
    assert ops.batch_rule(aten.addmm.default)
    assert ops.batch_rule(aten.softmax.int)
    assert not ops.batch_rule(aten.mkldnn_rnn_layer.default)


def test_attention_without_dropout_is_not_random() -> None:
    assert not ops.is_random(aten._scaled_dot_product_flash_attention_for_cpu.default)
    assert ops.is_random(aten._scaled_dot_product_flash_attention.default)


def test_assemble_is_cat_on_real_and_fake_tensors() -> None:
    assemble = torch.ops.fuse.assemble.default
    pieces = [torch.randn(2, 3), torch.randn(2, 5)]
    assert torch.equal(assemble(pieces, 1), torch.cat(pieces, 1))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(piece) for piece in pieces]
        assert assemble(fakes, 1).shape == (2, 8)
    facts = ops.info(assemble)
    assert facts is not None
    assert (facts.kind, facts.launches) == ("movement", 0)
    assert not ops.is_view(assemble)
    assert not ops.mutates(assemble)
    torch.library.opcheck(assemble, (pieces, 1), test_utils=["test_schema", "test_faketensor"])
