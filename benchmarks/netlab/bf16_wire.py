"""An all-reduce that sends bf16 and sums in float32: an all-to-all of slices, a sum, an all-gather."""

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
        self._world = dist.get_world_size()
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
        dist.all_to_all_single(received, mine, group=self._group)
        mean = received.view(world, each).sum(0, dtype=torch.float32).div_(world)
        dist.all_gather(list(mine.view(world, each)), mean.bfloat16(), group=self._group)
        gradient.copy_(mine[:n])
        mine[n:] = 0

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()
        dist.destroy_process_group(self._group)
