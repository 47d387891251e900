"""Times both plans of every operator on a GPU over a grid of shapes, blocks and densities, and judges the choice.

    python benchmarks/densify.py --json benchmarks/results/h200_densify_sm90.json
    BLOCK_SPARSE_CUDA_PATH=sm80 python benchmarks/densify.py --json benchmarks/results/h200_densify_sm80.json

Printed are the cells in which the plan that runs by default takes 10 % and 10 us longer than the other: where they are
many, native/densify_rates.h wants new figures. A row: the median microseconds of our kernel (blocks), of densify, and
of the dense product; its shape is T, I, O as in the benchmark command's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from pytorch_block_sparse import BlockPattern, backends, ops
from pytorch_block_sparse.cli import environment
from pytorch_block_sparse.cli.measure import interleave
from pytorch_block_sparse.native import block_sparse_native
from pytorch_block_sparse.text import progress, table

TOKENS = {(14336, 4096): (64, 256, 1024, 8192), (4096, 4096): (256, 1024, 4096)}  # by (O, I)
TOKENS |= dict.fromkeys([(4096, 1024), (1024, 4096)], (64, 256, 1024, 4096, 16384))
BLOCKS, DENSITIES = (16, 32, 64, 128), (0.25, 0.5, 1.0)
# The portable kernels are several times slower: fewer cells.
PORTABLE_TOKENS = dict.fromkeys([(4096, 4096), (4096, 1024)], (256, 1024, 4096))
FLOAT32_TOKENS = {(4096, 4096): (256, 2048)}
HEADER = ("operator", "T x I x O", "dtype", "block", "density", "blocks us", "densify us", "dense us", "plan")


def grid(path: str) -> Iterator[tuple[str, tuple[int, int], int, float, tuple[int, ...]]]:
    """(dtype, (O, I), block, density, token counts) of each pattern."""
    dtypes = ("bfloat16",) if path == "sm90" else ("bfloat16", "tf32", "float32")
    for dtype in dtypes:
        shapes = TOKENS if path == "sm90" else PORTABLE_TOKENS if dtype == "bfloat16" else FLOAT32_TOKENS
        for shape, tokens in shapes.items():
            for block in BLOCKS:
                for density in DENSITIES:
                    yield dtype, shape, block, density, tokens


def measure(
    dtype: str, shape: tuple[int, int], block: int, density: float, all_tokens: tuple[int, ...], repeats: int
) -> Iterator[dict[str, Any]]:
    """The rows of one pattern."""
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")

    def tensor(*sizes: int) -> Tensor:
        return torch.randn(sizes, device="cuda").to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)

    pattern = BlockPattern.random(shape, density, (block, block))
    values, weight = tensor(pattern.nnz, block, block), tensor(*shape)
    for tokens in all_tokens:
        x, dy = tensor(tokens, shape[1]), tensor(tokens, shape[0])
        products = {
            "linear": (lambda x=x: ops.linear(x, values, pattern), lambda x=x: linear(x, weight)),
            "input_grad": (lambda dy=dy: ops.input_grad(dy, values, pattern), lambda dy=dy: dy @ weight),
            "weight_grad": (lambda x=x, dy=dy: ops.weight_grad(dy, x, pattern), lambda x=x, dy=dy: dy.t() @ x),
        }
        for operator, (ours, dense) in products.items():
            functions = {
                "blocks": backends.densify_plan("never")(ours),
                "densify": backends.densify_plan("always")(ours),
                "dense": dense,
            }
            timings = interleave(functions, device="cuda", repeats=repeats)
            backends.densify_plan("auto")(ours)()
            row = {
                "operator": operator,
                "shape": [tokens, *shape[::-1]],
                "dtype": dtype,
                "block": block,
                "density": density,
            }
            row |= {f"{name}_us": round(1e3 * timings.median_ms(name), 1) for name in functions}
            yield row | {"plan": block_sparse_native.last_plan()}


def loses(row: dict[str, Any]) -> bool:
    """Whether the default plan was much the slower one."""
    ours = row["densify_us" if row["plan"] == "densify" else "blocks_us"]
    return ours > max(1.1 * min(row["blocks_us"], row["densify_us"]), min(row["blocks_us"], row["densify_us"]) + 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write environment and rows to this file")
    parser.add_argument("--repeats", type=int, default=7, help="rounds for a cell (default: 7)")
    parser.add_argument("--commit", help="what the result says was measured (default: from git)")
    options = parser.parse_args()
    if missing := environment.cuda_missing():
        parser.error(f"a GPU is needed: {missing}")
    facts = environment.describe(torch.device("cuda"), options.commit)
    cells = list(grid(facts["cuda_path"]))
    rows: list[dict[str, Any]] = []
    with progress(len(cells), unit="pattern", leave=False, disable=None) as bar:
        for cell in cells:
            rows += measure(*cell, options.repeats)
            bar.update()
    lost = [row for row in rows if loses(row)]
    lines = [list((row | {"shape": "x".join(map(str, row["shape"]))}).values()) for row in lost]
    print(table(HEADER, lines, left=3))
    print(f"the default plan loses more than 10 % in {len(lost)} of {len(rows)} cells")
    if options.json:
        text = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        options.json.write_text(f'{{"environment": {json.dumps(facts, indent=1)},\n "rows": [\n{text}\n ]}}\n')


if __name__ == "__main__":
    main()
