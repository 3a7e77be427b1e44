"""The processes of an `accelerate launch`, or the only one: each works on its own batches, gradients are shared once per step."""

import os
from collections.abc import Iterable

import torch
from torch import distributed

LAUNCHED = "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) > 1


class Workers:
    """This process's place among its peers. With one process everything here is free."""

    def __init__(self, cpu: bool = False) -> None:
        """Join the peers.

        Args:
            cpu: whether they work on CPUs (else each has a GPU of its own).
        """
        self.rank, self.count, self.local_rank, self.local_count = 0, 1, 0, 1
        if LAUNCHED:
            from accelerate import PartialState

            state = PartialState(cpu=cpu)  # reads what `accelerate launch` set, and joins the process group
            self.rank, self.count, self.local_rank = state.process_index, state.num_processes, state.local_process_index
            self.local_count = int(os.environ.get("LOCAL_WORLD_SIZE", self.count))

    @property
    def first(self) -> bool:
        """Whether this process writes logs, checkpoints and the head."""
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the processes, in place."""
        if self.count > 1:
            distributed.all_reduce(tensor)
        return tensor

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add up the gradients of all processes; one that had no batch adds nothing."""
        if self.count == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            distributed.all_reduce(parameter.grad)

    def agree(self, module: torch.nn.Module) -> None:
        """Take over the first process's weights."""
        if self.count > 1:
            for tensor in module.state_dict().values():
                distributed.broadcast(tensor, 0)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rows of all processes [their rows, ...], in order of rank."""
        if self.count == 1:
            return tensor
        parts: list[torch.Tensor | None] = [None] * self.count
        distributed.all_gather_object(parts, tensor.cpu())
        return torch.cat([part for part in parts if part is not None])

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            distributed.barrier()

    def close(self) -> None:
        """Leave the group."""
        if self.count > 1:
            distributed.destroy_process_group()


def launched_device(device: str) -> str:
    """The device of this process under `accelerate launch`: each has its own GPU where there are GPUs."""
    if not LAUNCHED or device not in ("auto", "cuda"):
        return device
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes") or not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
