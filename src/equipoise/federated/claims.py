"""What a federated guarantee here covers, and what is refused because no proof covers it.

unit="record"       one record at one client. A whole client can move its scalar by U, not U / B, and its K
                    steps by far more than K clipped records: no guarantee for clients follows from this one.
noise="local"       every client's own noise protects its records against everybody else. Noise that is right
                    only in the sum over clients ("distributed") needs that nobody sees a single answer; after
                    K > 1 steps a client has moved along its own under-noised path, which no sum hides, and
                    there is no proof of composition.
"""

from __future__ import annotations

__all__ = ["check_claim"]


def check_claim(unit: str, noise: str, local_steps: int) -> None:
    """Refuse a claim that no proof covers.

    Raises:
        ValueError: another unit than "record", another noise than "local", or an unknown word.

    Example:
        >>> check_claim("client", "local", local_steps=1)
        Traceback (most recent call last):
            ...
        ValueError: unit='client': the guarantee is one record's at one client; ...
    """
    if unit != "record":
        raise ValueError(
            f"unit={unit!r}: the guarantee is one record's at one client; a whole client can move its "
            "answers by far more than the noise is made for. Give unit='record'"
        )
    if noise == "distributed" and local_steps > 1:
        raise ValueError(
            f"noise='distributed' with local_steps={local_steps}: a client's later steps follow its own "
            "under-noised path, which adding up the answers does not hide, and no proof covers it. Give "
            "noise='local'"
        )
    if noise != "local":
        raise ValueError(
            f"noise={noise!r}: a client counts the noise that it adds itself, and counts on nobody else's. "
            "Give noise='local'; the share of a noise that is whole in a sum alone is SecureClient's"
        )
