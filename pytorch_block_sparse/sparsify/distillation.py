"""distill(): trains a sparse student to give its dense teacher's outputs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, kl_div, log_softmax

from .. import text
from ..errors import BlockSparseError
from .calibration import Batch, check_batches, evaluation_mode, run_batch

Output = Callable[[nn.Module, Batch], Tensor]
DistillationLoss = Callable[[Tensor, Tensor], Tensor]

_WARM_UP = 0.1  # share of the training in which the learning rate rises
_PROGRESS_BAR = "{desc} |{bar:30}| {percentage:3.0f}% [{elapsed}<{remaining}{postfix}]"


@dataclass(frozen=True)
class DistillationReport:
    """What :func:`distill` did.

    Attributes:
        losses: of every step.
        seconds: of training, without the teacher's outputs.
    """

    losses: tuple[float, ...]
    seconds: float

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return len(self.losses)


def cosine_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """1 - cosine similarity along the last dimension, averaged: for embeddings and hidden states."""
    return (1 - cosine_similarity(student.float(), teacher.float(), dim=-1)).mean()


def kl_loss(temperature: float = 2.0) -> DistillationLoss:
    """KL divergence of softened class probabilities, times the temperature squared: for logits [..., classes].

    Source: Hinton et al., "Distilling the Knowledge in a Neural Network", 2015, arXiv:1503.02531.
    """
    if not temperature > 0:
        raise BlockSparseError(f"temperature must be positive, got {temperature!r}")

    def loss(student: Tensor, teacher: Tensor) -> Tensor:
        logs = [log_softmax(logits.float().flatten(0, -2) / temperature, -1) for logits in (student, teacher)]
        return kl_div(*logs, reduction="batchmean", log_target=True) * temperature**2

    return loss


def distill(
    student: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Batch],
    *,
    steps: int | None = None,
    seconds: float | None = None,
    learning_rate: float = 1e-3,
    output: Output | None = None,
    loss: DistillationLoss | None = None,
    parameters: Iterable[nn.Parameter] | None = None,
    progress: bool = True,
) -> DistillationReport:
    """Trains ``student`` to give ``teacher``'s outputs, with AdamW; the learning rate rises, then falls along a cosine.

    Batches are taken in random order, every one before any comes again, following ``torch.manual_seed``. The teacher's
    outputs are computed once a batch and kept.

    Source: Hinton et al., "Distilling the Knowledge in a Neural Network", 2015, arXiv:1503.02531.

    Args:
        student: the sparse model; trained in place, in evaluation mode: dropout would blur what is compared.
        teacher: the dense model; it is not changed.
        batches: model inputs, as in :func:`sparsify`'s calibration.
        steps: train for so many steps; once over the batches if neither this nor ``seconds`` is given.
        seconds: train for so long, instead.
        learning_rate: at its highest.
        output: (model, batch) -> what to compare; if not given, the logits, hidden states or tensor that the
            model returns.
        loss: (student's output, teacher's output) -> scalar; if not given, :func:`kl_loss` for logits, else
            :func:`cosine_loss`.
        parameters: of the student, to train; all that require a gradient if not given.
        progress: show a progress bar.

    Raises:
        BlockSparseError: an argument is malformed, or a loss is not finite. Of a malformed argument nothing is changed.
    """
    for name, model in (("student", student), ("teacher", teacher)):
        if not isinstance(model, nn.Module):
            raise BlockSparseError(f"{name} must be a torch.nn.Module, got {type(model).__name__}")
    if student is teacher:
        raise BlockSparseError("teacher must be another model than student, got the same: sparsify with inplace=False")
    if steps is not None and seconds is not None:
        raise BlockSparseError(f"give at most one of steps and seconds, got {steps!r} and {seconds!r}")
    for name, value in (("steps", steps), ("seconds", seconds), ("learning_rate", learning_rate)):
        if value is not None and not (isinstance(value, (int, float)) and 0 < value < math.inf):
            raise BlockSparseError(f"{name} must be a positive number, got {value!r}")
    found = check_batches("batches", batches)
    trained = [p for p in (student.parameters() if parameters is None else parameters) if p.requires_grad]
    if not trained:
        raise BlockSparseError("parameters must hold one that requires a gradient, got none")
    if seconds is None and steps is None:
        steps = len(found)
    output = output or _model_output
    with evaluation_mode(student), evaluation_mode(teacher):
        if loss is None:
            with torch.no_grad():
                is_logits = output is _model_output and _find(run_batch(teacher, found[0]))[0] == "logits"
            loss = kl_loss() if is_logits else cosine_loss
        return _train(student, teacher, found, steps, seconds, learning_rate, output, loss, trained, progress)


def _train(
    student: nn.Module,
    teacher: nn.Module,
    batches: list[Batch],
    steps: int | None,
    seconds: float | None,
    learning_rate: float,
    output: Output,
    loss: DistillationLoss,
    parameters: list[nn.Parameter],
    progress: bool,
) -> DistillationReport:
    fused = all(p.device.type in ("cpu", "cuda") for p in parameters)
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, fused=fused, weight_decay=0.0)
    targets: dict[int, Tensor] = {}
    order: list[int] = []
    losses: list[float] = []
    spent = 0.0
    with text.progress(1.0, desc="distill", bar_format=_PROGRESS_BAR, disable=not progress) as bar:
        share = 0.0
        while share < 1:
            if not order:
                order = torch.randperm(len(batches), device="cpu").tolist()
            place = order.pop()
            if place not in targets:
                with torch.no_grad():
                    targets[place] = output(teacher, batches[place]).detach()
            begin = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * min(1, (share + 1e-3) / _WARM_UP) * (1 + math.cos(math.pi * share)) / 2
            with torch.enable_grad():
                value = loss(output(student, batches[place]), targets[place])
            if not torch.isfinite(value):
                raise BlockSparseError(f"loss must be finite, got {value.item()} at step {len(losses)}")
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(value.item())
            spent += time.perf_counter() - begin
            before, share = share, min(1.0, len(losses) / steps if seconds is None else spent / seconds)
            bar.update(share - before)
            bar.set_postfix_str(f"loss {losses[-1]:.4f}")
    optimizer.zero_grad()
    return DistillationReport(tuple(losses), spent)


def _model_output(model: nn.Module, batch: Batch) -> Tensor:
    """The tensor to compare, without the tokens that the batch's attention mask leaves out."""
    _, found = _find(run_batch(model, batch))
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, Tensor) and found.dim() == 3 and mask.shape == found.shape[:2]:
        found = found[mask.to(found.device) != 0]
    return found


def _find(result: Any) -> tuple[str, Tensor]:
    """(name, tensor) of what to compare in a model's output."""
    if isinstance(result, Tensor):
        return "tensor", result
    for name in ("logits", "last_hidden_state"):
        found = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
        if isinstance(found, Tensor):
            return name, found
    if isinstance(result, (tuple, list)) and result and isinstance(result[0], Tensor):
        return "tensor", result[0]
    raise BlockSparseError(
        f"output must be given for a model that returns {type(result).__name__} without logits or hidden states"
    )


__all__ = ["DistillationReport", "cosine_loss", "distill", "kl_loss"]
