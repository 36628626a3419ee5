"""Many runs as one table."""

from typing import TYPE_CHECKING

from fednca.base.lazy import lazy

if TYPE_CHECKING:
    from fednca.bench.cells import Bench, Cell, plan_bench
    from fednca.bench.local import Outcome, train_bench
    from fednca.bench.rows import Row, parse_rows, parse_seeds
else:
    __getattr__, __dir__ = lazy(__name__, "rows", "cells", "local")

__all__ = ["Bench", "Cell", "Outcome", "Row", "parse_rows", "parse_seeds", "plan_bench", "train_bench"]
