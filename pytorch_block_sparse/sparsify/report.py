"""SparsifyReport: what became of each layer, as a table, a dict and a picture."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..pattern import BlockPattern
from ..text import table
from .activation_fusing import NOTHING_FOLLOWS


@dataclass(frozen=True)
class LayerReport:
    """One converted layer.

    Attributes:
        name: of the module in the model.
        pattern: the blocks that are kept.
        weight_error: ||V - W|| / ||W|| of the new weights V, Frobenius norms.
        output_error: ||y - y_dense|| / ||y_dense|| over the calibration tokens; None without calibration. With
            refitting, y comes from the inputs that the sparse layers before this one give it.
        parameters_before, parameters: of weight and bias; what an edge block holds past the weight does not count.
        bytes_before, bytes: of parameters and buffers.
        activation: that the layer computes, or None.
    """

    name: str
    pattern: BlockPattern
    weight_error: float
    output_error: float | None
    parameters_before: int
    parameters: int
    bytes_before: int
    bytes: int
    activation: str | None = None

    @property
    def density(self) -> float:
        """Stored blocks over all blocks."""
        return self.pattern.density

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, ready for JSON."""
        return {
            "name": self.name,
            "shape": list(self.pattern.shape),
            "block_shape": list(self.pattern.block_shape),
            "blocks": self.pattern.nnz,
            "density": self.density,
            "weight_error": self.weight_error,
            "output_error": self.output_error,
            "parameters_before": self.parameters_before,
            "parameters": self.parameters,
            "bytes_before": self.bytes_before,
            "bytes": self.bytes,
            "activation": self.activation,
        }


@dataclass(frozen=True)
class SparsifyReport:
    """What :func:`sparsify` did, or in a dry run would do. Prints as a table.

    Attributes:
        model: the sparse model; in a dry run the model as it was.
        layers: the converted layers, in the model's order.
        skipped: name -> reason, of the linear layers that stayed dense.
        importance, allocation: names of the methods.
        refit: whether the kept blocks were refitted.
        dry_run: whether nothing was changed.
        not_fused: name -> reason, of the layers that compute no activation although ``fuse_activation`` was asked for.
    """

    model: nn.Module = field(repr=False)
    layers: tuple[LayerReport, ...]
    skipped: dict[str, str]
    importance: str
    allocation: str
    refit: bool
    dry_run: bool
    not_fused: dict[str, str] = field(default_factory=dict)

    @property
    def density(self) -> float:
        """Stored elements over all elements of the converted layers' weights."""
        kept = sum(layer.pattern.stored_elements() for layer in self.layers)
        return kept / sum(layer.pattern.shape[0] * layer.pattern.shape[1] for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, ready for JSON."""
        totals = ("parameters_before", "parameters", "bytes_before", "bytes")
        return {
            "layers": [layer.to_dict() for layer in self.layers],
            "skipped": dict(self.skipped),
            "not_fused": dict(self.not_fused),
            "importance": self.importance,
            "allocation": self.allocation,
            "refit": self.refit,
            "dry_run": self.dry_run,
            "density": self.density,
            **{name: sum(getattr(layer, name) for layer in self.layers) for name in totals},
        }

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the block map, density and error of every layer to an image file.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        from .report_plot import plot_report

        plot_report(self, path)

    def __str__(self) -> str:
        header = ["layer", "shape", "block", "density", "weight error", "output error", "parameters", "MB", "(dense)"]
        rows = [
            [
                layer.name,
                "x".join(map(str, layer.pattern.shape)),
                "x".join(map(str, layer.pattern.block_shape)),
                f"{layer.density:.3f}",
                f"{layer.weight_error:.3f}",
                "-" if layer.output_error is None else f"{layer.output_error:.3f}",
                f"{layer.parameters:,}",
                f"{layer.bytes / 1e6:.2f}",
                f"{layer.bytes_before / 1e6:.2f}",
            ]
            for layer in self.layers
        ]
        total = self.to_dict()
        rows.append(
            ["total", "", "", f"{self.density:.3f}", "", "", f"{total['parameters']:,}"]
            + [f"{total[name] / 1e6:.2f}" for name in ("bytes", "bytes_before")]
        )
        method = f"importance {self.importance}, allocation {self.allocation}, {'' if self.refit else 'not '}refitted"
        lines = [table(header, rows), "", method + (" (dry run: nothing was changed)" if self.dry_run else "")]
        lines += [
            f"computes its activation: {each.name} ({each.activation})" for each in self.layers if each.activation
        ]
        lines += [
            f"activation not fused: {name} ({reason})"
            for name, reason in self.not_fused.items()
            if reason != NOTHING_FOLLOWS
        ]
        lines += [f"left dense: {name} ({reason})" for name, reason in self.skipped.items()]
        return "\n".join(lines)


__all__ = ["LayerReport", "SparsifyReport"]
