"""An all-reduce that sends bf16 and sums in float32: an all-to-all of slices, a sum, an all-gather.

Both exchanges are point-to-point messages: over a link of 100 Mbit/s, Gloo's own all-to-all takes twice as
long, because its messages do not travel both ways at once, and its all-gather one and a half times.
"""

import queue
import threading

import torch
import torch.distributed as dist


class Bf16Wire:
    """A DDP hook. Each rank sums one slice of a bucket, and each element is rounded to bf16 twice: before the
    all-to-all, and after the sum. Both collectives of a bucket run in a thread of this hook, bucket after
    bucket, so that they overlap the backward pass as plain DDP does. No error feedback."""

    def __init__(self) -> None:
        self._group = dist.new_group()  # of its own: plain DDP's broadcasts may run at the same time
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._blocks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._work: queue.SimpleQueue[tuple[int, torch.Tensor, torch.futures.Future[torch.Tensor]] | None]
        self._work = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="bf16-wire", daemon=True)
        self._thread.start()

    @staticmethod
    def hook(wire: "Bf16Wire", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        wire._work.put((bucket.index(), bucket.buffer(), done))
        return done

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            index, gradient, done = item
            try:
                self._average(index, gradient)
                done.set_result(gradient)
            except Exception as e:
                done.set_exception(e)

    def _average(self, index: int, gradient: torch.Tensor) -> None:
        n, world = gradient.numel(), self._world
        each = -(-n // world)
        if index not in self._blocks or self._blocks[index][0].numel() != each * world:
            mine = torch.zeros(each * world, dtype=torch.bfloat16)
            self._blocks[index] = mine, torch.empty_like(mine)
        mine, received = self._blocks[index]
        mine[:n] = gradient
        out, into = mine.view(world, each), received.view(world, each)
        into[self._rank] = out[self._rank]
        self._exchange([(p, out[p], into[p]) for p in range(world)])
        out[self._rank] = into.sum(0, dtype=torch.float32).div_(world)
        self._exchange([(p, out[self._rank], out[p]) for p in range(world)])
        gradient.copy_(mine[:n])
        mine[n:] = 0

    def _exchange(self, messages: list[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
        """Of each other rank: what to send to it, and where to put what it sends."""
        others = [m for m in messages if m[0] != self._rank]
        works = [dist.irecv(into, group_src=p, group=self._group) for p, _, into in others]
        works += [dist.isend(out, group_dst=p, group=self._group) for p, out, _ in others]
        for work in works:
            assert work is not None
            work.wait()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()
        dist.destroy_process_group(self._group)
