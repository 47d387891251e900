"""SparseOptimizer: trains the pattern of block-sparse layers along with what any optimizer trains."""

from __future__ import annotations

import warnings
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..block_sparse_linear import BlockSparseLinear
from ..checks import check_int
from ..errors import BlockSparseError
from ..pattern import blocks_at_density
from .gradient_tap import GradientTap, gradient_block_norms
from .inputs import check_method, check_movable, schedules_by_layer, trained_layers, unwrapped
from .methods import Method
from .optimizer_state import check_optimizer, holds, reset_slots, resize_slots
from .replicas import Replicas, take_from_ddp
from .schedules import DensitySchedule
from .selection import select_blocks

_STATE_VERSION = 1


@dataclass(frozen=True)
class LayerUpdate:
    """What one update of the pattern did to one layer.

    Attributes:
        step: optimizer steps done.
        name: of the layer.
        moved: blocks that were dropped and came back elsewhere.
        removed: blocks that were dropped for good.
        density: stored blocks over all blocks, afterwards.
    """

    step: int
    name: str
    moved: int
    removed: int
    density: float


@dataclass(eq=False)
class _Entry:
    """A layer in training."""

    name: str
    layer: BlockSparseLinear
    schedule: DensitySchedule
    initial_density: float
    movement: Tensor | None  # [nnz], float32 or float64: the score of MovementPruning
    tap: GradientTap | None

    @property
    def knows_movement(self) -> bool:
        """Whether there is a score for each block; not after the model alone has been loaded with another number."""
        return self.movement is not None and self.movement.shape[0] == self.layer.values.shape[0]


