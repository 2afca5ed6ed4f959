"""The WKV operator of RWKV: attention as a recurrence, its sums kept small by a running maximum.

    output = (a + exp(bonus + key) value) / (b + exp(bonus + key))
    a, b   = exp(-decay) a + exp(key) value,  exp(-decay) b + exp(key)

Peng et al., "RWKV: Reinventing RNNs for the Transformer Era", 2023, equations 11 to 18 and appendix D.
"""

import torch
from torch import nn

batch_size = 4
seq_length = 64
model_size = 128


class TimeMixing(nn.Module):
    def __init__(self, model_size):
        super().__init__()
        self.mix_key = nn.Parameter(torch.rand(model_size))
        self.mix_value = nn.Parameter(torch.rand(model_size))
        self.mix_receptance = nn.Parameter(torch.rand(model_size))
        self.decay = nn.Parameter(torch.linspace(-5.0, 3.0, model_size))
        self.bonus = nn.Parameter(torch.full((model_size,), 0.3))
        self.to_key = nn.Linear(model_size, model_size, bias=False)
        self.to_value = nn.Linear(model_size, model_size, bias=False)
        self.to_receptance = nn.Linear(model_size, model_size, bias=False)
        self.from_mixed = nn.Linear(model_size, model_size, bias=False)

    def forward(self, x):
        """``x``: batch, time, features."""
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
        key = self.to_key(torch.lerp(before, x, self.mix_key))
        value = self.to_value(torch.lerp(before, x, self.mix_value))
        receptance = torch.sigmoid(self.to_receptance(torch.lerp(before, x, self.mix_receptance)))
        return self.from_mixed(receptance * self.wkv(key, value))

    def wkv(self, key, value):
        decay = -torch.exp(self.decay)
        numerator = torch.zeros_like(key[:, 0])
        denominator = torch.zeros_like(key[:, 0])
        largest = torch.full_like(key[:, 0], -1e38)
        outputs = []
        for t in range(key.shape[1]):
            k, v = key[:, t], value[:, t]
            now = torch.maximum(largest, self.bonus + k)
            old, new = torch.exp(largest - now), torch.exp(self.bonus + k - now)
            outputs.append((old * numerator + new * v) / (old * denominator + new))
            now = torch.maximum(largest + decay, k)
            old, new = torch.exp(largest + decay - now), torch.exp(k - now)
            numerator = old * numerator + new * v
            denominator = old * denominator + new
            largest = now
        return torch.stack(outputs, dim=1)


def model():
    return TimeMixing(model_size)


def example_inputs():
    return (torch.randn(batch_size, seq_length, model_size),)
