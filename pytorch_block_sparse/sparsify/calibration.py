"""Running a model on calibration inputs, and streaming what its layers see: second moments and gradient scores."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks import to_grid
from ..dense_layers import is_conv1d
from ..errors import BlockSparseError
from .layers import TargetLayer

Batch = Mapping[str, Any] | Sequence[Any] | Tensor
Loss = Callable[[Any, Batch], Tensor]


class Moments:
    """The second moments of pairs (x, z), summed batch by batch; nothing of the size of the data is kept.

    Each vector is extended by a constant 1, so that sums and the count are entries of the same matrix.

    Attributes:
        total: float64 [I + 1, J + 1], the sum of [x; 1] [z; 1]ᵀ over tokens.
    """

    def __init__(self, features: int, others: int, device: torch.device | str = "cpu") -> None:
        self.total = torch.zeros((features + 1, others + 1), dtype=torch.float64, device=device)

    def add(self, x: Tensor, z: Tensor) -> None:
        """Adds tokens: [T, I] and [T, J]. Products of a batch are float32 (float64 for float64), their sum float64."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        x, z = x.to(dtype), z.to(dtype)
        self.total[:-1, :-1] += x.t() @ z
        self.total[:-1, -1] += x.sum(0, dtype=torch.float64)
        self.total[-1, :-1] += z.sum(0, dtype=torch.float64)
        self.total[-1, -1] += x.shape[0]

    @property
    def tokens(self) -> float:
        """The number of tokens."""
        return float(self.total[-1, -1])


@dataclass(frozen=True)
class Stage:
    """Layers that read the same tensor, such as query, key and value: they share one set of moments.

    Attributes:
        names: of the layers, in execution order.
        calls: how often each of them runs in one pass.
    """

    names: tuple[str, ...]
    calls: int


class _Stop(Exception):
    """Ends a forward pass once everything that was asked for has been seen."""


def check_batches(argument: str, batches: Iterable[Batch]) -> list[Batch]:
    """The batches as a list.

    Raises:
        BlockSparseError: there is none, or one is no mapping, tuple or tensor.
    """
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise BlockSparseError(
            f"{argument} must be an iterable of model inputs (mappings, tuples or tensors), "
            f"got {type(batches).__name__}"
        )
    found = list(batches)
    if not found:
        raise BlockSparseError(f"{argument} must hold at least one batch, got none")
    for place, batch in enumerate(found):
        if not isinstance(batch, (Tensor, Mapping, tuple, list)):
            raise BlockSparseError(
                f"{argument} must hold mappings, tuples or tensors, got {type(batch).__name__} at place {place}"
            )
    return found


def run_batch(model: nn.Module, batch: Batch) -> Any:
    """The model's output: a mapping is passed by keywords, a tuple by position. Tensors move to the model's device."""
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device

    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    if isinstance(batch, Mapping):
        return model(**{name: move(value) for name, value in batch.items()})
    if isinstance(batch, (tuple, list)):
        return model(*map(move, batch))
    return model(move(batch))


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, without dropout; afterwards each is as it was."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def trace_stages(model: nn.Module, batch: Batch, targets: Sequence[TargetLayer]) -> list[Stage]:
    """The layers in execution order, grouped by the tensor that they read.

    Raises:
        BlockSparseError: the model does not run some of the layers on this batch.
    """
    reads: dict[str, list[tuple[int, int]]] = {}
    alive: list[Tensor] = []  # a freed tensor's id could come back

    def remember(name: str, x: Tensor) -> None:
        alive.append(x)
        # The version too: between two reads an in-place operation may have changed it.
        reads.setdefault(name, []).append((id(x), 0 if x.is_inference() else x._version))

    with torch.no_grad(), _watch(targets, remember):
        run_batch(model, batch)
    missing = [target.name for target in targets if target.name not in reads]
    if missing:
        raise BlockSparseError(
            f"calibration must run every layer to convert, but its first batch does not reach {', '.join(missing)}; "
            "see exclude"
        )
    stages: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for name, inputs in reads.items():
        stages.setdefault(tuple(inputs), []).append(name)
    return [Stage(tuple(names), len(inputs)) for inputs, names in stages.items()]


@torch.no_grad()
def dense_moments(
    model: nn.Module,
    batches: Sequence[Batch],
    targets: Sequence[TargetLayer],
    stages: Sequence[Stage],
    advance: Callable[[], None],
) -> dict[str, Moments]:
    """The second moments of every layer's input in one pass over the batches; layers of a stage share theirs.

    Args:
        model: in evaluation mode.
        batches: its inputs. Where one has an ``attention_mask`` [B, T], masked tokens do not count.
        targets: the layers.
        stages: from :func:`trace_stages`.
        advance: called after every batch.
    """
    by_name = {target.name: target for target in targets}
    leaders = [by_name[stage.names[0]] for stage in stages]
    moments = {
        leader.name: Moments(leader.shape[1], leader.shape[1], leader.module.weight.device) for leader in leaders
    }
    for batch in batches:

        def add(name: str, x: Tensor, batch: Batch = batch) -> None:
            tokens = _tokens(x, batch)
            moments[name].add(tokens, tokens)

        with _watch(leaders, add):
            run_batch(model, batch)
        advance()
    return {name: moments[stage.names[0]] for stage in stages for name in stage.names}


