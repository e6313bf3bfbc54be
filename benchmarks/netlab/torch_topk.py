"""Top-k with error feedback, as a DDP hook is written with torch's operations alone."""

import torch
import torch.distributed as dist


class TorchTopk:
    """A DDP hook. From each bucket it sends the share `density` of largest magnitude of the gradient and the
    residual, as float32 values with int32 places, in two all-gathers. Both run beside the backward pass; a
    callback of the second one decodes."""

    def __init__(self, density: float) -> None:
        self.density = density
        self._group = dist.new_group()  # of its own: plain DDP's broadcasts may run at the same time
        self._world = dist.get_world_size()
        self._residuals: dict[tuple[int, ...], torch.Tensor] = {}  # by the parameters of a bucket
        self._of: dict[int, torch.Tensor] = {}  # by parameter: its part of one of these

    @staticmethod
    def hook(topk: "TorchTopk", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradient = bucket.buffer()
        residual = topk._residual(bucket.parameters())
        residual += gradient
        k = max(1, round(topk.density * gradient.numel()))
        places = torch.topk(residual.abs(), k, sorted=False).indices
        values = residual[places]
        residual[places] = 0
        return topk._exchanged(gradient, places.int(), values)

    def _residual(self, parameters: list[torch.Tensor]) -> torch.Tensor:
        """A bucket's. DDP rebuilds its buckets after the first step: each parameter's part moves along."""
        key = tuple(map(id, parameters))
        if key not in self._residuals:
            parts = [self._of.get(id(p), torch.zeros(p.numel())) for p in parameters]
            self._residuals[key] = whole = torch.cat(parts)
            self._of |= dict(zip(key, whole.split([p.numel() for p in parameters]), strict=True))
        return self._residuals[key]

    def _exchanged(
        self, gradient: torch.Tensor, places: torch.Tensor, values: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        all_places = places.new_empty(self._world * len(places))
        all_values = values.new_empty(self._world * len(values))
        works = [
            dist.all_gather_into_tensor(out, mine, group=self._group, async_op=True)
            for out, mine in ((all_places, places), (all_values, values))
        ]
        futures = [work.get_future() for work in works if work is not None]

        def decode(done: torch.futures.Future[list[torch.futures.Future[torch.Tensor]]]) -> torch.Tensor:
            done.value()
            gradient.zero_()
            gradient.index_add_(0, all_places, all_values.div_(self._world))
            return gradient

        result: torch.futures.Future[torch.Tensor] = torch.futures.collect_all(futures).then(decode)
        return result

    def close(self) -> None:
        dist.destroy_process_group(self._group)
