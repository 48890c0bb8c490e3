"""What the figures of one module come to, in words."""

import math
from dataclasses import dataclass
from typing import Literal

from publisher.records.extraction import APPROXIMATE, ModuleExtraction


@dataclass(frozen=True, slots=True)
class Verdict:
    """`whole`: nothing is missing but rounding; `doubtful`: more may be hidden; `short`: more is missing, and why."""

    level: Literal["whole", "doubtful", "short"]
    why: str


def verdict_on(module: ModuleExtraction) -> Verdict:
    """Return the verdict on a module, by what was left out, its error over rounding, and its distance to the noise."""
    following, edge = module.sigma_next, module.noise_edge
    if following is not None and following > edge:
        beyond = following / edge if edge else math.inf
        return Verdict(
            "short",
            f"signal is left out: the first value left out is {beyond:.3g} noise edges high",
        )
    if module.ratio is not None and module.ratio > APPROXIMATE:
        return Verdict("short", f"the fit misses {module.ratio:.3g} times what rounding explains")
    if module.rank_at_least:
        return Verdict("doubtful", "the smallest value kept stands near the noise edge: the true rank may be higher")
    if following is None:
        return Verdict("whole", "at full width: nothing is left out")
    return Verdict("whole", "what is missing is what merge rounding explains")
