"""Fake tensors: shape, strides and dtype without memory, as eager would give them."""
