"""The core's view of weights that are spread over processes: ``Sharding``.

Under FSDP2 and ZeRO-3 a process holds a part of each matrix. Then G is built from captured inputs
and errors, one matrix at a time: each process forms its own sum of outer products, ``reduce`` adds
them up over the processes and keeps this process's part. V is elementwise on the parts (diagonal
Fisher) or on one whole matrix at a time. Values contract with one whole M at a time: ``gather``.
So never more than one matrix is whole. Label values by differences gather nothing of M: every
process moves its own part of the weights along its own part of M (``moving``), and G comes by
autograd, one gradient reduced as the backward makes it.
Under sharding a ``GradientReducer`` gets parts of sums that have been taken over all processes
already; only its ``count`` is this process's own.

All methods but ``shape``, ``local``, ``part_of``, ``narrow`` and (without ``within``)
``repeatable`` are collective: every process must call them for the same names in the same order,
and the same number of times, or the processes wait for each other for ever. Where the weights are
sharded, a forward is collective as well, so every process must run equally many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

MasterWeights = Callable[[str, Tensor], Tensor]
"""Name and parameter to the weight as the optimizer keeps it, in float32 where the model holds a
16-bit copy: whole, or under ``Sharding`` this process's part. Collective."""


@runtime_checkable
class Sharding(Protocol):
    """Moves single matrices between a process's part and the whole.

    ``name`` is always the parameter's name in ``model.named_parameters(remove_duplicate=False)``;
    the identity of a parameter object means nothing, because a module holds another object inside
    a forward than outside. A *part* is what this process keeps of a matrix. Its shape depends on
    the layout and it may be padded with zeros, but parts of one name can be added, scaled and
    multiplied elementwise. Results are detached, and never the parameter's own memory.
    """

    def shape(self, name: str) -> torch.Size:
        """Shape of the whole parameter."""
        ...

    def full(self, name: str, parameter: Tensor) -> Tensor:
        """The whole parameter at its current values. Collective."""
        ...

    def local(self, name: str, parameter: Tensor) -> Tensor:
        """This process's part of the parameter at its current values, without communication."""
        ...

    def part_of(self, name: str, full: Tensor) -> Tensor:
        """This process's part of a whole tensor that every process has, without communication."""
        ...

    def reduce(self, name: str, full: Tensor) -> Tensor:
        """This process's part of the sum of ``full`` over the processes. Collective."""
        ...

    def gather(self, name: str, part: Tensor) -> Tensor:
        """The whole tensor from the parts. Collective; ``gather(n, part_of(n, x))`` is ``x``."""
        ...

    def repeatable(self, within: nn.Module | None = None) -> AbstractContextManager[None]:
        """Enter this around every backward through one forward but the last.

        A layout gathers a module's weights for its forward and again for its backward, and frees
        them afterwards; some count how many backwards are still to come. This context puts those
        counts back to where they were when the forward ended, so that the next backward through
        the same graph finds the weights gathered.

        Args:
            within: the module that the backward starts and ends in, if it does not start from the
                model's output. A layout that gathers weights where a backward enters a module by
                its output then gathers them here, so the call is collective.
        """
        ...

    def norms(self, parts: Mapping[str, Tensor]) -> dict[str, float]:
        """Euclidean norm of each whole tensor, from the parts. Collective, one call for all."""
        ...

    def local_shard_and_direction(
        self, name: str, parameter: Tensor, part: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The memory that the next forward gathers the parameter from, and M for it.

        Args:
            name: of the parameter.
            parameter: as ``model.named_parameters`` has it, outside a forward.
            part: this process's part of M.

        Returns:
            Two tensors of one shape; what is written into the first, moves the weights. Collective.
        """
        ...

    def regather(self) -> None:
        """Let the next forward see the parts as they are now; outside it parameters are parts."""
        ...

    def low_precision_reason(self) -> str | None:
        """Arithmetic of the forward if it is narrower than float32, as with mixed precision."""
        ...

    def summed(self, numbers: Sequence[float]) -> list[float]:
        """Each number's sum over the processes. Collective."""
        ...


@contextmanager
def objects_in_use(
    model: nn.Module, names: Iterable[str]
) -> Iterator[dict[int, tuple[str, Tensor]]]:
    """Parameters as the modules hold them while they run: identity -> (name, object).

    Filled by each forward inside, since a layout may put another object in a parameter's place.

    Args:
        model: outside a forward.
        names: of parameters; a tied one is followed to all its places.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    names_by_id = {id(named[name]): name for name in names}
    in_use: dict[int, tuple[str, Tensor]] = {}

    def enter(module: nn.Module, _: object) -> None:
        for holder, local, name in places[module]:
            parameter = holder._parameters[local]
            assert parameter is not None
            in_use[id(parameter)] = (name, parameter)

    # Nobody calls a ParameterDict, as PEFT keeps its factors of embeddings in: what is in it is in
    # use where the module around it runs.
    containers = (nn.ParameterDict, nn.ParameterList)
    places = {
        module: [
            (holder, n, names_by_id[id(p)])
            for holder in (module, *(c for c in module.children() if isinstance(c, containers)))
            for n, p in holder._parameters.items()
            if id(p) in names_by_id
        ]
        for module in model.modules()
    }
    handles = [m.register_forward_pre_hook(enter) for m, inside in places.items() if inside]
    try:
        yield in_use
    finally:
        for handle in handles:
            handle.remove()
