"""Recurrent, spiking, neural-ODE, CRF, graph and attention models of small packages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo_common import Case, Over, over, package, prefixed, tensor, tokens

ABSENT: dict[str, str] = {}
STEPS = 32
CASES: dict[str, Case] = {}


def spiking(cell: Any, states: int) -> Any:
    """A loop over time around a neuron of snntorch that is given its states."""

    def run(first: nn.Module, neuron: Any, last: nn.Module, x: Tensor) -> Tensor:
        state = neuron.reset_mem() if states > 1 else (neuron.reset_mem(),)
        spikes = []
        for step in x.unbind(1):
            spike, *state = neuron(first(step), *state)
            spikes.append(last(spike))
        return torch.stack(spikes, 1)

    return over(run, lambda: nn.Linear(100, 128), cell, lambda: nn.Linear(128, 10), shape=(STEPS, 100))


if snn := package("snntorch", ABSENT):
    CASES |= prefixed(
        "snntorch",
        {
            "leaky": spiking(lambda: snn.Leaky(beta=0.9), 1),
            "synaptic": spiking(lambda: snn.Synaptic(alpha=0.8, beta=0.9), 2),
            "alpha": spiking(lambda: snn.Alpha(alpha=0.9, beta=0.8), 3),
            "lapicque": spiking(lambda: snn.Lapicque(beta=0.9), 1),
            "slstm": over(
                lambda cell, x: (lambda s: [s := cell(step, *s)[1:] for step in x.unbind(1)][-1])(cell.reset_mem()),
                lambda: snn.SLSTM(100, 128),
                shape=(STEPS, 100),
            ),
        },
    )
if (sj := package("spikingjelly.activation_based.neuron", ABSENT)) and package("spikingjelly.activation_based", ABSENT):
    from spikingjelly.activation_based import functional, layer

    def stepped(neuron: Any) -> Case:
        def run(net: nn.Module, x: Tensor) -> Any:
            functional.reset_net(net)
            return net(x.transpose(0, 1))

        return over(
            run,
            lambda: nn.Sequential(
                layer.Linear(100, 128, step_mode="m"), neuron(), layer.Linear(128, 10, step_mode="m"), neuron()
            ),
            shape=(STEPS, 100),
        )

    CASES |= prefixed(
        "spikingjelly",
        {
            "if": stepped(lambda: sj.IFNode(step_mode="m")),
            "lif": stepped(lambda: sj.LIFNode(step_mode="m")),
            "plif": stepped(lambda: sj.ParametricLIFNode(step_mode="m")),
        },
    )
if norse := package("norse.torch.module.lif", ABSENT):
    from norse.torch.module.lif import LIFRecurrentCell
    from norse.torch.module.lif_adex import LIFAdExRecurrentCell
    from norse.torch.module.lsnn import LSNNRecurrentCell

    def recurrent(cell: Any) -> Case:
        """A loop over time around a recurrent cell."""

        def run(cell: Any, x: Tensor) -> Any:
            state, spikes = None, []
            for step in x.unbind(1):
                spike, state = cell(step, state)
                spikes.append(spike)
            return torch.stack(spikes, 1)

        return over(run, cell, shape=(STEPS, 100))

    CASES |= prefixed(
        "norse",
        {
            "lif": recurrent(lambda: LIFRecurrentCell(100, 128)),
            "lif_adex": recurrent(lambda: LIFAdExRecurrentCell(100, 128)),
            "lsnn": recurrent(lambda: LSNNRecurrentCell(100, 128)),
        },
    )
if ode := package("torchdiffeq", ABSENT):

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return self.net(y)

    def solved(method: str) -> Case:
        times = torch.linspace(0, 1, 9)
        return over(lambda field, x: ode.odeint(field, x, times, method=method), Field, shape=(64,))

    CASES |= prefixed("torchdiffeq", {name: solved(name) for name in ("euler", "midpoint", "rk4", "dopri5")})
if crf := package("torchcrf", ABSENT):

    def tagged(decode: bool) -> Case:
        def made(batch: int) -> Any:
            model = crf.CRF(9, batch_first=True)
            tags = torch.randint(0, 9, (batch, STEPS))
            run = (lambda m, e: m.decode(e)) if decode else (lambda m, e: m(e, tags))
            return Over(run, model), (torch.randn(batch, STEPS, 9),), {}

        return made

    CASES |= prefixed("pytorch-crf", {"loss": tagged(False), "decode": tagged(True)})
if package("torch_geometric", ABSENT):
    import torch_geometric.nn as geometric

    def graph(model: Any, **options: Any) -> Case:
        def made(batch: int) -> Any:
            edges = torch.randint(0, 100 * batch, (2, 400 * batch))
            return model(64, 64, 4, 10, **options), (torch.randn(100 * batch, 64), edges), {}

        return made

    CASES |= prefixed(
        "torch-geometric",
        {
            "gcn": graph(geometric.GCN),
            "sage": graph(geometric.GraphSAGE),
            "gat": graph(geometric.GAT),
            "gatv2": graph(geometric.GAT, v2=True),
            "gin": graph(geometric.GIN),
            "edge_cnn": graph(geometric.EdgeCNN),
        },
    )
if package("ncps.torch", ABSENT):
    from ncps.torch import LTC, CfC

    CASES |= prefixed(
        "ncps", {"cfc": tensor(lambda: CfC(64, 128), STEPS, 64), "ltc": tensor(lambda: LTC(64, 32), STEPS, 64)}
    )
if package("mambapy.mamba", ABSENT):
    from mambapy.mamba import Mamba, MambaConfig

    CASES["mambapy:mamba"] = tensor(lambda: Mamba(MambaConfig(d_model=256, n_layers=2)), STEPS, 256)
if package("minGRU_pytorch", ABSENT):
    from minGRU_pytorch.minGRU import minGRU
    from minGRU_pytorch.minLSTM import minLSTM

    CASES |= prefixed(
        "minGRU-pytorch",
        {"mingru": tensor(lambda: minGRU(256), STEPS, 256), "minlstm": tensor(lambda: minLSTM(256), STEPS, 256)},
    )
if package("conformer", ABSENT):
    from conformer import Conformer

    CASES["conformer:conformer"] = tensor(
        lambda: Conformer(dim=144, depth=2, dim_head=36, heads=4, ff_mult=4), 100, 144
    )
if package("x_transformers", ABSENT):
    from x_transformers import Decoder, Encoder, TransformerWrapper

    def wrapped(layers: Any, **options: Any) -> Case:
        stack = {"dim": 512, "depth": 4, "heads": 8, **options}
        return tokens(
            lambda: TransformerWrapper(num_tokens=1000, max_seq_len=64, attn_layers=layers(**stack)), STEPS, 1000
        )

    CASES |= prefixed(
        "x-transformers",
        {
            "encoder": wrapped(Encoder),
            "decoder": wrapped(Decoder),
            "rotary": wrapped(Decoder, rotary_pos_emb=True),
            "alibi_swiglu": wrapped(Decoder, alibi_pos_bias=True, ff_swish=True, ff_glu=True, use_rmsnorm=True),
        },
    )
if package("performer_pytorch", ABSENT):
    from performer_pytorch import PerformerLM

    CASES["performer-pytorch:lm"] = tokens(
        lambda: PerformerLM(num_tokens=1000, max_seq_len=STEPS, dim=512, depth=2, heads=8, causal=False)
    )
if package("linear_attention_transformer", ABSENT):
    from linear_attention_transformer import LinearAttentionTransformerLM

    CASES["linear-attention-transformer:lm"] = tokens(
        lambda: LinearAttentionTransformerLM(
            num_tokens=1000, dim=512, heads=8, depth=2, max_seq_len=STEPS, causal=False, n_local_attn_heads=0
        )
    )
if package("local_attention", ABSENT):
    from local_attention import LocalTransformer

    CASES["local-attention:transformer"] = tokens(
        lambda: LocalTransformer(
            num_tokens=1000, dim=512, depth=2, max_seq_len=STEPS, causal=True, local_attn_window_size=16
        )
    )
if package("pytorch_tcn", ABSENT):
    from pytorch_tcn import TCN

    CASES["pytorch-tcn:tcn"] = tensor(lambda: TCN(64, [64, 64, 64, 64]), 64, 100)
if package("neuralop.models", ABSENT):
    from neuralop.models import FNO

    CASES["neuraloperator:fno"] = tensor(
        lambda: FNO(n_modes=(12, 12), in_channels=1, out_channels=1, hidden_channels=32, n_layers=2), 1, 32, 32
    )
if package("xlstm", ABSENT):
    from xlstm import mLSTMBlockConfig, mLSTMLayerConfig, xLSTMBlockStack, xLSTMBlockStackConfig

    CASES["xlstm:mlstm"] = tensor(
        lambda: xLSTMBlockStack(
            xLSTMBlockStackConfig(
                mlstm_block=mLSTMBlockConfig(mlstm=mLSTMLayerConfig(num_heads=4)),
                context_length=STEPS,
                num_blocks=2,
                embedding_dim=128,
            )
        ),
        STEPS,
        128,
    )
if package("kan", ABSENT):
    from kan.KANLayer import KANLayer

    CASES["pykan:layer"] = tensor(lambda: KANLayer(16, 16), 16)