class SparseOptimizer(Optimizer):
    """Moves the blocks of a model's :class:`BlockSparseLinear` layers while other optimizers train their values.

    It wraps optimizers, or is attached to them: give them to the constructor or to :meth:`attach`, and call either
    :meth:`step` here or ``step`` of each of them. Patterns are updated when all that hold values of sparse layers have
    stepped. Any ``torch.optim`` optimizer serves that keeps its state by parameter, in any variant and with any number
    of parameter groups.

    A block that stays keeps its slot, its values and its optimizer state, bit by bit. A new block starts at zero, with
    the state that the optimizer itself would begin with; the count of steps belongs to the parameter and goes on. Where
    the density falls, values and state are cut down to the blocks that stay; the Parameter is the same object.

    A learning-rate scheduler takes the inner optimizer or this one, whose ``param_groups`` are the inner ones' own.
    Under ``torch.distributed`` the first rank decides, from gradients summed over all ranks. Where the density falls,
    make the SparseOptimizer before ``DistributedDataParallel`` wraps ``model``: a hook then averages the values'
    gradients, also after :meth:`detach`. Where the model is compiled, RigL needs an eager forward at the steps that
    update the pattern: ``torch.compiler.set_stance("force_eager")`` where :attr:`gradient_is_due`.

    Args:
        model: its sparse layers that require a gradient and hold a block are trained; the others are left alone.
        optimizers: one or several; more can be attached later.
        method: :class:`SET`, :class:`RigL`, :class:`MagnitudePruning` or :class:`MovementPruning`.
        schedule: how the density falls, of all layers or by layer name; constant where not given. The two pruning
            methods need one.
        generator: CPU generator for random growth; if not given, one that follows ``torch.manual_seed``.
        process_group: the ranks that train copies of the model; all of them if not given.

    Attributes:
        last_update: what the last update did, layer by layer.

    Raises:
        BlockSparseError: an argument breaks its rule; nothing is changed then.

    >>> from pytorch_block_sparse.training import RigL
    >>> layer = BlockSparseLinear(64, 64, density=0.25, block_shape=(16, 16))
    >>> adam = torch.optim.Adam(layer.parameters())
    >>> optimizer = SparseOptimizer(layer, adam, method=RigL(stop=100, interval=2, fraction=0.5))
    >>> for _ in range(2):
    ...     optimizer.zero_grad()
    ...     layer(torch.randn(8, 64)).square().mean().backward()
    ...     optimizer.step()
    >>> optimizer.last_update[0].step, layer.pattern.nnz
    (2, 4)
    """

    # Not Optimizer.__init__: the groups and the state are those of the inner optimizers.
    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizer | Iterable[Optimizer] = (),
        *,
        method: Method,
        schedule: DensitySchedule | Mapping[str, DensitySchedule] | None = None,
        generator: torch.Generator | None = None,
        process_group: Any = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise BlockSparseError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        check_method(method)
        if generator is not None and (not isinstance(generator, torch.Generator) or generator.device.type != "cpu"):
            raise BlockSparseError(f"generator must be a torch.Generator on the CPU, got {generator!r}")
        layers = trained_layers(unwrapped(model))
        schedules = schedules_by_layer(schedule, layers)
        optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        for position, optimizer in enumerate(optimizers):
            self._check_attachable(optimizer, optimizers[:position])
        resized = {name: layer for name, layer in layers.items() if schedules[name].end > 0}
        if method.grow_signal is None and not resized:
            raise BlockSparseError(
                f"schedule must let the density fall with {type(method).__name__}, which only removes blocks, "
                f"got {schedule!r}"
            )
        replicas = Replicas(process_group)
        if resized and replicas.size > 1 and isinstance(model, DistributedDataParallel):
            raise BlockSparseError(
                "model must not be wrapped in DistributedDataParallel before SparseOptimizer has seen it where the "
                "density falls: make the SparseOptimizer of the plain model, then wrap it"
            )

        replicas.align(list(layers.values()))
        if resized and replicas.size > 1:
            take_from_ddp(unwrapped(model), resized, replicas)
        self.method = method
        self.last_update: tuple[LayerUpdate, ...] = ()
        self._replicas = replicas
        self._generator = _new_generator() if generator is None else generator
        self._steps = 0
        self._entries = [
            _Entry(
                name,
                layer,
                schedules[name],
                layer.density,
                layer.values.new_zeros(layer.pattern.nnz, dtype=_score_dtype(layer)).detach()
                if method.drop_signal == "movement"
                else None,
                GradientTap(layer, lambda: self.gradient_is_due) if method.grow_signal == "gradient" else None,
            )
            for name, layer in layers.items()
        ]
        self._handles: list[Any] = [
            entry.layer.register_forward_hook(entry.tap, with_kwargs=True) for entry in self._entries if entry.tap
        ]
        self._optimizers: list[Optimizer] = []
        self._stepped: list[bool] = []  # by optimizer: since the last update of the count
        self._scored: set[str] = set()  # layers whose movement of this step is in
        self._holders: tuple[Any, dict[str, list[int]]] = (None, {})
        for optimizer in optimizers:
            self.attach(optimizer)

    # What it works on

    def attach(self, optimizer: Optimizer) -> None:
        """Follows the steps of ``optimizer`` from now on, whoever calls them.

        Raises:
            BlockSparseError: it is no optimizer, keeps no state by parameter, or is attached already.
        """
        self._check_attachable(optimizer, self._optimizers)
        self._optimizers.append(optimizer)
        self._stepped.append(False)
        self._handles.append(optimizer.register_step_pre_hook(self._before_step))
        self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def detach(self) -> None:
        """Takes every hook off the layers and the optimizers: patterns stay as they are from now on."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._optimizers.clear()
        self._stepped.clear()
        for entry in self._entries:
            if entry.tap is not None:
                entry.tap.clear()

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The attached optimizers."""
        return tuple(self._optimizers)

    @property
    def steps(self) -> int:
        """Steps done: all optimizers that hold values of sparse layers have stepped."""
        return self._steps

    @property
    def densities(self) -> dict[str, float]:
        """Stored blocks over all blocks, by layer."""
        return {entry.name: entry.layer.density for entry in self._entries}

    @property
    def gradient_is_due(self) -> bool:
        """Whether the next step grows blocks by the gradient, so that its forward passes have to run eagerly."""
        return self.method.grow_signal == "gradient" and self._fraction(self._steps + 1) > 0

    # What an optimizer has

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all attached optimizers: the same dicts, so that a scheduler's changes reach them."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> Mapping[Tensor, Any]:
        """The state of all attached optimizers by parameter."""
        return ChainMap(*(optimizer.state for optimizer in self._optimizers))

    @property
    def defaults(self) -> dict[str, Any]:
        """The first attached optimizer's, which schedulers read."""
        return self._optimizers[0].defaults if self._optimizers else {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every attached optimizer, and of the pattern where it is due.

        Args:
            closure: computes the loss and the gradients; called once, before the first optimizer steps.

        Returns:
            What ``closure`` returned.
        """
        if not self._optimizers:
            raise BlockSparseError("step needs an attached optimizer, got none: give optimizers, or attach() them")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self._optimizers:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of every attached optimizer's parameters."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none)
        for entry in self._entries:
            if entry.tap is not None:
                entry.tap.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Always an error: parameters belong to one of the attached optimizers."""
        raise BlockSparseError("param_group must go to one of the attached optimizers, by its add_param_group")

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed training needs besides the model's own state dict, the optimizers' included.

        Tensors, numbers, strings and containers only: ``torch.load(weights_only=True)`` reads it.
        """
        return {
            "version": _STATE_VERSION,
            "method": type(self.method).__name__,
            "steps": self._steps,
            "stepped": list(self._stepped),
            "generator": self._generator.get_state(),
            "layers": {
                entry.name: {
                    "initial_density": entry.initial_density,
                    "block_coords": entry.layer.pattern.block_coords.clone(),
                    "movement": entry.movement.clone() if entry.knows_movement else None,
                }
                for entry in self._entries
            },
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where :meth:`state_dict` was taken. Load the model's state dict first: it brings the patterns.

        Args:
            state_dict: from a SparseOptimizer of the same layers, method and optimizers.

        Raises:
            BlockSparseError: it is of others, or the model does not have its patterns; nothing is changed then.
        """
        self._check_state(state_dict)
        for optimizer, inner in zip(self._optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(inner)
        self._steps = state_dict["steps"]
        self._stepped = list(state_dict["stepped"])
        self._scored.clear()
        self._generator.set_state(state_dict["generator"].cpu())
        for entry in self._entries:
            saved = state_dict["layers"][entry.name]
            entry.initial_density = saved["initial_density"]
            if entry.movement is not None and saved["movement"] is not None:
                entry.movement = saved["movement"].to(entry.movement, copy=True)
            if entry.tap is not None:
                entry.tap.clear()

    def __getstate__(self) -> dict[str, Any]:
        raise BlockSparseError("a SparseOptimizer must be saved by its state_dict, got a copy or a pickle")

    def __repr__(self) -> str:
        inner = ", ".join(type(optimizer).__name__ for optimizer in self._optimizers)
        return f"SparseOptimizer({self.method}, layers={len(self._entries)}, optimizers=[{inner}], steps={self._steps})"

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or state.get("version") != _STATE_VERSION:
            found = state.get("version") if isinstance(state, Mapping) else type(state).__name__
            raise BlockSparseError(f"state_dict must be a SparseOptimizer's of version {_STATE_VERSION}, got {found!r}")
        missing = {"method", "steps", "stepped", "generator", "layers", "optimizers"} - set(state)
        if missing:
            raise BlockSparseError(
                f"state_dict must hold {', '.join(sorted(missing))}, got {', '.join(map(str, state))}"
            )
        check_int("state_dict['steps']", state["steps"], 0)
        if state["method"] != type(self.method).__name__:
            raise BlockSparseError(f"state_dict must be of {type(self.method).__name__}, got {state['method']}")
        names, saved = {entry.name for entry in self._entries}, set(state["layers"])
        if names != saved:
            raise BlockSparseError(f"state_dict must be of the layers {sorted(names)}, got {sorted(saved)}")
        for entry in self._entries:
            layer = state["layers"][entry.name]
            if not torch.equal(layer["block_coords"].cpu(), entry.layer.pattern.block_coords):
                raise BlockSparseError(
                    f"state_dict must have the block_coords of the model, but layer {entry.name!r} differs: load the "
                    "model's state dict first"
                )
            movement = layer["movement"]
            # Not the score's own length: the model's state dict may just have brought another number of blocks.
            wrong = entry.knows_movement if movement is None else movement.shape != (entry.layer.pattern.nnz,)
            if entry.movement is not None and wrong:
                raise BlockSparseError(f"state_dict must hold the movement of every block of layer {entry.name!r}")
        found = [[len(group["params"]) for group in inner["param_groups"]] for inner in state["optimizers"]]
        expected = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in self._optimizers]
        if found != expected or len(state["stepped"]) != len(expected):
            raise BlockSparseError(
                f"state_dict must be of optimizers with groups of {expected} parameters, got {found}: attach the same "
                "optimizers in the same order"
            )

    # The step

    def _before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        holders = self._find_holders()
        for entry in self._entries:
            if not holders[entry.name]:
                check_movable(entry.name, entry.layer)  # another Parameter, if FSDP has come in between
                raise BlockSparseError(
                    f"the values of every sparse layer must be in an attached optimizer, but those of {entry.name!r} "
                    "are not: attach() theirs, or freeze them"
                )
        if self.method.drop_signal != "movement":
            return
        if any(closure is not None for closure in (*args[1:], kwargs.get("closure"))):
            raise BlockSparseError("movement needs the gradients before the step: call SparseOptimizer.step(closure)")
        position = self._position(optimizer)
        for entry in self._entries:
            values = entry.layer.values
            if not entry.knows_movement:
                raise BlockSparseError(
                    f"layer {entry.name!r} must have the {entry.movement.shape[0]} blocks whose movement is known, got "
                    f"{values.shape[0]}: load the SparseOptimizer's state dict after the model's"
                )
            if position in holders[entry.name] and entry.name not in self._scored and values.grad is not None:
                moved = values.detach().to(entry.movement.dtype) * values.grad.to(entry.movement.dtype)
                entry.movement -= moved.sum((1, 2))
                self._scored.add(entry.name)

    def _after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        self._stepped[self._position(optimizer)] = True
        needed = {position for positions in self._find_holders().values() for position in positions}
        if not all(self._stepped[position] for position in needed):
            return
        self._stepped = [False] * len(self._optimizers)
        self._scored.clear()
        self._steps += 1
        if self._steps % self.method.interval == 0 or any(self._steps == entry.schedule.end for entry in self._entries):
            self._update()

    def _find_holders(self) -> dict[str, list[int]]:
        """Positions of the optimizers that hold each layer's values; looked up again when a group has grown."""
        sizes = [len(group["params"]) for group in self.param_groups]
        if self._holders[0] != (len(self._optimizers), sizes):
            found = {
                entry.name: [
                    position
                    for position, optimizer in enumerate(self._optimizers)
                    if holds(optimizer, entry.layer.values)
                ]
                for entry in self._entries
            }
            self._holders = ((len(self._optimizers), sizes), found)
        return self._holders[1]

    def _position(self, optimizer: Optimizer) -> int:
        return next(position for position, other in enumerate(self._optimizers) if other is optimizer)

    @staticmethod
    def _check_attachable(optimizer: object, others: Iterable[Optimizer]) -> None:
        check_optimizer(optimizer)
        if isinstance(optimizer, SparseOptimizer):
            raise BlockSparseError("optimizer must train values itself, got a SparseOptimizer")
        if any(other is optimizer for other in others):
            raise BlockSparseError(f"optimizer must not be attached twice, got {type(optimizer).__name__} again")

    # The pattern

    def _fraction(self, step: int) -> float:
        return self.method.fraction_at(step) if step % self.method.interval == 0 else 0.0

    @torch.no_grad()
    def _update(self) -> None:
        """Moves, and where the density falls removes, blocks of every layer; all masks are known before the first."""
        fraction = self._fraction(self._steps)
        entries = self._entries
        if fraction > 0 and self.method.grow_signal == "gradient":
            entries = self._with_gradient(entries)
        masks = {entry: self._choose(entry, fraction) for entry in entries}
        if masks and self._replicas.size > 1:
            together = torch.cat([mask.flatten() for mask in masks.values()]).to(torch.uint8)
            together = together.to(entries[0].layer.values.device)
            self._replicas.broadcast_(together)
            pieces = together.bool().cpu().split([mask.numel() for mask in masks.values()])
            masks = {entry: piece.view(mask.shape) for (entry, mask), piece in zip(masks.items(), pieces, strict=True)}
        self.last_update = tuple(self._apply(entry, mask) for entry, mask in masks.items())
        for entry in self._entries:
            if entry.tap is not None:
                entry.tap.clear()

    def _with_gradient(self, entries: list[_Entry]) -> list[_Entry]:
        """The layers that a backward pass has reached, on any rank; the others have nothing to choose by."""
        recorded = torch.tensor([bool(entry.tap.records) for entry in entries], dtype=torch.int32)
        recorded = recorded.to(entries[0].layer.values.device)
        self._replicas.sum_(recorded)
        for entry, count in zip(entries, recorded.tolist(), strict=True):
            gradient = entry.layer.values.grad
            if not count and gradient is not None and gradient.any():
                raise BlockSparseError(
                    f"grow signal 'gradient' needs the forward of layer {entry.name!r} to run eagerly, after the "
                    "SparseOptimizer was made, but it recorded nothing: do not compile steps that update the pattern"
                )
        return [entry for entry, count in zip(entries, recorded.tolist(), strict=True) if count]

    def _choose(self, entry: _Entry, fraction: float) -> Tensor:
        """bool [R, C]: the blocks that the layer stores next."""
        layer, pattern = entry.layer, entry.layer.pattern
        density = entry.schedule.density(self._steps, entry.initial_density)
        count = min(blocks_at_density(density, pattern.grid_shape[0] * pattern.grid_shape[1]), pattern.nnz)
        if self.method.drop_signal == "movement":
            drop = entry.movement.cpu()
        else:
            drop = torch.linalg.vector_norm(layer.values.detach().to(_score_dtype(layer)), dim=(1, 2)).cpu()
        grow = None
        if fraction > 0 and self.method.grow_signal == "random":
            grow = torch.rand(pattern.grid_shape, generator=self._generator, device="cpu", dtype=torch.float64)
        elif fraction > 0 and self.method.grow_signal == "gradient":
            grow = gradient_block_norms(entry.tap.records, pattern, layer.values.device, self._replicas.sum_)
        for signal, scores in ((self.method.drop_signal, drop), (self.method.grow_signal, grow)):
            if scores is not None and not scores.isfinite().all():
                warnings.warn(
                    f"step {self._steps}: layer {entry.name!r} keeps its pattern, its {signal} is not finite",
                    stacklevel=2,
                )
                return pattern.mask()
        return select_blocks(pattern, drop, grow, count, fraction)

    def _apply(self, entry: _Entry, mask: Tensor) -> LayerUpdate:
        layer, values = entry.layer, entry.layer.values
        before = layer.pattern
        holders = [self._optimizers[position] for position in self._find_holders()[entry.name]]
        if int(mask.sum()) == before.nnz:
            slots = layer.rewire_to(mask)
            moved = slots.numel()
            if moved:
                slots = slots.to(values.device)
                for optimizer in holders:
                    reset_slots(optimizer, values, slots)
                for gradient in (values.grad, layer.main_grad):
                    if gradient is not None:
                        gradient[slots] = 0
                if entry.movement is not None:
                    entry.movement[slots] = 0
        else:
            shape = values.shape
            kept = layer.resize_to(mask)
            moved = layer.pattern.nnz - kept.numel()
            for optimizer in holders:
                resize_slots(optimizer, values, shape, kept)
            if entry.movement is not None:
                entry.movement = torch.cat((entry.movement[kept], entry.movement.new_zeros(moved)))
        return LayerUpdate(self._steps, entry.name, moved, before.nnz - layer.pattern.nnz, layer.density)


def _score_dtype(layer: BlockSparseLinear) -> torch.dtype:
    return torch.float64 if layer.values.dtype == torch.float64 else torch.float32


def _new_generator() -> torch.Generator:
    """A generator of its own, so that the training's draws stay what they were."""
    seed = torch.randint(2**62, (1,), device="cpu")
    return torch.Generator().manual_seed(int(seed))
