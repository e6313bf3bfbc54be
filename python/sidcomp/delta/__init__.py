"""Lossless deltas of weights: what has changed since a version that the receiver has, near the entropy bound.

    delta = sidcomp.delta.encode(old, new)  # mappings of names to tensors, or two tensors
    sidcomp.delta.apply(weights, delta)  # weights were old, and are new now, bit for bit

    sender = sidcomp.delta.Sender(model.state_dict())  # keeps a copy of what the receivers have
    message = sender.message()  # after some steps of the optimizer
    version = receiver.apply(message)  # on each receiver: sidcomp.delta.Receiver(weights)
    sender.confirm(version)  # once all of them have applied it

A delta is checked against the weights before anything is written: if it is damaged, was cut, or was made from
other weights, a DeltaError says so and the weights are as they were.
"""

from sidcomp.delta.chain import Receiver, Sender
from sidcomp.delta.coding import apply, encode

__all__ = ["Receiver", "Sender", "apply", "encode"]
