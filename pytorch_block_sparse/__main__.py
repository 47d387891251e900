"""``python -m pytorch_block_sparse``: see :mod:`pytorch_block_sparse.cli`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
