"""Published claims that fail: one attack a file, one line in `ATTACKS`.

Each attack runs the algorithm as published with the published noise, and certifies an epsilon above the
claimed one. None of them works on the library's own recipes (`equipoise.testing.method_audit`).
"""

from __future__ import annotations

from collections.abc import Callable

from reproduction.attacks.dc_noise import attack_dc_dpsgd
from reproduction.attacks.dice_memory import attack_dice_sgd
from reproduction.attacks.finding import Finding
from reproduction.attacks.private_directions import attack_pcdp_sgd
from reproduction.attacks.raw_thresholds import attack_dp_c4, attack_dp_c4_plus
from reproduction.attacks.shuffled_rounds import attack_adaptive_rms

__all__ = ["ATTACKS", "Finding"]

ATTACKS: dict[str, Callable[..., Finding]] = {
    "dice-sgd": attack_dice_sgd,
    "dp-c4": attack_dp_c4,
    "dp-c4-plus": attack_dp_c4_plus,
    "dc-dpsgd": attack_dc_dpsgd,
    "pcdp-sgd": attack_pcdp_sgd,
    "adaptive-rms": attack_adaptive_rms,
}
"""name -> attack(seed=0, ...), as `python -m reproduction attacks NAME` runs it."""
