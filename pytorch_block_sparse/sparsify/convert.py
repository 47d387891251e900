"""sparsify() and densify(): dense layers of a model to block-sparse ones, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import text
from ..block_sparse import strongest_blocks
from ..block_sparse_linear import BlockSparseLinear
from ..blocks import gather_blocks, scatter_blocks
from ..errors import BlockSparseError
from ..pattern import BlockPattern
from . import allocation as allocations
from .activation_fusing import fuse_activations
from .calibration import (
    Batch,
    Moments,
    Stage,
    check_batches,
    dense_moments,
    evaluation_mode,
    gradient_scores,
    paired_moments,
    trace_stages,
)
from .importance import Importance, LayerContext, as_importance
from .layers import Selector, TargetLayer, module_places, select_layers
from .reconstruction import Regression, build_regression, relative_output_error
from .reconstruction import refit as solve
from .report import LayerReport, SparsifyReport
from .swap import ModuleSwap


def sparsify(
    model: nn.Module,
    density: float = 0.5,
    *,
    block_shape: tuple[int, int] = (32, 32),
    rules: Mapping[Any, Any] | Sequence[tuple[Any, Any]] | None = None,
    include: Selector | Sequence[Selector] | None = None,
    exclude: Selector | Sequence[Selector] | None = None,
    importance: str | Importance | Callable[[LayerContext], Tensor] = "magnitude",
    allocation: str = "uniform",
    calibration: Iterable[Batch] | None = None,
    refit: bool | None = None,
    fuse_activation: bool = False,
    inplace: bool = True,
    dry_run: bool = False,
    progress: bool = False,
) -> SparsifyReport:
    """Replaces linear layers of a trained model by :class:`BlockSparseLinear` layers that keep its quality.

    With calibration inputs the layers are converted in the order in which they run. Each is refitted to the output that
    the *dense* layer has in the *dense* model, from the inputs that the layers before it, sparse by now, give it: so it
    also makes up for their errors (asymmetric calibration; least-squares reconstruction of pruned layers: He et al.,
    "Channel Pruning for Accelerating Very Deep Neural Networks", 2017, arXiv:1707.06168). See ``reconstruction``.

    Args:
        model: ``torch.nn.Linear`` and transformers' ``Conv1D`` layers in it are converted. By default those that cannot
            be (a weight tied to an embedding, say) stay dense and are named in the report; naming one is an error.
        density: share of the blocks to keep, in (0, 1].
        block_shape: (bh, bw).
        rules: selector -> density, None (leave dense), or a mapping with any of "density", "block_shape" and
            "activation" (of the new layer). The first selector that fits holds. An allocation respects its densities.
        include: convert only what one of these selectors fits (or a rule). A selector is a regular expression that has
            to match the module's whole name, a type, or a predicate ``(name, module) -> bool``.
        exclude: convert nothing that one of these fits.
        importance: which blocks are worth keeping: "magnitude" ("magnitude_l1", "magnitude_l2"), "random"; with
            calibration "wanda" and "obs" (the best), and "taylor" and "movement", which need a loss; an
            :class:`Importance`; or a function of a :class:`LayerContext` that returns [R, C].
        allocation: how layers share the blocks: "uniform", "global", "erdos_renyi_kernel" ("erk"), "error".
        calibration: model inputs: mappings (keyword arguments), tuples or tensors. A few hundred sentences or images.
            With an ``attention_mask`` [B, T], masked tokens do not count.
        refit: whether the kept blocks are refitted by least squares; if not given, whether there is calibration.
        fuse_activation: have layers compute the ReLU, GELU or SiLU module that follows them; an ``nn.Identity`` takes
            its place. Done where the source of the parent's forward shows that the activation follows this layer alone,
            and that nothing else uses what the layer returns; the report tells of each. :func:`densify` restores it.
        inplace: convert ``model`` itself; else a deep copy of it. The report has the result as ``model``.
        dry_run: report everything, but leave the model as it is.
        progress: show a progress bar.

    Returns:
        The report: a table when printed, and ``to_dict()``, ``plot(path)``, ``model``.

    Raises:
        BlockSparseError: an argument is malformed; calibration is missing where it is needed, does not reach a layer,
            or brings no loss. The model is then as it was.

    >>> model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    >>> report = sparsify(model, density=0.25, exclude="2")
    >>> model[0]
    BlockSparseLinear(in_features=64, out_features=128, bias=True, block_shape=(32, 32), nnz=2, density=0.25)
    >>> report.density, report.skipped
    (0.25, {'2': 'excluded'})
    """
    measure = as_importance(importance)
    allocation = allocations.check_allocation(allocation)
    select_layers(model, density, block_shape, rules, include, exclude)  # before a copy is made
    batches = None if calibration is None else check_batches("calibration", calibration)
    if batches is None:
        _require_calibration(measure, allocation, refit)
    if not inplace and not dry_run:
        model = copy.deepcopy(model)
    targets, skipped = select_layers(model, density, block_shape, rules, include, exclude)
    not_fused: dict[str, str] = {}
    if fuse_activation:
        targets, not_fused = fuse_activations(targets)
    conversion = _Conversion(
        model, targets, measure, allocation, batches, batches is not None if refit is None else bool(refit), progress
    )
    swap = ModuleSwap()
    try:
        with evaluation_mode(model):
            layers = conversion.run(swap)
    except BaseException:
        swap.undo()
        raise
    if dry_run:
        swap.undo()
    return SparsifyReport(model, tuple(layers), skipped, measure.name, allocation, conversion.refit, dry_run, not_fused)


def densify(model: nn.Module) -> nn.Module:
    """Replaces every :class:`BlockSparseLinear` in ``model``, in place, by the dense layer with the same weights.

    What was transformers' ``Conv1D`` before :func:`sparsify` is one again; anything else becomes ``nn.Linear``. An
    activation module that :func:`sparsify` has fused is back in its place.

    Returns:
        ``model``; the dense layer itself if ``model`` is a BlockSparseLinear.

    Raises:
        BlockSparseError: a layer has an activation, which ``nn.Linear`` has not, and which replaced no module of
            ``model``. Nothing is changed then.
    """
    if isinstance(model, BlockSparseLinear):
        return _dense_layer("model", model, None)
    if not isinstance(model, nn.Module):
        raise BlockSparseError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    places = module_places(model)
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, BlockSparseLinear)]
    dense = [(layer, _dense_layer(name, layer, places[layer][0][0])) for name, layer in layers]
    swap = ModuleSwap()
    for layer, replacement in dense:
        origin, parent = layer.dense_origin, places[layer][0][0]
        swap.replace(places[layer], layer, replacement)
        if origin.activation_name is not None:
            activation = origin.activation_module.train(layer.training)
            swap.replace([(parent, origin.activation_name)], parent._modules[origin.activation_name], activation)
    return model


@dataclass
class _Conversion:
    """One run of :func:`sparsify`, its arguments checked."""

    model: nn.Module
    targets: list[TargetLayer]
    measure: Importance
    allocation: str
    batches: list[Batch] | None
    refit: bool
    progress: bool

    def run(self, swap: ModuleSwap) -> list[LayerReport]:
        """Replaces the layers through ``swap``."""
        stages: list[Stage] = [Stage((target.name,), 1) for target in self.targets]
        dense: dict[str, Moments] = {}
        gradients: dict[str, tuple[Tensor, Tensor]] = {}
        batches = self.batches or []
        if self.batches is not None:
            stages = trace_stages(self.model, batches[0], self.targets)
        passes = len(batches) * (1 + self.measure.needs_gradients) + len(stages) * (1 + len(batches) * self.refit)
        with text.progress(passes, desc="sparsify", unit="step", disable=not self.progress) as bar:
            if self.batches is not None:
                dense = dense_moments(self.model, batches, self.targets, stages, bar.update)
            if self.measure.needs_gradients:
                gradients = gradient_scores(self.model, batches, self.targets, self.measure.loss, bar.update)
            with torch.no_grad():
                contexts = {
                    target.name: LayerContext(
                        target.name,
                        target.weight,
                        _bias(target),
                        target.block_shape,
                        dense.get(target.name),
                        None,
                        gradients.get(target.name),
                    )
                    for target in self.targets
                }
                scores: dict[str, Tensor] = {}
                # Scores that the inputs decide are taken again, stage by stage, from those that the sparse model has.
                if not (
                    self.refit and self.measure.needs_inputs and self.allocation in ("uniform", "erdos_renyi_kernel")
                ):
                    scores = {target.name: self.measure(contexts[target.name]) for target in self.targets}
                counts = self._allocate(scores, contexts)
                by_name = {target.name: target for target in self.targets}
                reports: dict[str, LayerReport] = {}
                for stage in stages:
                    members = [by_name[name] for name in stage.names]
                    pair = None
                    if self.refit:
                        pair = paired_moments(self.model, batches, members[0], stage.calls, swap.originals, bar.update)
                    made = [
                        self._convert(target, contexts[target.name], counts[target.name], scores, pair)
                        for target in members
                    ]
                    for target, (layer, report) in zip(members, made, strict=True):
                        swap.replace(target.places, target.module, layer)
                        origin = layer.dense_origin
                        if origin.activation_name is not None:
                            place = (target.places[0][0], origin.activation_name)
                            swap.replace([place], origin.activation_module, nn.Identity().train(layer.training))
                        reports[target.name] = report
                    bar.update()
        return [reports[target.name] for target in self.targets]

    def _allocate(self, scores: Mapping[str, Tensor], contexts: Mapping[str, LayerContext]) -> dict[str, int]:
        pinned = [target for target in self.targets if target.pinned or self.allocation == "uniform"]
        shared = [target for target in self.targets if not (target.pinned or self.allocation == "uniform")]
        counts = allocations.uniform(pinned)
        if not shared:
            return counts
        if self.allocation == "global":
            return counts | allocations.by_global_score(shared, scores)
        if self.allocation == "erdos_renyi_kernel":
            return counts | allocations.erdos_renyi_kernel(shared)
        known: dict[str, Regression] = {}  # of the layer that is being measured

        def error_at(target: TargetLayer, count: int) -> float:
            context = contexts[target.name]
            mask = strongest_blocks(scores[target.name], count)
            if target.name not in known:
                known.clear()
                known[target.name] = build_regression(context.weight, context.bias, context.moments)
            pattern = BlockPattern.from_mask(mask, target.block_shape, target.shape)
            weight, bias = self._solve(context, pattern, known[target.name] if self.refit else None)
            return relative_output_error(context.weight, context.bias, weight, bias, context.moments)

        return counts | allocations.by_output_error(shared, error_at)

    def _convert(
        self,
        target: TargetLayer,
        context: LayerContext,
        count: int,
        scores: Mapping[str, Tensor],
        pair: tuple[Moments, Moments] | None,
    ) -> tuple[BlockSparseLinear, LayerReport]:
        now, cross = pair or (None, None)
        if self.refit and self.measure.needs_inputs:
            score = self.measure(
                LayerContext(
                    context.name, context.weight, context.bias, context.block_shape, now, cross, context.gradients
                )
            )
        else:
            score = scores[target.name]
        pattern = BlockPattern.from_mask(strongest_blocks(score, count), target.block_shape, target.shape)
        regression = build_regression(context.weight, context.bias, now, cross) if self.refit else None
        weight, bias = self._solve(context, pattern, regression)
        layer = _sparse_layer(target, pattern)
        if self.refit:
            layer.values.copy_(gather_blocks(weight, pattern))
            if bias is not None:
                layer.bias.copy_(bias)
        dense = context.weight.double()
        output_error = None
        if context.moments is not None:
            output_error = relative_output_error(
                context.weight, context.bias, weight, bias, context.moments, now, cross
            )
        return layer, LayerReport(
            name=target.name,
            pattern=pattern,
            weight_error=float((weight - dense).norm() / dense.norm().clamp_min(1e-300)),
            output_error=output_error,
            parameters_before=sum(parameter.numel() for parameter in target.module.parameters()),
            parameters=pattern.stored_elements() + (0 if layer.bias is None else layer.bias.numel()),
            bytes_before=sum(parameter.nbytes for parameter in target.module.parameters()),
            bytes=sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers())),
            activation=layer.activation,
        )

    def _solve(
        self, context: LayerContext, pattern: BlockPattern, regression: Regression | None
    ) -> tuple[Tensor, Tensor | None]:
        """Weight (float64 [O, I], zero outside the pattern) and bias: refitted, or the dense ones."""
        if regression is None:
            kept = scatter_blocks(gather_blocks(context.weight.double(), pattern), pattern)
            return kept, context.bias
        weight = solve(regression, pattern.mask(), pattern.block_shape)
        return weight, regression.bias(weight)


def _require_calibration(measure: Importance, allocation: str, refit: bool | None) -> None:
    for argument, needed in (
        (f"importance {measure.name!r}", measure.needs_inputs or measure.needs_gradients),
        ("allocation 'error'", allocation == "error"),
        ("refit", bool(refit)),
    ):
        if needed:
            raise BlockSparseError(f"calibration must be given for {argument}, got None")


def _bias(target: TargetLayer) -> Tensor | None:
    return None if target.module.bias is None else target.module.bias.detach()


def _sparse_layer(target: TargetLayer, pattern: BlockPattern) -> BlockSparseLinear:
    layer = BlockSparseLinear.from_linear(target.module, pattern=pattern, activation=target.activation)
    if target.activation_name is not None:
        activation = target.places[0][0]._modules[target.activation_name]
        layer.dense_origin = replace(
            layer.dense_origin, activation_name=target.activation_name, activation_module=activation
        )
    return layer


def _dense_layer(name: str, layer: BlockSparseLinear, parent: nn.Module | None) -> nn.Module:
    origin = layer.dense_origin
    place = None if parent is None else parent._modules.get(origin.activation_name)
    if layer.activation is not None and type(place) is not nn.Identity:
        raise BlockSparseError(
            f"model must hold no layer with an activation, which a dense layer has not; {name} has {layer.activation!r}"
        )
    linear = layer.to_linear(without_activation=True)
    if origin.layer_type.__name__ != "Conv1D":
        return linear
    conv = origin.layer_type(layer.out_features, layer.in_features).to(linear.weight)
    with torch.no_grad():
        conv.weight.copy_(linear.weight.t())
        conv.bias.copy_(linear.bias)
    conv.weight.requires_grad_(linear.weight.requires_grad)
    conv.bias.requires_grad_(linear.bias.requires_grad)
    return conv.train(linear.training)


__all__ = ["densify", "sparsify"]
