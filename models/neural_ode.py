"""A neural ordinary differential equation, solved by the classical Runge-Kutta method in steps of one size.

    dh/dt = f(h, t), a network;  h(0) -> h(1)

Chen, Rubanova, Bettencourt and Duvenaud, "Neural Ordinary Differential Equations", 2018.
"""

import torch
from torch import nn

batch_size = 4
steps = 64
state_size = 32
hidden_size = 64


class Slope(nn.Module):
    def __init__(self, state_size, hidden_size):
        super().__init__()
        self.inner = nn.Linear(state_size, hidden_size)
        self.time = nn.Parameter(torch.randn(hidden_size))
        self.outer = nn.Linear(hidden_size, state_size)

    def forward(self, h, t):
        return self.outer(torch.tanh(self.inner(h) + t * self.time))


class NeuralODE(nn.Module):
    def __init__(self, state_size, hidden_size, steps):
        super().__init__()
        self.slope = Slope(state_size, hidden_size)
        self.steps = steps

    def forward(self, h):
        """``h``: batch, state at time 0. Returns the states after every step: time, batch, state."""
        dt = 1 / self.steps
        states = []
        for n in range(self.steps):
            t = n * dt
            k1 = self.slope(h, t)
            k2 = self.slope(h + dt / 2 * k1, t + dt / 2)
            k3 = self.slope(h + dt / 2 * k2, t + dt / 2)
            k4 = self.slope(h + dt * k3, t + dt)
            h = h + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            states.append(h)
        return torch.stack(states)


def model():
    return NeuralODE(state_size, hidden_size, steps)


def example_inputs():
    return (torch.randn(batch_size, state_size),)
