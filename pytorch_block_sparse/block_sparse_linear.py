"""BlockSparseLinear: nn.Linear with a weight of which only some blocks are stored."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from . import ops
from .block_sparse import BlockSparseMatrix, strongest_blocks
from .blocks import clear_past_edges, gather_blocks, to_grid
from .checks import check_int, check_pair
from .dense_layers import as_linear, is_conv1d
from .dense_origin import DenseOrigin
from .errors import BlockSparseError
from .main_grad import check_main_grad, fitted_main_grad, new_main_grad
from .pattern import BlockPattern, block_grid, blocks_at_density
from .pattern_input import DEFAULT_BLOCK_SHAPE, as_pattern
from .state_dicts import to_native

_DEFAULT_DENSITY = 0.5


class BlockSparseLinear(nn.Module):
    """y = activation(x Wᵀ + bias), where W (O, I) = (out_features, in_features) stores only the blocks of a pattern.

    A replacement for ``torch.nn.Linear``: memory, forward and all gradients cost in proportion to the stored blocks.

    Args:
        in_features: I.
        out_features: O.
        bias: whether to add a learned bias [O].
        density: share of the blocks to store, in (0, 1]; 0.5 unless a pattern is given.
        torch_nn_linear: take sizes, bias, device, dtype and the strongest blocks of this layer's weight, exactly.
        verbose: print what was made.
        block_shape: (bh, bw), (32, 32) unless a pattern carries one. Squares of 16, 32, 64 and 128 are fast.
        pattern: the blocks to store: a :class:`BlockPattern`, a bool grid [R, C], a ``torch.sparse_bsr`` tensor or a
            SciPy sparse matrix. Without one, blocks are drawn at random, following ``torch.manual_seed``.
        activation: None, "relu", "gelu", "gelu_tanh" or "silu".
        device: of the parameters.
        dtype: of the parameters: float64, float32, bfloat16 or float16.

    Attributes:
        values: parameter [nnz, bh, bw]: the block of each slot, row-major (out, in); zero past O or I.
        bias: parameter [O], or None.
        block_coords: buffer, int32 [nnz, 2]: the (block row, block column) of each slot. Everything derived from it is
            cached on :attr:`pattern` and rebuilt, validated, when it changes.
        dense_origin: what it stands for in a model: :func:`densify` puts that back.

    Shape:
        x [..., I] -> [..., O], with any leading dimensions.

    Raises:
        BlockSparseError: an argument is out of range, or contradicts the pattern.

    :meth:`accumulate_main_grad` makes the backward add the values' gradient to ``values.main_grad``, in float32.

    Under ``DistributedDataParallel`` pass ``broadcast_buffers=False``, else every step rewrites ``block_coords`` and
    has it checked.

    >>> layer = BlockSparseLinear(128, 256, density=0.25)
    >>> layer
    BlockSparseLinear(in_features=128, out_features=256, bias=True, block_shape=(32, 32), nnz=8, density=0.25)
    >>> layer(torch.randn(4, 10, 128)).shape
    torch.Size([4, 10, 256])
    """

    values: nn.Parameter
    bias: nn.Parameter | None
    block_coords: Tensor
    dense_origin: DenseOrigin = DenseOrigin()

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        density: float | None = None,
        torch_nn_linear: nn.Linear | None = None,
        verbose: bool = False,
        block_shape: tuple[int, int] | None = None,
        *,
        pattern: Any = None,
        activation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if torch_nn_linear is not None:
            weight = _dense_weight(torch_nn_linear)
            out_features, in_features = _linear_shape(weight, in_features, out_features)
            bias = torch_nn_linear.bias is not None
            device, dtype = device or weight.device, dtype or weight.dtype
        ops.check_activation(activation)
        shape = (check_int("out_features", out_features, 1), check_int("in_features", in_features, 1))
        if pattern is not None:
            pattern = as_pattern(pattern, shape, block_shape)
            if density is not None and blocks_at_density(density, math.prod(pattern.grid_shape)) != pattern.nnz:
                raise BlockSparseError(f"density {density!r} contradicts the pattern's {pattern.density:.6g}")
        else:
            block_shape = check_pair("block_shape", DEFAULT_BLOCK_SHAPE if block_shape is None else block_shape)
            density = _DEFAULT_DENSITY if density is None else density
            if torch_nn_linear is None:
                pattern = BlockPattern.random(shape, density, block_shape)
            else:
                pattern = _strongest_pattern(weight, density, block_shape, "magnitude")

        if (dtype or torch.get_default_dtype()) not in ops.DTYPES:
            raise BlockSparseError(f"dtype must be float64, float32, bfloat16 or float16, got {dtype}")
        self.out_features, self.in_features = shape
        self.activation = activation
        self.verbose = verbose
        self._accumulates_main_grad = False
        self.values = nn.Parameter(torch.empty((pattern.nnz, *pattern.block_shape), device=device, dtype=dtype))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(self.out_features, device=device, dtype=dtype)) if bias else None
        )
        coords = torch.empty((pattern.nnz, 2), device=self.values.device, dtype=torch.int32)
        self.register_buffer("block_coords", coords)
        self._install(pattern)
        if torch_nn_linear is None:
            self.reset_parameters()
        else:
            self._copy_linear(torch_nn_linear)
        if verbose:
            print(self)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        density: float | None = None,
        pattern: Any = None,
        block_shape: tuple[int, int] | None = None,
        importance: str | Tensor = "magnitude",
        activation: str | None = None,
    ) -> BlockSparseLinear:
        """A layer that holds blocks of ``linear``, exactly and unscaled, with its bias, device, dtype and mode.

        Args:
            linear: ``nn.Linear`` or transformers' ``Conv1D``; it is not changed.
            density: keep the most important blocks, this share of them. None: every block that is not all zero.
            pattern: keep these blocks instead.
            block_shape: (bh, bw), (32, 32) unless the pattern carries one.
            importance: "magnitude" (a block's Euclidean norm), or a score for every block, [R, C].
            activation: as in the constructor.
        """
        origin = DenseOrigin(type(linear)) if is_conv1d(linear) else DenseOrigin()
        linear = as_linear(linear) if is_conv1d(linear) else linear
        weight = _dense_weight(linear)
        if pattern is None:
            block_shape = check_pair("block_shape", DEFAULT_BLOCK_SHAPE if block_shape is None else block_shape)
            if density is None:
                pattern = BlockSparseMatrix.from_dense(weight, block_shape).pattern
            else:
                pattern = _strongest_pattern(weight, density, block_shape, importance)
            density = None
        layer = cls(
            0,
            0,
            density=density,
            torch_nn_linear=linear,
            block_shape=block_shape,
            pattern=pattern,
            activation=activation,
        )
        layer.dense_origin = origin
        return layer.train(linear.training)

    def to_linear(self, *, without_activation: bool = False) -> nn.Linear:
        """The dense layer with the same weight and bias.

        Args:
            without_activation: leave out the layer's activation, if it has one.

        Raises:
            BlockSparseError: the layer has an activation, which ``nn.Linear`` has not.
        """
        if self.activation is not None and not without_activation:
            raise BlockSparseError(f"to_linear needs activation None, got {self.activation!r}: nn.Linear has none")
        linear = nn.Linear(
            self.in_features, self.out_features, self.bias is not None, device="meta", dtype=self.values.dtype
        ).to_empty(device=self.values.device)
        with torch.no_grad():
            linear.weight.copy_(self.weight.to_dense())
            linear.weight.requires_grad_(self.values.requires_grad)
            if self.bias is not None:
                linear.bias.copy_(self.bias)
                linear.bias.requires_grad_(self.bias.requires_grad)
        return linear.train(self.training)

    def reset_parameters(self) -> None:
        """Draws values and bias as ``nn.Linear`` does, from U(-k, k) with k = fan_in^-1/2.

        An output's fan-in is the number of inputs that the pattern leaves it; one without any has bias 0.
        """
        rows, cols = self.pattern.block_coords.long().unbind(1)
        height, width = self.pattern.block_shape
        widths = (self.in_features - cols * width).clamp(max=width)
        fan_in = torch.zeros(self.pattern.grid_shape[0], dtype=torch.int64, device="cpu").index_add_(0, rows, widths)
        bound = torch.where(fan_in > 0, fan_in.double().rsqrt(), 0.0).to(self.values)
        with torch.no_grad():
            self.values.uniform_(-1, 1).mul_(bound[rows.to(bound.device), None, None])
            clear_past_edges(self.values, self.pattern)
            if self.bias is not None:
                self.bias.uniform_(-1, 1).mul_(bound.repeat_interleave(height)[: self.out_features])

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        # A compiled graph takes the index as it is: loading and moving refresh it (see _load_from_state_dict, _apply).
        if not torch.compiler.is_compiling():
            self._refresh()
        return ops.linear(x, self.values, self._pattern, self.bias, self.activation, self.main_grad)

    # The main gradient

    @property
    def main_grad(self) -> Tensor | None:
        """What the backward adds the values' gradient to, ``values.main_grad``; None unless that is switched on."""
        if not self._accumulates_main_grad:
            return None
        if (main_grad := _attached(self.values)) is None:
            raise BlockSparseError("values.main_grad must be a tensor, got None: call accumulate_main_grad() again")
        return main_grad

    def accumulate_main_grad(self, enabled: bool = True, *, main_grad: Tensor | None = None) -> None:
        """Switches the accumulation of the values' gradient in ``values.main_grad`` on or off; it is off at first.

        While it is on, each backward adds the gradient of ``values`` to ``values.main_grad`` within the kernel that
        computes it, summed in float32, and ``values.grad`` stays as it is; the gradients of x and bias are the usual
        ones. This is Megatron's gradient accumulation fusion: over many micro-batches nothing is rounded to 16 bits,
        and no gradient is written and read again. What it asks of you:

        - Give the optimizer the gradient, as by ``layer.values.grad = layer.main_grad.to(layer.values.dtype)``.
        - Call :meth:`zero_main_grad` between steps; ``zero_grad`` does not know ``main_grad``.
        - Hooks on the gradient of ``values`` do not run, those of ``DistributedDataParallel`` included: reduce
          ``main_grad`` yourself. ``values`` must be an ordinary tensor, so FSDP's shards do not serve.
        - ``create_graph=True`` is an error.
        - Where the layer is compiled, PyTorch raises an error if a second forward runs before the first's backward.

        ``main_grad`` is in no state dict. It follows ``values`` to another device, to float64 and to another number of
        blocks, then as a new tensor; loading leaves it alone where it still fits. A deep copy has zeros.

        Args:
            enabled: on or off; off forgets ``values.main_grad``.
            main_grad: [nnz, bh, bw], contiguous, on the device of ``values``, float32 or the dtype of ``values``
                (float64 for float64): a tensor of yours, a view of a larger buffer for example, taken as it is. If not
                given, zeros in float32 (float64 for float64).

        Raises:
            BlockSparseError: ``main_grad`` does not fit, or ``values`` is sharded; nothing is changed then.
        """
        if enabled:
            self._check_ordinary("to have a main_grad")
        if main_grad is not None:
            if not enabled:
                raise BlockSparseError("main_grad must be None where enabled is False")
            check_main_grad(main_grad, self.values)
        if enabled:
            self.values.main_grad = new_main_grad(self.values) if main_grad is None else main_grad
        elif hasattr(self.values, "main_grad"):
            del self.values.main_grad
        self._accumulates_main_grad = bool(enabled)

    def zero_main_grad(self) -> None:
        """Sets ``values.main_grad`` to zero, where it is switched on."""
        if (main_grad := self.main_grad) is not None:
            main_grad.zero_()

    def _keep_main_grad(self, main_grad: Tensor | None) -> None:
        """After ``values`` has changed: ``main_grad``, what it was before, as it fits now."""
        if self._accumulates_main_grad:
            self.values.main_grad = fitted_main_grad(main_grad, self.values)

    # The pattern

    @property
    def pattern(self) -> BlockPattern:
        """The blocks that are stored, with their indices."""
        self._refresh()
        return self._pattern

    @property
    def weight(self) -> BlockSparseMatrix:
        """W as a view of the layer's parameter: ``weight.shape``, ``weight.dtype``, ``weight.to_dense()``, ..."""
        return BlockSparseMatrix(self.pattern, self.values)

    @property
    def block_shape(self) -> tuple[int, int]:
        """(bh, bw)."""
        return self._pattern.block_shape

    @property
    def density(self) -> float:
        """Stored blocks over all blocks."""
        return self._pattern.density

    def rewire(self, slots: Tensor, block_coords: Tensor, values: Tensor | None = None) -> None:
        """Moves blocks at fixed nnz; the others keep their slots, so their data and optimizer state stay.

        Args:
            slots: integers [n], the slots that move.
            block_coords: integers [n, 2], the new (block row, block column) of each.
            values: [n, bh, bw] that the moved blocks then hold; zeros if not given.
        """
        pattern = self.pattern.rewire(slots, block_coords)
        slots = torch.as_tensor(slots, device=self.values.device).long()
        expected = (slots.numel(), *pattern.block_shape)
        if values is not None and tuple(values.shape) != expected:
            raise BlockSparseError(f"values must be {expected} as slots and block_shape, got {tuple(values.shape)}")
        with torch.no_grad():
            self.values[slots] = 0 if values is None else values.to(self.values)
            clear_past_edges(self.values, pattern)
        self._install(pattern)

    def rewire_to(self, mask: Tensor) -> Tensor:
        """Moves as few blocks as needed, filled with zeros, to store the blocks of ``mask`` (bool [R, C], same nnz).

        Returns:
            int64 [n]: the slots that moved.
        """
        before, after = self.pattern, self.pattern.rebuild(mask)
        slots = (before.block_coords != after.block_coords).any(1).nonzero()[:, 0]
        self.rewire(slots, after.block_coords[slots])
        return slots

    def resize_to(self, mask: Tensor) -> Tensor:
        """Stores the blocks of ``mask`` (bool [R, C]), which may be fewer or more: the same Parameter, another nnz.

        Kept blocks come first, in the order of their slots; new ones follow in row order, filled with zeros. The
        values' gradient is dropped. Where nnz stays, :meth:`rewire_to` leaves kept blocks in their slots.

        Returns:
            int64 [k]: the former slots of the kept blocks, which are now the slots 0 to k - 1.

        Raises:
            BlockSparseError: ``mask`` is not the block grid, or ``values`` is no ordinary tensor (FSDP shards it).
        """
        self._check_ordinary("to resize")
        before = self.pattern
        after = BlockPattern.from_mask(mask, before.block_shape, before.shape)
        keys = before.block_coords.long() @ torch.tensor((before.grid_shape[1], 1), device="cpu")
        wanted = after.mask().flatten()
        kept = wanted[keys].nonzero()[:, 0]
        wanted[keys] = False
        coords = torch.cat((before.block_coords[kept], wanted.view(before.grid_shape).nonzero()))
        pattern = BlockPattern.from_coords(coords, before.shape, before.block_shape)
        kept = kept.to(self.values.device)
        with torch.no_grad():
            values = self.values.data.new_zeros((pattern.nnz, *pattern.block_shape))
            values[: kept.numel()] = self.values.data[kept]
        self._replace_values(values)
        self._install(pattern)
        return kept

    def _check_ordinary(self, purpose: str) -> None:
        if type(self.values.data) is not Tensor:
            raise BlockSparseError(
                f"values must be an ordinary tensor {purpose}, got {type(self.values.data).__name__}"
            )

    def _replace_values(self, values: Tensor) -> None:
        """Gives the Parameter, which optimizers and hooks hold, ``values`` [nnz, bh, bw] with another nnz."""
        self.values.grad = None
        main_grad = _attached(self.values)
        if type(self.values.data) is Tensor:
            # A graph that still lives, as that of the last step's loss does, holds the parameter's gradient
            # accumulator, which remembers the former shape. Only a change of dtype makes PyTorch forget it.
            other = torch.float32 if values.dtype == torch.float64 else torch.float64
            self.values.data = values.new_empty(0, dtype=other)
        self.values.data = values
        if not self.values.is_inference():
            torch.autograd.graph.increment_version(self.values)  # what an old graph has saved is no longer there
        self.block_coords = self.block_coords.new_empty((values.shape[0], 2))
        self._keep_main_grad(main_grad)

    def _install(self, pattern: BlockPattern) -> None:
        """Makes ``pattern`` the layer's own and writes its coordinates to the buffer."""
        with torch.no_grad():
            self.block_coords.copy_(pattern.block_coords)
        self._pattern = pattern
        self._mark()

    def _mark(self) -> None:
        """Remembers that ``block_coords`` as it is now belongs to the pattern, and has the index ready there."""
        coords = self._buffers["block_coords"]
        self._seen = (coords, _version(coords))
        self._pattern.index(coords.device)

    def _refresh(self) -> None:
        """Rebuilds the pattern if somebody wrote to ``block_coords`` or replaced it; an invalid one is an error."""
        coords, (seen, version) = self._buffers["block_coords"], self._seen
        if coords is seen and _version(coords) == version:
            return
        if type(coords) is not Tensor or coords.is_meta:
            return  # no data to read: a fake or meta tensor keeps the pattern
        found = coords.detach().cpu()
        if not torch.equal(found, self._pattern.block_coords):
            if tuple(found.shape) != (self.values.shape[0], 2):
                raise BlockSparseError(
                    f"block_coords must be [{self.values.shape[0]}, 2] as values, got {list(found.shape)}"
                )
            self._pattern = BlockPattern.from_coords(found, self._pattern.shape, self._pattern.block_shape)
        self._mark()

    # Moving, copying and loading

    def _apply(self, fn: Any, recurse: bool = True) -> BlockSparseLinear:
        self._refresh()
        before, main_grad = self.block_coords, _attached(self.values)
        super()._apply(fn, recurse)
        self._keep_main_grad(main_grad)
        if self.block_coords is not before and not self.block_coords.is_meta:
            # to_empty() leaves the buffer uninitialised; the pattern is known, so the coordinates are written again.
            self._install(self._pattern)
        else:
            self._mark()
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A copy has its own buffer, which its first forward compares with the pattern that it shares.
        return {**self.__dict__, "_seen": (None, 0)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"_accumulates_main_grad": False, **state})
        self._keep_main_grad(_attached(self.values))

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        entries = {name[len(prefix) :]: entry for name, entry in state_dict.items() if name.startswith(prefix)}
        try:
            entries = to_native(entries, self._pattern)
            pattern = self._pattern_of(entries)
        except BlockSparseError as error:
            error_msgs.append(f"{prefix}: {error}")
            return
        if pattern.nnz != self.values.shape[0]:
            self._replace_values(self.values.data.new_empty((pattern.nnz, *pattern.block_shape)))
        main_grad = _attached(self.values)
        super()._load_from_state_dict(
            {prefix + name: entry for name, entry in entries.items()},
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        self._keep_main_grad(main_grad)
        self._pattern = pattern
        self._mark()

    def _pattern_of(self, entries: dict[str, Tensor]) -> BlockPattern:
        """The pattern of state dict entries, all of them checked before anything is changed."""
        pattern = self._pattern
        coords, values, bias = (entries.get(name) for name in ("block_coords", "values", "bias"))
        if coords is not None and not coords.is_meta and not _same(coords, pattern.block_coords):
            if values is None:
                raise BlockSparseError("block_coords change the pattern, so values must be there too")
            pattern = BlockPattern.from_coords(coords, pattern.shape, pattern.block_shape)
        expected = (pattern.nnz, *pattern.block_shape)
        if values is not None and tuple(values.shape) != expected:
            raise BlockSparseError(
                f"values must be {expected} as block_coords and block_shape, got {tuple(values.shape)}"
            )
        if bias is not None and self.bias is not None and tuple(bias.shape) != (self.out_features,):
            raise BlockSparseError(f"bias must be ({self.out_features},), got {tuple(bias.shape)}")
        return pattern

    def _copy_linear(self, linear: nn.Linear) -> None:
        with torch.no_grad():
            self.values.copy_(gather_blocks(linear.weight, self._pattern))
            self.values.requires_grad_(linear.weight.requires_grad)
            if self.bias is not None:
                self.bias.copy_(linear.bias)
                self.bias.requires_grad_(linear.bias.requires_grad)

    def extra_repr(self) -> str:
        parts = [
            f"in_features={self.in_features}",
            f"out_features={self.out_features}",
            f"bias={self.bias is not None}",
            f"block_shape={self.block_shape}",
            f"nnz={self._pattern.nnz}",
            f"density={self.density:.4g}",
        ]
        if self.activation is not None:
            parts.append(f"activation={self.activation}")
        return ", ".join(parts)


def _attached(values: Tensor) -> Tensor | None:
    return getattr(values, "main_grad", None)


def _version(tensor: Tensor) -> int:
    """The in-place version; a tensor made in inference mode has none."""
    return 0 if tensor.is_inference() else tensor._version


def _same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first.detach().cpu().long(), second.long())


