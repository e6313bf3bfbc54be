"""Deltas of weights over a socket: a trainer, and an engine that is killed and starts again.

python examples/delta_socket.py
"""

import multiprocessing
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.process import BaseProcess

import sidcomp
import torch
from sidcomp.errors import DeltaError
from torch import nn

PROMPT = torch.linspace(-1, 1, 256, dtype=torch.bfloat16)


def checkpoint() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 8))


def engine(address: tuple[str, int]) -> None:
    """Answers each message with whether it was applied, a version, and what its model says to the prompt."""
    model = checkpoint().bfloat16()
    receiver = sidcomp.delta.Receiver(model.state_dict())
    with Client(address, authkey=multiprocessing.current_process().authkey) as trainer:
        while message := trainer.recv_bytes():
            try:
                answer = True, receiver.apply(message)
            except DeltaError as e:
                if e.needs is None:  # the message is damaged
                    raise
                answer = False, e.needs
            trainer.send((*answer, model(PROMPT).tolist()))


def start(listener: Listener) -> tuple[BaseProcess, Connection]:
    process = multiprocessing.get_context("spawn").Process(target=engine, args=(listener.address,))
    process.start()
    return process, listener.accept()


def main() -> None:
    listener = Listener(("127.0.0.1", 0), authkey=multiprocessing.current_process().authkey)
    process, socket = start(listener)
    model, served = checkpoint(), checkpoint().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    sender = sidcomp.delta.Sender(served.state_dict())
    for step in range(1, 5):
        x = torch.randn(32, 256)
        nn.functional.mse_loss(model(x), x[:, :8]).backward()
        optimizer.step()
        optimizer.zero_grad()
        served.load_state_dict(model.state_dict())  # rounds, in place
        if step == 3:
            process.kill()
            process, socket = start(listener)  # with the checkpoint again
        for full in (False, True):
            message = sender.message(full=full)
            socket.send_bytes(message)
            applied, version, said = socket.recv()
            print(f"step {step}: {len(message):,} bytes; version {version}{' is missing' * (not applied)}")
            if applied:
                break
        sender.confirm(version)
        assert said == served(PROMPT).tolist()
    socket.send_bytes(b"")  # the end


if __name__ == "__main__":
    main()

# It prints:
#   step 1: 3,424 bytes; version 1
#   step 2: 2,552 bytes; version 2
#   step 3: 2,264 bytes; version 2 is missing
#   step 3: 271,592 bytes; version 4
#   step 4: 1,984 bytes; version 5