@torch.no_grad()
def paired_moments(
    model: nn.Module,
    batches: Sequence[Batch],
    leader: TargetLayer,
    calls: int,
    use_dense: Callable[[], contextlib.AbstractContextManager],
    advance: Callable[[], None],
) -> tuple[Moments, Moments]:
    """Moments of a layer's input x in the model as it is, and of x with the input z that the dense model would give it.

    Args:
        model: in evaluation mode; layers before ``leader`` may be sparse already.
        batches: its inputs.
        leader: a layer that is still dense.
        calls: how often it runs in one pass; the rest of the pass is left out.
        use_dense: a context in which the model is the dense one.
        advance: called after every batch.

    Returns:
        (Σ x xᵀ, Σ x zᵀ).
    """
    features, device = leader.shape[1], leader.module.weight.device
    now, cross = Moments(features, features, device), Moments(features, features, device)
    for batch in batches:
        sparse = _inputs(model, batch, leader, calls)
        with use_dense():
            dense = _inputs(model, batch, leader, calls)
        for x, z in zip(sparse, dense, strict=True):
            now.add(x, x)
            cross.add(x, z)
        advance()
    return now, cross


def gradient_scores(
    model: nn.Module,
    batches: Sequence[Batch],
    targets: Sequence[TargetLayer],
    loss: Loss | None,
    advance: Callable[[], None],
) -> dict[str, tuple[Tensor, Tensor]]:
    """For each layer (Σ |Σ w g|, Σ Σ w g), each [R, C]: inner sums over a block, outer ones over batches.

    No gradient outlives its batch, and no ``grad`` of a parameter is touched.

    Raises:
        BlockSparseError: there is no loss: neither ``loss`` nor the model's output has one.
    """
    weights = [target.module.weight for target in targets]
    before = [weight.requires_grad for weight in weights]
    sums = [
        (torch.zeros(target.grid_shape, dtype=torch.float64), torch.zeros(target.grid_shape, dtype=torch.float64))
        for target in targets
    ]
    try:
        for weight in weights:
            weight.requires_grad_(True)
        for batch in batches:
            with torch.enable_grad():
                value = _loss_of(run_batch(model, batch), batch, loss)
                gradients = torch.autograd.grad(value, weights, allow_unused=True)
            for target, gradient, (absolute, signed) in zip(targets, gradients, sums, strict=True):
                if gradient is not None:
                    product = target.weight * (gradient.t() if is_conv1d(target.module) else gradient)
                    blocks = to_grid(product.double(), target.block_shape).sum((2, 3)).cpu()
                    absolute += blocks.abs()
                    signed += blocks
            advance()
    finally:
        for weight, flag in zip(weights, before, strict=True):
            weight.requires_grad_(flag)
    return {target.name: pair for target, pair in zip(targets, sums, strict=True)}


def _loss_of(output: Any, batch: Batch, loss: Loss | None) -> Tensor:
    if loss is not None:
        return loss(output, batch)
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None and isinstance(output, Tensor) and output.numel() == 1:
        found = output
    if found is None:
        raise BlockSparseError(
            "calibration must make the model return a loss (with transformers: pass labels), or the importance must "
            "be given one: importance=taylor(loss)"
        )
    return found.sum()


@contextlib.contextmanager
def _watch(targets: Iterable[TargetLayer], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Calls ``see(name, input)`` whenever one of the layers is about to run; a :class:`_Stop` in it ends the pass."""

    def hook_for(name: str) -> Callable:
        def hook(module: nn.Module, arguments: tuple, keywords: dict) -> None:
            see(name, arguments[0] if arguments else next(iter(keywords.values())))

        return hook

    handles = [target.module.register_forward_pre_hook(hook_for(target.name), with_kwargs=True) for target in targets]
    try:
        yield
    except _Stop:
        pass
    finally:
        for handle in handles:
            handle.remove()


def _inputs(model: nn.Module, batch: Batch, layer: TargetLayer, calls: int) -> list[Tensor]:
    """What ``layer`` reads in each of its ``calls``, [T, I] each."""
    found: list[Tensor] = []

    def keep(name: str, x: Tensor) -> None:
        found.append(_tokens(x, batch))
        if len(found) == calls:
            raise _Stop

    with _watch([layer], keep):
        run_batch(model, batch)
    return found


def _tokens(x: Tensor, batch: Batch) -> Tensor:
    """[..., I] -> [T, I], without the tokens that the batch's attention mask leaves out."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, Tensor) and mask.dim() == 2 and x.dim() == 3 and mask.shape == x.shape[:2]:
        return x.detach()[mask.to(x.device) != 0]
    return x.detach().reshape(-1, x.shape[-1])


__all__ = [
    "Batch",
    "Loss",
    "Moments",
    "Stage",
    "check_batches",
    "dense_moments",
    "evaluation_mode",
    "gradient_scores",
    "paired_moments",
    "run_batch",
    "trace_stages",
]
