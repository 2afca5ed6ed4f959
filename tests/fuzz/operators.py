"""Lines of a program beyond the commonest: what models call less often of functions, views, writes and indices.

``a`` and ``b`` are tensors of any shape and dtype, ``d`` a dimension, ``i`` 0 to 2, ``v`` the line's result.
"""

from __future__ import annotations

ACTIVATIONS = (
    "torch.nn.functional.leaky_relu({a}, 0.1)", "torch.nn.functional.selu({a})", "torch.nn.functional.celu({a})",
    "torch.nn.functional.hardtanh({a})", "torch.nn.functional.hardsigmoid({a})", "torch.nn.functional.relu6({a} * 4)",
    "torch.nn.functional.logsigmoid({a})", "torch.nn.functional.softsign({a})", "torch.nn.functional.tanhshrink({a})",
    "torch.nn.functional.softshrink({a}, 0.3137)", "torch.nn.functional.hardshrink({a}, 0.3137)",
    "torch.nn.functional.prelu({a}, self.bias[:1])", "torch.nn.functional.gelu({a}, approximate='tanh')",
    "torch.nn.functional.threshold({a}, 0.3137, -1)", "torch.nn.functional.softmin({a}, {d})",
    "torch.nn.functional.softplus({a}, 2, 3)", "torch.nn.functional.silu({a}, inplace=True)",
)  # fmt: skip
MATHEMATICS = (
    "torch.where({a} > 0.3137, 1.0, 0.0)", "torch.where({a} > 0.3137, 1, 0)", "torch.where({a} > 0.3137, 0.5, {b})",
    "torch.where({a} > 0.3137, {a}.sum(), {b})", "torch.clamp({a}, {b} - 1, {b} + 1)", "{a}.clamp(min=0.1618)",
    "torch.addcdiv({a}, {b}, {a}.abs() + 1, value=0.5)", "torch.lerp({a}, {b}, {a}.sigmoid())", "{a}.sgn() * {b}",
    "torch.xlogy({a}, {b}.abs() + 1)", "torch.sinc({a})", "torch.float_power({a}.abs() + 0.5, 1.5)", "{a}.frac()",
    "{a}.abs().sqrt()", "({a}.abs() + 0.5).pow(-1.5)", "2 ** {a}.clamp(-3, 3)", "({a}.abs() + 0.5) ** {b}.tanh()",
    "{a}.tan().clamp(-3, 3)", "{a}.tanh().asin()", "{a}.sinh().clamp(-9, 9)", "({a}.abs() + 1.1).acosh()",
    "{a}.sigmoid().logit(eps=0.01)", "({a}.abs() + 0.5).lgamma()", "{a}.erfc()", "{a}.exp2().clamp(max=9)",
    "torch.rsub({a}, {b}, alpha=0.5)", "torch.add({a}, {b}, alpha=2)", "{a}.square() - {b}.abs()", "{a}.remainder(0.7)",
    "torch.fmax({a}, {b})", "torch.special.i0({a}.tanh())", "torch.special.log_ndtr({a})",
    "torch.ldexp({a}, {b}.sign())", "{a}.double() + {b}", "{a}.type_as({b}) * 2", "{a} + {b}.to({a}.dtype)",
    "{a}.half() + {b}", "{a} / 3 + 1", "{a}.clamp(-9, 9).long() / 4", "{a}.clamp(-9, 9).int() + 0.5",
    "({a} > 0.3137) * {b}", "({a} > 0.3137) + {b}.bool()", "{a}.logical_not() * 0.5",
    "{a}.clamp(-99, 99).long().bitwise_xor(5)", "{a}.clamp(-99, 99).int().remainder(3)",
    "{a}.heaviside({a}.new_tensor(0.5))", "{a}.isfinite() & ({b} != 0)", "torch.isclose({a}, {b}, atol=0.5)",
    "torch.complex({a}.float(), {b}.float()).abs()", "torch.view_as_real(torch.polar({a}.abs(), {a}))",
)  # fmt: skip
REDUCED = (
    "{a}.argmax({d})", "{a}.argmin({d}, keepdim=True)", "{a}.amin({d}, keepdim=True) * 2", "{a}.nansum({d})",
    "torch.var_mean({a}, {d})[0] + torch.std_mean({a}, {d})[1]", "{a}.count_nonzero({d})", "{a}.median({d}).values",
    "{a}.sum({d}, dtype=torch.float64)", "{a}.norm(p=1, dim={d})", "{a}.norm()", "{a}.kthvalue(1, {d}).values",
    "{a}.min()", "{a}.mean()", "{a}.prod()", "{a}.max() - {a}.min()", "{a}.quantile(0.3, {d})", "{a}.argmax()",
    "torch.linalg.vector_norm({a}, 3, {d})", "{a}.sum((0, -1)) if {a}.dim() > 1 else {a}.sum()", "{a}.var()",
    "torch.softmax({a}, {d}, dtype=torch.float64)", "({a}.softmax({d}) * {b}).sum({d}, keepdim=True)", "{a}.amax()",
    "({a} - {a}.mean({d}, keepdim=True)) / ({a}.std({d}, keepdim=True) + 1)", "{a}.trace()",
    "({a} * {b}).sum(-1).mean()", "torch.nn.functional.rms_norm({a}, {a}.shape[-1:])",
    "torch.nn.functional.instance_norm({a}.reshape(1, 1, -1))",
    "torch.nn.functional.layer_norm({a}[..., :4], (4,), self.bias, self.bias)", "{a}.logsumexp((0,))",
)  # fmt: skip
SCANS = (
    "{a}.cumprod({d})", "{a}.logcumsumexp({d})", "{a}.cummin({d}).values", "{a}.cumsum({d}).flip({d})",
    "{a}.flip({d}).cumsum({d})", "{a}.cumsum({d}, dtype=torch.float64)", "{a}.cumsum({d}) / {a}.shape[{d}]",
    "{a}.cummax({d}).indices", "{a}.sort(stable=True, dim={d}, descending=True).indices",
    "torch.trapezoid({a}, dim={d})",
)  # fmt: skip
LOSSES = (
    "torch.nn.functional.smooth_l1_loss({a}, {b})", "torch.nn.functional.huber_loss({a}, {b}, reduction='none')",
    "torch.nn.functional.binary_cross_entropy_with_logits({a}, {b}.sigmoid())", "torch.nn.functional.l1_loss({a}, {b})",
    "torch.nn.functional.kl_div({a}.log_softmax(-1), {b}.softmax(-1), reduction='batchmean')",
    "torch.nn.functional.nll_loss({a}.log_softmax(-1), {b}.argmax(-1), reduction='none')",
    "torch.nn.functional.cross_entropy({a}, {b}.softmax(-1), label_smoothing=0.1)",
    "torch.nn.functional.cosine_similarity({a}, {b}, dim={d})", "torch.nn.functional.pairwise_distance({a}, {b})",
    "torch.nn.functional.cross_entropy({a}, {b}.argmax(-1), ignore_index=0, reduction='sum')",
    "torch.nn.functional.binary_cross_entropy({a}.sigmoid(), {b}.sigmoid(), {a}.sigmoid())",
    "torch.nn.functional.margin_ranking_loss({a}, {b}, {a}.sign())",
    "torch.nn.functional.soft_margin_loss({a}, {b}.sign())",
    "torch.nn.functional.gaussian_nll_loss({a}, {b}, {a}.abs() + 0.5)", "torch.dist({a}, {b})",
    "torch.nn.functional.cosine_embedding_loss({a}, {b}, {a}.select(-1, 0).sign())",
)  # fmt: skip
CONTRACTIONS = (
    "torch.einsum('...i,...i->...', {a}, {b})", "torch.einsum('i...,i...->i...', {a}, {b})", "{a}.mT @ {b}",
    "torch.einsum('ij,kj->ik', {a}, {b})", "torch.einsum('bij,bkj->bik', {a}, {b})", "torch.einsum('ij->ji', {a}) * 2",
    "torch.einsum('ij,jk,kl->il', {a}[:, :4], self.square, self.square)", "torch.einsum('bij->b', {a})",
    "torch.einsum('ii->i', {a})", "({a} @ {a}.mT).softmax(-1) @ {a}", "torch.bmm({a}, {b}.transpose(1, 2))",
    "(({a} @ {a}.mT) * 0.5).masked_fill(torch.ones({a}.shape[-2], {a}.shape[-2]).triu(1) > 0, -1e4).softmax(-1) @ {a}",
    "torch.nn.functional.scaled_dot_product_attention({a}, {a}, {a}, attn_mask={a} @ {a}.mT > -0.7137)",
    "torch.nn.functional.scaled_dot_product_attention({a}, {b}, {b}, scale=0.5)", "torch.kron({a}[:2], {b}[:2])",
    "torch.addmv(self.bias, self.square, {a}.reshape(-1)[:4])", "{a}.reshape(-1) @ {b}.reshape(-1)",
    "torch.nn.functional.bilinear({a}[..., :4], {b}[..., :4], self.square.expand(2, 4, 4))",
    "torch.nn.functional.linear({a}[..., :3], self.narrow.t(), self.bias).relu()",
    "torch.chain_matmul({a}, self.square, {b}.mT)", "torch.linalg.matrix_power({a}[..., :2, :2].tanh(), 3)",
)  # fmt: skip
IMAGES = (
    "torch.nn.functional.conv1d({a}.reshape(1, 2, -1), self.narrow[:2].view(4, 1, 2), groups=2)",
    "torch.nn.functional.conv1d({a}.reshape(1, 1, -1), self.narrow.view(3, 1, 4), self.bias[:3], 2, 3, 2).relu()",
    "torch.nn.functional.conv1d({a}.unsqueeze(0), self.narrow[:, :1].expand(3, {a}.shape[0]).unsqueeze(-1))",
    "torch.nn.functional.conv2d({a}.reshape(1, 1, -1, {a}.shape[-1]), self.square.view(4, 1, 2, "
    "2)).relu().mean((2, 3))",
    "torch.nn.functional.conv2d({a}.reshape(1, 1, -1, {a}.shape[-1]), self.square.view(4, 1, 4, 1), self.bias, 2, 2)",
    "torch.nn.functional.conv_transpose2d({a}.reshape(1, 1, -1, {a}.shape[-1]), self.square.view(1, 4, 2, 2), "
    "padding=1)", "torch.nn.functional.adaptive_avg_pool1d({a}.reshape(1, 1, -1), 3)",
    "torch.nn.functional.avg_pool2d({a}[None], 2, 1)",
    "torch.nn.functional.adaptive_max_pool2d({a}.reshape(1, 1, -1, {a}.shape[-1]), 2)",
    "torch.nn.functional.max_pool2d({a}.reshape(1, 1, -1, {a}.shape[-1]), 2, 1, 1)",
    "torch.nn.functional.interpolate({a}.reshape(1, 1, -1, {a}.shape[-1]), size=(5, 3), mode='bilinear')",
    "torch.nn.functional.pad({a}.reshape(1, 1, -1), (2, 1), mode='reflect')",
    "torch.nn.functional.pad({a}.reshape(1, 1, -1), (2, 1), mode='circular')",
    "torch.nn.functional.pad({a}, (-1, 2), value=0.5)",
    "torch.nn.functional.pixel_shuffle({a}.reshape(1, 4, 1, -1), 2)",
    "torch.nn.functional.unfold({a}.reshape(1, 1, -1, {a}.shape[-1]), 2)", "torch.fft.rfft({a}).abs()",
    "torch.nn.functional.lp_pool1d({a}.abs().reshape(1, 1, -1), 2, 2)", "torch.fft.fft({a}, dim={d}).real",
    "torch.nn.functional.channel_shuffle({a}.reshape(1, 4, 1, -1), 2)",
    "torch.nn.functional.grid_sample({a}.reshape(1, 1, -1, {a}.shape[-1]), {b}.reshape(-1)[:8].reshape(1, 2, 2, "
    "2).tanh(), align_corners=False)",
)  # fmt: skip
LAYOUTS = (
    "{a}.as_strided((2, 2), (1, 2))", "{a}[None, ..., None]", "{a}[::2, 1:]", "{a}[-1:]", "{a}.view(-1, 2)",
    "{a}.view({a}.shape)", "{a}.expand_as({b})", "{a}.broadcast_to(2, *{a}.shape)", "{a}.tile(2)", "{a}.rot90()",
    "{a}.swapaxes(0, {d}).contiguous()", "torch.cat([*{a}.unbind({d})], -1)", "torch.cat({a}.chunk(3, {d})[::-1], {d})",
    "torch.stack({a}.split(1, {d}), 0)", "torch.hstack([{a}, {b}])", "torch.vstack([{a}, {b}])", "{a}.triu({i})",
    "torch.tensor_split({a}, 2, {d})[1]", "torch.column_stack([{a}, {a}])", "{a}.ravel()[::3]", "{a}.diag_embed()",
    "torch.meshgrid({a}.reshape(-1)[:3], {b}.reshape(-1)[:2], indexing='ij')[1]", "{a}.flatten(-2) * {i}",
    "torch.broadcast_tensors({a}, {b})[0] + 1", "torch.block_diag({a}[:2], {b}[:2])", "{a}.unflatten(0, (-1, 1))",
    "torch.linspace(0, 1, {a}.shape[{d}]) * 2", "torch.eye({a}.shape[{d}]) + 1", "torch.cartesian_prod({a}, {a})",
    "torch.arange(0, 2 * {a}.shape[{d}], 2, dtype={a}.dtype)", "{a}.new_full({a}.shape, 0.25) * {a}", "{a}.mT.clone()",
    "torch.empty_like({a}).copy_({b})", "{a}.clone(memory_format=torch.preserve_format)", "{a}.to({b}.dtype).mT",
    "{a}.diagonal(1, -2, -1)", "{a}.unfold({d}, 2, 2).sum(-1)", "torch.roll({a}, (1, {i}), (0, {d}))", "{a}.fliplr()",
)  # fmt: skip
POSITIONS = (
    "{a}.masked_select({a} > 0.3137)", "{a}[({b} > 0.1618).nonzero(as_tuple=True)]", "{a}[..., [0, 0]]",
    "{a}[[0, -1], 0]", "{a}.index_put((torch.tensor([0, 0]),), {a}[:1], accumulate=True)", "{a}[:, [0]] * {a}[[0]]",
    "{a}[0, ..., None]", "{a}.masked_scatter({a} > 0.3137, {b})", "{a}.scatter({d}, {a}.argsort({d}), {a})",
    "{a}.take(torch.tensor([0, 1]))", "{a}.scatter_reduce({d}, torch.zeros_like({a}, dtype=torch.long), {a}, 'amax')",
    "torch.bucketize({a}, self.bias.sort()[0])", "{a}.index_copy({d}, torch.tensor([0]), {a}.narrow({d}, -1, 1))",
    "torch.searchsorted(self.bias.sort()[0], {a})", "{a}.gather({d}, {a}.argmax({d}, keepdim=True))",
    "{a}.index_reduce({d}, torch.tensor([0]), {a}.narrow({d}, -1, 1), 'amin')",
    "{a}.select_scatter({b}.select({d}, 0), {d}, 0)", "{a}.slice_scatter({a}[1:] * 2, 0, 1)",
    "{a}.diagonal_scatter({a}[0])",
    "torch.nn.functional.embedding_bag({a}.reshape(1, -1).clamp(0, 3).long(), self.square)",
    "{a}[{a}.argmax({d})[:1] * 0]", "self.square[{a}.clamp(0, 3).long()]", "{a}[torch.tensor(0)]",
    "{a}[torch.tensor([[0, 0]]), :1]", "{a}[{i} % {a}.shape[0]]", "torch.tril_indices({a}.shape[0], 3) + {i}",
    "torch.bincount({a}.reshape(-1).clamp(0, 3).long(), minlength=4)", "{a}[({a} > 0.3137).any(-1)]",
    "{a}.argsort({d})[..., :2]", "torch.histc({a}, 4, -2, 2)", "{a}.unique().sum()",
)  # fmt: skip
FURTHER_WRITES = (
    "{a}[{a} > 0.3137] = 0.25", "{a}[{b} > 0.1618] *= 2", "{a}[torch.tensor([0, -1])] = {b}[:1]", "{a}[[0]] += {b}",
    "{a}.index_put_((torch.tensor([0]),), {b}[:1], accumulate=True)",
    "{a}.scatter_({d}, torch.zeros_like({a}).long(), 0.5)",
    "{a}.index_add_({d}, torch.tensor([0]), {a}.narrow({d}, -1, 1) * 2)", "{a}.diagonal(0, -2, -1).fill_(0.5)",
    "{a}.unsqueeze(0).mul_(0.5)", "{a}.view(-1)[::3] = 0.25", "{a}.mT[..., :1] = {b}.mT[..., :1]",
    "{a}.chunk(2, {d})[1].neg_()", "{a}.unbind({d})[0].add_(1)", "{a}.narrow({d}, {i}, 1).copy_({b}.narrow({d}, 0, 1))",
    "{a}.clamp_(-1, 1)", "{a} += {b}", "{a} *= 0.5", "{a}[...] = {b}", "{a}.lerp_({b}, 0.3)",
    "{a}.addcmul_({a}, {b}, value=0.5)", "{a}.sub_({b}, alpha=0.5)", "{a}.transpose(0, {d})[0].exp_().clamp_(max=2)",
    "{a}.index_fill_({d}, torch.tensor([0]), 0.5)", "{a}.relu_().add_(0.1)", "{a}.masked_scatter_({a} > 0.3137, {b})",
    "{a}.fill_({b}.sum())", "{a}[1:] -= {a}[:-1]", "{a}[{i}], {a}[0] = {a}[0], {a}[{i}]",
    "torch.mul({a}, 0.5, out={a})", "{a}[..., 0], {a}[..., 1] = {a}[..., 1].clone(), {a}[..., 0].clone()",
    "{v}, w = {a}.chunk(2, {d}); {v} = {v} * w.sigmoid()", "{v} = {a}.expand(2, *{a}.shape).clone(); {v}[0] *= 2",
    "{v} = {a}.clone().t_(); {v}[0] = 0.5", "{v} = {a}.reshape(-1); {v}[:2].mul_(2)",
    "{v} = {a}.contiguous(); {v} += 1", "{v} = {a}.permute(*range({a}.dim())[::-1]); {v}.mul_({v}.sigmoid())",
    "{v} = torch.zeros(4, 4); {v}[:2, 1:3] += {a}[0, 0]",
    "{v} = {{'x': {a}, 'y': ({b}, {a} * 2)}}; {v} = {v}['x'] - {v}['y'][1]", "{v}, _ = torch.sort({a}, {d}); {v} += 1",
)  # fmt: skip
FURTHER = (ACTIVATIONS, MATHEMATICS, REDUCED, SCANS, LOSSES, CONTRACTIONS, IMAGES, LAYOUTS, POSITIONS, FURTHER_WRITES)
