"""Arguments of a training by the names of their fields, whichever object they belong to."""

from dataclasses import fields
from typing import Any

from equipoise.training import Data, Record, Run, Users


def arranged(**flat: Any) -> dict[str, Any]:
    """The arguments of `PrivateTraining`, with fields of `Data`, `Run` and `Record` or `Users` in these."""

    def own(kind: Any) -> dict[str, Any]:
        return {field.name: flat.pop(field.name) for field in fields(kind) if field.name in flat}

    is_user = "owner" in flat
    data, run, unit = own(Data), own(Run), own(Users if is_user else Record)
    if data:
        flat["data"] = Data(flat["data"], **data)
    if "run" not in flat and run:
        flat["run"] = Run(**run)
    if unit:
        flat["unit"] = (Users if is_user else Record)(**unit)
    return flat
