"""What a training's guarantee rests on, in the words of its statement.

A statement names each sentence that holds for its run. What the processes of the run found out (`Assumption`)
stands in config.json, to which every process that goes on with the run adds. `consistency` asks for all that
is there, and for what follows from the settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

from equipoise._relations import ARE_PUBLIC

MODEL = "that a record's loss and gradient follow from that record alone is "
DATA = "that reading, collating and augmenting treat each item by itself is "
"""Before one of the words "proved" (for all values of the records), "compared" (on a few of them) and
"unchecked"."""

# ---- what follows from the settings of a run

OF_RECORD = (
    "each item of the data is made of one record and of public constants alone, and no record occurs twice: "
    "equal items are taken to be those of different persons"
)
OF_USER = "each item of the data is made of records of its one owner and of public constants alone"
STATED = (
    "population, batch size and every other setting that was given are public: they would be the same for a "
    "neighbouring data set"
)
START = (
    "what the run starts from (parameters, buffers, optimizer state, and whatever else model and loss hold) "
    "is public, or was paid for in the same journal; between steps nothing but public and released numbers "
    "changes what model, loss, optimizer and scheduler hold, and nothing changes the data"
)
ROUNDED = (
    "rounding is not counted: each float32 product that sums the rows of a micro-batch rounds (a record in "
    "front of 400,000 others moved a sum by up to 1.003 bounds in micro-batches of 2,048, and by 1.006 in "
    "one of all of them). Of several micro-batches or processes each sum is rounded once more, to whole "
    "numbers of a public unit (by at most K sqrt(P) / 2^61 bounds, for P numbers and draws of at most K "
    "records), and these are added exactly. In lower precision (TF32, bfloat16, float16) rounding is not "
    "covered at all"
)
NOT_COMPARED = "public records were not compared with the private ones"


def always(unit: Any) -> list[str]:
    """What every training assumes that protects a unit of this name, "record" or "user"."""
    return [OF_USER if unit == "user" else OF_RECORD, STATED, START, ROUNDED]


ALLOWED = "public and private records belong to different persons, also where they are equal"

# ---- what a process finds out, with the names of what it found

COMPARED_DATA = "compared, on a few records; what it keeps of those that it met before is not looked for"

HELD = "what these tensors of model and loss hold at the start is public, or paid for in the same journal: "
AFTER = "the run starts from a model that these runs left: "
STEPPED = "the owner's public step "
THROWN_AWAY = (
    "what a forward writes to these buffers, attributes and variables is thrown away, and none is published: "
)
CHANGED = (
    "the training loop set these anew after the start, as follows from public numbers alone, and model, "
    "loss, collate and augmentation were tried again before the next step: "
)
HOOKED = "a hook of the optimizer's step moves these frozen parameters, by public or released numbers alone: "
FIRST_VALUES = " (its first values)"  # after the name of what took more than were tried
NAMED = (MODEL, DATA, HELD, AFTER, STEPPED, THROWN_AWAY, CHANGED, HOOKED)


def with_public_step(found: Sequence[str], name: str) -> list[str]:
    """What was found, and one more call of the owner's public step of this name.

    >>> with_public_step(with_public_step([], "clip"), "clip")
    ["the owner's public step clip moved the parameters 2 times by public or released numbers alone"]
    """
    start = f"{STEPPED}{name} moved the parameters "
    others = [text for text in found if not text.startswith(start)]
    times = 1 + sum(int(text[len(start) :].split()[0]) for text in found if text.startswith(start))
    return [*others, f"{start}{times} time{'s'[: times > 1]} by public or released numbers alone"]


class Assumption(StrEnum):
    """What a process finds out of its data, model and loss, and what its user gave it to run."""

    SCANNED = "no record holds NaN or infinity (all were checked before the start)"
    TRUSTED = (
        "records that are read on demand were not checked for NaN and infinity before the start; one that "
        "holds some has weight zero"
    )
    ELSEWHERE = (
        "other machines hold the records, each under one number for the whole run, and compute its gradient "
        "only from it, the parameters and a seed of its own; this machine, that of a record and the way "
        "between them are trusted with its gradients and with when it is drawn (none of this was tried)"
    )
    WEIGHTED = (
        "records are weighted: each one's clipped gradient is multiplied by a number from 0 to 1, which "
        "follows from that record and from public numbers alone"
    )
    ROUNDING = (
        "a record's gradient may round differently with its place in a micro-batch (not measured); where the "
        "loss has no kinks this moves the sum by rounding alone"
    )
    PLANNED_ON_RECORDS = (
        "how rows are computed, and how many share a forward, follows a few private records: on zeros the "
        "model fails, gives what is not finite, or runs other operations"
    )
    OWN_NUMBERS = (
        "every random number of the model, the loss, the augmentation and the collate function belongs to "
        "one record (tried on a few records before the start)"
    )
    SHARED_NUMBERS = (
        "there are no more records (or users, if users are drawn) than the stated population: a run with "
        "more is refused, since random numbers are shared between records; that refusal tells of their "
        "number, and epsilon does not cover it"
    )
    SECRET_SEED = (
        "noise and sampling follow from a file that the owner keeps: they are secret as long as it is, and "
        "whoever reads it can subtract the noise; no other run has this file and this seed, as two of them "
        "would show whether their records are the same"
    )
    PUBLIC_START = "the owner states that what the run starts from is public"
    PADDED_WITH_COPIES = (
        "copies of a few private records fill up micro-batches that are not full, with weight zero: on zeros "
        "the model fails, gives what is not finite, or runs other operations"
    )
    RANDOM_PIPELINE = (
        "collating and augmenting treat each record by itself, and no random number makes them fail: they "
        "draw some, or few records could be read, so that not all of it could be tried before the start"
    )
    KEEPS_NOTHING = (
        "model, loss, data set, collate and augmentation keep nothing of the records that they meet, but in "
        "attributes, containers and variables, which are put back after a forward"
    )
    SHAPES_ALIKE = (
        "batches have the same shape whichever records they hold (all records that were tried before the "
        "start have one shape)"
    )
    SHAPES_FOLLOW = (
        "the shape of a batch follows the records in it, such as padding to the longest: a longer record "
        "makes the gradients of the others round anew (a loss with kinks may turn that into other ones), and "
        "epsilon does not count that; by it alone, and by what epsilon covers, a published number follows "
        "how long the longest drawn record is; how much is proved of the model may follow which were drawn"
    )
    OTHER_DATA = (
        "the run was resumed with other records than it began with: which were added, removed or changed "
        "followed from nothing that it had released"
    )
    BY_NAME = (
        "draws are assigned by the names in owner or ids, and each name is that of the same user or record "
        "for the whole run (not compared)"
    )
    BY_CONTENT = (
        "draws are assigned by what records hold: a record that is corrected while the run is interrupted "
        "counts as one that is withdrawn and another one that is added"
    )
    BY_NUMBER = (
        "draws are assigned by the numbers of the items of data, and each number is that of the same record "
        "for the whole run (compared at every resume, for the items that had been read)"
    )
    BY_NUMBER_UNCOMPARED = (
        "draws are assigned by the numbers of the items of data, and each number is that of the same record "
        "for the whole run (not compared: items are random, or hold what cannot be compared)"
    )
    SCHEDULED = (
        "the scheduler follows only the step and what was released: the learning rates that it sets are "
        "published"
    )
    EVALUATED = "what evaluate(model) answers follows only the model and public records: it is published"
    HELD_OUT = (
        "what evaluate(model) answers is published without noise, and follows records that were set aside "
        "from the private ones and not trained on: epsilon does not cover those records"
    )
    COMPILED = "torch.compile, which made kernels of what the proof has read, is trusted to keep its meaning"
    FOUND = (
        "the start tried model, loss and data on a few private records: which sentences are listed here, and "
        "perhaps the size of a batch, follows from that, and epsilon does not cover it"
    )

    @classmethod
    def of_all(cls, found: Iterable[str]) -> list[str]:
        """Of what several processes found: all that is assumed, and what was checked only if all checked it.

        Raises:
            ValueError: a text that is not one of them and begins with none of `NAMED`.

        >>> both = Assumption.of_all([Assumption.SCANNED, Assumption.SHAPES_ALIKE, Assumption.TRUSTED])
        >>> [one.name for one in both]
        ['TRUSTED', 'SHAPES_ALIKE']
        """
        texts = set(found)
        named = {text for text in texts if text.startswith(NAMED)}
        there = {cls(text) for text in texts - named}
        if cls.TRUSTED in there:
            there.discard(cls.SCANNED)
        if cls.BY_NUMBER_UNCOMPARED in there:
            there.discard(cls.BY_NUMBER)
        if cls.SHAPES_FOLLOW in there:
            there.discard(cls.SHAPES_ALIKE)
        changed = {text for text in named if text.startswith(CHANGED)}
        names = {name for text in changed for name in text.removeprefix(CHANGED).split(", ")}
        names -= {name.removesuffix(FIRST_VALUES) for name in names if name.endswith(FIRST_VALUES)}
        joined = [CHANGED + ", ".join(sorted(names))] if names else []
        weakest = [max(same, key=_strength) for start in (MODEL, DATA) if (same := _of(start, named))]
        others = named - changed - {text for text in named if text.startswith((MODEL, DATA))}
        return [*(one for one in cls if one in there), *weakest, *sorted(others), *joined]


# ---- who is to check what

_OWNERS = (
    "population ", "draws are assigned by ", "every record belongs", "no other run on these data",
    "the other runs in this journal", OF_RECORD, OF_USER, STATED, ALLOWED, NOT_COMPARED,
    Assumption.OTHER_DATA, Assumption.SHARED_NUMBERS, Assumption.SECRET_SEED, Assumption.TRUSTED,
    Assumption.HELD_OUT, Assumption.ELSEWHERE, Assumption.WEIGHTED,
)  # fmt: skip
_LIMITS = (
    ROUNDED, THROWN_AWAY, f"{MODEL}proved", f"{DATA}proved", Assumption.SCANNED, Assumption.ROUNDING,
    Assumption.PLANNED_ON_RECORDS, Assumption.PADDED_WITH_COPIES, Assumption.SHAPES_ALIKE,
    Assumption.SHAPES_FOLLOW, Assumption.COMPILED, Assumption.FOUND, Assumption.OWN_NUMBERS,
)  # fmt: skip


def by_reader(texts: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Assumptions under headings that say who is to check them.

    >>> by_reader(["population 60000 and sampling Poisson of draw 'batch'"])[0]
    ('For the owner of the data to check', ["population 60000 and sampling Poisson of draw 'batch'"])
    """
    found: dict[str, list[str]] = {
        "For the owner of the data to check": [],
        "For the author of the training to check": [],
        "Found at the start, and limits": [],
    }
    of_owner, of_author, limits = found.values()
    for text in texts:
        is_owners = text.startswith(_OWNERS) or ARE_PUBLIC in text
        (of_owner if is_owners else limits if text.startswith(_LIMITS) else of_author).append(text)
    return list(found.items())


def _of(start: str, texts: Iterable[str]) -> list[str]:
    return sorted(text for text in texts if text.startswith(start))


def _strength(text: str) -> int:
    """How little was found out."""
    start = next(start for start in (MODEL, DATA) if text.startswith(start))
    return ("proved", "compared", "unchecked").index(text.removeprefix(start).split()[0].rstrip(",:"))