def _dense_weight(linear: nn.Linear) -> Tensor:
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not hasattr(linear, "bias"):
        raise BlockSparseError(f"torch_nn_linear must be a torch.nn.Linear, got {type(linear).__name__}")
    return weight.detach()


def _linear_shape(weight: Tensor, in_features: int, out_features: int) -> tuple[int, int]:
    """The layer's (O, I) where the arguments are 0, as in the 2020 package, or agree with it."""
    for name, given, found in (
        ("out_features", out_features, weight.shape[0]),
        ("in_features", in_features, weight.shape[1]),
    ):
        if given not in (0, found):
            raise BlockSparseError(f"{name} must be 0 or torch_nn_linear's {found}, got {given!r}")
    return weight.shape[0], weight.shape[1]


def _strongest_pattern(
    weight: Tensor, density: float, block_shape: tuple[int, int], importance: str | Tensor
) -> BlockPattern:
    shape = (weight.shape[0], weight.shape[1])
    grid = block_grid(shape, block_shape)
    count = blocks_at_density(density, math.prod(grid))
    if isinstance(importance, Tensor):
        if tuple(importance.shape) != grid:
            raise BlockSparseError(f"importance must be the block grid {grid}, got {tuple(importance.shape)}")
        scores = importance
    elif importance == "magnitude":
        scores = torch.linalg.vector_norm(to_grid(weight, block_shape).float(), dim=(2, 3))
    else:
        raise BlockSparseError(f"importance must be 'magnitude' or a score for every block, got {importance!r}")
    return BlockPattern.from_mask(strongest_blocks(scores, count), block_shape, shape)


__all__ = ["BlockSparseLinear"]
